"""Calls over real sockets: our client and our server with each other, and each with gRPC's own library."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop

from hbone.settings import Role
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings
from rpc.aio.client import Call, Channel
from rpc.aio.server import Handler, Server, ServerCall, unary
from rpc.status import RpcFailed, Status
from rpc.tls import client_tls, server_tls
from ztunnel.identity.authority import CertificateAuthority

LIMIT_S = 20.0
BIG = bytes(range(256)) * 4 * 1024 * 5  # 5 MiB: more than every window
AUTHORITY = CertificateAuthority.in_memory("test", datetime.now(UTC))


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "uvloop") -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    (uvloop.run if loop == "uvloop" else asyncio.run)(limited())


# What both servers do: /t.S/Echo one message, /t.S/Chat each message back in capitals, /t.S/Fail, /t.S/Meta.


async def chat(call: ServerCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message.upper())


async def fail(call: ServerCall) -> None:
    await call.read()
    raise RpcFailed(Status.NOT_FOUND, "kein „a“")


async def fail_late(call: ServerCall) -> None:
    await call.write(b"first")
    raise RpcFailed(Status.ABORTED, "second")


async def never(call: ServerCall) -> None:
    await asyncio.Event().wait()


async def answer_and_stay(call: ServerCall) -> None:
    await call.write(b"here")
    await asyncio.Event().wait()


METHODS: dict[str, Handler] = {
    "/t.S/Echo": unary(lambda message, call: message),
    "/t.S/Meta": unary(lambda message, call: call.head.metadata.get("x-key", "").encode()),
    "/t.S/Chat": chat,
    "/t.S/Fail": fail,
    "/t.S/FailLate": fail_late,
    "/t.S/Never": never,
    "/t.S/Stay": answer_and_stay,
}


@asynccontextmanager
async def ours(address: str = "127.0.0.1:0", tls: TlsContext | None = None) -> AsyncIterator[str]:
    async with Server(METHODS.get, tls=tls) as server:
        yield await server.listen(address)


@asynccontextmanager
async def theirs(address: str = "127.0.0.1:0", tls: Any = None) -> AsyncIterator[str]:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def meta(request: bytes, context: Any) -> bytes:
        return dict(context.invocation_metadata()).get("x-key", "").encode()

    async def chat(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.upper()

    async def fail(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.NOT_FOUND, "kein „a“")
        yield b""

    async def fail_late(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await context.abort(grpc.StatusCode.ABORTED, "second")

    async def never(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    methods = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Meta": grpc.unary_unary_rpc_method_handler(meta),
        "Chat": grpc.stream_stream_rpc_method_handler(chat),
        "Fail": grpc.stream_stream_rpc_method_handler(fail),
        "FailLate": grpc.stream_stream_rpc_method_handler(fail_late),
        "Never": grpc.unary_unary_rpc_method_handler(never),
    }
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", -1),))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.S", methods)])
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


Serve = Callable[..., AbstractAsyncContextManager[str]]
SERVERS = pytest.mark.parametrize("serve", [ours, theirs], ids=["ours", "grpcio"])
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


async def failure_of(awaited: Awaitable[object]) -> RpcFailed:
    with pytest.raises(RpcFailed) as caught:
        await awaited
    return caught.value


@LOOPS
@SERVERS
def test_our_client_makes_every_kind_of_call(serve: Serve, loop: str) -> None:
    async def main() -> None:
        async with serve() as address, Channel(address) as channel:
            assert await channel.unary("/t.S/Echo", b"", timeout_s=5) == b""
            assert await channel.unary("/t.S/Echo", BIG, timeout_s=15) == BIG
            assert await channel.unary("/t.S/Meta", b"", metadata=[("x-key", "v")], timeout_s=5) == b"v"
            call = await channel.call("/t.S/Chat")
            for message in (b"one", b"", BIG):
                await call.write(message)
                assert await call.read() == message.upper()
            await call.write(b"last", ended=True)
            assert await call.read() == b"LAST"
            assert await call.read() is None
            assert await call.read() is None
            call.cancel()

    run(main, loop)


@SERVERS
def test_statuses_reach_our_client(serve: Serve) -> None:
    async def main() -> None:
        async with serve() as address, Channel(address) as channel:
            call = await channel.call("/t.S/Fail")
            await call.write(b"x")
            assert str(await failure_of(call.read())) == "NOT_FOUND: kein „a“"
            assert str(await failure_of(call.write(b"y"))) == "NOT_FOUND: kein „a“"
            call = await channel.call("/t.S/FailLate")
            assert await call.read() == b"first"
            assert str(await failure_of(call.read())) == "ABORTED: second"
            failure = await failure_of(channel.unary("/t.S/Nothing", b"", timeout_s=5))
            assert failure.status is Status.UNIMPLEMENTED
            failure = await failure_of(channel.unary("/t.S/Never", b"", timeout_s=0.2))
            assert failure.status is Status.DEADLINE_EXCEEDED
            # The connection is as good as before.
            assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"

    run(main)


@LOOPS
def test_grpcs_own_client_calls_our_server(loop: str) -> None:
    options = (("grpc.max_receive_message_length", -1),)

    async def main() -> None:
        async with ours() as address, grpc.aio.insecure_channel(address, options=options) as channel:
            assert await channel.unary_unary("/t.S/Echo")(BIG, timeout=15) == BIG
            assert await channel.unary_unary("/t.S/Meta")(b"", metadata=(("x-key", "v"),)) == b"v"
            chat = channel.stream_stream("/t.S/Chat")()
            for message in (b"one", b"", BIG):
                await chat.write(message)
                assert await chat.read() == message.upper()
            await chat.done_writing()
            assert await chat.read() is grpc.aio.EOF
            assert await chat.code() is grpc.StatusCode.OK
            for method, code, details in (
                ("Fail", grpc.StatusCode.NOT_FOUND, "kein „a“"),
                ("Nothing", grpc.StatusCode.UNIMPLEMENTED, "no method /t.S/Nothing"),
            ):
                call = channel.stream_stream(f"/t.S/{method}")()
                if method == "Fail":  # the other one may have ended, which its library takes ill
                    await call.write(b"x")
                assert await call.code() is code
                assert await call.details() == details
            late = channel.stream_stream("/t.S/FailLate")()
            assert await late.read() == b"first"
            assert (await late.code(), await late.details()) == (grpc.StatusCode.ABORTED, "second")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t.S/Never")(b"", timeout=0.2)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(main, loop)


@SERVERS
def test_unix_sockets(serve: Serve, tmp_path: Path) -> None:
    async def main() -> None:
        async with serve(f"unix:{tmp_path}/s") as address, Channel(address) as channel:
            assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"
        assert not (tmp_path / "s").exists()

    run(main)


@LOOPS
@SERVERS
@pytest.mark.parametrize("tls_1_2", [False, True])
def test_tls_by_the_servers_name(serve: Serve, loop: str, tls_1_2: bool) -> None:
    async def main() -> None:
        issued = AUTHORITY.issue_for_hosts(["istiod.example"], datetime.now(UTC), timedelta(days=1))
        shown: Any = server_tls(issued.key_pem, issued.chain_pem)
        if serve is theirs:
            shown = grpc.ssl_server_credentials([(issued.key_pem, issued.chain_pem)])
        root, stranger = AUTHORITY.root_pem, CertificateAuthority.in_memory("other", datetime.now(UTC)).root_pem
        async with serve(tls=shown) as address:
            for names in (["istiod.example"], ["127.0.0.1", "istiod.example"]):
                tls = client_tls(b"# caf\xc3\xa9\n" + root, names, tls_1_2=tls_1_2)
                async with Channel(address, tls=tls) as channel:
                    assert await channel.unary("/t.S/Echo", BIG, timeout_s=15) == BIG
            for pem, name, words in (
                (root, "127.0.0.1", "the certificate is for istiod.example, not for 127.0.0.1"),
                (root, "other.example", "not for other.example"),
                (stranger, "istiod.example", "TLS failed (chain)"),
            ):
                async with Channel(address, tls=client_tls(pem, [name])) as channel:
                    failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
                    assert failure.status is Status.UNAVAILABLE
                    assert words in failure.details
            async with Channel(address) as channel:
                assert (await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))).status in (
                    Status.UNAVAILABLE,
                    Status.INTERNAL,
                )

    run(main, loop)


def test_a_server_keeps_nothing_of_peers_that_are_gone() -> None:
    async def main() -> None:
        issued = AUTHORITY.issue_for_hosts(["127.0.0.1"], datetime.now(UTC), timedelta(days=1))
        async with Server(METHODS.get, tls=server_tls(issued.key_pem, issued.chain_pem)) as server:
            address = await server.listen("127.0.0.1:0")
            for name in ("127.0.0.1", "other.example"):
                async with Channel(address, tls=client_tls(AUTHORITY.root_pem, [name])) as channel:
                    with suppress(RpcFailed):
                        await channel.unary("/t.S/Echo", b"", timeout_s=5)
                        assert server.peers == 1
            while server.peers:
                await asyncio.sleep(0.01)

    run(main)


@LOOPS
def test_grpcs_own_client_believes_our_certificate(loop: str) -> None:
    async def main() -> None:
        credentials = grpc.ssl_channel_credentials(root_certificates=AUTHORITY.root_pem)
        issued = AUTHORITY.issue_for_hosts(["127.0.0.1"], datetime.now(UTC), timedelta(days=1))
        options = (("grpc.max_receive_message_length", -1),)
        async with (
            ours(tls=server_tls(issued.key_pem, issued.chain_pem)) as address,
            grpc.aio.secure_channel(address, credentials, options=options) as channel,
        ):
            assert await channel.unary_unary("/t.S/Echo")(BIG, timeout=15) == BIG

    run(main, loop)


def test_a_server_that_speaks_no_http2_or_no_tls_is_named() -> None:
    async def main() -> None:
        issued = AUTHORITY.issue_for_hosts(["127.0.0.1"], datetime.now(UTC), timedelta(days=1))
        other = TlsContext(
            Role.SERVER,
            TlsSettings(
                certificate_chain_pem=issued.chain_pem,
                private_key_pem=issued.key_pem,
                client_certificate=ClientCertificate.NONE,
                alpn=(),
            ),
        )
        tls = client_tls(AUTHORITY.root_pem, ["127.0.0.1"])
        for shown, words in ((other, "selected no protocol of ours"), (None, "wrong version number")):
            async with ours(tls=shown) as address, Channel(address, tls=tls) as channel:
                failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
                assert failure.status is Status.UNAVAILABLE
                assert words in failure.details

    run(main)


@pytest.mark.parametrize("client", [True, False])
def test_who_never_finishes_a_handshake_is_left(monkeypatch: pytest.MonkeyPatch, client: bool) -> None:
    monkeypatch.setattr("rpc.aio.client.TLS_S", 0.1)
    monkeypatch.setattr("rpc.aio.server.TLS_S", 0.1)
    issued = AUTHORITY.issue_for_hosts(["127.0.0.1"], datetime.now(UTC), timedelta(days=1))

    async def main() -> None:
        if client:
            async with ours(tls=server_tls(issued.key_pem, issued.chain_pem)) as address:
                host, _, port = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                assert await reader.read() == b""
                writer.close()
                await writer.wait_closed()
            return

        async def listen_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(listen_only, "127.0.0.1", 0)
        async with server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Channel(address, tls=client_tls(AUTHORITY.root_pem, ["127.0.0.1"])) as channel:
                failure = await failure_of(channel.call("/t.S/Echo"))
                assert "the handshake took too long" in failure.details

    run(main)


@pytest.mark.parametrize(
    "target", ["host", ":1", "host:", "host:0", "host:65536", "::1:80", "[::g]:80", "http://a:1", "host:1a"]
)
def test_targets_that_are_none(target: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r".+"):
            Channel(target)

    run(main)


def test_nobody_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with ours() as address:
            pass
        for target, words in ((address, "Connection refused"), (f"unix:{tmp_path}/gone", "No such file")):
            async with Channel(target) as channel:
                failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
                assert failure.status is Status.UNAVAILABLE
                assert failure.details.startswith(f"cannot connect to {target}: {words}")

    run(main)


@SERVERS
def test_a_server_that_comes_back_is_used_again(serve: Serve, tmp_path: Path) -> None:
    async def main() -> None:
        address = f"unix:{tmp_path}/s"
        async with Channel(address) as channel:
            async with serve(address):
                call = await channel.call("/t.S/Chat")
                await call.write(b"a")
                assert await call.read() == b"A"
            assert (await failure_of(call.read())).status in (Status.UNAVAILABLE, Status.CANCELLED)
            assert (await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))).status is Status.UNAVAILABLE
            async with serve(address):
                assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"

    run(main)


def test_what_goes_with_the_client() -> None:
    """A handler stops when its client does: by cancelling, and by its connection's end."""
    gone: list[str] = []
    waiting = asyncio.Semaphore(0)

    async def wait(call: ServerCall) -> None:
        try:
            while await call.read() is not None:
                waiting.release()
        except asyncio.CancelledError:
            gone.append(call.head.path)
            waiting.release()
            raise

    async def main() -> None:
        async with Server(lambda path: wait) as server:
            address = await server.listen("127.0.0.1:0")
            async with Channel(address) as channel:
                first, second = await channel.call("/first"), await channel.call("/second")
                for call in (first, second):
                    await call.write(b"x")
                    await waiting.acquire()
                first.cancel()
                await waiting.acquire()
                assert gone == ["/first"]
                assert (await failure_of(first.read())).status is Status.CANCELLED
            await waiting.acquire()
            assert gone == ["/first", "/second"]

    run(main)


def test_leaving_a_server_ends_its_calls() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        async with ours() as address:
            channel = Channel(address)
            call = await channel.call("/t.S/Stay")
            await call.write(b"x")
            assert await call.read() == b"here"
        failure = await failure_of(call.read())
        assert failure.status is Status.UNAVAILABLE
        assert "GOAWAY NO_ERROR" in failure.details
        await channel.close()
        assert asyncio.all_tasks() == before

    run(main)


def test_closing_a_channel_may_wait_for_its_calls() -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def slow(call: ServerCall) -> None:
            await release.wait()
            await call.write(b"done")

        async with Server(lambda path: slow) as server:
            address = await server.listen("127.0.0.1:0")
            patient, hasty = Channel(address), Channel(address)
            calls = [await channel.call("/x") for channel in (patient, hasty)]
            closing = asyncio.gather(patient.close(grace_s=10))
            await hasty.close(grace_s=0.05)
            assert (await failure_of(calls[1].read())).status is Status.UNAVAILABLE
            release.set()
            assert await calls[0].read() == b"done"
            assert await calls[0].read() is None
            await closing
            assert (await failure_of(patient.call("/x"))).status is Status.CANCELLED

    run(main)


def test_a_channel_that_closes_while_it_connects() -> None:
    async def main() -> None:
        async with Server(METHODS.get) as server:
            channel = Channel(await server.listen("127.0.0.1:0"))
            calling = asyncio.get_running_loop().create_task(channel.call("/t.S/Echo"))
            await asyncio.sleep(0)
            await channel.close()
            assert (await failure_of(calling)).status is Status.CANCELLED
            await asyncio.sleep(0.05)
            assert server.peers == 0

    run(main)


def test_who_does_not_read_stops_the_other_side() -> None:
    """Neither a server nor a client collects what nobody reads."""
    written = 0

    async def pour(call: ServerCall) -> None:
        nonlocal written
        while True:
            await call.write(bytes(100_000))
            written += 1

    async def pours(write: Callable[[bytes], Awaitable[None]]) -> int:
        count = 0
        try:
            async with asyncio.timeout(0.3):
                while True:
                    await write(bytes(100_000))
                    count += 1
        except TimeoutError:
            return count

    async def main() -> None:
        methods: dict[str, Handler] = {"/pour": pour, "/hold": never}
        async with Server(methods.get) as server:
            address = await server.listen("127.0.0.1:0")
            async with Channel(address) as channel:
                call = await channel.call("/pour")
                await asyncio.sleep(0.3)
                stood = written
                assert stood * 100_000 < 8 * 2**20
                for _ in range(stood + 50):
                    assert await call.read() == bytes(100_000)
                assert written > stood
                call.cancel()
                held = await channel.call("/hold")
                assert 0 < await pours(held.write) < 80
                # The others on the connection have the rest of its window.
                other = await channel.call("/pour")
                assert await other.read() == bytes(100_000)

    run(main)


def test_limits_of_messages() -> None:
    async def main() -> None:
        async with Server(METHODS.get, message_limit_bytes=10) as server:
            address = await server.listen("127.0.0.1:0")
            async with Channel(address) as channel:
                assert await channel.unary("/t.S/Echo", bytes(10), timeout_s=5) == bytes(10)
                failure = await failure_of(channel.unary("/t.S/Echo", bytes(11), timeout_s=5))
                assert str(failure) == "RESOURCE_EXHAUSTED: message of 11 bytes is over the limit of 10"
        async with ours() as address, Channel(address, message_limit_bytes=10) as channel:
            failure = await failure_of(channel.unary("/t.S/Echo", bytes(11), timeout_s=5))
            assert str(failure) == "RESOURCE_EXHAUSTED: message of 11 bytes is over the limit of 10"

    run(main)


def test_a_bug_in_a_handler_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(call: ServerCall) -> None:
        raise KeyError("secret")

    async def late(call: ServerCall) -> None:
        raise TimeoutError("not the caller's")

    async def main() -> None:
        methods: dict[str, Handler] = {"/broken": broken, "/late": late}
        async with Server(methods.get) as server:
            address = await server.listen("127.0.0.1:0")
            async with Channel(address) as channel:
                for method in methods:
                    failure = await failure_of(channel.unary(method, b"", timeout_s=5))
                    assert str(failure) == "INTERNAL: internal error of the server"

    run(main)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "handler failed method=/broken",
        "handler failed method=/late",
    ]


def test_many_calls_at_once() -> None:
    async def main() -> None:
        async with ours() as address, Channel(address) as channel:
            answers = await asyncio.gather(
                *(channel.unary("/t.S/Echo", b"%d" % index * 100, timeout_s=10) for index in range(300))
            )
            assert answers == [b"%d" % index * 100 for index in range(300)]

    run(main)


def test_bad_addresses_to_serve(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "file").write_text("x")
        async with Server(METHODS.get) as server:
            address = await server.listen("127.0.0.1:0")
            for bad, error in (
                ("nonsense", ValueError),
                ("127.0.0.1:99999", ValueError),
                (address, OSError),
                (f"unix:{tmp_path}/file", OSError),
                ("192.0.2.1:0", OSError),
            ):
                with pytest.raises(error):
                    await server.listen(bad)
            async with Channel(address) as channel:
                assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"
        assert (tmp_path / "file").read_text() == "x"

    run(main)


def test_the_socket_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"unix:{tmp_path}/s"
        async with ours(address), ours(address) as second, Channel(second) as channel:
            assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"

    run(main)


def test_a_call_that_is_over_costs_nothing_to_cancel() -> None:
    async def main() -> None:
        async with ours() as address, Channel(address) as channel:
            call: Call = await channel.call("/t.S/Fail")
            await call.write(b"x")
            await failure_of(call.read())
            call.cancel()
            call.cancel()
            assert (await failure_of(call.read())).status is Status.NOT_FOUND

    run(main)
