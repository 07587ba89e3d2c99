"""Probes of an application, answered by its sidecar, over real sockets."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.ztunnel.kube.certificates import self_signed
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from ztunnel.proxy.istio.admin.prober import answer
from ztunnel.proxy.istio.settings.app_probes import AppProbe
from ztunnel.runtime.http.page import Page

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"


def body_of(page: Page) -> str:
    return "".join(piece if isinstance(piece, str) else bytes(piece).decode() for piece in page.body)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def application(
    respond: Callable[[bytes], bytes | None], tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[tuple[str, bytes]]]]:
    """Run a server whose answer ``respond`` makes from the request's head. Yield its port, and its clients."""
    seen: list[tuple[str, bytes]] = []

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append((writer.get_extra_info("peername")[0], head))
            said = respond(head)
            if said is None:
                await reader.read()  # until the prober gives up
            else:
                writer.write(said)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1], seen
        while left := [task for task in serving if task is not None and not task.done()]:
            await asyncio.wait(left)


def probing(check: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await check()

    asyncio.run(main())


def test_http_probe_relays_status_body_and_headers() -> None:
    async def check() -> None:
        async with application(lambda head: b"HTTP/1.1 418 No\r\n\r\n" + b"x" * 20_000) as (port, seen):
            headers = (("Host", "shop"), ("X-One", "1"))
            probe = AppProbe(kind="http", port=port, path="/ready?a=b", headers=headers)
            page = await answer(probe, "127.0.0.1", "127.0.0.6")
            assert (page.status, len(body_of(page))) == (418, 10 * 1024)
            source, head = seen[0]
            assert source == "127.0.0.6"
            assert head.startswith(b"GET /ready?a=b HTTP/1.1\r\n")
            assert b"X-One: 1\r\n" in head
            assert head.lower().count(b"host: ") == 1
            assert b"Connection: close" in head

    probing(check)


def test_probe_with_its_own_host_uses_the_kernels_source_address() -> None:
    async def check() -> None:
        async with application(lambda _: OK) as (port, seen):
            # "localhost" can resolve to ::1 first, for which there is no IPv4 source.
            probe = AppProbe(kind="http", port=port, host="localhost")
            assert (await answer(probe, "192.0.2.1", "127.0.0.6")).status == 200
            same = AppProbe(kind="http", port=port, host="127.0.0.1")
            assert (await answer(same, "127.0.0.1", "127.0.0.6")).status == 200
            assert [source for source, _ in seen] == ["127.0.0.1", "127.0.0.6"]

    probing(check)


def test_a_redirect_is_followed_on_the_host_and_is_a_success_elsewhere() -> None:
    def respond(head: bytes) -> bytes:
        where = {b"/": b"/next", b"/away": b"https://example.com/", b"/for-ever": b"/for-ever"}
        path = head.split()[1]
        if path == b"/next":
            return OK
        return b"HTTP/1.1 302 Found\r\nlocation: " + where[path] + b"\r\ncontent-length: 0\r\n\r\n"

    async def check() -> None:
        async with application(respond) as (port, seen):
            page = await answer(AppProbe(kind="http", port=port), "127.0.0.1", None)
            assert (page.status, body_of(page)) == (200, "ok")
            assert (await answer(AppProbe(kind="http", port=port, path="/away"), "127.0.0.1", None)).status == 200
            assert len(seen) == 3
            looping = await answer(AppProbe(kind="http", port=port, path="/for-ever"), "127.0.0.1", None)
            assert (looping.status, "redirects more than 10 times" in body_of(looping)) == (500, True)

    probing(check)


def test_https_probe_does_not_verify_the_certificate(tmp_path: Path) -> None:
    pair = self_signed(tmp_path / "pair")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)

    async def check() -> None:
        async with application(lambda _: OK, tls) as (port, _):
            page = await answer(AppProbe(kind="https", port=port), "127.0.0.1", None)
            assert (page.status, body_of(page)) == (200, "ok")

    probing(check)


def test_tcp_probe_succeeds_by_connecting() -> None:
    async def check() -> None:
        async with application(lambda _: OK) as (port, _):
            assert (await answer(AppProbe(kind="tcp", port=port), "127.0.0.1", None)).status == 200
        page = await answer(AppProbe(kind="tcp", port=port), "127.0.0.1", None)
        assert page.status == 500
        assert "the application cannot be asked" in body_of(page)

    probing(check)


@pytest.mark.parametrize(("status", "expected"), [(b"\x08\x01", 200), (b"\x08\x02", 500), (b"", 500)])
def test_grpc_probe_calls_the_health_service(status: bytes, expected: int) -> None:
    asked: list[bytes] = []

    def check_health(request: bytes, context: Any) -> bytes:
        asked.append(request)
        return status

    handler = grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check_health)}
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def check() -> None:
        name = "s" * 200
        for service, sent in (("", b""), ("a.B", b"\x0a\x03a.B"), (name, b"\x0a\xc8\x01" + name.encode())):
            probe = AppProbe(kind="grpc", port=port, service=service, timeout_s=10)
            assert (await answer(probe, "127.0.0.1", "127.0.0.6")).status == expected
            assert asked.pop() == sent
        away = await answer(AppProbe(kind="grpc", port=1, timeout_s=10), "127.0.0.1", None)
        assert away.status == 500

    try:
        probing(check)
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("respond", "timeout_s", "said"),
    [
        (lambda _: None, 0.2, "did not answer within 0.2 s"),
        (lambda _: b"", 20, "without an answer"),
        (lambda _: b"SSH-2.0-x\r\n\r\n", 20, "cannot be asked"),
    ],
)
def test_an_application_that_does_not_answer_is_a_failure_with_its_reason(
    respond: Callable[[bytes], bytes | None], timeout_s: float, said: str
) -> None:
    async def check() -> None:
        async with application(respond) as (port, _):
            page = await answer(AppProbe(kind="http", port=port, timeout_s=timeout_s), "127.0.0.1", None)
            assert page.status == 500
            assert said in body_of(page)

    probing(check)


SIDECAR = {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c", "ZTUNNEL_SIDECAR": "true"}


def test_kubelets_paths_are_on_the_metrics_port() -> None:
    path = "/app-health/web/readyz"
    env = {
        **SIDECAR,
        "ISTIO_KUBE_APP_PROBERS": json.dumps({path: {"httpGet": {"port": 1}}}),
        "INSTANCE_IP": "127.0.0.1",
    }

    async def check(harness: Harness) -> None:
        async with application(lambda _: OK) as (port, seen):
            probe = replace(harness.proxy.config.app_probes[path], port=port)
            object.__setattr__(harness.proxy, "config", replace(harness.proxy.config, app_probes={path: probe}))
            found = await harness.ask("stats", path)
            assert (found.status, found.text, found.headers["content-type"]) == (200, "ok", "text/plain")
            assert seen[0][0] == "127.0.0.6"
        missing = await harness.ask("stats", "/app-health/web/livez")
        assert (missing.status, path in missing.text) == (404, True)

    served(check, env)


@pytest.mark.parametrize("content_type", [b"text/plain; name=\xe9", b"text/plain;\r\n "])
def test_an_unusual_content_type_does_not_fail_the_probe(content_type: bytes) -> None:
    path = "/app-health/web/readyz"
    probers = json.dumps({path: {"httpGet": {"port": 1}}})

    async def check(harness: Harness) -> None:
        said = b"HTTP/1.1 200 OK\r\ncontent-type: " + content_type + b"\r\ncontent-length: 2\r\n\r\nok"
        async with application(lambda _: said) as (port, _):
            probe = replace(harness.proxy.config.app_probes[path], port=port)
            object.__setattr__(harness.proxy, "config", replace(harness.proxy.config, app_probes={path: probe}))
            found = await harness.ask("stats", path)
            assert (found.status, found.text) == (200, "ok")
            assert found.headers["content-type"] == content_type.decode("latin-1").strip()

    served(check, {**SIDECAR, "ISTIO_KUBE_APP_PROBERS": probers, "INSTANCE_IP": "127.0.0.1"})


def test_only_containers_of_the_pod_can_end_a_sidecar() -> None:
    async def check(harness: Harness) -> None:
        goodbyes: list[str] = []

        def send_goaway() -> int:
            goodbyes.append("drain")
            return 3

        harness.proxy.send_goaway = send_goaway  # type: ignore[method-assign]
        harness.proxy.shut_down = lambda: goodbyes.append("quit")  # type: ignore[method-assign]
        assert (await harness.ask("stats", "/drain")).status == 405
        assert (await harness.ask("stats", "/drain", "POST")).text == "3 connections are open\n"
        assert (await harness.ask("stats", "/quitquitquit", "POST")).status == 200
        assert goodbyes == ["drain", "quit"]

    async def node_proxy(harness: Harness) -> None:
        assert (await harness.ask("stats", "/quitquitquit", "POST")).status == 404

    served(check, SIDECAR)
    served(node_proxy)
