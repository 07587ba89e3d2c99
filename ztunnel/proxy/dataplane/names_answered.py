"""Remembers which names each pod's DNS queries resolved to an address, so that connections to this address can be
given a name. Pure.

One address can have many names, and one name many addresses. Names are untrusted input, so all tables are bounded.
A full table evicts a pod's oldest addresses, or the pod that has sent no query for the longest time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

PodKey = tuple[str, str]

_PODS: Final = 512
_ADDRESSES: Final = 4096
_NAMES: Final = 8


class NamesAnswered:
    """The names that pods have resolved, by pod (its namespace and name) and by address."""

    def __init__(self) -> None:
        self._pods: OrderedDict[PodKey, OrderedDict[str, tuple[str, ...]]] = OrderedDict()

    @property
    def known(self) -> bool:
        """Whether any pod has resolved a name."""
        return bool(self._pods)

    def note(self, pod: PodKey, name: str, addresses: Iterable[str]) -> None:
        """Record that a pod has resolved a name to these addresses."""
        known = self._pods.get(pod)
        if known is None:
            known = self._pods[pod] = OrderedDict()
            if len(self._pods) > _PODS:
                self._pods.popitem(last=False)
        self._pods.move_to_end(pod)
        name = name.removesuffix(".").lower()
        for address in addresses:
            others = tuple([each for each in known.get(address, ()) if each != name])
            known[address] = (*others, name)[-_NAMES:]
            known.move_to_end(address)
        while len(known) > _ADDRESSES:
            known.popitem(last=False)

    def of(self, pod: PodKey, address: str) -> tuple[str, ...]:
        """Return the names that a pod resolved to an address, the latest last."""
        known = self._pods.get(pod)
        return known.get(address, ()) if known is not None else ()
