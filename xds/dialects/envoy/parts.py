"""Caches the compiled parts of a listener by content, so that a new version compiles only changed parts.

The outbound listener of the ambient dialect has a chain per service and an entry per service and per pod. The
control plane sends the whole listener after each change of one chain.
"""

import hashlib

from xds.model.listener import FilterChain
from xds.model.matcher import OnMatch


class Parts:
    """The compiled parts of a listener, in one version. Pass the previous version's parts, and keep these for the
    next version.

    Values are immutable, so versions share them. Each chain is returned only once per version, because chains are
    distinguished by identity.
    """

    def __init__(self, earlier: "Parts | None" = None) -> None:
        self._chains: dict[str, FilterChain] = {}
        self._on_matches: dict[bytes, OnMatch] = {}
        self._earlier_chains = {} if earlier is None else earlier._chains
        self._earlier_on_matches = {} if earlier is None else earlier._on_matches

    def complete(self) -> None:
        """Drop the parts of the previous version."""
        self._earlier_chains = {}
        self._earlier_on_matches = {}

    def chain(self, content: str) -> FilterChain | None:
        """Return the previous version's chain with this digest, if this version has not used it already."""
        if content in self._chains:
            return None
        found = self._earlier_chains.get(content)
        if found is not None:
            self._chains[content] = found
        return found

    def keep_chain(self, chain: FilterChain) -> None:
        """Keep a chain for the next version."""
        self._chains[chain.content] = chain

    def on_match(self, key: bytes) -> OnMatch | None:
        """Return a matcher entry of either version by its key."""
        found = self._on_matches.get(key)
        if found is None:
            found = self._earlier_on_matches.get(key)
            if found is not None:
                self._on_matches[key] = found
        return found

    def keep_on_match(self, key: bytes, on_match: OnMatch) -> None:
        """Keep a matcher entry for this version and the next."""
        self._on_matches[key] = on_match


def key_of(packed: bytes) -> bytes:
    """Return a key of bounded length for :meth:`Parts.on_match`. A short action, which many pods share, is its own
    key.
    """
    return packed if len(packed) <= 256 else hashlib.blake2b(packed, digest_size=32).digest()
