"""Connections wait for a log that is behind, and never for longer than the limit."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.aio.poller import Poller
from xds.model.address import SocketAddress
from ztunnel.runtime import log_writer
from ztunnel.runtime.accepting import Gates, ListeningSocket
from ztunnel.runtime.log_pressure import LogPressure
from ztunnel.runtime.log_writer import LogWriter

LIMIT_S = 5.0


@given(st.lists(st.tuples(st.floats(0, 2 * LIMIT_S), st.booleans())))
def test_no_wait_is_longer_than_the_limit_and_none_is_without_a_reason(steps: list[tuple[float, bool]]) -> None:
    now, behind = 0.0, False
    gate = LogPressure(lambda: behind, LIMIT_S, lambda: now)
    closed_since: float | None = None
    exhausted = False
    for passed, is_behind in steps:
        now += passed
        behind = is_behind
        admitted = gate.admits()
        if not behind:
            assert admitted
            closed_since, exhausted = None, False
            continue
        closed_since = now if closed_since is None else closed_since
        exhausted = exhausted or now - closed_since >= LIMIT_S
        assert admitted == exhausted


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times, behind = iter((0.0, 0.0, 1.0, 5.0, 6.0)), True
    gate = LogPressure(lambda: behind, LIMIT_S, lambda: next(times))
    for _ in range(4):
        gate.admits()
    behind = False
    gate.admits()
    gate.admits()
    assert caplog.messages == [
        "the log is behind, new connections wait limit=5s",
        "the log is behind for 5s, new connections are accepted and lines dropped",
        "the log has caught up, connections do not wait any longer",
    ]


def test_every_gate_must_admit_and_each_is_told_of_connections() -> None:
    class Fixed:
        def __init__(self, *, admitted: bool) -> None:
            self.admitted = admitted
            self.numbers: list[int] = []

        def admits(self) -> bool:
            return self.admitted

        def accepted(self, number: int) -> None:
            self.numbers.append(number)

    for first in (False, True):
        for second in (False, True):
            one, other = Fixed(admitted=first), Fixed(admitted=second)
            both = Gates(one, other)
            assert both.admits() == (first and second)
            both.accepted(7)
            assert one.numbers == other.numbers == [7]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def read_some(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 65_536)


def read_all(descriptor: int) -> None:
    os.set_blocking(descriptor, True)
    while os.read(descriptor, 65_536):
        pass


@pytest.mark.parametrize("mends", [True, False], ids=["the log is read again", "the log stands still"])
def test_connections_wait_for_a_log_that_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mends: bool
) -> None:
    monkeypatch.setattr(log_writer, "MAX_PENDING", 400_000)
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = LogWriter()
    file = writer.file(str(fifo))
    now = 0.0
    accepted: list[socket.socket] = []

    async def main() -> None:
        nonlocal now
        assert not writer.is_behind
        for _ in range(3):  # more than the pipe holds, and than half of what may be pending
            file.append(b"x" * 99_999 + b"\n")
            writer.hand_over(file)
        assert writer.is_behind
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        address = SocketAddress(*listening.getsockname()[:2])
        gate = LogPressure(lambda: writer.is_behind, LIMIT_S, lambda: now)
        with contextlib.closing(Poller()) as poller:
            listener = ListeningSocket(listening, address, 16, poller, gate=gate)
            listener.start(lambda sock, peer: accepted.append(sock))
            with socket.create_connection((address.host, address.port)):
                await asyncio.sleep(0.2)
                assert not accepted
                if not mends:
                    now = LIMIT_S
                while mends and writer.is_behind:
                    read_some(reader)
                    await asyncio.sleep(0)
                await until(lambda: len(accepted) == 1)
                assert writer.is_behind == (not mends)
            listener.close()

    asyncio.run(main())
    for sock in accepted:
        sock.close()
    draining = threading.Thread(target=read_all, args=(reader,))
    draining.start()
    writer.close()
    draining.join()
    os.close(reader)
    assert writer.counts.dropped.value == 0
