"""Follows a PolicySync server. Each stream fills a new store, which replaces the previous one when complete.

While the connection is down, and until a new stream has sent InSync, the last complete store answers. So objects
deleted in the meantime do not survive, and a restart of Felix interrupts no connection.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from random import random
from typing import Final

from xds.aio.channel import Channel, Keepalive
from xds.dialects.calico.policysync import decode
from xds.errors import ConfigError
from xds.grpc.status import RpcFailed
from xds.model import calico as c
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.store import Store
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.clock import Clock

log = logging.getLogger(__name__)

METHOD: Final = "/felix.PolicySync/Sync"

#: The longest message. Felix's own limit is 4 MiB, or 82,200 members of an IP set, but other servers might not
#: have that limit.
MESSAGE_BYTES: Final = 64 * 1024 * 1024
#: After this number of consecutive faulty messages a stream is restarted.
FAULTS: Final = 100
#: The maximum size of a store in members of IP sets, which take 95 bytes each. The largest store that Calico has
#: measured has 280,000 objects and members. A server that never ends its snapshot must not take all memory.
OBJECTS: Final = 5_000_000
#: The number of message bytes that count like one member of an IP set: a rule of 100 bytes takes a kilobyte when
#: it is compiled.
_BYTES_PER_MEMBER: Final = 8
#: The number of updates, or of members in one update, that are applied in one slice of about 4 ms before other
#: tasks run.
_BATCH: Final = 64
_SLICE: Final = 4096
#: The time after which a log line reports an incomplete snapshot, for example while Felix waits for its datastore.
_SLOW_S: Final = 30.0
#: The prefix of a set's id while the set is being filled. No set in a message can have such an id.
_FILLING: Final = "\0"


@dataclass(slots=True)
class FollowerCounts:
    """Counts that include all streams to the server.

    Attributes:
        streams: number of streams opened.
        updates: number of updates applied.
        faults: messages that could not be read.
        ignored: payloads that policy does not need.
    """

    streams: int = 0
    updates: int = 0
    faults: int = 0
    ignored: int = 0


class Follower:
    """The connection to one PolicySync server.

    Args:
        target: ``unix:/path`` or ``host:port``.
        clock: for :attr:`age_s`.
        trust_domains, connections_only: see :class:`~ztunnel.policy.calico.evaluator.Evaluator`.
        changed: called after each change of :attr:`evaluator` or its store.
        backoff: the waits between streams. By default 0.2 s, doubling to 0.8 s, with a random fifth. They are
            short, because the server is on the same node, and checks are refused until it has sent its snapshot.

    Attributes:
        evaluator: uses the last complete store. Before the first, it answers UNAVAILABLE.
        in_sync: whether the stream is open and its store is in use.
        error: why the last stream ended.
    """

    def __init__(
        self,
        target: str,
        clock: Clock,
        *,
        trust_domains: frozenset[str] = frozenset(),
        connections_only: bool = False,
        changed: Callable[[], object] = lambda: None,
        backoff: Backoff | None = None,
    ) -> None:
        self.target = target
        self.evaluator = Evaluator(Store(), trust_domains, connections_only=connections_only)
        self.in_sync = False
        self.error = ""
        self.counts = FollowerCounts()
        self._clock = clock
        self._trust_domains = trust_domains
        self._connections_only = connections_only
        self._changed = changed
        self._lost_at: float | None = None
        self._keepalive = Keepalive()
        self._backoff = backoff or Backoff(0.2, 0.8, spread=0.2)

    @property
    def name(self) -> str:
        """A description of the policies' source, for people."""
        return self.target

    @property
    def age_s(self) -> float:
        """Seconds since the active store was last known to be current. 0 while it is in sync, and before the first
        store.
        """
        return 0.0 if self.in_sync or self._lost_at is None else self._clock.monotonic() - self._lost_at

    async def run(self) -> None:
        """Follow the server until cancelled."""
        while True:
            try:
                async with Channel(
                    self.target, message_limit_bytes=MESSAGE_BYTES, keepalive=self._keepalive
                ) as channel:
                    await self._stream(channel)
                self.error = "the server has ended the stream"
            except RpcFailed as error:
                self.error = str(error)
            except ConfigError as error:
                self.error = str(error)
            finally:
                if self.in_sync:
                    self._lost_at = self._clock.monotonic()
                self.in_sync = False
            wait_s = self._backoff.next(random())
            log.warning("PolicySync stream ended server=%s error=%s wait_s=%.1f", self.target, self.error, wait_s)
            await asyncio.sleep(wait_s)

    async def _stream(self, channel: Channel) -> None:
        call = await channel.call(METHOD)
        slow: asyncio.TimerHandle | None = None
        try:
            await call.write(b"", ended=True)
            self.counts.streams += 1
            pending = Evaluator(Store(), self._trust_domains, connections_only=self._connections_only)
            weights = _Weights()
            slow = asyncio.get_running_loop().call_later(_SLOW_S, self._is_slow, pending)
            faults = 0
            read = 0
            while (message := await call.read()) is not None:
                try:
                    update = decode(message)
                except ConfigError as error:
                    self.counts.faults += 1
                    faults += 1
                    log.warning("PolicySync message not readable server=%s error=%s", self.target, error)
                    if faults >= FAULTS:
                        raise ConfigError(f"{faults} messages cannot be read, the last one: {error}") from error
                    continue
                if update is None:
                    self.counts.ignored += 1
                    continue
                weights.note(update, len(message))
                await self._apply(pending, update, weights)
                self.counts.updates += 1
                if isinstance(update, c.InSync) and pending is not self.evaluator:
                    self._take_over(pending)
                if pending is self.evaluator:
                    self._changed()
                # Reading messages that have arrived never waits, and a snapshot is long. So checks must get time
                # to run in between.
                read += 1
                if read % _BATCH == 0:
                    await asyncio.sleep(0)
        finally:
            if slow is not None:
                slow.cancel()
            call.cancel()

    async def _apply(self, pending: Evaluator, update: c.Update, weights: "_Weights") -> None:
        """Apply one update. A large update is applied in slices, between which other tasks run.

        Meanwhile a set is filled under a temporary name, because a partly filled set must not be used.

        Raises:
            ConfigError: the store has become too large.
        """
        for part in _slices(update):
            pending.apply(part)
            if pending.store.size + weights.total > OBJECTS:
                raise ConfigError(f"the server has sent more than {OBJECTS:,} objects")
            if part is not update:
                await asyncio.sleep(0)
        if isinstance(update, c.IpSetUpdate) and len(update.members) > _SLICE:
            pending.store.rename_ip_set(_FILLING + update.id, update.id)

    def _is_slow(self, pending: Evaluator) -> None:
        if pending is not self.evaluator:
            self.error = f"the server has not sent InSync yet, after {_SLOW_S:.0f} s"
            size = pending.store.size
            log.warning("PolicySync not complete server=%s objects=%d error=%s", self.target, size, self.error)

    def _take_over(self, pending: Evaluator) -> None:
        self.evaluator = pending
        self.in_sync = True
        self.error = ""
        self._backoff.reset()
        store = pending.store
        log.info(
            "PolicySync in sync server=%s policies=%d profiles=%d endpoints=%d ip_sets=%d members=%d",
            self.target,
            len(store.policies),
            len(store.profiles),
            len(store.endpoints),
            len(store.ip_sets),
            store.ip_sets.members,
        )
        for set_id, member in store.ip_sets.broken():
            log.error("IP set not usable id=%s member=%r", set_id, member)


class _Weights:
    """Estimates the memory of all objects except IP sets by the sizes of their messages, in units of one IP set
    member.
    """

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[tuple[str, Hashable], int] = {}

    def note(self, update: c.Update, size: int) -> None:
        """Record the message of an update, which replaces the object's previous message."""
        key: Hashable
        value: object
        match update:
            case c.PolicyUpdate(id=key, policy=value):
                pass
            case c.ProfileUpdate(name=key, profile=value):
                pass
            case c.EndpointUpdate(id=key, endpoint=value):
                pass
            case c.ServiceAccountUpdate(namespace=namespace, name=name, labels=value):
                key = (namespace, name)
            case c.NamespaceUpdate(name=key, labels=value):
                pass
            case _:
                return
        place = (type(update).__name__, key)
        self.total -= self._of.pop(place, 0)
        if value is not None:
            self._of[place] = size // _BYTES_PER_MEMBER
            self.total += size // _BYTES_PER_MEMBER


def _slices(update: c.Update) -> Iterator[c.Update]:
    """Yield the parts of an update: one part, unless the update has many members."""
    match update:
        case c.IpSetUpdate() if len(update.members) > _SLICE:
            filling = _FILLING + update.id
            yield c.IpSetUpdate(filling, update.type, update.members[:_SLICE])
            for start in range(_SLICE, len(update.members), _SLICE):
                yield c.IpSetDelta(filling, update.members[start : start + _SLICE], ())
        case c.IpSetDelta() if len(update.added) + len(update.removed) > _SLICE:
            for start in range(0, len(update.added), _SLICE):
                yield c.IpSetDelta(update.id, update.added[start : start + _SLICE], ())
            for start in range(0, len(update.removed), _SLICE):
                yield c.IpSetDelta(update.id, (), update.removed[start : start + _SLICE])
        case _:
            yield update
