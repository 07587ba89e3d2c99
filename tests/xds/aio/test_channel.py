"""Our client over real sockets against gRPC's own server, on both loops."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop

from hbone.errors import TlsError
from hbone.settings import Role
from hbone.tls import TlsSession, sealed_bytes
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings
from xds.aio.channel import _TCP_PROBES, Channel, Keepalive
from xds.aio.grpc_server import new_server
from xds.grpc.status import RpcFailed, Status
from xds.grpc.tls import client_tls
from ztunnel.proxy.identity.authority import CertificateAuthority

LIMIT_S = 30.0
MIB = 2**20
BIG = bytes(range(256)) * 4 * 1024 * 5  # 5 MiB: more than a stream's window
HUGE = 100 * MIB
AUTHORITY = CertificateAuthority.in_memory("test", datetime.now(UTC))
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "uvloop") -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    (uvloop.run if loop == "uvloop" else asyncio.run)(limited())


class Methods(grpc.GenericRpcHandler):
    """What the server does: a coroutine per path, which reads and writes bytes."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.written = 0
        self.release = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        method = getattr(self, handler_call_details.method.removeprefix("/t.S/").lower(), None)
        return None if method is None else grpc.stream_stream_rpc_method_handler(method)

    async def echo(self, requests: Any, context: Any) -> None:
        await context.write(await context.read())

    async def meta(self, requests: Any, context: Any) -> None:
        await context.write(dict(context.invocation_metadata()).get("x-key", "").encode())

    async def chat(self, requests: Any, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(request.upper())

    async def fail(self, requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "kein „a“")

    async def faillate(self, requests: Any, context: Any) -> None:
        await context.write(b"first")
        await context.abort(grpc.StatusCode.ABORTED, "second")

    async def broken(self, requests: Any, context: Any) -> None:
        raise KeyError("oops")

    async def never(self, requests: Any, context: Any) -> None:
        try:
            await context.write(b"here")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.gone.append("never")
            raise

    async def slow(self, requests: Any, context: Any) -> None:
        await self.release.wait()
        await context.write(b"done")

    async def stay(self, requests: Any, context: Any) -> None:
        await context.write(b"here")
        await self.release.wait()
        await context.write(b"done")

    async def huge(self, requests: Any, context: Any) -> None:
        await context.write(bytes(HUGE))

    async def push(self, requests: Any, context: Any) -> None:
        for number in range(int(await context.read())):
            await context.write(b"%d" % number)

    async def pour(self, requests: Any, context: Any) -> None:
        while True:
            await context.write(bytes(100_000))
            self.written += 1

    async def deadline(self, requests: Any, context: Any) -> None:
        await context.write(b"%d" % round(context.time_remaining()))


@asynccontextmanager
async def serving(
    address: str = "127.0.0.1:0", tls: Any = None, methods: Methods | None = None, **options: Any
) -> AsyncIterator[str]:
    """Run gRPC's server; yield its address."""
    arguments = {"grpc.max_receive_message_length": -1, "grpc.so_reuseport": 0}
    arguments |= {f"grpc.{name}": value for name, value in options.items()}
    server = new_server(tuple(arguments.items()))
    server.add_generic_rpc_handlers([methods or Methods()])
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def failure_of(awaited: Awaitable[object]) -> RpcFailed:
    with pytest.raises(RpcFailed) as caught:
        await awaited
    return caught.value


@LOOPS
def test_every_kind_of_call(loop: str) -> None:
    async def main() -> None:
        async with serving() as address, Channel(address) as channel:
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


@LOOPS
def test_calls_raise_the_servers_status_and_text(loop: str) -> None:
    async def main() -> None:
        async with serving() as address, Channel(address) as channel:
            call = await channel.call("/t.S/Fail")
            assert str(await failure_of(call.read())) == "NOT_FOUND: kein „a“"
            assert str(await failure_of(call.write(b"y"))) == "NOT_FOUND: kein „a“"
            call = await channel.call("/t.S/FailLate")
            assert await call.read() == b"first"
            assert str(await failure_of(call.read())) == "ABORTED: second"
            failure = await failure_of(channel.unary("/t.S/Nothing", b"", timeout_s=5))
            assert failure.status is Status.UNIMPLEMENTED
            failure = await failure_of(channel.unary("/t.S/Broken", b"", timeout_s=5))
            assert failure.status is Status.UNKNOWN
            # The connection is as good as before.
            assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"

    run(main, loop)


@LOOPS
def test_calls_end_at_their_deadline_which_the_server_gets(loop: str) -> None:
    """Kept by the client, and sent to the server."""

    async def main() -> None:
        methods = Methods()
        async with serving(methods=methods) as address, Channel(address) as channel:
            failure = await failure_of(channel.unary("/t.S/Slow", b"", timeout_s=0.2))
            assert str(failure) == "DEADLINE_EXCEEDED: no answer within 0.2 s"
            assert await channel.unary("/t.S/Deadline", b"", timeout_s=600) == b"600"
            methods.release.set()
            assert await channel.unary("/t.S/Slow", b"", timeout_s=5) == b"done"

    run(main, loop)


@LOOPS
def test_unix_sockets(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(f"unix:{tmp_path}/s") as address, Channel(address) as channel:
            assert await channel.unary("/t.S/Echo", BIG, timeout_s=15) == BIG

    run(main, loop)


def server_credentials(hosts: list[str]) -> Any:
    issued = AUTHORITY.issue_for_hosts(hosts, datetime.now(UTC), timedelta(days=1))
    return grpc.ssl_server_credentials([(issued.key_pem, issued.chain_pem)])


@LOOPS
@pytest.mark.parametrize("tls_1_2", [True, False])
def test_tls(loop: str, tls_1_2: bool) -> None:
    root, stranger = AUTHORITY.root_pem, CertificateAuthority.in_memory("other", datetime.now(UTC)).root_pem

    async def main() -> None:
        async with serving(tls=server_credentials(["istiod.example"])) as address:
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
                failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
                assert failure.status is Status.UNAVAILABLE

    run(main, loop)


def test_a_server_without_tls_is_named() -> None:
    async def main() -> None:
        tls = client_tls(AUTHORITY.root_pem, ["127.0.0.1"])
        async with serving() as address, Channel(address, tls=tls) as channel:
            failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
            assert failure.status is Status.UNAVAILABLE
            assert "wrong version number" in failure.details

    run(main)


@LOOPS
def test_a_server_that_comes_back_is_used_again(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        address = f"unix:{tmp_path}/s"
        async with Channel(address) as channel:
            for _ in range(3):
                async with serving(address):
                    assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"
                    call = await channel.call("/t.S/Chat")
                    await call.write(b"a")
                    assert await call.read() == b"A"
                assert (await failure_of(call.read())).status in (Status.UNAVAILABLE, Status.CANCELLED)
                failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
                assert failure.status is Status.UNAVAILABLE

    run(main, loop)


@LOOPS
def test_a_call_outlives_the_goaway_of_a_server_that_stops(loop: str) -> None:
    async def main() -> None:
        methods = Methods()
        server = new_server()
        server.add_generic_rpc_handlers([methods])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with Channel(f"127.0.0.1:{port}") as channel:
            call = await channel.call("/t.S/Stay")
            assert await call.read() == b"here"
            stopping = asyncio.get_running_loop().create_task(server.stop(10))
            while (await failure_of_any(channel)) is None:
                await asyncio.sleep(0)
            methods.release.set()
            assert await call.read() == b"done"
            assert await call.read() is None
            await stopping

    async def failure_of_any(channel: Channel) -> RpcFailed | None:
        """A new call fails once the server refuses: then its GOAWAY has come."""
        try:
            await channel.unary("/t.S/Meta", b"", timeout_s=5)
        except RpcFailed as failure:
            return failure
        return None

    run(main, loop)


@LOOPS
def test_the_age_of_a_connection(loop: str) -> None:
    """Servers end old connections with GOAWAY. Open calls continue, and new ones use the next connection."""

    async def main() -> None:
        ages = {"max_connection_age_ms": 50, "max_connection_age_grace_ms": 20_000}
        async with serving(**ages) as address, Channel(address) as channel:
            call = await channel.call("/t.S/Chat")
            until_s = time.monotonic() + 0.5
            answers = []
            while time.monotonic() < until_s:
                await call.write(b"a")
                assert await call.read() == b"A"
                try:
                    answers.append(await channel.unary("/t.S/Echo", b"x", timeout_s=5))
                except RpcFailed as failure:
                    answers.append(failure.status.name.encode())
            # UNAVAILABLE: the GOAWAY met the request on its way.
            assert set(answers) <= {b"x", b"UNAVAILABLE"}
            assert answers.count(b"x") > 10

    run(main, loop)


@LOOPS
def test_many_calls_at_once(loop: str) -> None:
    async def main() -> None:
        async with serving() as address, Channel(address) as channel:
            answers = await asyncio.gather(
                *(channel.unary("/t.S/Echo", b"%d" % index * 100, timeout_s=20) for index in range(300))
            )
            assert answers == [b"%d" % index * 100 for index in range(300)]

    run(main, loop)


@LOOPS
@pytest.mark.parametrize("secure", [False, True])
def test_answers_of_100_mib(loop: str, secure: bool) -> None:
    async def main() -> None:
        credentials = server_credentials(["127.0.0.1"]) if secure else None
        tls = client_tls(AUTHORITY.root_pem, ["127.0.0.1"]) if secure else None
        async with serving(tls=credentials) as address, Channel(address, tls=tls) as channel:
            assert await channel.unary("/t.S/Huge", b"", timeout_s=25) == bytes(HUGE)
            limited = Channel(address, tls=tls, message_limit_bytes=HUGE - 1)
            failure = await failure_of(limited.unary("/t.S/Huge", b"", timeout_s=25))
            assert str(failure) == f"RESOURCE_EXHAUSTED: message of {HUGE} bytes is over the limit of {HUGE - 1}"
            await limited.close()

    run(main, loop)


@LOOPS
def test_many_pushes_are_all_received(loop: str) -> None:
    """A busy control plane sends thousands of messages a second. No budget limits them."""
    count = 10_000

    async def main() -> None:
        async with serving() as address, Channel(address) as channel:
            call = await channel.call("/t.S/Push")
            await call.write(b"%d" % count)
            for number in range(count):
                assert await call.read() == b"%d" % number
            assert await call.read() is None

    run(main, loop)


@LOOPS
def test_a_quiet_server_that_answers_pings_is_kept(loop: str) -> None:
    """A quiet server is asked, and kept as long as it answers."""

    async def main() -> None:
        permissive = {"http2.min_ping_interval_without_data_ms": 1, "http2.max_ping_strikes": 0}
        methods = Methods()
        async with serving(methods=methods, **permissive) as address:
            keepalive = Keepalive(interval_s=0.05, timeout_s=5)
            async with Channel(address, keepalive=keepalive) as channel:
                call = await channel.call("/t.S/Slow")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call.read(), 0.5)
                methods.release.set()
                assert await call.read() == b"done"

    run(main, loop)


@LOOPS
def test_no_proxy_is_used(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")

    async def main() -> None:
        async with serving() as address, Channel(address) as channel:
            assert await channel.unary("/t.S/Echo", b"x", timeout_s=5) == b"x"

    run(main, loop)


@pytest.mark.parametrize(
    "target", ["host", ":1", "host:", "host:0", "host:65536", "::1:80", "[::g]:80", "http://a:1", "host:1a"]
)
def test_malformed_targets(target: str) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r".+"):
            Channel(target)

    run(main)


def test_an_unreachable_server_is_named_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving() as address:
            pass
        for target, words in ((address, "Connection refused"), (f"unix:{tmp_path}/gone", "No such file")):
            async with Channel(target) as channel:
                failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
                assert failure.status is Status.UNAVAILABLE
                assert failure.details.startswith(f"cannot connect to {target}: {words}")

    run(main)


@LOOPS
def test_cancelling_ends_the_servers_side(loop: str) -> None:
    """A call is ended by cancelling it, and by the end of its connection. Cancelling an ended call has no cost."""

    async def main() -> None:
        methods = Methods()
        async with serving(methods=methods) as address:
            async with Channel(address) as channel:
                first, second = await channel.call("/t.S/Never"), await channel.call("/t.S/Never")
                for call in (first, second):
                    assert await call.read() == b"here"
                first.cancel()
                first.cancel()
                while methods.gone != ["never"]:
                    await asyncio.sleep(0.01)
                assert (await failure_of(first.read())).status is Status.CANCELLED
                failed = await channel.call("/t.S/Fail")
                await failure_of(failed.read())
                failed.cancel()
                assert (await failure_of(failed.read())).status is Status.NOT_FOUND
            while methods.gone != ["never", "never"]:
                await asyncio.sleep(0.01)
            assert (await failure_of(second.read())).details == "channel closed"

    run(main, loop)


def test_closing_a_channel_may_wait_for_its_calls() -> None:
    async def main() -> None:
        methods = Methods()
        async with serving(methods=methods) as address:
            patient, hasty = Channel(address), Channel(address)
            calls = [await channel.call("/t.S/Slow") for channel in (patient, hasty)]
            closing = asyncio.gather(patient.close(grace_s=10))
            await hasty.close(grace_s=0.05)
            assert (await failure_of(calls[1].read())).status is Status.UNAVAILABLE
            methods.release.set()
            assert await calls[0].read() == b"done"
            assert await calls[0].read() is None
            await closing
            assert (await failure_of(patient.call("/t.S/Slow"))).status is Status.CANCELLED

    run(main)


@LOOPS
def test_a_channel_that_closes_while_it_connects(loop: str) -> None:
    async def main() -> None:
        async with serving() as address:
            channel = Channel(address)
            calling = asyncio.get_running_loop().create_task(channel.call("/t.S/Echo"))
            await asyncio.sleep(0)
            await channel.close()
            assert (await failure_of(calling)).status is Status.CANCELLED

    run(main, loop)


@LOOPS
def test_unread_messages_stop_the_server(loop: str) -> None:
    """Flow control limits unread data. Other calls have the rest of the connection's window."""

    async def main() -> None:
        methods = Methods()
        async with serving(methods=methods) as address, Channel(address) as channel:
            call = await channel.call("/t.S/Pour")
            stood = -1
            while stood != methods.written:
                stood = methods.written
                await asyncio.sleep(0.2)
            assert 0 < stood * 100_000 < 16 * MIB
            other = await channel.call("/t.S/Never")
            assert await other.read() == b"here"
            for _ in range(stood + 50):
                assert await call.read() == bytes(100_000)
            assert methods.written > stood

    run(main, loop)


@LOOPS
def test_a_server_that_does_not_read_stops_the_writer(loop: str) -> None:
    async def main() -> None:
        async with serving() as address, Channel(address) as channel:
            call = await channel.call("/t.S/Never")
            count = 0

            async def write() -> None:
                nonlocal count
                while True:
                    await call.write(bytes(100_000))
                    count += 1

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(write(), 0.5)
            assert 0 < count < 400

    run(main, loop)


def test_limits_of_messages() -> None:
    async def main() -> None:
        async with serving() as address, Channel(address, message_limit_bytes=10) as channel:
            assert await channel.unary("/t.S/Echo", bytes(10), timeout_s=5) == bytes(10)
            failure = await failure_of(channel.unary("/t.S/Echo", bytes(11), timeout_s=5))
            assert str(failure) == "RESOURCE_EXHAUSTED: message of 11 bytes is over the limit of 10"

    run(main)


def test_metadata_that_cannot_be_sent() -> None:
    async def main() -> None:
        async with Channel("127.0.0.1:1") as channel:
            failure = await failure_of(channel.call("/t.S/Echo", metadata=[("x", "a\nb")]))
            assert failure.status is Status.INVALID_ARGUMENT

    run(main)


def test_leaving_a_channel_leaves_no_task() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        async with serving() as address, Channel(address) as channel:
            call = await channel.call("/t.S/Never")
            assert await call.read() == b"here"
        # gRPC's own server ends its tasks later.
        left = [task for task in asyncio.all_tasks() - before if "grpcio" not in repr(task)]
        assert left == []

    run(main)


def tls_server(**settings: Any) -> TlsContext:
    issued = AUTHORITY.issue_for_hosts(["127.0.0.1"], datetime.now(UTC), timedelta(days=1))
    own = TlsSettings(certificate_chain_pem=issued.chain_pem, private_key_pem=issued.key_pem, **settings)
    return TlsContext(Role.SERVER, own)


@LOOPS
@pytest.mark.parametrize(
    ("context", "words"),
    [
        (tls_server(client_certificate=ClientCertificate.NONE, alpn=()), "selected no protocol of ours"),
        # In TLS 1.3 this alert comes after our side of the handshake is done.
        (tls_server(trusted_ca_pem=AUTHORITY.root_pem), "certificate required"),
    ],
)
def test_the_error_names_what_a_tls_server_requires(context: TlsContext, words: str, loop: str) -> None:
    """Servers that send an alert, like Go's. gRPC's own server closes without an alert."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session, refused = TlsSession(context), False
        out = memoryview(bytearray(sealed_bytes(0)))
        while data := await reader.read(65536):
            if refused:
                continue
            session.receive(memoryview(data))
            try:
                session.handshake()
            except TlsError:
                refused = True
            writer.write(out[: session.seal(b"", out)])
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Channel(address, tls=client_tls(AUTHORITY.root_pem, ["127.0.0.1"])) as channel:
                failure = await failure_of(channel.unary("/t.S/Echo", b"", timeout_s=5))
                assert failure.status is Status.UNAVAILABLE
                assert words in failure.details

    run(main, loop)


@LOOPS
def test_a_host_that_is_gone_is_found_by_tcp(loop: str) -> None:
    async def main() -> None:
        async with serving() as address, Channel(address) as channel:
            sock = await channel._socket()
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option, _ in _TCP_PROBES] == [
                30,
                10,
                3,
                60_000,
            ]
            sock.close()

    run(main, loop)
