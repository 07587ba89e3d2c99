"""Kubeconfigs and service accounts mean to this client what they mean to client-go."""

import asyncio
import base64
import json
import ssl
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.kube.certificates import Pair, self_signed
from tests.ztunnel.kube.fake_api import FakeApi
from ztunnel.kube.client import connect
from ztunnel.kube.errors import ApiUnreachable, BadKubeconfig


def edited(path: Path, *, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    described = json.loads(path.read_text())
    described["clusters"][0]["cluster"].update({key.replace("_", "-"): value for key, value in cluster.items()})
    if user is not None:
        described["users"][0]["user"] = user
    path.write_text(json.dumps(described))
    return path


def serving(pair: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return context


def program(folder: Path, text: str, **fields: Any) -> dict[str, Any]:
    """Return a user whose credentials are printed by a Python program."""
    path = folder / "credentials.py"
    path.write_text(text)
    described = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": [str(path)]}
    return {"exec": {**described, **fields}}


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_credential_program_gets_its_version_and_the_cluster(tmp_path: Path, version: str) -> None:
    user = program(
        tmp_path,
        "import json, os\n"
        "info = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
        f"open({str(tmp_path / 'info')!r}, 'a').write(json.dumps(info) + chr(10))\n"
        "print(json.dumps({'apiVersion': info['apiVersion'], 'status': {'token': os.environ['TOKEN']}}))\n",
        apiVersion=f"client.authentication.k8s.io/{version}",
        env=[{"name": "TOKEN", "value": "mine"}],
        interactiveMode="Never",
        provideClusterInfo=True,
    )

    async def check() -> None:
        async with FakeApi().serve() as api:
            api.accept_token = "mine"
            extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}}
            path = edited(api.kubeconfig(tmp_path), user=user, extensions=[extension])
            async with connect(path) as client:
                await asyncio.gather(*(client.version() for _ in range(3)))
            (info,) = map(json.loads, (tmp_path / "info").read_text().splitlines())
            assert info["apiVersion"] == f"client.authentication.k8s.io/{version}"
            assert info["spec"] == {
                "interactive": False,
                "cluster": {"server": f"http://127.0.0.1:{api.port}", "config": {"audience": "a"}},
            }

    asyncio.run(check())


def test_expired_credentials_of_a_program_are_renewed_before_a_request(tmp_path: Path) -> None:
    user = program(
        tmp_path,
        "import json\n"
        f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n"
        "print(json.dumps({'status': {'token': 't', 'expirationTimestamp': '2020-01-01T00:00:00Z'}}))\n",
    )

    async def check() -> None:
        async with FakeApi().serve() as api:
            async with connect(edited(api.kubeconfig(tmp_path), user=user)) as client:
                await client.version()
                await client.version()
            assert (tmp_path / "runs").read_text() == "xx"

    asyncio.run(check())


def test_credential_program_that_needs_a_terminal_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = program(tmp_path, "", interactiveMode="Always")

    async def check() -> None:
        async with FakeApi().serve() as api:
            with open("/dev/null") as null:
                monkeypatch.setattr(sys, "stdin", null)
                async with connect(edited(api.kubeconfig(tmp_path), user=user)) as client:
                    with pytest.raises(ApiUnreachable, match="needs a terminal"):
                        await client.version()

    asyncio.run(check())


def test_unknown_version_of_a_credential_program_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        user = program(tmp_path, "", apiVersion="client.authentication.k8s.io/v9")
        with pytest.raises(BadKubeconfig, match="v9 not implemented"):
            async with connect(edited(FakeApi().kubeconfig(tmp_path), user=user)):
                pass

    asyncio.run(check())


def test_credential_program_can_return_a_client_certificate(tmp_path: Path) -> None:
    async def check() -> None:
        server, mine = self_signed(tmp_path / "server"), self_signed(tmp_path / "mine")
        answer = {
            "status": {
                "clientCertificateData": mine.certificate.read_text(),
                "clientKeyData": mine.key.read_text(),
            }
        }
        user = program(tmp_path, f"print({json.dumps(answer)!r})\n")
        context = serving(server)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(mine.certificate)
        async with FakeApi().serve(ssl=context) as api:
            path = api.kubeconfig(tmp_path, scheme="https", **{"certificate-authority": str(server.certificate)})
            async with connect(edited(path, user=user)) as client:
                await client.version()
            (headers,) = api.headers
            assert "authorization" not in headers

    asyncio.run(check())


def test_first_file_of_the_list_in_kubeconfig_counts_and_missing_files_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            (tmp_path / "second").mkdir()
            whole = api.kubeconfig(tmp_path / "second")
            (tmp_path / "second/token").write_text("of the second folder")
            edited(whole, user={"tokenFile": "token"})
            first = tmp_path / "first"
            cluster = {"name": "it", "cluster": {"server": "http://127.0.0.1:1"}}
            context = {"name": "other", "context": {"cluster": "it", "user": "me"}}
            first.write_text(json.dumps({"contexts": [context], "current-context": "other"}))
            monkeypatch.setenv("KUBECONFIG", f"{first}:{tmp_path}/missing:{whole}")
            async with connect() as client:
                await client.version()
            assert api.headers[-1]["authorization"] == "Bearer of the second folder"
            first.write_text(json.dumps({"clusters": [cluster]}))
            async with connect() as client:
                assert client.server == "http://127.0.0.1:1"
            monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/missing:{tmp_path}/gone")
            with pytest.raises(BadKubeconfig, match=f"{tmp_path}/missing, {tmp_path}/gone.*not found"):
                async with connect():
                    pass

    asyncio.run(check())


def test_user_without_a_home_directory_reads_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)  # it has no entry in passwd

    async def check() -> None:
        with pytest.raises(BadKubeconfig, match=r"no \$KUBECONFIG, and the user has no home directory"):
            async with connect():
                pass

    asyncio.run(check())


def test_tls_server_name_is_sent_and_verified(tmp_path: Path) -> None:
    async def check() -> None:
        pair = self_signed(tmp_path / "server")
        names: list[str | None] = []
        context = serving(pair)
        context.sni_callback = lambda _, name, __: names.append(name)  # type: ignore[assignment]
        async with FakeApi().serve(ssl=context) as api:
            path = api.kubeconfig(tmp_path, scheme="https", **{"certificate-authority": str(pair.certificate)})
            async with connect(edited(path, tls_server_name="localhost")) as client:
                await client.version()
            async with connect(edited(path, tls_server_name="kubernetes.example")) as client:
                with pytest.raises(ApiUnreachable, match=r"mismatch|not valid for 'kubernetes\.example'"):
                    await client.version()
        assert names == ["localhost", "kubernetes.example"]

    asyncio.run(check())


def test_requests_go_through_the_proxy_of_the_kubeconfig(tmp_path: Path) -> None:
    requests: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).splitlines()[0])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def check() -> None:
        async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            path = edited(FakeApi().kubeconfig(tmp_path), proxy_url=url, server="http://api.example:6443")
            async with connect(path) as client:
                await client.version()
        assert requests == [b"GET http://api.example:6443/version HTTP/1.1"]

    asyncio.run(check())


@pytest.mark.parametrize(("flag", "shown"), [("", "robot"), ("admin", "admin")])
def test_requests_act_as_the_user_that_the_kubeconfig_names(tmp_path: Path, flag: str, shown: str) -> None:
    user = {
        "token": "secret",
        "as": "robot",
        "as-groups": ["watchers"],
        "as-uid": "7",
        "as-user-extra": {"example.com/reason": ["audit"]},
    }

    async def check() -> None:
        async with FakeApi().serve() as api:
            async with connect(edited(api.kubeconfig(tmp_path), user=user), as_user=flag) as client:
                await client.version()
            headers = {name: value for name, value in api.headers[-1].items() if name.startswith("impersonate")}
            assert headers == {
                "impersonate-user": shown,
                "impersonate-uid": "7",
                "impersonate-group": "watchers",
                "impersonate-extra-example.com%2freason": "audit",
            }

    asyncio.run(check())


def test_empty_fields_are_like_missing_ones(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            empty = {"token": "", "client-certificate-data": "", "client-key-data": "", "username": ""}
            path = edited(api.kubeconfig(tmp_path), user=empty, certificate_authority_data="", tls_server_name="")
            async with connect(path) as client:
                await client.version()
            assert "authorization" not in api.headers[-1]

    asyncio.run(check())


def test_context_without_a_user_has_no_credentials(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            path = api.kubeconfig(tmp_path)
            described = json.loads(path.read_text())
            del described["contexts"][0]["context"]["user"]
            path.write_text(json.dumps(described))
            async with connect(path) as client:
                await client.version()
            assert "authorization" not in api.headers[-1]

    asyncio.run(check())


def test_text_beside_the_certificates_of_a_ca_can_have_any_characters(tmp_path: Path) -> None:
    async def check() -> None:
        pair = self_signed(tmp_path / "server")
        async with FakeApi().serve(ssl=serving(pair)) as api:
            text = "# Zertifizierungsstelle für Köln\n".encode() + pair.certificate.read_bytes()
            path = api.kubeconfig(tmp_path, scheme="https")
            data = base64.b64encode(text).decode()
            async with connect(edited(path, certificate_authority_data=data)) as client:
                await client.version()

    asyncio.run(check())


def test_ca_that_is_replaced_on_disk_is_used_for_the_next_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When a cluster's CA is rotated, kubelet replaces ``ca.crt``, and the API server gets a new certificate."""

    async def check() -> None:
        old, new = self_signed(tmp_path / "old"), self_signed(tmp_path / "new")
        ca = tmp_path / "ca.crt"
        ca.write_bytes(old.certificate.read_bytes())
        api = FakeApi()
        async with api.serve(ssl=serving(old)):
            path = api.kubeconfig(tmp_path, scheme="https", **{"certificate-authority": str(ca)})
            async with connect(path) as client:
                await client.version()
                ca.write_text("half of a")
                await client.version()  # the last good CA stays in use
                assert "changed certificates are not used" in caplog.text
                ca.write_bytes(old.certificate.read_bytes() + new.certificate.read_bytes())
                await client.version()
        async with connect(path) as client:
            ca.write_bytes(old.certificate.read_bytes())
            async with api.serve(ssl=serving(old)):
                await client.version()
            async with api.serve(ssl=serving(new)):
                with pytest.raises(ApiUnreachable):
                    await client.version()
                ca.write_bytes(new.certificate.read_bytes())
                await client.version()

    asyncio.run(check())


def test_client_certificate_that_is_replaced_on_disk_is_used_for_the_next_connection(tmp_path: Path) -> None:
    async def check() -> None:
        server, first, second = (self_signed(tmp_path / name) for name in ("server", "first", "second"))
        pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
        user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        pair.certificate.write_bytes(first.certificate.read_bytes())
        pair.key.write_bytes(first.key.read_bytes())
        context = serving(server)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(second.certificate)
        async with FakeApi().serve(ssl=context) as api:
            path = api.kubeconfig(tmp_path, scheme="https", **{"certificate-authority": str(server.certificate)})
            async with connect(edited(path, user=user)) as client:
                with pytest.raises(ApiUnreachable):
                    await client.version()
                pair.certificate.write_bytes(second.certificate.read_bytes())
                with pytest.raises(ApiUnreachable):
                    await client.version()  # certificate and key do not match yet
                pair.key.write_bytes(second.key.read_bytes())
                await client.version()

    asyncio.run(check())
