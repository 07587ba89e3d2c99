"""Serving unary calls on sockets: addresses, silence, and the end."""

import asyncio
import socket
from pathlib import Path

import pytest

from hbone.frames import ACK, GOAWAY, PING, PREFACE, SETTINGS, frame
from tests.ztunnel.policy.calico.test_follower import LOOPS, run, until
from xds.aio.channel import Channel
from xds.grpc.serve_error import ServeError
from xds.grpc.status import RpcFailed
from ztunnel.policy.authz import call_server
from ztunnel.policy.authz.call_server import UnaryServer

ECHO = "/x.Y/Echo"
ANSWERS = {ECHO: lambda message: message[::-1]}
HELLO = PREFACE + frame(SETTINGS, 0, 0)


@LOOPS
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]", "localhost"])
def test_a_port_is_served(loop: str, host: str) -> None:
    async def main() -> None:
        async with UnaryServer([f"{host}:0"], ANSWERS) as server:
            port = server.addresses[0].rpartition(":")[2]
            assert server.addresses == (f"{host}:{port}",)
            targets = {"127.0.0.1": ["127.0.0.1"], "localhost": ["localhost"]}.get(host, ["127.0.0.1", "[::1]"])
            for target in targets:
                async with Channel(f"{target}:{port}") as channel:
                    assert await channel.unary(ECHO, b"abc", timeout_s=5) == b"cba"
            with pytest.raises(ServeError, match="Address already in use"):
                async with UnaryServer([f"{host}:{port}"], ANSWERS):
                    raise AssertionError

    run(main, loop)


@LOOPS
def test_a_stale_socket_is_replaced_and_ours_goes_with_us(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    async def main() -> None:
        async with UnaryServer([f"unix:{path}"], ANSWERS, socket_mode=0o640), Channel(f"unix:{path}") as channel:
            assert path.stat().st_mode & 0o777 == 0o640
            assert await channel.unary(ECHO, b"abc", timeout_s=5) == b"cba"
        assert not path.exists()
        path.write_text("no socket")
        with pytest.raises(ServeError, match="File exists"):
            async with UnaryServer([f"unix:{path}"], ANSWERS):
                raise AssertionError
        assert path.read_text() == "no socket"

    run(main, loop)


async def frames(reader: asyncio.StreamReader) -> list[int]:
    """Return the types of the frames up to the end of the connection."""
    found = []
    while head := await reader.read(9):
        head += await reader.readexactly(9 - len(head))
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        found.append(head[3])
    return found


@LOOPS
def test_a_client_that_is_gone_without_a_word_is_noticed(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_server, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(call_server, "KEEPALIVE_TIMEOUT_S", 1.0)

    async def main() -> None:
        async with UnaryServer([f"unix:{tmp_path}/s"], ANSWERS) as server, Channel(f"unix:{tmp_path}/s") as alive:
            assert await alive.unary(ECHO, b"abc", timeout_s=5) == b"cba"
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
            writer.write(HELLO)
            found = await frames(reader)
            assert PING in found
            writer.close()
            await until(lambda: len(server._connections) == 1)
            assert await alive.unary(ECHO, b"abc", timeout_s=5) == b"cba"

    run(main, loop)


@LOOPS
def test_the_end_is_announced_and_waits_for_no_client(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with UnaryServer([f"unix:{tmp_path}/s"], ANSWERS, stop_grace_s=0.2):
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
            writer.write(HELLO)
            await reader.readuntil(frame(SETTINGS, ACK, 0))  # the server has read all of it
        assert (await frames(reader))[-1] == GOAWAY
        writer.close()
        async with Channel(f"unix:{tmp_path}/s") as channel:
            with pytest.raises(RpcFailed, match="UNAVAILABLE"):
                await channel.unary(ECHO, b"", timeout_s=1)

    run(main, loop)


@LOOPS
def test_rubbish_ends_its_connection_only(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with UnaryServer([f"unix:{tmp_path}/s"], ANSWERS), Channel(f"unix:{tmp_path}/s") as channel:
            for rubbish in (
                b"GET / HTTP/1.1\r\n\r\n",
                HELLO + b"\xff" * 100,
                PREFACE + frame(PING, 0, 0, b"short"),
            ):
                reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
                writer.write(rubbish)
                assert GOAWAY in await frames(reader)
                writer.close()
            assert await channel.unary(ECHO, b"abc", timeout_s=5) == b"cba"

    run(main, loop)
