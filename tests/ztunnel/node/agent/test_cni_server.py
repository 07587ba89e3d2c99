"""The socket of the CNI plugin, with istio-cni's messages and with bad ones."""

import asyncio
import http.client
import json
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ztunnel.node.agent.cni_server import BadEvent, CniServer, read_event
from ztunnel.node.agent.enroller import Added
from ztunnel.node.agent.errors import CannotAdd

#: As istio-cni 1.27 sends it.
UPSTREAM = (
    b'{"Netns":"/var/run/netns/cni-5c2e","PodName":"web-0","PodNamespace":"shop","IPs":[{"Interface":0,'
    b'"Address":{"IP":"10.0.0.7","Mask":"////AA=="},"Gateway":"10.0.0.1"}]}'
)
EVENT = Added(namespace="shop", name="web-0", netns="/var/run/netns/cni-5c2e")


def test_upstreams_message_is_read() -> None:
    assert read_event(UPSTREAM) == EVENT
    assert read_event(UPSTREAM[:-1] + b',"PodUID":"u"}').uid == "u"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"Netns":"/n","PodName":"x"}', "PodNamespace"),
        (b'{"Netns":"/n","PodName":"","PodNamespace":"y"}', "PodName is empty"),
        (b'{"Netns":"n","PodName":"x","PodNamespace":"y"}', "not an absolute path"),
        (b'{"Netns":7,"PodName":"x","PodNamespace":"y"}', r"\$\.Netns"),
    ],
)
def test_a_bad_message_says_why(body: bytes, reason: str) -> None:
    with pytest.raises(BadEvent, match=reason):
        read_event(body)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(self.path))


def asked(path: Path, body: bytes, method: str = "POST", target: str = "/cmdadd") -> tuple[int, str]:
    connection = UnixConnection(path)
    try:
        connection.request(method, target, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def serving(tmp_path: Path, check: Callable[[CniServer], Awaitable[None]]) -> list[Added]:
    seen: list[Added] = []

    async def add(event: Added) -> str:
        seen.append(event)
        if event.name == "refused":
            raise CannotAdd("pod shop/refused: no ztunnel connection")
        return "in the mesh"

    async def main() -> None:
        async with CniServer(tmp_path / "run" / "pluginevent.sock", add) as server:
            await check(server)

    asyncio.run(main())
    return seen


def test_a_sandbox_is_announced_and_refused(tmp_path: Path) -> None:
    async def check(server: CniServer) -> None:
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        assert await asyncio.to_thread(asked, server.path, UPSTREAM) == (200, "in the mesh\n")
        refused = json.dumps({"Netns": "/n", "PodName": "refused", "PodNamespace": "shop"}).encode()
        assert await asyncio.to_thread(asked, server.path, refused) == (
            500, "pod shop/refused: no ztunnel connection\n"
        )  # fmt: skip
        assert server.answers == {200: 1, 500: 1}

    assert [event.name for event in serving(tmp_path, check)] == ["web-0", "refused"]


def test_what_is_no_announcement_gets_an_answer_that_says_so(tmp_path: Path) -> None:
    async def check(server: CniServer) -> None:
        for body, method, target, status, text in (
            (b"{", "POST", "/cmdadd", 400, "bad event"),
            (UPSTREAM, "PUT", "/cmdadd", 405, "takes POST"),
            (UPSTREAM, "POST", "/cmddel", 404, "/cmdadd"),
            (b"x" * 70_000, "POST", "/cmdadd", 413, "more than 65536 bytes"),
        ):
            got = await asyncio.to_thread(asked, server.path, body, method, target)
            assert got[0] == status
            assert text in got[1]
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(b"hello\r\n\r\n")
        assert b" 400 " in await reader.read()
        writer.close()
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(b"POST /cmdadd HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")
        writer.write_eof()
        assert b" 400 " in await reader.read()
        writer.close()

    assert serving(tmp_path, check) == []


def test_a_successor_takes_the_socket_over(tmp_path: Path) -> None:
    async def check(server: CniServer) -> None:
        async def add(event: Added) -> str:
            return "by the successor"

        async with CniServer(server.path, add):
            assert await asyncio.to_thread(asked, server.path, UPSTREAM) == (200, "by the successor\n")

    assert serving(tmp_path, check) == []


def test_all_pods_of_a_node_that_starts_are_answered_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        waiting, pods = 0, 250
        every = asyncio.Event()

        async def add(event: Added) -> str:
            nonlocal waiting
            waiting += 1
            if waiting == pods:
                every.set()
            await every.wait()
            return "in the mesh"

        async def plugin(path: Path) -> bytes:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(
                b"POST /cmdadd HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(UPSTREAM) + UPSTREAM
            )
            answer = await reader.read()
            writer.close()
            return answer

        async with CniServer(tmp_path / "pluginevent.sock", add) as server, asyncio.timeout(60):
            answers = await asyncio.gather(*(plugin(server.path) for _ in range(pods)))
        assert {answer[:15] for answer in answers} == {b"HTTP/1.1 200 OK"}

    asyncio.run(main())
