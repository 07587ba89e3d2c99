"""The local socket: captures with their limits, and who gets none."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from tests.ztunnel.proxy.tap.tapping import FACTS, POD, WAIT_S, Source, Tapped
from tproxy.errors import TproxyError
from ztunnel.proxy.tap.capture import Capture, CapturedStream
from ztunnel.proxy.tap.request import TapRequest, Totals
from ztunnel.proxy.tap.server import TapServer
from ztunnel.runtime.clock import SystemClock

LOOPS = (asyncio.run, uvloop.run)


@asynccontextmanager
async def serving(folder: Path, source: Source | None = None) -> AsyncIterator[tuple[Path, Source]]:
    """A socket that this test's own user may use."""
    path, found = folder / "run" / "tap.sock", source or Source()
    async with TapServer(path, found, SystemClock(), root=os.getuid()):
        yield path, found


async def tapping(source: Source, process: int = 0) -> Capture:
    """The tap of the pod, once it has begun."""
    async with asyncio.timeout(WAIT_S):
        while (capture := source.capture(process)) is None:
            await asyncio.sleep(0.005)
    return capture


def stream(capture: Capture) -> CapturedStream:
    found = capture.stream(FACTS)
    assert found is not None
    return found


def a_connection(capture: Capture, payload: bytes = b"hello") -> None:
    one = stream(capture)
    one.received(memoryview(payload))
    one.receive_ended(reset=False)
    one.send_ended(reset=False)
    one.left()


@pytest.mark.parametrize("run", LOOPS)
def test_tap_delivers_a_complete_capture(
    tmp_path: Path, run: Callable[[Awaitable[None]], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def body() -> None:
        async with serving(tmp_path) as (path, source):
            tapped = await Tapped.ask(path, pod=POD, peer="db", limit="1MiB")
            assert (tapped.status, tapped.headers["content-type"]) == (200, "application/x-pcapng")
            assert tapped.headers["ztunnel-open-connections"] == "3"
            capture = await tapping(source)
            a_connection(capture, b"x" * 100_000)
            await tapped.until(100_000)
            tapped.stop()
            found = await tapped.rest()

            assert found.application.startswith("ztunnel ")
            assert "default/web, peer db" in found.comment
            assert [each.name for each in found.interfaces] == ["default/web outbound", "default/web inbound"]
            assert list(found.streams().values()) == [(b"x" * 100_000, b"")]
            outbound, inbound = (each.statistics for each in found.interfaces)
            assert outbound is not None
            assert inbound is not None
            assert (outbound["packets"], outbound["dropped"], inbound["packets"]) == (len(found.packets), 0, 0)
            assert (
                outbound["started_us"] <= found.packets[0].at_us <= found.packets[-1].at_us <= outbound["ended_us"]
            )
            assert found.interfaces[0].closing_comment == "1 connections; the reader has ended it"
            assert tapped.trailers == {
                "ztunnel-ended": "the reader has ended it",
                "ztunnel-streams": "1",
                "ztunnel-packets": str(len(found.packets)),
                "ztunnel-dropped": "0",
                "ztunnel-dropped-bytes": "0",
            }
            assert source.capture() is None

    run(body())
    reader = f"pod=default/web port=any peer=db uid={os.getuid()} pid={os.getpid()}"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[1] == f"tap begins {reader} for=60s limit=1048576 open_connections=3"
    assert lines[2].startswith(f"tap ends {reader} reason='the reader has ended it' duration=")


def test_tap_ends_at_its_time_limit(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (path, source):
            tapped = await Tapped.ask(path, **{"pod": POD, "for": "300ms"})
            a_connection(await tapping(source))
            found = await tapped.rest()
            assert tapped.trailers["ztunnel-ended"] == "the time limit is reached"
            assert list(found.streams().values()) == [(b"hello", b"")]
            again = await Tapped.ask(path, **{"pod": POD, "for": "50ms"})
            assert (await again.rest()).packets == []

    asyncio.run(body())


def test_tap_ends_at_its_size_limit_with_whole_packets(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (path, source):
            tapped = await Tapped.ask(path, pod=POD, limit="50KB")
            one = stream(await tapping(source))
            one.received(memoryview(bytes(200_000)))
            found = await tapped.rest()
            assert tapped.trailers["ztunnel-ended"] == "the size limit is reached"
            assert 45_000 < len(tapped.data) < 51_000
            assert 30_000 < len(next(iter(found.streams().values()))[0]) < 50_000

    asyncio.run(body())


def test_stalled_reader_drops_packets_within_bounded_memory(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (path, source):
            tapped = await Tapped.ask(path, pod=POD)
            capture = await tapping(source)
            one = stream(capture)
            while not capture.dropped_bytes:
                one.received(memoryview(bytes(100_000)))
                await asyncio.sleep(0)
            one.receive_ended(reset=False)
            tapped.stop()
            found = await tapped.rest()
            dropped = int(tapped.trailers["ztunnel-dropped"])
            assert dropped > 0
            assert "the reader was too slow" in found.interfaces[0].closing_comment
            statistics = found.interfaces[0].statistics
            assert statistics is not None
            assert (statistics["dropped"], statistics["packets"]) == (dropped, dropped + len(found.packets))
            fin = next(packet for packet in found.packets if "F" in packet.flags)
            assert "are not in the capture" in fin.comment

    asyncio.run(body())


def test_captures_of_several_processes_are_merged(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path, Source(processes=3)) as (path, source):
            tapped = await Tapped.ask(path, pod=POD)
            for process in range(3):
                a_connection(await tapping(source, process), b"%d" % process * 50_000)
            await tapped.until(150_000)
            tapped.stop()
            found = await tapped.rest()
            assert tapped.trailers["ztunnel-streams"] == "3"
            assert len(found.packets) == int(tapped.trailers["ztunnel-packets"])

    asyncio.run(body())


def test_process_that_sends_an_invalid_block_ends_the_tap(tmp_path: Path) -> None:
    class Taken(Source):
        def carriers(self) -> list[object]:  # type: ignore[override]
            async def carry(request: TapRequest, sink: socket.socket) -> Totals:
                await asyncio.get_running_loop().sock_sendall(sink, b"\x0a\x0d\x0d\x0a\x20\0\0\0")
                return Totals()

            return [carry]

    async def body() -> None:
        async with serving(tmp_path, Taken()) as (path, _):
            tapped = await Tapped.ask(path, pod=POD)
            assert (await tapped.rest()).packets == []
            assert tapped.trailers["ztunnel-ended"] == "a capturing process sent an invalid packet block"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("target", "method", "given", "status", "reason"),
    [
        ("/tap", "GET", {"pod": "default/other"}, 404, "no pod default/other here"),
        ("/tap", "GET", {}, 400, "pod: this parameter is required"),
        ("/tap", "GET", {"pod": POD, "for": "1h"}, 400, "for: 1h must be more than 0"),
        ("/tap", "POST", {"pod": POD}, 405, "GET /tap"),
        ("/config_dump", "GET", {}, 404, "no such page; this socket has /tap"),
    ],
)
def test_invalid_tap_requests_are_refused(
    tmp_path: Path, target: str, method: str, given: dict[str, str], status: int, reason: str
) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (path, _):
            tapped = await Tapped.ask(path, target, method, **given)
            assert tapped.status == status
            assert (await tapped.text()).startswith(reason)

    asyncio.run(body())


def test_taps_are_limited_to_one_per_pod_and_four_in_all(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (path, _):
            taps = [await Tapped.ask(path, pod=POD)]
            second = await Tapped.ask(path, pod=POD)
            assert (second.status, await second.text()) == (409, "default/web has a tap already")
            taps += [await Tapped.ask(path, pod=f"default/more{number}") for number in range(3)]
            fifth = await Tapped.ask(path, pod="default/more3")
            assert (fifth.status, await fifth.text()) == (503, "there are 4 taps already")
            taps[0].stop()
            await taps[0].rest()
            third = await Tapped.ask(path, pod=POD)
            assert third.status == 200
            for tapped in (*taps[1:], third):
                tapped.stop()
                await tapped.rest()

    asyncio.run(body())


def test_tap_client_without_root_credentials_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        path = tmp_path / "tap.sock"
        async with TapServer(path, Source(), SystemClock(), root=os.getuid() + 1):
            tapped = await Tapped.ask(path, pod=POD)
            assert (tapped.status, await tapped.text()) == (403, "a tap is for root only")

    asyncio.run(body())
    assert f"tap refused uid={os.getuid()} pid={os.getpid()}: not root" in caplog.text


def test_tap_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (path, _):
            found = path.lstat()
            assert stat.S_ISSOCK(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o600
            assert [each.name for each in path.parent.iterdir()] == ["tap.sock"]
            async with serving(tmp_path) as (_, successor):
                # The place is the successor's, which answers at once.
                tapped = await Tapped.ask(path, pod=POD)
                await tapping(successor)
                tapped.stop()
                await tapped.rest()
                inode = path.lstat().st_ino
            assert inode != found.st_ino
            assert not path.exists()
        assert list(path.parent.iterdir()) == []

    asyncio.run(body())


def test_ending_predecessor_keeps_the_socket_of_its_successor(tmp_path: Path) -> None:
    async def body() -> None:
        path = tmp_path / "tap.sock"
        first = TapServer(path, Source(), SystemClock(), root=os.getuid())
        await first.__aenter__()
        async with TapServer(path, Source(), SystemClock(), root=os.getuid()):
            await first.__aexit__(None, None, None)
            tapped = await Tapped.ask(path, pod=POD)
            assert tapped.status == 200
            tapped.stop()
            await tapped.rest()

    asyncio.run(body())


def test_file_at_the_path_of_the_tap_socket_is_not_replaced(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "tap.sock").write_text("mine")
        with pytest.raises(TproxyError, match="it exists and is no socket"):
            await TapServer(tmp_path / "tap.sock", Source(), SystemClock()).__aenter__()

    asyncio.run(body())
    assert [each.name for each in tmp_path.iterdir()] == ["tap.sock"]
    assert (tmp_path / "tap.sock").read_text() == "mine"


def test_ending_server_ends_its_taps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with serving(tmp_path) as (path, source):
            tapped = await Tapped.ask(path, pod=POD)
            await tapping(source)
        assert source.capture() is None
        tapped.writer.close()

    asyncio.run(body())
    assert "reason='the proxy stops'" in caplog.text
