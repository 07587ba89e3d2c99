"""Resolves the host names of workloads that have no addresses, and caches the results for their time to live."""

from collections import OrderedDict

from ztunnel.proxy.dataplane.resolver import Answer, Resolver
from ztunnel.runtime.clock import Clock

_MOST = 4096
#: The shortest time to cache a name, so that a TTL of 0 does not cause a query per connection.
_LEAST_S = 1.0


class Names:
    """A resolver with a bounded cache. The least recently used name is evicted first."""

    def __init__(self, resolver: Resolver, clock: Clock) -> None:
        self._resolver = resolver
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], tuple[float, Answer]] = OrderedDict()

    async def resolve(self, hostname: str, families: tuple[int, ...]) -> tuple[str, ...]:
        """Return the addresses of a name, from the cache if they have not expired.

        Args:
            hostname: a DNS name.
            families: the acceptable IP versions, 4 or 6 or both.

        Raises:
            ResolveFailed: the name has no addresses, or no server answered.
        """
        family = "ALL" if len(families) == 2 else "V4_ONLY" if families == (4,) else "V6_ONLY"
        key, now_s = (hostname, family), self._clock.monotonic()
        known = self._known.get(key)
        if known is not None and known[0] > now_s:
            self._known.move_to_end(key)
            return known[1].addresses
        answer = await self._resolver.resolve(hostname, family)
        self._known[key] = now_s + max(_LEAST_S, answer.ttl_s), answer
        self._known.move_to_end(key)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return answer.addresses
