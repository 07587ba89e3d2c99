"""Limits connections that have not completed their TLS handshake, by source and by pod, and starts handshakes one
at a time.

An accepted connection stays here as one small object until the kernel has received its whole ClientHello, which is
peeked at and not read. Only then the handshake begins, which needs a TLS object and a fiber, some 80 KiB. One
handshake starts per loop iteration, round-robin over pods and over the sources within a pod. So a flood of
connections to one pod delays neither the bytes of established connections nor other pods' handshakes.

::

    accepted --> waiting for a ClientHello --> queued --> handshake --> established, or over
                 (timeout, limits: closed)     (limits: oldest closed)

Every unfinished handshake is charged to its source, its pod and the process. A source that left many handshakes
unfinished must wait. A stalled handshake is ended after a second if other handshakes are waiting.

Under overload, connections first wait. If a limit is reached, the oldest connection is closed: of the source, of
the pod, or, for the limit of the process, of the pod with the most half-open connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hbone.aio.poller import HUNG_UP, Poller
from hbone.flow import Budget
from hbone.limits import HANDSHAKE_TIMEOUT_S
from ztunnel.proxy.dataplane.client_hello_arrival import FirstBytes, first_bytes
from ztunnel.runtime.settings import plain_reason

log = logging.getLogger(__name__)

_SWEEP_S: Final = 0.5
_RETRY_S: Final = 0.02
#: How long a source must wait before its next handshake after its connections have violated protocol limits.
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 4.0
_FORGIVEN_S: Final = 40.0
#: A pod's limiter remembers the unfinished handshakes of this many sources that have no open connections.
_KEPT_SOURCES: Final = 256

TOO_MANY_OF_SOURCE: Final = "too many half-open connections of this source"
TOO_MANY_OF_POD: Final = "too many half-open connections to this pod"
TOO_MANY: Final = "too many half-open connections"
STALLED: Final = "handshake stalled while others wait"
NO_HELLO: Final = "TLS handshake timed out"
TOO_LONG: Final = "ClientHello is too long"
_LIMITS: Final = frozenset((TOO_MANY_OF_SOURCE, TOO_MANY_OF_POD, TOO_MANY, STALLED, NO_HELLO, TOO_LONG))
GONE: Final = "peer closed the connection during the TLS handshake"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOpenLimits:
    """Limits on connections before the end of their handshake.

    A handshake takes one or two milliseconds of a core, so 64 concurrent handshakes are more than any honest
    source needs. ``unfinished_*`` are a burst and a rate per second of handshakes that ended without
    authentication. 200 such handshakes per second, from all sources, take a sixth of a core.
    """

    per_source: int = 512
    per_pod: int = 1024
    in_all: int = 4096
    handshakes_per_source: int = 64
    handshakes_per_pod: int = 128
    handshakes: int = 256
    patience_s: float = 1.0
    """The age in seconds after which a running handshake is ended if another handshake waits."""
    hello_bytes: int = 16_384
    timeout_s: float = HANDSHAKE_TIMEOUT_S
    unfinished_of_source: tuple[float, float] = (100.0, 50.0)
    unfinished_of_pod: tuple[float, float] = (200.0, 100.0)
    unfinished: tuple[float, float] = (400.0, 200.0)

    @classmethod
    def of_descriptors(cls, most: int, *, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> HalfOpenLimits:
        """Return limits for a process with ``most`` file descriptors. Half-open connections can use a quarter of
        the descriptors.
        """
        usual = cls()
        in_all = max(16, min(usual.in_all, most // 4))
        per_pod = min(usual.per_pod, in_all // 2)
        return cls(
            in_all=in_all,
            per_pod=per_pod,
            per_source=min(usual.per_source, max(8, per_pod // 2)),
            handshakes=min(usual.handshakes, in_all),
            handshakes_per_pod=min(usual.handshakes_per_pod, per_pod),
            timeout_s=timeout_s,
        )


class Cancellable(Protocol):
    """A fiber or a task that can be cancelled."""

    def cancel(self) -> object:
        """Cancel the fiber or task."""


#: A function that begins the handshake of an accepted socket and becomes the socket's owner. Returns a handle to
#: cancel it.
Begin = Callable[["PendingHandshake"], Cancellable]
#: A function that is called before a connection is closed, with the reason. The reason is empty if the pod ends.
Rejected = Callable[["PendingHandshake", str], None]


class _Source:
    """The half-open connections of one source address to one pod."""

    __slots__ = ("offences", "pending_handshakes", "queue", "running", "unfinished", "waits_until_s")

    def __init__(self, limits: HalfOpenLimits) -> None:
        self.pending_handshakes: dict[PendingHandshake, None] = {}
        self.queue: deque[PendingHandshake] = deque()
        self.running: dict[PendingHandshake, None] = {}
        self.unfinished = Budget(burst=limits.unfinished_of_source[0], rate=limits.unfinished_of_source[1])
        self.offences = 0
        self.waits_until_s = 0.0
        """No handshake from this source begins before this time, because its connections exceeded protocol limits.
        """


class PendingHandshake:
    """A connection whose handshake has not finished. Until the handshake starts, the poller reports received bytes
    to it.

    Attributes:
        sock: a non-blocking socket. The limiter owns it until the handshake begins.
        peer: the client's address.
        owner: the front end's object for this connection.
        queued: whether the connection's handshake is queued.
        over: whether the connection has left the limiter.
    """

    __slots__ = (
        "_limiter",
        "_registered",
        "_running",
        "over",
        "owner",
        "peer",
        "queued",
        "since_s",
        "sock",
        "source",
    )

    def __init__(
        self,
        limiter: HandshakeLimiter,
        source: _Source,
        sock: socket.SocketType,
        peer: tuple[str, int],
        owner: Any,
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.owner = owner
        self.source = source
        self.since_s = 0.0
        """When the handshake began. Before it begins, this is when the connection was accepted."""
        self.over = self.queued = False
        self._limiter = limiter
        self._registered = False
        self._running: Cancellable | None = None

    @property
    def in_handshake(self) -> bool:
        """Whether the connection's handshake has started."""
        return self._running is not None

    def proved(self) -> float:
        """Record that the handshake has authenticated the peer. Idempotent. The first call returns the handshake's
        duration in seconds.
        """
        return self._limiter.leave(self, proved=True)

    def offended(self) -> None:
        """Record that the connection exceeded a protocol limit. Its source must then wait before its next
        handshake.
        """
        self._limiter.offended(self.source)

    def ended(self) -> None:
        """Record that the connection has ended without authentication. No effect after :meth:`proved`."""
        self._limiter.leave(self, proved=False)

    # For the limiter

    def watch(self, poller: Poller) -> None:
        """Let the poller report the connection's received bytes to this object.

        Raises:
            OSError: the poller cannot watch any more sockets.
        """
        poller.register(self.sock.fileno(), self)
        self._registered = True

    def unwatch(self, poller: Poller) -> None:
        """Stop watching for received bytes; undoes :meth:`watch`. Idempotent."""
        if self._registered:
            self._registered = False
            poller.unregister(self.sock.fileno())

    def begin(self, begin: Begin, now_s: float) -> None:
        """Start the handshake."""
        self.since_s = now_s
        self.queued = False
        self._running = begin(self)

    def stop(self) -> None:
        """Close the connection, and end its handshake if it has started."""
        if self._running is not None:
            self._running.cancel()
        else:
            self.sock.close()

    # Called by the poller

    def on_event(self, mask: int) -> None:
        if not self.over and self._running is None:
            self._limiter.peek(self, hung_up=bool(mask & HUNG_UP))

    def on_bug(self, error: Exception) -> None:
        log.error("a connection before its handshake failed", exc_info=error)
        self._limiter.reject(self, GONE)


#: A function that is called with a handshake's duration in seconds, and whether it succeeded.
Finished = Callable[[float, bool], object]


def _not_counted(seconds: float, succeeded: bool) -> None:
    """Do nothing. The default of :data:`Finished`, if handshakes are not counted."""


class HalfOpen:
    """All half-open connections of a process, by pod. There is one per poller.

    Attributes:
        rejected: the total number of connections closed by a limit.
        handshakes: the number of handshakes in progress.
        finished: called with the seconds of each handshake that ends, and whether it succeeded.
    """

    def __init__(self, poller: Poller, limits: HalfOpenLimits, finished: Finished = _not_counted) -> None:
        self.finished = finished
        self.poller = poller
        self.limits = limits
        self.rejected = 0
        self.handshakes = 0
        self.size = 0
        self._limiters: dict[HandshakeLimiter, None] = {}
        self._unfinished = Budget(burst=limits.unfinished[0], rate=limits.unfinished[1])
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return self.size

    def limiter(self, begin: Begin, rejected: Rejected, *, timeout_s: float | None = None) -> HandshakeLimiter:
        """Return the limiter of one pod. The caller closes the limiter."""
        limiter = HandshakeLimiter(self, begin, rejected, timeout_s or self.limits.timeout_s)
        self._limiters[limiter] = None
        return limiter

    def shed(self) -> bool:
        """Close the oldest half-open connection of the pod with the most half-open connections. Return False if
        there are none.
        """
        fullest = max(self._limiters, key=len, default=None)
        if fullest is None or not len(fullest):
            return False
        fullest.reject_oldest(TOO_MANY)
        return True

    # Called by limiters

    def changed(self, by: int) -> None:
        """Change the number of half-open connections, and start the timer that enforces their time limits."""
        self.size += by
        if self.size and self._timer is None:
            self._timer = self.poller.loop.call_later(_SWEEP_S, self._sweep)

    def removed(self, limiter: HandshakeLimiter) -> None:
        """Remove a limiter; idempotent."""
        self._limiters.pop(limiter, None)

    def pump(self) -> None:
        """Schedule the queued handshakes to begin, one per loop iteration."""
        self.poller.requeue(self)

    def may_begin(self, now_s: float) -> bool:
        """Charge one unfinished handshake to the budget of the process. Return False if the budget is already used
        up.
        """
        return self._unfinished.affords(now_s)

    def gives_way(self, now_s: float) -> bool:
        """Make room for another handshake: end the oldest handshake of the pod that has the most, if it is older
        than ``patience_s``. Return whether it was ended.
        """
        fullest = max(self._limiters, key=lambda each: len(each.running), default=None)
        # Possibly no pod has a running handshake: the process still counts a stopped pod's handshakes until their
        # fibers end.
        return fullest is not None and bool(fullest.running) and fullest.gives_way(fullest.running, now_s)

    def refund(self) -> None:
        """Refund the charge of :meth:`may_begin`, because the handshake succeeded."""
        self._unfinished.refund(1.0)

    def on_event(self, mask: int) -> None:
        """Begin one handshake; see :class:`hbone.aio.poller.Handler`."""
        now_s = self.poller.loop.time()
        waiting = False
        for limiter in list(self._limiters):
            if not limiter.queued:
                continue
            waiting = True
            if limiter.begin_one(now_s):
                # Move this pod's limiter to the end, so that it is another pod's turn.
                self._limiters.pop(limiter, None)
                self._limiters[limiter] = None
                self.pump()
                return
        if waiting and self._retry is None:
            self._retry = self.poller.loop.call_later(_RETRY_S, self._again)

    def on_bug(self, error: Exception) -> None:
        log.error("a handshake did not begin", exc_info=error)
        self.pump()

    def _again(self) -> None:
        self._retry = None
        self.pump()

    def _sweep(self) -> None:
        self._timer = None
        now_s = self.poller.loop.time()
        for limiter in list(self._limiters):
            limiter.sweep(now_s)
        self.changed(0)

    def close(self) -> None:
        """Stop the timers. Idempotent. The owners of limiters close these."""
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        self._timer = self._retry = None


def _begins_nothing(pending: PendingHandshake) -> Cancellable:
    raise AssertionError("a handshake of a closed limiter")


class HandshakeLimiter:
    """The half-open connections of one pod.

    Args:
        half_open: the process's half-open connections.
        begin: starts a handshake. It must eventually call :meth:`PendingHandshake.proved` or
            :meth:`PendingHandshake.ended`.
        rejected: called with each connection that the limiter closes, and the reason.
        timeout_s: the longest wait for a ClientHello.

    Attributes:
        running: connections with a running handshake, oldest first.
    """

    def __init__(self, half_open: HalfOpen, begin: Begin, rejected: Rejected, timeout_s: float) -> None:
        self._all = half_open
        self._timeout_s = timeout_s
        self._limits = half_open.limits
        self._poller = half_open.poller
        self._begin = begin
        self._rejected = rejected
        self._closed = False
        self._pending: dict[PendingHandshake, None] = {}
        self._sources: dict[str, _Source] = {}
        self._ready: deque[_Source] = deque()  # each source at most once, served in turn
        self.running: dict[PendingHandshake, None] = {}
        self._unfinished = Budget(burst=self._limits.unfinished_of_pod[0], rate=self._limits.unfinished_of_pod[1])

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def queued(self) -> bool:
        """Whether handshakes are queued."""
        return bool(self._ready)

    def enter(self, sock: socket.SocketType, peer: tuple[str, int], owner: Any = None) -> PendingHandshake:
        """Add an accepted, non-blocking socket. If a limit is reached, this or an older connection is closed."""
        limits = self._limits
        source = self._source(peer[0])
        if self._closed:
            pending = PendingHandshake(self, source, sock, peer, owner)
            self._rejected(pending, "")
            pending.stop()
            return pending
        if len(source.pending_handshakes) >= limits.per_source:
            self.reject(next(iter(source.pending_handshakes)), TOO_MANY_OF_SOURCE)
        elif len(self._pending) >= limits.per_pod:
            self.reject_oldest(TOO_MANY_OF_POD)
        elif self._all.size >= limits.in_all:
            self._all.shed()
        pending = PendingHandshake(self, source, sock, peer, owner)
        pending.since_s = self._poller.loop.time()
        self._pending[pending] = None
        source.pending_handshakes[pending] = None
        self._all.changed(+1)
        self.peek(pending, hung_up=False)
        if not pending.over:
            try:
                pending.watch(self._poller)
            except OSError as error:  # epoll cannot watch the socket (max_user_watches), so close the connection
                self.reject(pending, f"cannot be watched: {plain_reason(error)}")
        return pending

    def peek(self, pending: PendingHandshake, *, hung_up: bool) -> None:
        """Peek at a connection's received bytes, and queue the connection for its handshake when the ClientHello
        is complete.

        If it is already queued, only check whether the peer has closed it.
        """
        if pending.queued:
            if hung_up:
                self.reject(pending, GONE)
            return
        most = self._limits.hello_bytes
        room = self._poller.ciphertext[: 2 * most]  # TLS record headers need additional room
        try:
            size = pending.sock.recv_into(room, 0, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            self.reject(pending, f"network failed: {plain_reason(error)} during the TLS handshake")
            return
        found = first_bytes(room[:size], most) if size else FirstBytes.PART
        if found is FirstBytes.PART:
            if not size or hung_up:
                self.reject(pending, GONE)
        elif found is FirstBytes.TOO_LONG:
            self.reject(pending, TOO_LONG)
        else:
            # A connection whose bytes are not TLS is queued, too, so that the handshake reports the error.
            pending.queued = True
            source = pending.source
            if not source.queue:
                self._ready.append(source)
            source.queue.append(pending)
            self._all.pump()

    def begin_one(self, now_s: float) -> bool:
        """Begin one handshake, for the next source that may begin one. Return False if no source may."""
        if not self._unfinished.affords(now_s):
            return False
        if not self._all.may_begin(now_s):
            self._unfinished.refund(1.0)
            return False
        for _ in range(len(self._ready)):
            source = self._ready[0]
            self._ready.rotate(-1)
            if now_s < source.waits_until_s:
                continue
            if source.unfinished.affords(now_s):
                if self._has_place(source, now_s):
                    self._begin_of(source, now_s)
                    return True
                source.unfinished.refund(1.0)
        self._unfinished.refund(1.0)
        self._all.refund()
        return False

    def _begin_of(self, source: _Source, now_s: float) -> None:
        pending = source.queue.popleft()
        if not source.queue:
            self._ready.remove(source)
        source.running[pending] = self.running[pending] = None
        self._all.handshakes += 1
        pending.unwatch(self._poller)
        try:
            pending.begin(self._begin, now_s)
        except BaseException:
            self.reject(pending, GONE)
            raise

    def _has_place(self, source: _Source, now_s: float) -> bool:
        limits = self._limits
        if len(source.running) >= limits.handshakes_per_source:
            return self.gives_way(source.running, now_s)
        if len(self.running) >= limits.handshakes_per_pod:
            return self.gives_way(self.running, now_s)
        return self._all.handshakes < limits.handshakes or self._all.gives_way(now_s)

    def gives_way(self, running: dict[PendingHandshake, None], now_s: float) -> bool:
        """End the oldest handshake in ``running`` if it is older than ``patience_s``. Return
        whether it was ended.
        """
        pending = next(iter(running))
        if now_s - pending.since_s < self._limits.patience_s:
            return False
        self.reject(pending, STALLED)
        return True

    def offended(self, source: _Source) -> None:
        """Make a source wait before its next handshake. The waiting time doubles with each violation, up to a
        limit.

        The waiting time is reset after ten times this limit without another violation.
        """
        now_s = self._poller.loop.time()
        if now_s - source.waits_until_s > _FORGIVEN_S:
            source.offences = 0
        wait_s = min(_FIRST_WAIT_S * 2**source.offences, _LONGEST_WAIT_S)
        source.offences += 1
        source.waits_until_s = max(source.waits_until_s, now_s + wait_s)

    def reject_oldest(self, reason: str) -> None:
        """Close the pod's oldest half-open connection. The caller ensures that one exists."""
        self.reject(next(iter(self._pending)), reason)

    def reject(self, pending: PendingHandshake, reason: str) -> None:
        """Close one half-open connection for ``reason``. Idempotent."""
        if pending.over:
            return
        self._all.rejected += reason in _LIMITS
        self.leave(pending, proved=False)
        pending.unwatch(self._poller)
        self._rejected(pending, reason)
        pending.stop()

    def leave(self, pending: PendingHandshake, *, proved: bool) -> float:
        """Remove a connection. Return its handshake's duration in seconds, or 0 if no handshake has started.
        Idempotent.
        """
        if pending.over:
            return 0.0
        seconds = 0.0
        pending.over = True
        source = pending.source
        self._pending.pop(pending, None)
        source.pending_handshakes.pop(pending, None)
        if pending in self.running:
            del source.running[pending], self.running[pending]
            self._all.handshakes -= 1
            seconds = self._poller.loop.time() - pending.since_s
            self._all.finished(seconds, proved)
            if proved:
                source.unfinished.refund(1.0)
                self._unfinished.refund(1.0)
                self._all.refund()
            if self._ready:
                self._all.pump()
        elif pending.queued:
            source.queue.remove(pending)
            if not source.queue:
                self._ready.remove(source)
        self._all.changed(-1)
        return seconds

    def sweep(self, now_s: float) -> None:
        """Close connections whose ClientHello did not arrive in time. Started handshakes have a separate limit."""
        until_s = now_s - self._timeout_s
        for pending in list(self._pending):
            if pending.in_handshake:
                continue
            if pending.since_s > until_s:
                break
            self.reject(pending, NO_HELLO)

    def close(self) -> None:
        """Close all connections whose handshake has not started, and reject new connections. Idempotent.

        Started handshakes end with their fibers.
        """
        self._closed = True
        self._begin = _begins_nothing  # the previous function would keep the pod's objects in memory
        self._all.removed(self)
        for pending in list(self._pending):
            if not pending.in_handshake:
                self.leave(pending, proved=False)
                pending.unwatch(self._poller)
                self._rejected(pending, "")
                pending.stop()

    def _source(self, host: str) -> _Source:
        source = self._sources.get(host)
        if source is None:
            if len(self._sources) >= self._limits.per_pod + _KEPT_SOURCES:
                self._forget_one()
            source = self._sources[host] = _Source(self._limits)
        return source

    def _forget_one(self) -> None:
        now_s = self._poller.loop.time()
        waiting = None
        for host, source in self._sources.items():
            if not source.pending_handshakes:
                if source.waits_until_s <= now_s:
                    del self._sources[host]
                    return
                waiting = waiting or host
        if waiting is not None:
            del self._sources[waiting]
