"""The embedded control plane's addresses and calls: gRPC's own client, and one that speaks HTTP/2 by hand."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.events
import pytest
import uvloop

from xds.aio.channel import Channel
from xds.aio.grpc_server import server_tls
from xds.aio.server import Caller, NotAdmitted, SnapshotServer
from xds.grpc.messages import prefix
from xds.grpc.serve_error import ServeError
from xds.grpc.status import RpcFailed, Status
from xds.grpc.tls import client_tls
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from xds.protocol.snapshot import Snapshot
from xds.protocol.types import CDS, method_path
from ztunnel.proxy.identity.authority import CertificateAuthority

LIMIT_S = 20.0
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
AUTHORITY = CertificateAuthority.in_memory("test", datetime.now(UTC))
ADS = method_path(None, delta=False)
ECHO = "/t.S/Echo"
REQUEST = DiscoveryRequest(node=Node(id="n"), type_url=CDS).SerializeToString()


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "asyncio") -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    (uvloop.run if loop == "uvloop" else asyncio.run)(limited())


def server(*addresses: str, **options: Any) -> SnapshotServer:
    served = SnapshotServer(addresses or ["127.0.0.1:0"], unary={ECHO: lambda data, caller: data}, **options)
    served.publish("n", Snapshot.of([Cluster(name="c")]))
    return served


async def first_response(channel: Channel) -> DiscoveryResponse:
    call = await channel.call(ADS)
    await call.write(REQUEST)
    data = await call.read()
    assert data is not None
    call.cancel()
    return DiscoveryResponse.FromString(data)


@LOOPS
def test_every_kind_of_address(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with server("127.0.0.1:0", "[::1]:0", "localhost:0", f"unix:{tmp_path}/s") as served:
            assert [address.rpartition(":")[0] for address in served.addresses] == [
                "127.0.0.1",
                "[::1]",
                "localhost",
                "unix",
            ]
            for address in served.addresses:
                async with Channel(address) as channel:
                    assert (await first_response(channel)).type_url == CDS
                    assert await channel.unary(ECHO, b"x", timeout_s=5) == b"x"

    run(main, loop)


def test_addresses_that_cannot_be_served(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "file").write_text("x")
        async with server() as served:
            taken = served.addresses[0]
            for bad, reason in (
                ("nonsense", "neither host:port nor unix:/path"),
                ("127.0.0.1:99999", "neither host:port nor unix:/path"),
                (taken, "Address already in use"),
                ("192.0.2.1:0", "Cannot assign requested address"),
                (f"unix:{tmp_path}/file", "File exists"),
                (f"unix:{tmp_path}/none/s", "No such file or directory"),
                (f"unix:{tmp_path}/{'x' * 200}", "AF_UNIX path too long"),
            ):
                with pytest.raises(ServeError, match=reason) as caught:
                    await server(f"unix:{tmp_path}/good", bad).__aenter__()
                assert caught.value.address == bad
                assert not (tmp_path / "good").exists()
            async with Channel(taken) as channel:
                assert await channel.unary(ECHO, b"x", timeout_s=5) == b"x"
        assert sorted(os.listdir(tmp_path)) == ["file"]
        assert (tmp_path / "file").read_text() == "x"

    run(main)


@LOOPS
def test_a_socket_belongs_to_the_last_server_that_bound_it(loop: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{tmp_path}/s")
        async with server(address), server(address):
            # The first one ends while the second one serves, as at an upgrade.
            pass
        first, second = server(address), server(address)
        await first.__aenter__()
        await second.__aenter__()
        await first.__aexit__(None, None, None)
        async with Channel(address) as channel:
            assert await channel.unary(ECHO, b"x", timeout_s=5) == b"x"
        await second.__aexit__(None, None, None)
        assert os.listdir(tmp_path) == []

    run(main, loop)


@LOOPS
def test_tls_and_who_is_local(loop: str, tmp_path: Path) -> None:
    callers: list[Caller] = []

    def admit(node: Node, caller: Caller) -> None:
        callers.append(caller)
        if not caller.local and caller.metadata.get("authorization") != "Bearer t":
            raise NotAdmitted("no token")

    async def main() -> None:
        issued = AUTHORITY.issue_for_hosts(["127.0.0.1"], datetime.now(UTC), timedelta(days=1))
        tls = server_tls(issued.key_pem, issued.chain_pem)
        async with server("127.0.0.1:0", f"unix:{tmp_path}/s", tls=tls, admit=admit) as served:
            tcp, unix = served.addresses
            async with Channel(unix) as channel:
                await first_response(channel)
            own = client_tls(AUTHORITY.root_pem, ["127.0.0.1"])
            async with Channel(tcp, tls=own) as channel:
                call = await channel.call(ADS)
                await call.write(REQUEST)
                with pytest.raises(RpcFailed, match="UNAUTHENTICATED: no token"):
                    await call.read()
                metadata = [("authorization", "Bearer t"), ("x-a", "1"), ("x-a", "2")]
                call = await channel.call(ADS, metadata=metadata)
                await call.write(REQUEST)
                assert await call.read() is not None
                call.cancel()
        assert [caller.local for caller in callers] == [True, False, False]
        assert callers[2].metadata["x-a"] == "1,2"
        async with server(admit=admit) as served, Channel(served.addresses[0]) as channel:
            await first_response(channel)
        assert callers[3].local

    run(main, loop)


@LOOPS
def test_a_bug_ends_its_call_and_is_logged(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(data: bytes, caller: Caller) -> bytes:
        raise KeyError("secret")

    async def main() -> None:
        served = SnapshotServer(["127.0.0.1:0"], unary={"/t.S/Broken": broken, ECHO: lambda data, caller: data})
        async with served, Channel(served.addresses[0]) as channel:
            with pytest.raises(RpcFailed) as caught:
                await channel.unary("/t.S/Broken", b"", timeout_s=5)
            assert str(caught.value) == "INTERNAL: internal error of the server"
            assert await channel.unary(ECHO, b"x", timeout_s=5) == b"x"

    run(main, loop)
    records = [record for record in caplog.records if record.name == "xds.aio.grpc_server"]
    assert [record.getMessage() for record in records if record.exc_info] == ["handler failed method=/t.S/Broken"]


@pytest.mark.parametrize("messages", [[], [b"a", b"b"]])
def test_unary_methods_take_one_message(messages: list[bytes]) -> None:
    async def main() -> None:
        async with server() as served, grpc.aio.insecure_channel(served.addresses[0]) as channel:
            call = channel.stream_stream(ECHO)()
            for message in messages:
                await call.write(message)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert await call.details() == "this method takes exactly one message"

    run(main)


def test_requests_have_a_limit() -> None:
    async def main() -> None:
        async with server() as served, Channel(served.addresses[0]) as channel:
            with pytest.raises(RpcFailed) as caught:
                await channel.unary(ECHO, bytes(64 * 2**20 + 1), timeout_s=15)
            assert caught.value.status is Status.RESOURCE_EXHAUSTED

    run(main)


@LOOPS
def test_a_stream_that_its_client_leaves_is_forgotten(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """A stream is ended by a cancel, and by the end of its connection. Neither is logged."""

    async def main() -> None:
        async with server() as served:
            channel = Channel(served.addresses[0])
            for _ in range(3):
                await first_response(channel)
            call = await channel.call(ADS)
            await call.write(REQUEST)
            await call.read()
            await channel.close()
            while served.connected():
                await asyncio.sleep(0.01)

    run(main, loop)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


@LOOPS
def test_leaving_ends_every_stream(loop: str) -> None:
    async def main() -> None:
        async with server() as served:
            channel = Channel(served.addresses[0])
            call = await channel.call(ADS)
            await call.write(REQUEST)
            await call.read()
        with pytest.raises(RpcFailed):
            await call.read()
        await channel.close()

    run(main, loop)


@LOOPS
def test_an_unknown_method_and_its_reset_in_one_read_end_no_other_call(loop: str) -> None:
    """What a client sends when it gives up at once must not cost its other calls their connection."""

    async def main() -> None:
        async with server() as served:
            host, _, port = served.addresses[0].rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
            client.initiate_connection()
            head = {":method": "POST", ":scheme": "http", ":authority": "a", ":path": "/no.S/M", "te": "trailers"}
            head["content-type"] = "application/grpc"
            for stream_id in range(1, 201, 2):
                client.send_headers(stream_id, head.items())
                client.reset_stream(stream_id, 8)
            client.send_headers(201, {**head, ":path": ECHO}.items())
            client.send_data(201, prefix(b"x") + b"x", end_stream=True)
            writer.write(client.data_to_send())
            answered = b""
            while not answered:
                data = await reader.read(65536)
                assert data, "the server closed the connection"
                for event in client.receive_data(data):
                    assert not isinstance(event, h2.events.ConnectionTerminated)
                    if isinstance(event, h2.events.DataReceived):
                        answered += event.data
                writer.write(client.data_to_send())
            assert answered == prefix(b"x") + b"x"
            writer.close()
            await writer.wait_closed()

    run(main, loop)
