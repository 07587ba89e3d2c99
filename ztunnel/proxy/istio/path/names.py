"""Resolves the host names of workloads that have no addresses, and caches the results for their time to live.

Connections that need the same name at the same time share one query. Otherwise a busy client of a slow name server
would use up the process's file descriptors.
"""

import asyncio
from collections import OrderedDict

from ztunnel.proxy.dataplane.resolver import Answer, ResolveFailed, Resolver
from ztunnel.runtime.clock import Clock

_MOST = 4096
#: The shortest time to cache a name, so that a TTL of 0 does not cause a query per connection.
_LEAST_S = 1.0


class _Query:
    """A running query.

    Attributes:
        ended: set when the query has ended.
        result: the addresses, or why the query has failed. ``None`` if its connection has ended before.
    """

    __slots__ = ("ended", "result")

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.result: tuple[str, ...] | ResolveFailed | None = None


class Names:
    """A resolver with a bounded cache. The least recently used name is evicted first."""

    def __init__(self, resolver: Resolver, clock: Clock) -> None:
        self._resolver = resolver
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], tuple[float, Answer]] = OrderedDict()
        self._running: dict[tuple[str, str], _Query] = {}

    async def resolve(self, hostname: str, families: tuple[int, ...]) -> tuple[str, ...]:
        """Return the addresses of a name, from the cache if they have not expired.

        Args:
            hostname: a DNS name.
            families: the acceptable IP versions, 4 or 6 or both.

        Raises:
            ResolveFailed: the name has no addresses, or no server answered.
        """
        family = "ALL" if len(families) == 2 else "V4_ONLY" if families == (4,) else "V6_ONLY"
        key = hostname, family
        while (addresses := self._cached(key)) is None:
            running = self._running.get(key)
            if running is None:
                return await self._query(key)
            await running.ended.wait()
            result = running.result
            if isinstance(result, ResolveFailed):
                raise ResolveFailed(str(result), absent=result.absent) from result
            if result is not None:
                return result
        return addresses

    def _cached(self, key: tuple[str, str]) -> tuple[str, ...] | None:
        known = self._known.get(key)
        if known is None or known[0] <= self._clock.monotonic():
            return None
        self._known.move_to_end(key)
        return known[1].addresses

    async def _query(self, key: tuple[str, str]) -> tuple[str, ...]:
        began_s = self._clock.monotonic()
        query = self._running[key] = _Query()
        try:
            answer = await self._resolver.resolve(*key)
            query.result = answer.addresses
        except ResolveFailed as error:
            query.result = error
            raise
        finally:
            del self._running[key]
            query.ended.set()
        self._known[key] = began_s + max(_LEAST_S, answer.ttl_s), answer
        self._known.move_to_end(key)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)
        return answer.addresses
