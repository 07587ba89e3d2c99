"""The upkeep of the caBundle, and the own CA in its Secret, against an API server of the tests."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.kube.certificates import self_signed
from tests.ztunnel.kube.fake_api import FakeApi
from ztunnel.kube.client import Client, connect
from ztunnel.sidecar.inject.authority import BadAuthority, OwnCertificates
from ztunnel.sidecar.inject.bundle_sync import keep_bundle

PLURAL = "mutatingwebhookconfigurations"


@contextlib.asynccontextmanager
async def api_and_client(folder: Path) -> AsyncIterator[tuple[FakeApi, Client]]:
    async with FakeApi().serve() as api, connect(api.kubeconfig(folder)) as client:
        yield api, client


@contextlib.asynccontextmanager
async def keeping(client: Client, ca: Path) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(keep_bundle(client, "injector", ca), name="keeper")
        try:
            yield
        finally:
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def bundles(api: FakeApi) -> list[bytes]:
    entries = api.objects[PLURAL, "", "injector"]["webhooks"]
    return [base64.b64decode(each["clientConfig"].get("caBundle", "")) for each in entries]


def entries(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "clientConfig": {"url": "https://x"}} for name in names]


def test_missing_ca_bundles_are_written_and_kept_current(tmp_path: Path) -> None:
    async def check() -> None:
        ca = tmp_path / "ca.crt"
        pem = self_signed(tmp_path / "one").certificate.read_bytes()
        ca.write_bytes(pem)
        async with api_and_client(tmp_path) as (api, client), keeping(client, ca):
            await api.put(PLURAL, "", "injector", webhooks=entries("a", "b"))
            await until(lambda: bundles(api) == [pem, pem])
            # It is emptied again: after a wait, since somebody may fight for it.
            await api.put(PLURAL, "", "injector", webhooks=entries("a"))
            await until(lambda: bundles(api) == [pem])
            # The file changes.
            fresh = self_signed(tmp_path / "two").certificate.read_bytes()
            ca.write_bytes(fresh)
            await until(lambda: bundles(api) == [fresh])
            assert len(api.bodies) == 3

    asyncio.run(check())


def test_a_valid_ca_bundle_is_not_rewritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        ca = tmp_path / "ca.crt"
        pem = self_signed(tmp_path / "one").certificate.read_bytes()
        ca.write_bytes(pem)
        webhooks = entries("a")
        webhooks[0]["clientConfig"]["caBundle"] = base64.b64encode(b"# comment\n" + pem).decode()
        async with api_and_client(tmp_path) as (api, client):
            await api.put(PLURAL, "", "injector", webhooks=webhooks)
            async with keeping(client, ca):
                await api.wait_watches()
                ca.write_bytes(b"no certificate")
                await until(lambda: "holds no certificates" in caplog.text)
                ca.unlink()
                await until(lambda: "no such file" in caplog.text)
            assert api.bodies == []

    asyncio.run(check())


def test_two_replicas_share_the_ca_that_the_first_one_makes(tmp_path: Path) -> None:
    async def check() -> None:
        async with api_and_client(tmp_path) as (api, client):
            api.keeps = True
            folders = [tmp_path / name for name in ("a", "b")]
            made = []
            for folder in folders:
                folder.mkdir()
                made.append(OwnCertificates(client, "mesh", "ca", ("injector.mesh.svc",), folder))
            await asyncio.gather(*(each.refresh() for each in made))
            assert len({(folder / "ca.crt").read_bytes() for folder in folders}) == 1
            assert len({(folder / "tls.crt").read_bytes() for folder in folders}) == 2
            before = (folders[0] / "tls.crt").read_bytes()
            await made[0].refresh()
            assert (folders[0] / "tls.crt").read_bytes() == before
            # Another CA in the Secret: another certificate.
            good = api.objects["secrets", "mesh", "ca"]["data"]
            del api.objects["secrets", "mesh", "ca"]
            await made[1].refresh()
            await made[0].refresh()
            assert (folders[0] / "ca.crt").read_bytes() == (folders[1] / "ca.crt").read_bytes()
            after = (folders[0] / "tls.crt").read_bytes()
            assert after != before
            for data in ({}, {"ca.crt": "%"}, {**good, "ca.key": "bm8="}, None):
                await api.put("secrets", "mesh", "ca", data=data)
                with pytest.raises(BadAuthority, match=r"ca\.(crt|key)"):
                    await made[0].refresh()
            assert (folders[0] / "tls.crt").read_bytes() == after

    asyncio.run(check())
