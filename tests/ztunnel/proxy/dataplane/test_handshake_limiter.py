"""Connections before their handshake, over loopback: the order of handshakes, the closed connections, the
charges.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from hbone.aio.poller import Poller
from tests.hbone import virtual_time
from tests.ztunnel.proxy.dataplane.test_client_hello_arrival import HELLO
from tests.ztunnel.proxy.istio.pods import pair
from ztunnel.proxy.dataplane import handshake_limiter as module
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpen, HalfOpenLimits, PendingHandshake

LIMITS = HalfOpenLimits(
    per_source=4,
    per_pod=6,
    in_all=8,
    handshakes_per_source=2,
    handshakes_per_pod=3,
    handshakes=4,
)


class Running:
    """A handshake that a test ends."""

    def __init__(self, pending: PendingHandshake) -> None:
        self.pending = pending
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.pending.sock.close()


class Pod:
    """One limiter and its clients."""

    def __init__(self, half_open: HalfOpen, order: list[tuple[str, str]], name: str = "pod") -> None:
        self.begun: dict[PendingHandshake, Running] = {}
        self.rejected: list[tuple[str, str]] = []
        self.clients: list[socket.socket] = []
        self._order = order
        self._name = name
        self.limiter = half_open.limiter(self._begin, self._away)

    def _begin(self, pending: PendingHandshake) -> Running:
        self._order.append((self._name, pending.peer[0]))
        self.begun[pending] = Running(pending)
        return self.begun[pending]

    def _away(self, pending: PendingHandshake, reason: str) -> None:
        self.rejected.append((pending.peer[0], reason))

    def comes(self, source: str = "a", data: bytes = b"") -> socket.socket:
        near, far = pair("127.0.0.1", "127.0.0.1")
        near.setblocking(True)
        near.sendall(data)
        self.clients.append(near)
        self.limiter.enter(far, (source, 1))
        return near

    def end(self, *, proved: bool = True) -> None:
        """End every handshake that has begun."""
        for pending, running in self.begun.items():
            (pending.proved if proved else pending.ended)()
            pending.sock.close()
            del running
        self.begun.clear()

    def close(self) -> None:
        self.limiter.close()
        for pending in self.begun:
            pending.sock.close()
        for client in self.clients:
            client.close()


@contextmanager
def pods(limits: HalfOpenLimits, *names: str) -> Iterator[tuple[HalfOpen, list[Pod], list[tuple[str, str]]]]:
    order: list[tuple[str, str]] = []
    with closing(Poller()) as poller:
        half_open = HalfOpen(poller, limits)
        made = [Pod(half_open, order, name) for name in names or ("pod",)]
        try:
            yield half_open, made, order
        finally:
            for each in made:
                each.close()
            half_open.close()
            assert len(half_open) == half_open.handshakes == poller.registered == 0 or any(
                each.begun for each in made
            )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.05)


def play(body: Callable[[], Awaitable[None]]) -> None:
    virtual_time.run(body)


def test_a_handshake_begins_with_the_last_byte_of_the_client_hello() -> None:
    async def main() -> None:
        with pods(LIMITS) as (half_open, (pod,), order):
            client = pod.comes()
            for position in range(len(HELLO) - 1):
                client.send(HELLO[position : position + 1])
                await asyncio.sleep(0.001)
            assert (order, len(half_open)) == ([], 1)
            client.send(HELLO[-1:])
            await until(lambda: order)
            (pending,) = pod.begun
            assert pending.sock.recv(len(HELLO) + 1) == HELLO  # it is all there, for TLS to read
            pod.end()
            assert len(half_open) == 0

    play(main)


@pytest.mark.parametrize("data", [b"", b"\x16\x03"])
def test_client_without_a_whole_client_hello_times_out(data: bytes) -> None:
    async def main() -> None:
        with pods(LIMITS) as (_, (pod,), order):
            pod.comes(data=data)
            await until(lambda: pod.rejected)
            assert pod.rejected == [("a", module.NO_HELLO)]
            assert order == []

    play(main)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", module.GONE), (b"\x16\x03", module.GONE), (b"\x16\x03\x01\x40\0\x01\xff\xff\xff", module.TOO_LONG)],
)
def test_closed_or_too_long_first_bytes_are_rejected_at_once(data: bytes, reason: str) -> None:
    async def main() -> None:
        with pods(LIMITS) as (_, (pod,), _):
            client = pod.comes(data=data)
            if not pod.rejected:
                client.shutdown(socket.SHUT_WR)
            await until(lambda: pod.rejected)
            assert pod.rejected == [("a", reason)]

    play(main)


def test_oldest_connection_of_the_same_source_is_closed_first() -> None:
    async def main() -> None:
        with pods(LIMITS) as (half_open, (pod,), _):
            clients = [pod.comes() for _ in range(5)]
            other = pod.comes("b")
            assert pod.rejected == [("a", module.TOO_MANY_OF_SOURCE)]
            assert clients[0].recv(1) == b""
            pod.comes("c")
            pod.comes("d")
            assert pod.rejected[1:] == [("a", module.TOO_MANY_OF_POD)]
            other.send(HELLO)
            await until(lambda: pod.begun)
            pod.end()
            assert len(half_open) == 5  # six, less the one that has proved itself

    play(main)


def test_process_limit_closes_a_connection_of_the_fullest_pod() -> None:
    async def main() -> None:
        with pods(LIMITS, "x", "y") as (half_open, (x, y), _):
            for number in range(6):
                x.comes(str(number))
            for number in range(3):
                y.comes(str(number))
            assert len(half_open) == 8
            assert (x.rejected, y.rejected) == ([("0", module.TOO_MANY)], [])

    play(main)


def test_handshakes_begin_round_robin_over_pods_and_sources() -> None:
    async def main() -> None:
        wide = replace(LIMITS, per_source=99, per_pod=99, in_all=99, handshakes_per_source=99)
        wide = replace(wide, handshakes_per_pod=99, handshakes=99)
        with pods(wide, "x", "y") as (_, (x, y), order):
            for source in "aaaab":
                x.comes(source, HELLO)
            y.comes("c", HELLO)
            await until(lambda: len(order) == 6)
            assert order[:3] == [("x", "a"), ("y", "c"), ("x", "b")]
            x.end()
            y.end()

    play(main)


def test_stalled_handshakes_are_closed_if_others_wait() -> None:
    async def main() -> None:
        with pods(LIMITS) as (_, (pod,), order):
            for _ in range(3):
                pod.comes("a", HELLO)
            pod.comes("b", HELLO)
            await until(lambda: len(order) == 3)
            assert sorted(source for _, source in order) == ["a", "a", "b"]
            assert pod.rejected == []
            stuck = list(pod.begun.values())
            await until(lambda: len(order) == 4)  # after a second of patience
            assert pod.rejected == [("a", module.STALLED)]
            assert sum(each.cancelled for each in stuck) == 1
            pod.end()

    play(main)


def test_full_process_closes_a_handshake_of_the_pod_with_most() -> None:
    async def main() -> None:
        narrow = replace(LIMITS, handshakes=3, handshakes_per_source=3)
        with pods(narrow, "x", "y") as (_, (x, y), order):
            for _ in range(3):
                x.comes("a", HELLO)
            await until(lambda: len(order) == 3)
            y.comes("b", HELLO)
            await until(lambda: y.begun)
            assert x.rejected == [("a", module.STALLED)]
            x.end()
            y.end()

    play(main)


def test_running_handshakes_of_an_ended_pod_are_awaited() -> None:
    async def main() -> None:
        with pods(replace(LIMITS, handshakes=2), "x", "y") as (_, (x, y), order):
            for _ in range(2):
                x.comes("a", HELLO)
            await until(lambda: len(order) == 2)
            x.limiter.close()
            y.comes("b", HELLO)
            await asyncio.sleep(2.0)
            assert len(order) == 2
            x.end(proved=False)
            await until(lambda: y.begun)
            y.end()

    play(main)


def test_only_unfinished_handshakes_are_charged_to_their_source() -> None:
    async def main() -> None:
        limits = replace(LIMITS, unfinished_of_source=(3.0, 0.001))
        with pods(limits) as (_, (pod,), order):
            for _ in range(20):
                pod.comes("a", HELLO)
                await until(lambda: pod.begun)
                pod.end(proved=True)
            for _ in range(3):
                pod.comes("a", HELLO)
                await until(lambda: pod.begun)
                pod.end(proved=False)
            begun = len(order)
            pod.comes("a", HELLO)
            pod.comes("b", HELLO)
            await until(lambda: len(order) > begun)
            assert order[begun:] == [("pod", "b")]
            pod.end()

    play(main)


def test_queued_connection_that_closes_starts_no_handshake() -> None:
    async def main() -> None:
        limits = replace(LIMITS, unfinished_of_source=(1.0, 0.5))
        with pods(limits) as (half_open, (pod,), order):
            waiting = [pod.comes("a", HELLO) for _ in range(4)]
            await until(lambda: pod.begun)
            for client in waiting[1:]:
                client.close()
            await until(lambda: len(half_open) == 1)
            assert pod.rejected == [("a", module.GONE)] * 3
            pod.comes("a", HELLO)
            await until(lambda: len(order) == 2)
            pod.end()

    play(main)


def test_handshake_that_fails_to_begin_frees_its_place() -> None:
    async def main() -> None:
        with closing(Poller()) as poller:
            half_open = HalfOpen(poller, LIMITS)

            def fails(pending: PendingHandshake) -> Running:
                raise MemoryError

            away: list[str] = []
            limiter = half_open.limiter(fails, lambda pending, reason: away.append(reason))
            near, far = pair("127.0.0.1", "127.0.0.1")
            with near:
                near.sendall(HELLO)
                limiter.enter(far, ("a", 1))
                await until(lambda: away)
                assert (len(half_open), half_open.handshakes) == (0, 0)
                assert far.fileno() < 0
            limiter.close()
            half_open.close()

    play(main)


def test_connection_after_close_is_rejected() -> None:
    async def main() -> None:
        with pods(LIMITS) as (half_open, (pod,), order):
            pod.comes()
            pod.limiter.close()
            pod.comes(data=HELLO)
            assert pod.rejected == [("a", "")] * 2
            assert (len(half_open), order) == (0, [])

    play(main)


def test_limits_follow_the_descriptors() -> None:
    few = HalfOpenLimits.of_descriptors(512)
    assert (few.in_all, few.per_pod, few.per_source, few.handshakes) == (128, 64, 32, 128)
    assert HalfOpenLimits.of_descriptors(1 << 20) == HalfOpenLimits()


def test_a_socket_that_cannot_be_watched_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would ever wake it up."""

    async def main() -> None:
        with pods(LIMITS) as (half_open, (pod,), _):

            def full(fd: int, handler: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            with monkeypatch.context() as patched:
                patched.setattr(half_open.poller, "register", full)
                client = pod.comes()
            assert client.recv(1) == b""
            assert pod.rejected == [("a", "cannot be watched: no space left on device")]
            assert len(half_open) == 0

    play(main)


def test_offending_source_waits_longer_each_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pods(LIMITS) as (_, (pod,), _order):
            waits = []
            for _ in range(5):
                pod.comes("a", HELLO)
                began_s = loop.time()
                while not pod.begun:
                    await asyncio.sleep(0.01)
                waits.append(loop.time() - began_s)
                for pending in pod.begun:
                    pending.offended()
                pod.end()
            # Real time passes, too, if something else has the processor.
            assert waits[0] < 0.4
            assert 0.4 < waits[1] < 0.9
            assert 0.9 < waits[2] < 1.9
            assert 3.9 < waits[4] < 7.9
            pod.comes("a", HELLO)
            pod.comes("b", HELLO)
            await asyncio.sleep(0.1)
            assert [pending.peer[0] for pending in pod.begun] == ["b"]
            pod.end()
            await asyncio.sleep(60)  # it has kept quiet, and is forgiven
            pod.end()
            pod.comes("a", HELLO)
            await asyncio.sleep(0.1)
            for pending in pod.begun:
                pending.offended()
            pod.end()
            pod.comes("a", HELLO)
            await asyncio.sleep(0.6)
            assert pod.begun

    virtual_time.run(main)


def test_queued_connection_is_not_closed_by_the_end_of_another_with_its_descriptor() -> None:
    """A socket of a batch is closed, and an accepted one gets its number, before its hang-up is handled."""

    class Ended:
        def on_event(self, mask: int) -> None: ...

        def on_bug(self, error: Exception) -> None: ...

    class Listening(Ended):
        def on_event(self, mask: int) -> None:
            number = old.detach()
            pod.limiter._poller.unregister(number)
            near, far = pair("127.0.0.1", "127.0.0.1")
            near.sendall(HELLO)
            os.dup2(far.fileno(), number)
            far.close()
            accepted = socket.socket(fileno=number)
            accepted.setblocking(False)
            pod.clients.append(near)
            pod.limiter.enter(accepted, ("a", 1))

    async def body() -> None:
        nonlocal old, pod
        with pods(LIMITS) as (half_open, (pod,), _):
            poller = half_open.poller
            old, peer = pair("127.0.0.1", "127.0.0.1")
            listening, client = pair("127.0.0.1", "127.0.0.1")
            poller.register(listening.fileno(), Listening())
            poller.register(old.fileno(), Ended())
            client.send(b"x")
            peer.close()
            await until(lambda: pod.begun or pod.rejected)
            assert pod.rejected == []
            pod.end()
            poller.unregister(listening.fileno())
            listening.close()
            client.close()

    old: socket.socket
    pod: Pod
    play(body)
