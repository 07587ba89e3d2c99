"""The client: the sources of its configuration, and its error texts."""

import asyncio
import json
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from tests.ztunnel.kube.fake_api import FakeApi
from ztunnel.kube.client import connect
from ztunnel.kube.errors import ApiRefused, ApiUnreachable, BadAnswer, BadKubeconfig
from ztunnel.kube.kinds import ADMIN_NETWORK_POLICY, NAMESPACE, POD, Selection


def test_api_paths_of_objects_and_lists() -> None:
    assert POD.path() == "/api/v1/pods"
    assert POD.path("a", "b") == "/api/v1/namespaces/a/pods/b"
    assert NAMESPACE.path("ignored", "a") == "/api/v1/namespaces/a"
    assert ADMIN_NETWORK_POLICY.path() == "/apis/policy.networking.k8s.io/v1alpha1/adminnetworkpolicies"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "not found"),
        ("", "missing or misshapen"),
        ("{", "while parsing a flow node"),
        ("[]", "missing or misshapen"),
        (json.dumps({"clusters": [], "contexts": []}), "No current context"),
        (json.dumps({"clusters": [], "contexts": [], "current-context": "a"}), "Context 'a' not found"),
        (
            json.dumps(
                {
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "gone", "user": "me"}}],
                    "clusters": [],
                    "users": [],
                }
            ),
            "'gone'",
        ),
        (
            json.dumps(
                {
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "c", "user": "me"}}],
                    "clusters": [
                        {"name": "c", "cluster": {"server": "https://x", "certificate-authority": "/no/ca"}}
                    ],
                    "users": [{"name": "me", "user": {}}],
                }
            ),
            "No such file",
        ),
        (
            json.dumps(
                {
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "c", "user": "me"}}],
                    "clusters": [
                        {"name": "c", "cluster": {"server": "https://x", "certificate-authority-data": "bm8gY2E="}}
                    ],
                    "users": [{"name": "me", "user": {}}],
                }
            ),
            "CA or client certificate",
        ),
    ],
)
def test_a_bad_kubeconfig_is_one_line_that_names_the_file(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)

    async def check() -> None:
        with pytest.raises(BadKubeconfig) as raised:
            async with connect(path):
                pass
        assert str(path) in str(raised.value)
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)

    asyncio.run(check())


def test_the_token_of_a_service_account_is_read_again_when_it_rotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            path = api.kubeconfig(tmp_path)
            described = json.loads(path.read_text())
            token = tmp_path / "token"
            token.write_text("old\n")
            described["users"][0]["user"] = {"tokenFile": str(token)}
            path.write_text(json.dumps(described))
            api.accept_token = "old"
            async with connect(path) as client:
                await client.list_page(Selection(POD))
                api.accept_token = "new"
                token.write_text("new\n")
                await client.list_page(Selection(POD))
                api.accept_token = "newer"
                with pytest.raises(ApiRefused, match="the token or certificate is expired"):
                    await client.list_page(Selection(POD))
                token.unlink()
                with pytest.raises(ApiUnreachable, match="not found"):
                    await client.list_page(Selection(POD))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-program"], "GET /version: no credentials from no-such-program: No such file or directory"),
        (["echo", "please log in"], "GET /version: no credentials from echo: it gives no token"),
        (["echo", "{}"], "GET /version: no credentials from echo: it gives no token"),
        (["echo", "[]"], "GET /version: no credentials from echo: it gives no token"),
        (["printf", r"\377"], "GET /version: no credentials from printf: it gives no token"),
        (["sh", "-c", "echo log >&2; echo in >&2; exit 1"], "GET /version: Exec sh returned 1: log in"),
        (None, ": Is a directory"),
    ],
)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_credentials_that_are_not_there_are_one_line_that_names_their_source(
    tmp_path: Path, command: list[str] | None, said: str, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            path = api.kubeconfig(tmp_path)
            described = json.loads(path.read_text())
            program = {"apiVersion": "client.authentication.k8s.io/v1beta1"}
            described["users"][0]["user"] = (
                {"tokenFile": str(tmp_path)}
                if command is None
                else {"exec": {**program, "command": command[0], "args": command[1:]}}
            )
            path.write_text(json.dumps(described))
            async with connect(path) as client:
                with pytest.raises(ApiUnreachable) as raised:
                    await client.version()
                assert said in str(raised.value)
                assert "\n" not in str(raised.value)

    run(check())


def test_an_unreachable_api_server_is_one_line(tmp_path: Path) -> None:
    async def check() -> None:
        api = FakeApi()
        async with api.serve():
            path = api.kubeconfig(tmp_path)
        async with connect(path) as client:
            with pytest.raises(ApiUnreachable, match=f"API server http://127.0.0.1:{api.port}"):
                await client.list_page(Selection(POD))

    asyncio.run(check())


def test_a_web_server_is_no_api_server(tmp_path: Path) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    async def check() -> None:
        api = FakeApi()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            api.port = server.sockets[0].getsockname()[1]
            async with connect(api.kubeconfig(tmp_path)) as client:
                with pytest.raises(BadAnswer, match="is no list"):
                    await client.list_page(Selection(POD))

    asyncio.run(check())


def test_a_server_of_another_ca_is_named(tmp_path: Path) -> None:
    from tests.ztunnel.kube.certificates import self_signed

    async def check() -> None:
        mine, others = self_signed(tmp_path / "mine"), self_signed(tmp_path / "others")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(mine.certificate, mine.key)
        async with FakeApi().serve(ssl=context) as api:
            good = {"certificate-authority": str(mine.certificate)}
            async with connect(api.kubeconfig(tmp_path, scheme="https", **good)) as client:
                await client.list_page(Selection(POD))
            wrong = {"certificate-authority": str(others.certificate)}
            async with connect(api.kubeconfig(tmp_path, scheme="https", **wrong)) as client:
                with pytest.raises(ApiUnreachable, match="is not trusted by the CA of the kubeconfig"):
                    await client.list_page(Selection(POD))

    asyncio.run(check())
