"""Large flows between two plain sockets, through a pipe in the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterator

import pytest

from hbone.aio import splice
from hbone.aio.relay import ByteCounts, Relay, relay
from hbone.aio.socket import PlainSocket
from tests.hbone.aio.harness import App, polling, run, tcp_pair
from tests.hbone.aio.test_relay import blob, exchange

LARGE = 8 << 20


@contextlib.contextmanager
def relayed(*, idle_timeout_s: float | None = None) -> Iterator[tuple[App, App, Relay, ByteCounts]]:
    """App - plain end - relay - plain end - app; no descriptor more or less afterwards."""
    with polling() as poller:
        before = len(os.listdir("/proc/self/fd"))
        near, inner_near = tcp_pair()
        inner_far, far = tcp_pair()
        a, b = App(near), App(far)
        with PlainSocket(inner_near, poller) as one, PlainSocket(inner_far, poller) as two:
            counts = ByteCounts()
            running = relay(one, two, counts, idle_timeout_s=idle_timeout_s)
            try:
                yield a, b, running, counts
            finally:
                running.abort("test over")
                a.close()
                b.close()
        assert len(os.listdir("/proc/self/fd")) == before


async def _ended(running: Relay) -> object:
    return await running


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the pieces that went through pipes."""
    pieces: list[int] = []
    fill = splice.SplicePipe.fill

    def watched(pipe: splice.SplicePipe, fd: int) -> int:
        pieces.append(fill(pipe, fd))
        return pieces[-1]

    monkeypatch.setattr(splice.SplicePipe, "fill", watched)
    return pieces


@pytest.mark.pure
def test_a_large_flow_arrives_whole_and_counted(pipes: list[int]) -> None:
    async def main() -> None:
        with relayed() as (a, b, running, counts):
            await exchange(a, b, blob(LARGE, 1), blob(LARGE + 1, 2))
            await running
            assert (counts.sent, counts.received) == (LARGE, LARGE + 1)
            assert sum(pipes) > LARGE

    run(main)


@pytest.mark.pure
def test_a_short_flow_gets_no_pipe(pipes: list[int]) -> None:
    async def main() -> None:
        with relayed() as (a, b, running, _):
            await exchange(a, b, bytes(splice.SPLICE_AFTER_BYTES), b"answer")
            await running
            assert not pipes

    run(main)


@pytest.mark.pure
def test_bytes_in_the_pipe_leave_before_eof_is_passed_on(pipes: list[int]) -> None:
    async def main() -> None:
        with relayed() as (a, b, running, _):
            sending = asyncio.get_running_loop().create_task(a.send(blob(LARGE, 3)))
            assert await b.read(1 << 20) == blob(LARGE, 3)[: 1 << 20]
            rest = asyncio.get_running_loop().create_task(b.read_all())
            await sending
            a.eof()
            assert await rest == blob(LARGE, 3)[1 << 20 :]
            await b.send(b"still open this way")
            assert await a.read(19) == b"still open this way"
            b.eof()
            await running
            assert pipes

    run(main)


@pytest.mark.pure
def test_a_reader_that_resets_ends_the_writer(pipes: list[int]) -> None:
    async def main() -> None:
        with relayed() as (a, b, running, _):
            sending = asyncio.get_running_loop().create_task(a.send(bytes(64 << 20)))
            await b.read(4 << 20)
            assert pipes
            b.reset()
            await asyncio.wait_for(_ended(running), 10)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    run(main)


@pytest.mark.pure
def test_an_aborted_flow_leaves_no_pipe(pipes: list[int]) -> None:
    async def main() -> None:
        with relayed() as (a, b, running, _):
            sending = asyncio.get_running_loop().create_task(a.send(bytes(64 << 20)))
            await b.read(4 << 20)
            assert pipes
            running.abort("policy changed")
            await running
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    run(main)


@pytest.mark.pure
@pytest.mark.parametrize("call", ["fill", "empty"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM, errno.ENOMEM])
def test_without_splice_it_copies(call: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox can forbid splice(2). An error of splice(2) is then not the end of the connection."""
    refusals: list[int] = []
    splices = getattr(splice.SplicePipe, call)

    def refused(pipe: splice.SplicePipe, fd: int) -> object:
        if call == "empty" and not pipe.held:
            return splices(pipe, fd)
        refusals.append(fd)
        raise OSError(code, os.strerror(code))

    async def main() -> None:
        with relayed() as (a, b, running, counts):
            monkeypatch.setattr(splice.SplicePipe, call, refused)
            await exchange(a, b, blob(LARGE, 5), blob(LARGE + 1, 6))
            await running
            assert (counts.sent, counts.received) == (LARGE, LARGE + 1)
            assert len(refusals) == 2  # once per direction

    run(main)


def test_without_descriptors_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    async def main() -> None:
        with relayed() as (a, b, running, _):
            monkeypatch.setattr(os, "pipe2", refused)
            await exchange(a, b, blob(LARGE, 4), b"")
            await running

    run(main)
