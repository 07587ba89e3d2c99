"""The webhook's server over real sockets: HTTP errors, reloading, and messages about faulty files."""

import asyncio
import base64
import contextlib
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.ztunnel.kube.certificates import Pair, self_signed
from ztunnel.cli import main
from ztunnel.sidecar.inject.review import MAX_BODY
from ztunnel.sidecar.inject.server import InjectServer

JSON = {"content-type": "application/json"}


def review(name: str = "web") -> bytes:
    pod = {"metadata": {"name": name}, "spec": {"containers": [{"name": "app"}]}}
    request = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "shop", "object": pod}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "request": request}).encode()


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate, self.key, self.config = folder / "tls.crt", folder / "tls.key", folder / "config.yaml"
        self.config.write_text("")

    def put(self, path: Path, data: bytes) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data)
        os.replace(fresh, path)

    def use(self, pair: Pair) -> None:
        self.put(self.certificate, pair.certificate.read_bytes())
        self.put(self.key, pair.key.read_bytes())


@contextlib.asynccontextmanager
async def serving(folder: Path, **limits: Any) -> AsyncIterator[tuple[Files, Pair, int]]:
    files, pair = Files(folder), self_signed(folder / "one")
    files.use(pair)
    listener = socket.create_server(("127.0.0.1", 0))
    async with InjectServer(listener, files.certificate, files.key, files.config, **limits) as server:
        yield files, pair, server.port
    listener.close()


@contextlib.asynccontextmanager
async def client(port: int, *pairs: Pair) -> AsyncIterator[httpx2.AsyncClient]:
    context = ssl.create_default_context()
    for pair in pairs:
        context.load_verify_locations(pair.certificate)
    async with httpx2.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, trust_env=False) as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


def test_requests_and_pages(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path) as (_, pair, port), client(port, pair) as http:
            answered = await http.post("/inject?timeout=5s", content=review(), headers=JSON)
            assert answered.status_code == 200
            assert answered.json()["response"]["patchType"] == "JSONPatch"
            # The API server keeps its connection.
            assert answered.headers.get("connection") != "close"
            assert (await http.post("/inject/cluster/one", content=review(), headers=JSON)).status_code == 200
            assert (await http.post("/inject", content=b"", headers=JSON)).status_code == 400
            assert (await http.post("/inject", content=review())).status_code == 415
            assert (await http.post("/inject", content=b" " * (MAX_BODY + 1), headers=JSON)).status_code == 400
            assert (await http.get("/inject")).status_code == 405
            assert (await http.get("/other")).status_code == 404
            assert (await http.get("/readyz")).text == "ok\n"
            page = (await http.get("/metrics")).text
            assert 'ztunnel_inject_requests_total{result="injected"} 2.0' in page
            assert 'ztunnel_inject_requests_total{result="bad-request"} 3.0' in page
            assert 'ztunnel_inject_file_current{file="certificate"} 1.0' in page

    asyncio.run(check())


def test_strangers_who_hold_connections_do_not_keep_the_api_server_out(tmp_path: Path) -> None:
    async def check() -> None:
        limits = {"connections": 8, "patience_s": 3600.0}
        async with serving(tmp_path, **limits) as (_, pair, port), client(port, pair) as http:
            trust = ssl.create_default_context(cafile=pair.certificate)
            head = b"POST /inject HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n"
            held = []
            for number in range(30):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
                # Nothing, half a head, or half a body.
                writer.write((b"", head, head + b"\r\n{")[number % 3])
                await writer.drain()
                held.append((reader, writer))
            answered = await http.post("/inject", content=review(), headers=JSON)
            assert answered.json()["response"]["allowed"] is True
            async with asyncio.timeout(20):
                for reader, _ in held[:20]:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
            for _, writer in held:
                writer.close()
                with contextlib.suppress(ConnectionError, ssl.SSLError):
                    await writer.wait_closed()

    asyncio.run(check())


@pytest.mark.parametrize(
    "sent", [b"", b"POST /inject HTTP/1.1\r\n", b"POST /inject HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"]
)
def test_a_connection_without_a_whole_request_is_closed(tmp_path: Path, sent: bytes) -> None:
    async def check() -> None:
        async with serving(tmp_path, patience_s=0.2) as (_, pair, port):
            trust = ssl.create_default_context(cafile=pair.certificate)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            writer.write(sent)
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    asyncio.run(check())


def test_a_certificate_is_taken_up_once_its_key_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def check() -> None:
        async with serving(tmp_path) as (files, old, port):
            new = self_signed(tmp_path / "two")
            files.put(files.certificate, new.certificate.read_bytes())
            await until(lambda: "the last good certificate stays in use" in caplog.text)
            async with client(port, old) as http:
                assert (await http.post("/inject", content=review(), headers=JSON)).status_code == 200
            files.put(files.key, new.key.read_bytes())
            await until(lambda: "a new certificate is in use" in caplog.text)
            async with client(port, new) as http:
                answered = await http.post("/inject", content=review(), headers=JSON)
                assert answered.status_code == 200
                # For a minute, so that no connection continues with the old certificate.
                assert answered.headers["connection"] == "close"

    asyncio.run(check())
    assert caplog.text.count("the last good certificate stays in use") == 1


def test_a_faulty_configuration_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def image(http: httpx2.AsyncClient) -> Any:
        answered = await http.post("/inject", content=review(), headers=JSON)
        patch = json.loads(base64.b64decode(answered.json()["response"]["patch"]))
        return patch[-1]["value"][0]["image"]

    async def check() -> None:
        async with serving(tmp_path) as (files, pair, port), client(port, pair) as http:
            files.put(files.config, b"image: example/a:1\n")
            await until(lambda: "a new config is in use" in caplog.text)
            assert await image(http) == "example/a:1"
            files.put(files.config, b"image: ''\npolicy: x\n")
            await until(lambda: "the last good config stays in use" in caplog.text)
            assert await image(http) == "example/a:1"
            assert 'ztunnel_inject_file_current{file="config"} 0.0' in (await http.get("/metrics")).text
            files.config.write_text("")  # in place, before the rest is written
            await until(lambda: "is empty, as while it is written; the last good config stays" in caplog.text)
            assert await image(http) == "example/a:1"
            files.put(files.config, b"image: example/b:1\n")
            await until(lambda: caplog.text.count("a new config is in use") == 2)
            assert await image(http) == "example/b:1"

    asyncio.run(check())


@pytest.mark.parametrize(
    ("certificate", "config", "said"),
    [
        (None, "", "No such file"),
        ("no certificate", "", "cannot be used as a certificate and its key"),
        ("", "policy: x", "policy: must be enabled or disabled"),
        ("", None, "no such file"),
    ],
)
def test_a_bad_start_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], certificate: str | None, config: str | None, said: str
) -> None:
    files = Files(tmp_path)
    if certificate == "":
        files.use(self_signed(tmp_path / "one"))
    elif certificate is not None:
        files.certificate.write_text(certificate)
        files.key.write_text(certificate)
    if config is None:
        files.config.unlink()
    else:
        files.config.write_text(config)
    arguments = ["--port=0", "--address=127.0.0.1", f"--certificate={files.certificate}", f"--key={files.key}"]
    assert main(["inject", "serve", *arguments, f"--config={files.config}"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert str(tmp_path) in lines[0]
