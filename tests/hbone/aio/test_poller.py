"""What a poller has for its sockets: turns that survive faults, interval timers, buffers, the peak of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest

from hbone.aio.poller import EVENTS_PER_FLUSH, REQUEUED_S, STEPS_S, Poller
from tests.hbone.aio.harness import LOOPS, polling, run, until


class Quiet:
    """A handler, and a member of an interval timer, that does nothing."""

    def on_event(self, mask: int) -> None: ...

    def on_bug(self, error: Exception) -> None: ...

    def on_interval(self) -> None: ...


def test_a_poller_has_one_timer_per_interval_and_stops_them() -> None:
    async def main() -> None:
        with polling() as poller:
            timer = poller.interval_timer(0.02)
            assert poller.interval_timer(0.02) is timer
            assert poller.interval_timer(0.03) is not timer
            timer.register(Quiet(), poller.now_s)
        assert not len(timer)
        assert poller.interval_timer(0.02) is not timer

    run(main)


def test_buffers_that_nobody_took_for_a_while_go_but_for_a_few() -> None:
    async def main() -> None:
        with polling() as poller:
            for buffer in [poller.acquire() for _ in range(10)]:
                poller.release(buffer)
            assert poller.drop_buffers() == 0  # all ten were in use since
            for buffer in [poller.acquire() for _ in range(3)]:
                poller.release(buffer)
            assert poller.drop_buffers() == 3
            assert poller.drop_buffers() == 3
            assert poller.drop_buffers() == 0

    run(main)


def test_peak_is_counted_since_the_last_query() -> None:
    async def main() -> None:
        with polling() as poller:
            socks = [sock for _ in range(3) for sock in socket.socketpair()]
            for sock in socks:
                poller.register(sock.fileno(), Quiet())
            for sock in socks[:5]:
                poller.unregister(sock.fileno())
            assert (poller.peak(), poller.peak(), poller.registered) == (6, 1, 1)
            for sock in socks:
                poller.unregister_closing(sock.fileno())
                sock.close()

    run(main)


class Fault(BaseException):
    """An error that is no Exception, as a CancelledError that leaks out of a callback."""


@dataclass(eq=False)
class Faulty:
    """A handler, flushable and steppable that fails wherever it is called, its report of bugs included."""

    error: type[BaseException]
    dirty: bool = False
    bugs: int = 0

    def on_event(self, mask: int) -> None:
        raise self.error

    def flush(self) -> None:
        self.dirty = False
        raise self.error

    def step(self) -> None:
        raise self.error

    def on_bug(self, error: Exception) -> None:
        self.bugs += 1
        raise self.error


@dataclass(eq=False)
class Served:
    """A handler, flushable and steppable that counts what it gets."""

    dirty: bool = False
    events: int = 0
    flushes: int = 0
    steps: int = 0

    def on_event(self, mask: int) -> None:
        self.events += 1

    def flush(self) -> None:
        self.dirty = False
        self.flushes += 1

    def step(self) -> None:
        self.steps += 1

    def on_bug(self, error: Exception) -> None:
        raise AssertionError(error)


class FullLog(logging.Handler):
    """A log that has no room for a line."""

    def emit(self, record: logging.LogRecord) -> None:
        raise MemoryError


@pytest.fixture
def full_log() -> Iterator[None]:
    handler, log = FullLog(), logging.getLogger("hbone.aio.poller")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("error", [MemoryError, RuntimeError, Fault])
@pytest.mark.usefixtures("full_log")
def test_a_turn_survives_any_callback(error: type[BaseException], loop: str) -> None:
    """An edge is reported once: without this rule, sockets after the failing one would wait for ever."""

    async def main() -> None:
        with polling() as poller:
            pairs = [socket.socketpair() for _ in range(12)]
            handlers = [Faulty(error) if index % 3 == 0 else Served() for index in range(12)]
            for (near, far), handler in zip(pairs, handlers, strict=True):
                far.setblocking(False)
                poller.register(far.fileno(), handler)
                near.send(b"x")  # all sockets are in one batch of events
                poller.requeue(handler)
                poller.call_soon(handler)
                poller.schedule_flush(handler)
            good = [handler for handler in handlers if isinstance(handler, Served)]
            faulty = [handler for handler in handlers if isinstance(handler, Faulty)]
            await until(lambda: all(handler.events >= 2 for handler in good))
            assert {(each.events, each.steps, each.flushes) for each in good} == {(2, 1, 1)}
            assert {each.bugs for each in faulty} == {4}  # requeued, event, step, flush
            for near, far in pairs:
                poller.unregister(far.fileno())
                near.close()
                far.close()

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_edges_that_epoll_lost_are_asked_for_again(loop: str) -> None:
    """epoll_wait takes the edges out of the kernel before Python has room for the list of them."""

    class Forgetful:
        def __init__(self, real: select.epoll) -> None:
            self.real = real
            self.left = 1

        def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
            ready = self.real.poll(timeout, most)
            if ready and self.left:
                self.left -= 1
                raise MemoryError
            return ready

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    async def main() -> None:
        with mock.patch("select.epoll", lambda real=select.epoll: Forgetful(real())), polling() as poller:
            near, far = socket.socketpair()
            handler = Served()
            poller.register(far.fileno(), handler)
            near.send(b"x")
            await until(lambda: handler.events)
            poller.unregister(far.fileno())
            near.close()
            far.close()

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_socket_gets_no_event_of_an_earlier_socket_with_its_descriptor(loop: str) -> None:
    """A handler closes another socket of the batch, and registers a new one, which has the same number. The closed
    socket's hang-up is not the new one's.
    """

    class Recorder(Quiet):
        def __init__(self) -> None:
            self.masks: list[int] = []

        def on_event(self, mask: int) -> None:
            self.masks.append(mask)

    class Replacing(Quiet):
        def on_event(self, mask: int) -> None:
            number = ended.fileno()
            poller.unregister(number)
            os.dup2(fresh.fileno(), number)
            poller.register(number, recorder)

    async def main() -> None:
        nonlocal poller, ended, fresh
        with polling() as poller, contextlib.ExitStack() as sockets:
            (first, waking), (ended, peer), (fresh, client) = pairs = [socket.socketpair() for _ in range(3)]
            for each in pairs:
                for sock in each:
                    sockets.enter_context(sock)
            poller.register(first.fileno(), Replacing())
            poller.register(ended.fileno(), Quiet())
            client.send(b"x")
            waking.send(b"x")
            peer.close()
            await until(lambda: recorder.masks)
            assert recorder.masks == [select.EPOLLIN]
            poller.unregister(first.fileno())
            poller.unregister(ended.fileno())

    recorder = Recorder()
    poller: Poller
    ended: socket.socket
    fresh: socket.socket
    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_paused_poller_serves_nothing_until_it_resumes(loop: str) -> None:
    async def main() -> None:
        with polling() as poller:
            near, far = socket.socketpair()
            handler, other = Served(), Served()
            poller.register(far.fileno(), handler)
            poller.pause(60.0)
            near.send(b"x")
            poller.call_soon(other)
            poller.schedule_flush(other)
            await asyncio.sleep(0.02)
            assert (handler.events, other.steps, other.flushes) == (0, 0, 0)
            poller.resume()
            poller.resume()
            await until(lambda: (handler.events, other.steps, other.flushes) == (1, 1, 1))
            poller.pause(60.0)
            poller.pause(0.01)  # the last limit applies
            near.send(b"y")
            await until(lambda: handler.events == 2)
            poller.pause(60.0)
            poller.unregister(far.fileno())
            near.close()
            far.close()

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_socket_with_more_to_read_has_one_place_in_the_run_queue(loop: str) -> None:
    """Its peer sends small pieces, so that each turn has an edge for it besides its place in line."""

    class Greedy(Served):
        def on_event(self, mask: int) -> None:
            self.events += 1
            for _ in range(3):
                poller.requeue(self)

    class Modest(Served):
        def on_event(self, mask: int) -> None:
            self.events += 1
            poller.requeue(self)

    async def main() -> None:
        nonlocal poller
        with polling() as poller:
            greedy, modest = Greedy(), Modest()
            poller.requeue(greedy)
            poller.requeue(modest)
            await until(lambda: modest.events >= 20)
            assert abs(greedy.events - modest.events) <= 1

    poller: Poller
    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_new_events_do_not_wait_for_all_that_have_more(loop: str) -> None:
    """A turn handles some of the queued sockets. The others keep their places for later turns, and new events come
    in between.
    """

    class Slow(Served):
        def on_event(self, mask: int) -> None:
            self.events += 1
            until_s = time.monotonic() + REQUEUED_S
            while time.monotonic() < until_s:
                pass
            poller.requeue(self)

    class Fresh(Served):
        before = 0

        def on_event(self, mask: int) -> None:
            self.events += 1
            self.before = sum(each.events for each in slow)

    async def main() -> None:
        nonlocal poller, slow
        with polling() as poller:
            slow = [Slow() for _ in range(8)]
            for each in slow:
                poller.requeue(each)
            near, far = socket.socketpair()
            handler = Fresh()
            poller.register(far.fileno(), handler)
            near.send(b"x")
            await until(lambda: handler.events)
            assert handler.before <= 2
            await until(lambda: min(each.events for each in slow) >= 3)
            assert max(each.events for each in slow) <= 4
            poller.unregister(far.fileno())
            near.close()
            far.close()

    poller: Poller
    slow: list[Slow]
    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_new_events_do_not_wait_for_all_coroutines(loop: str) -> None:
    """A storm of connections resumes hundreds of coroutines at once. Reads of a small flow are handled in
    between.
    """

    class Slow:
        def step(self) -> None:
            steps.append(self)
            until_s = time.monotonic() + STEPS_S
            while time.monotonic() < until_s:
                pass

    class Fresh(Served):
        before = 0

        def on_event(self, mask: int) -> None:
            self.events += 1
            self.before = len(steps)

    async def main() -> None:
        with polling() as poller:
            slow = [Slow() for _ in range(40)]
            for each in slow:
                poller.call_soon(each)
            near, far = socket.socketpair()
            handler = Fresh()
            near.send(b"x")
            poller.call_soon(slow[0])

            class Registers:
                def step(self) -> None:
                    poller.register(far.fileno(), handler)

            poller.call_soon(Registers())
            for each in slow:
                poller.call_soon(each)
            await until(lambda: len(steps) >= 81)
            assert 41 <= handler.before <= 41 + 8
            poller.unregister(far.fileno())
            near.close()
            far.close()
        assert steps == [*slow, slow[0], *slow]

    steps: list[Slow] = []
    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_output_does_not_wait_for_all_events_of_a_turn(loop: str) -> None:
    """Its receiver is idle until then."""

    class Echo(Served):
        def on_event(self, mask: int) -> None:
            order.append("event")
            self.events += 1
            poller.schedule_flush(output)

    class Output(Served):
        def flush(self) -> None:
            self.dirty = False
            order.append("flush")

    async def main() -> None:
        nonlocal poller
        with polling() as poller:
            pairs = [socket.socketpair() for _ in range(2 * EVENTS_PER_FLUSH + 3)]
            handlers = []
            for near, far in pairs:
                near.send(b"x")
                handlers.append(Echo())
                poller.register(far.fileno(), handlers[-1])
            await until(lambda: all(each.events for each in handlers))
            for near, far in pairs:
                poller.unregister(far.fileno())
                near.close()
                far.close()
        some = [*["event"] * EVENTS_PER_FLUSH, "flush"]
        assert order == [*some, *some, *["event"] * 3, "flush"]

    poller: Poller
    output = Output()
    order: list[str] = []
    run(main, loop)
