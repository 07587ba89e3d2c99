"""The informer against an API server that breaks streams, compacts, refuses, and sends garbage."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.kube.fake_api import FakeApi
from ztunnel.kube import client as client_module
from ztunnel.kube import informer as informer_module
from ztunnel.kube.client import Client, connect
from ztunnel.kube.informer import Informer
from ztunnel.kube.kinds import ADMIN_NETWORK_POLICY, NAMESPACE, POD, Kind, Selection
from ztunnel.kube.objects import Object, ObjectKey
from ztunnel.runtime.backoff import Backoff


class Reader:
    """Keeps what an informer reports, as any reader would."""

    def __init__(self, informer: Informer) -> None:
        self.informer = informer
        self.objects: dict[ObjectKey, Object] = {}
        self.gone: list[ObjectKey] = []
        self.synced = False

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                changes = await self.informer.next()
                self.synced = changes.synced
                for key, value in changes.objects.items():
                    if value is None:
                        del self.objects[key]
                        self.gone.append(key)
                    else:
                        self.objects[key] = value

    @property
    def names(self) -> set[str]:
        return {key.name for key in self.objects}


def pod(name: str) -> ObjectKey:
    return ObjectKey("Pod", "default", name)


@contextlib.asynccontextmanager
async def client_of(api: FakeApi, folder: Path) -> AsyncIterator[Client]:
    async with connect(api.kubeconfig(folder)) as client:
        yield client


@contextlib.asynccontextmanager
async def following(api: FakeApi, folder: Path, *kinds: Kind | Selection, **options: Any) -> AsyncIterator[Reader]:
    async with (
        client_of(api, folder) as client,
        Informer(client, kinds or (POD,), first_retry_s=0.01, **options) as informer,
    ):
        yield Reader(informer)


def run(work: Any) -> None:
    asyncio.run(work)


def test_a_list_in_pages_then_a_watch(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            for number in range(25):
                await api.put("pods", "default", f"p{number:02}", spec={"n": number})
            async with following(api, tmp_path, page=10) as reader:
                await reader.until(lambda: reader.synced)
                assert len(reader.objects) == 25
                assert reader.objects[pod("p07")]["kind"] == "Pod"
                assert reader.objects[pod("p07")]["apiVersion"] == "v1"
                assert sum("limit=10" in each for each in api.requests) == 3
                await api.put("pods", "default", "new")
                await api.put("pods", "default", "p00", spec={"n": 100})
                await api.remove("pods", "default", "p01")
                await reader.until(lambda: "new" in reader.names and pod("p01") in reader.gone)
                await reader.until(lambda: reader.objects[pod("p00")].get("spec") == {"n": 100})

    run(check())


def test_no_objects_is_a_state_too(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api, following(api, tmp_path, POD, NAMESPACE) as reader:
            await reader.until(lambda: reader.synced)
            assert reader.objects == {}

    run(check())


def test_synced_needs_every_kind(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            await api.put("pods", "default", "a")
            missing = Selection(ADMIN_NETWORK_POLICY)
            async with following(api, tmp_path, POD, missing) as reader:
                await reader.until(lambda: "a" in reader.names)
                async with asyncio.timeout(WAIT_S):
                    while not reader.informer.faults:
                        await asyncio.sleep(0.005)
                assert not reader.synced
                assert "404" in str(reader.informer.faults) or "could not find" in str(reader.informer.faults)

    run(check())


def test_an_optional_kind_that_is_not_installed_has_no_objects(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            missing = Selection(ADMIN_NETWORK_POLICY, optional=True)
            async with following(api, tmp_path, POD, missing) as reader:
                await reader.until(lambda: reader.synced)
                assert reader.informer.faults == {}

    run(check())


def test_optional_kind_that_is_removed_has_no_objects_any_more(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            kind = Selection(ADMIN_NETWORK_POLICY, optional=True)
            api.versions.add("v1alpha1")
            await api.put("adminnetworkpolicies", "", "a")
            async with following(api, tmp_path, kind) as reader:
                await reader.until(lambda: reader.names == {"a"})
                await api.wait_watches()
                # Its definition is removed while the stream is broken, so that no event says so.
                api.versions.discard("v1alpha1")
                api.break_watches()
                await reader.until(lambda: not reader.names)
                assert reader.informer.faults == {}

    run(check())


@pytest.mark.parametrize("how", ["reset", "end"])
def test_a_stream_that_ends_continues_where_it_was(tmp_path: Path, how: str) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            await api.put("pods", "default", "a")
            async with following(api, tmp_path) as reader:
                await reader.until(lambda: reader.synced)
                await api.wait_watches()
                if how == "reset":
                    api.break_watches()
                else:
                    await api.end_watches()
                await api.put("pods", "default", "b")
                await reader.until(lambda: "b" in reader.names)
                assert api.lists == 1
                assert reader.informer.faults == {}

    run(check())


def test_a_bookmark_moves_the_version(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api, following(api, tmp_path) as reader:
            await reader.until(lambda: reader.synced)
            await api.wait_watches()
            await api.put("pods", "default", "a")
            await api.bookmark("pods")
            await reader.until(lambda: "a" in reader.names)
            marked = api.version
            # The bookmark is on the wire before the end of its stream.
            await asyncio.sleep(0)
            async with asyncio.timeout(WAIT_S):
                while f"resourceVersion={marked}" not in api.requests[-1]:
                    await api.wait_watches()
                    await api.end_watches()
                    await asyncio.sleep(0.01)
            assert api.lists == 1

    run(check())


@pytest.mark.parametrize(
    "status",
    [
        (410, "Expired", "too old resource version"),
        (500, "InternalError", "etcd event received with PrevKv=nil"),
    ],
)
def test_what_was_deleted_in_a_gap_is_gone_after_the_next_list(
    tmp_path: Path, status: tuple[int, str, str]
) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            api.compacted_status = status
            for name in ("a", "b"):
                await api.put("pods", "default", name)
            async with following(api, tmp_path) as reader:
                await reader.until(lambda: reader.synced and len(reader.objects) == 2)
                await api.wait_watches()
                api.break_watches()
                await api.remove("pods", "default", "a", tell=False)
                await api.put("pods", "default", "c", tell=False)
                api.compacted = api.version
                await reader.until(lambda: "c" in reader.names and reader.gone == [pod("a")])
                assert reader.names == {"b", "c"}
                assert api.lists == 2

    run(check())


def test_a_version_that_a_restored_server_uses_again_is_another_state(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            await api.put("pods", "default", "a", labels={"app": "before"})
            async with following(api, tmp_path) as reader:
                await reader.until(lambda: reader.synced and "a" in reader.names)
                await api.wait_watches()
                await api.put("pods", "default", "b")
                await reader.until(lambda: "b" in reader.names)
                # The backup is older than both pods. Then the first one is written again.
                api.objects.clear()
                api.history.clear()
                api.version -= 2
                await api.put("pods", "default", "a", tell=False, labels={"app": "after"})
                api.compacted = 10**9
                api.break_watches()
                await reader.until(lambda: reader.objects[pod("a")]["metadata"]["labels"] == {"app": "after"})
                assert reader.names == {"a"}

    run(check())


def test_lists_are_repeated_ever_more_slowly_while_no_watch_can_start_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Recorded(Backoff):
        def next(self, random: float = 0.5) -> float:
            waits.append(super().next())
            return 0.0

    monkeypatch.setattr(informer_module, "Backoff", Recorded)

    async def check() -> None:
        async with FakeApi().serve() as api:
            api.compacted = 10**9  # a backend whose lists are older than the history that its watches have
            async with following(api, tmp_path) as reader:
                async with asyncio.timeout(WAIT_S):
                    while len(waits) < 5:
                        await asyncio.sleep(0.005)
                api.compacted = 0
                await api.wait_watches()
                await api.put("pods", "default", "a")
                await reader.until(lambda: "a" in reader.names)
                waits.append(0.0)
                api.break_watches()
                async with asyncio.timeout(WAIT_S):
                    while waits[-1] == 0.0:
                        await asyncio.sleep(0.005)

    run(check())
    assert waits[:5] == [0.01, 0.02, 0.04, 0.08, 0.16]
    assert waits[-1] == 0.01  # an event has shown that watches work


def test_a_page_token_that_expires_begins_the_list_anew(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            for number in range(10):
                await api.put("pods", "default", f"p{number}")
            api.expire_continue = True
            async with following(api, tmp_path, page=4) as reader:
                await reader.until(lambda: reader.synced)
                assert len(reader.objects) == 10
                assert api.lists == 2

    run(check())


@pytest.mark.parametrize(
    "garbage", [b"not json\n", b'{"type": 3}\n', b"[]\n", b'{"type":"ERROR","object":{"code":"x"}}\n']
)
def test_garbage_in_a_watch_loses_nothing(tmp_path: Path, garbage: bytes) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            api.garbage = [garbage]
            async with following(api, tmp_path) as reader:
                await reader.until(lambda: reader.synced)
                await api.put("pods", "default", "a")
                await reader.until(lambda: "a" in reader.names)

    run(check())


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            (403, "Forbidden", 'pods is forbidden: User "x" cannot list resource "pods"'),
            "its role lacks this (RBAC)",
        ),
        ((401, "Unauthorized", "Unauthorized"), "the token or certificate is expired"),
        ((500, "InternalError", "etcd is away"), "etcd is away"),
    ],
)
def test_a_refusal_is_one_line_and_is_overcome(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: tuple[int, str, str], said: str
) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            await api.put("pods", "default", "a")
            api.refuse = refused
            async with following(api, tmp_path) as reader:
                async with asyncio.timeout(WAIT_S):
                    while len(api.requests) < 4:
                        await asyncio.sleep(0.005)
                assert said in reader.informer.faults["pods"]
                api.refuse = None
                await reader.until(lambda: reader.synced)
                assert reader.names == {"a"}
                assert reader.informer.faults == {}

    run(check())
    lines = [record.getMessage() for record in caplog.records if "cannot follow" in record.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize("dispensable", [True, False])
def test_a_kind_that_the_role_lacks_holds_nothing_up_if_it_is_dispensable(
    tmp_path: Path, dispensable: bool
) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            api.refuse = (403, "Forbidden", "no")
            async with following(api, tmp_path, Selection(POD, dispensable=dispensable)) as reader:
                async with asyncio.timeout(WAIT_S):
                    while len(api.requests) < 4:
                        await asyncio.sleep(0.005)
                assert reader.informer.synced is dispensable
                assert "no" in reader.informer.faults["pods"]
                api.refuse = None
                await api.put("pods", "default", "a")
                await reader.until(lambda: reader.names == {"a"})

    run(check())


def test_a_watch_that_has_died_without_a_word_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "_SILENT_S", 0.3)

    async def check() -> None:
        async with FakeApi().serve() as api, following(api, tmp_path) as reader:
            await reader.until(lambda: reader.synced)
            await api.wait_watches()
            api.silent = True
            dead = list(api.watches)
            await api.put("pods", "default", "a")
            async with asyncio.timeout(WAIT_S):
                while all(writer in dead for writer in api.watches):
                    await asyncio.sleep(0.005)
            # Another stream took its place, and nothing was missed in between.
            api.silent = False
            await api.put("pods", "default", "b")
            await reader.until(lambda: reader.names == {"a", "b"})

    run(check())
    assert any("no answer in time" in record.getMessage() for record in caplog.records)


def test_known_objects_stay_while_the_server_is_away(tmp_path: Path) -> None:
    async def check() -> None:
        api = FakeApi()
        async with api.serve():
            await api.put("pods", "default", "a")
            stack = contextlib.AsyncExitStack()
            reader = await stack.enter_async_context(following(api, tmp_path))
            await reader.until(lambda: reader.synced)
            await api.wait_watches()
        async with stack:
            async with asyncio.timeout(WAIT_S):
                while not reader.informer.faults:
                    await asyncio.sleep(0.005)
            assert "127.0.0.1" in reader.informer.faults["pods"]
            await api.put("pods", "default", "b")
            async with api.serve():
                await reader.until(lambda: "b" in reader.names)
            assert reader.gone == []

    run(check())


def test_changes_merge_before_a_slow_reader(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api, following(api, tmp_path) as reader:
            await reader.until(lambda: reader.synced)
            await api.wait_watches()
            for number in range(50):
                await api.put("pods", "default", "same", spec={"n": number})
                await api.put("pods", "default", f"short{number}")
                await api.remove("pods", "default", f"short{number}")
            await api.put("pods", "default", "end")
            async with asyncio.timeout(WAIT_S):
                while reader.informer.known(pod("end")) is None:
                    await asyncio.sleep(0.005)
            changes = await reader.informer.next()
            # What came and went unseen is not reported: it would collect before a reader that is slow.
            assert set(changes.objects) == {pod("same"), pod("end")}
            assert changes.objects[pod("same")]["spec"] == {"n": 49}  # type: ignore[index]

    run(check())


def test_cancelling_a_reader_loses_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api, following(api, tmp_path) as reader:
            await reader.until(lambda: reader.synced)
            waiting = asyncio.get_running_loop().create_task(reader.informer.next())
            await asyncio.sleep(0)
            waiting.cancel()
            await api.put("pods", "default", "a")
            await reader.until(lambda: "a" in reader.names)

    run(check())


def test_selectors_go_to_the_server_and_keep_trims(tmp_path: Path) -> None:
    def keep(item: Object) -> Object:
        return {"metadata": item["metadata"], "ip": item["status"]["podIP"]}

    async def check() -> None:
        async with FakeApi().serve() as api:
            await api.put("pods", "default", "a", status={"podIP": "10.0.0.1"}, spec={"big": "x" * 100})
            await api.put("pods", "default", "bad", status=3)
            chosen = Selection(POD, namespace="default", labels="app=a,b!=c", fields="spec.nodeName=n1", keep=keep)
            async with following(api, tmp_path, chosen) as reader:
                await reader.until(lambda: reader.synced)
                assert reader.objects[pod("a")].keys() == {"metadata", "ip"}
                # Its reader judges it: to leave it out would be a pod without policy.
                assert reader.objects[pod("bad")]["status"] == 3
                await api.wait_watches()
            assert len(api.requests) == 2
            for request in api.requests:
                assert request.startswith("GET /api/v1/namespaces/default/pods?")
                assert "labelSelector=app%3Da%2Cb%21%3Dc" in request
                assert "fieldSelector=spec.nodeName%3Dn1" in request

    run(check())


def test_the_loop_gets_its_turns_while_many_objects_come(tmp_path: Path) -> None:
    async def check() -> None:
        async with FakeApi().serve() as api:
            for number in range(3000):
                api.objects["pods", "default", f"p{number:04}"] = {
                    "metadata": {"name": f"p{number:04}", "namespace": "default", "resourceVersion": "1"}
                }
            handled: list[int] = []
            kept = 0

            def keep(item: Object) -> Object:
                nonlocal kept
                kept += 1
                return item

            async def others() -> None:
                while True:
                    handled.append(kept)
                    await asyncio.sleep(0)

            beside = asyncio.get_running_loop().create_task(others())
            async with following(api, tmp_path, Selection(POD, keep=keep), page=1000) as reader:
                await reader.until(lambda: reader.synced)
            beside.cancel()
            assert kept == 3000
            assert max(after - before for before, after in itertools.pairwise(handled)) <= 100

    run(check())
