"""Caches the compiled parts of a listener by content, so that a new version compiles only changed parts.

The outbound listener of the ambient dialect has a chain per service and an entry per service and per pod. The
control plane sends the whole listener after each change of one chain.
"""

import hashlib

from xds.model.listener import FilterChain
from xds.model.matcher import OnMatch


class Parts:
    """The compiled parts of a listener in one version. Created from the parts of the previous version, and kept
    for the next version.

    Values are immutable, so versions share them. Each chain is returned only once per version, because chains are
    distinguished by identity.
    """

    def __init__(self, earlier: "Parts | None" = None) -> None:
        self._chains: dict[str, FilterChain] = {}
        self._on_matches: dict[bytes, OnMatch] = {}
        self._earlier_chains = {} if earlier is None else earlier._chains
        self._earlier_on_matches = {} if earlier is None else earlier._on_matches

    def complete(self) -> None:
        """Drop the parts of the previous version, because this version is completely compiled."""
        self._earlier_chains = {}
        self._earlier_on_matches = {}

    def chain(self, content: str) -> FilterChain | None:
        """Return the previous version's filter chain with this digest. Each chain is returned only once."""
        if content in self._chains:
            return None
        found = self._earlier_chains.get(content)
        if found is not None:
            self._chains[content] = found
        return found

    def keep_chain(self, chain: FilterChain) -> None:
        """Store a compiled filter chain, for reuse by the listener's next version."""
        self._chains[chain.content] = chain

    def on_match(self, key: bytes) -> OnMatch | None:
        """Return the compiled matcher entry with this key, from this version or the previous one."""
        found = self._on_matches.get(key)
        if found is None:
            found = self._earlier_on_matches.get(key)
            if found is not None:
                self._on_matches[key] = found
        return found

    def keep_on_match(self, key: bytes, on_match: OnMatch) -> None:
        """Store a compiled matcher entry, for reuse by this version and the next."""
        self._on_matches[key] = on_match


def key_of(packed: bytes) -> bytes:
    """Return a key of bounded length for :meth:`Parts.on_match`: the bytes of an entry if they are short (many
    pods share these), or else their digest.
    """
    return packed if len(packed) <= 256 else hashlib.blake2b(packed, digest_size=32).digest()
