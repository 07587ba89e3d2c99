"""Pods enrolled by their objects, with a real agent in real namespaces; the test writes the objects."""

import asyncio
import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import Lab, Place
from deploy.processes import Proc
from tests.netns.test_agent import Toys, has_rules
from tests.netns.toys import WAIT_S, app, ask, serving
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect, listen
from tproxy.aio.table import BlockingTable
from tproxy.errors import ConnectFailed
from tproxy.expressions import Family
from tproxy.inpod import PROBE_TABLE
from tproxy.resources import Chain, Table
from ztunnel.kube.errors import ApiUnreachable
from ztunnel.kube.objects import Changes, Object, ObjectKey
from ztunnel.node.agent import enroller as enroller_module
from ztunnel.node.agent import node as node_module
from ztunnel.node.agent.audit import counted
from ztunnel.node.agent.auditor import Auditor
from ztunnel.node.agent.cni.installer import Installation, install
from ztunnel.node.agent.cni_server import CniServer
from ztunnel.node.agent.description import PodDescription
from ztunnel.node.agent.enroller import Added, Enroller
from ztunnel.node.agent.enrolment import MODE, REDIRECTION, Pod, Settings, Step, read_pod
from ztunnel.node.agent.errors import CannotAdd
from ztunnel.node.agent.namespaces import iptables_tables, remove_probes, remove_rules, take_over_rules, try_rules
from ztunnel.node.agent.phase import Phase
from ztunnel.node.agent.record import read_record
from ztunnel.node.agent.status import audit, check
from ztunnel.proxy.istio.zds.manager import PodManager
from ztunnel.proxy.istio.zds.pods import PodUid
from ztunnel.runtime.http.page import PageRequest

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
LABELLED = {MODE: "ambient"}
UIDS = {"web": "11111111-0000-0000-0000-000000000000", "db": "22222222-0000-0000-0000-000000000000"}
WEB = PodUid(UIDS["web"])


class Cluster:
    """Objects in memory: an ObjectSource, an Annotate and an EventSink."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, Object] = {}
        self.news: dict[ObjectKey, Object | None] = {}
        self.changed = asyncio.Event()
        self.changed.set()
        self.events: list[tuple[str, str, str]] = []
        self.annotations: list[tuple[str, str | None]] = []
        self.away = False

    def put(self, kind: str, namespace: str, name: str, value: Object | None) -> None:
        key = ObjectKey(kind, namespace, name)
        self.news[key] = value
        if value is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = value
        self.changed.set()

    def restarted(self) -> None:
        """Report every existing object anew, as to a new agent."""
        self.news = dict(self.objects)
        self.changed.set()

    def label(self, name: str, labels: dict[str, str]) -> None:
        self.put("Namespace", "", name, {"kind": "Namespace", "metadata": {"name": name, "labels": labels}})

    def run(self, place: Place, phase: str = "Running", *, addresses: bool = True, **metadata: Any) -> None:
        uid = UIDS[place.name]
        before = self.objects.get(ObjectKey("Pod", "shop", place.name), {"metadata": {}})
        annotations = before["metadata"].get("annotations", {})
        known = {"name": place.name, "namespace": "shop", "uid": uid, "annotations": annotations}
        status: dict[str, Any] = {"phase": phase}
        if addresses:
            status["podIPs"] = [{"ip": str(address)} for address in place.addresses]
        self.put("Pod", "shop", place.name, {"metadata": known | metadata, "spec": {}, "status": status})

    def annotation(self, name: str) -> str | None:
        value: str | None = self.objects[ObjectKey("Pod", "shop", name)]["metadata"]["annotations"].get(
            REDIRECTION
        )
        return value

    async def next(self) -> Changes:
        await self.changed.wait()
        self.changed.clear()
        news, self.news = self.news, {}
        return Changes(news, synced=True)

    async def __call__(self, pod: Pod, value: str | None) -> Pod | None:
        if self.away:
            raise ApiUnreachable("https://api", "no answer")
        key = ObjectKey("Pod", pod.info.namespace, pod.info.name)
        found = self.objects.get(key)
        if found is None or found["metadata"]["uid"] != pod.uid:
            return None
        annotations = {k: v for k, v in found["metadata"]["annotations"].items() if k != REDIRECTION}
        if value is not None:
            annotations[REDIRECTION] = value
        changed = {**found, "metadata": {**found["metadata"], "annotations": annotations}}
        self.put(key.kind, key.namespace, key.name, changed)
        self.annotations.append((key.name, value))
        return read_pod(changed)

    def event(self, key: ObjectKey, reason: str, message: str) -> None:
        self.events.append((key.name, reason, message))


class Scene:
    """A node with two pods, a cluster, and what a test starts."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.web, self.db = lab.pod("web"), lab.pod("db")
        self.folder = folder
        self.proc = Proc(folder / "proc")
        self.proc.add(1, None)
        self.cluster = Cluster()
        self.toys = Toys()

    def enroller(self, **options: Any) -> Enroller:
        given = {"grace_s": 3600.0, "record": self.folder / "record.json", "proc": self.proc.folder, **options}
        settings = given.pop("settings", Settings())
        return Enroller(self.folder / "zds", self.cluster, self.cluster, self.cluster, settings, **given)

    @contextlib.asynccontextmanager
    async def proxy(self) -> AsyncIterator[PodManager]:
        async with PodManager(self.folder / "zds", self.toys) as manager:
            yield manager

    def start(self, *places: Place) -> None:
        for number, place in enumerate(places, start=100 * (1 + len(list(self.proc.folder.iterdir())))):
            self.proc.add(number, place.netns, UIDS[place.name])
            self.cluster.run(place)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["web", "db"]}) as lab:
        yield lab


def on_stage(lab: Lab, folder: Path, body: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(lab, folder)
        await body(scene)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())


def phase_of(enroller: Enroller) -> Phase | None:
    status = enroller.agent.pod(WEB)
    return None if status is None else status.phase


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S * 2):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not in time: {what}") from None


def test_labels_bring_a_pod_in_and_out_and_its_connections_live(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        loop, cluster = asyncio.get_running_loop(), scene.cluster
        cluster.label("shop", {})
        scene.start(scene.web)
        async with app(scene.db), scene.enroller() as enroller, scene.proxy() as manager:
            await until(lambda: manager.ready and enroller.synced, "ready")
            direct = await connect((scene.db.ipv4, 8080), netns=scene.web.netns)
            with direct:
                assert (await loop.sock_recv(direct, 100)).startswith(b"app db")
                cluster.label("shop", LABELLED)
                await until(lambda: cluster.annotation("web") == "enabled", "enabled")
                tunnelled = await connect((scene.db.ipv4, 8080), netns=scene.web.netns)
                with tunnelled:
                    assert (await loop.sock_recv(tunnelled, 100)).startswith(b"15001")
                    cluster.label("shop", {})
                    await until(lambda: cluster.annotation("web") is None, "said out")
                    await until(lambda: phase_of(enroller) is Phase.LEAVING, "leaves")
                    async with asyncio.timeout(WAIT_S):
                        while not (await ask(scene.web, scene.db.ipv4)).startswith("app db"):
                            pass
                    cluster.label("shop", LABELLED)
                    await until(lambda: cluster.annotation("web") == "enabled", "in again")
                    assert (await ask(scene.web, scene.db.ipv4)).startswith("15001")
                    cluster.run(scene.web, labels={MODE: "none"})
                    await until(lambda: cluster.annotation("web") is None, "said out again")
                    for sock in (direct, tunnelled):
                        await loop.sock_sendall(sock, b"still")
                        assert await loop.sock_recv(sock, 100) == b"still"
                await until(lambda: not enroller.agent.pods(), "released when its last connection ended")
            assert cluster.annotations == [("web", value) for value in ("enabled", None, "enabled", None)]
            assert cluster.events == []
            assert len(scene.toys.started) == 1
        assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_a_pod_without_a_proxy_is_pending_and_says_why(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.enroller() as enroller:
            await until(lambda: cluster.annotation("web") == "pending", "pending")
            async with app(scene.db):
                with pytest.raises(ConnectFailed):
                    await ask(scene.web, scene.db.ipv4)
            async with scene.proxy():
                await until(lambda: cluster.annotation("web") == "enabled", "enabled")
            # A proxy that is disconnected for some time can still be serving the pod.
            await until(lambda: enroller.agent.proxies == 0, "the proxy is gone")
            assert cluster.annotation("web") == "enabled"

    on_stage(lab, tmp_path, body)


def test_a_pod_that_ends_or_goes_is_dropped_at_once(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        cluster, loop = scene.cluster, asyncio.get_running_loop()
        cluster.label("shop", LABELLED)
        scene.start(scene.web, scene.db)
        async with scene.enroller() as enroller, scene.proxy():
            await until(lambda: len(enroller.agent.pods()) == 2, "both are in")
            await until(lambda: {cluster.annotation(name) for name in UIDS} == {"enabled"}, "both say so")
            sock = await connect((scene.db.ipv4, 8080), netns=scene.web.netns)
            with sock:
                assert (await loop.sock_recv(sock, 100)).startswith(b"15001")
                cluster.run(scene.web, "Succeeded", addresses=False)
                await until(lambda: WEB not in enroller.agent.pods(), "a job that has ended")
                await until(lambda: cluster.annotation("web") is None, "and says so")
            cluster.put("Pod", "shop", "db", None)
            await until(lambda: not enroller.agent.pods(), "a pod that is gone")
            cluster.put("Pod", "shop", "web", None)
            await until(lambda: not enroller.pods() and not enroller.waiting, "nothing is remembered")
            assert cluster.events == []
        assert not has_rules(scene.web.netns)
        assert not has_rules(scene.db.netns)

    on_stage(lab, tmp_path, body)


def test_what_fails_is_tried_again_and_said(lab: Lab, tmp_path: Path) -> None:
    """A namespace that nobody shows yet, an API server that does not take annotations, an odd annotation."""

    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        cluster.away = True
        odd = {REDIRECTION: "enabled", "ambient.istio.io/dns-capture": "perhaps"}
        cluster.run(scene.web, annotations=odd)
        async with scene.enroller() as enroller, scene.proxy():
            await until(lambda: enroller.steps["enrol", "failed"] >= 3, "its namespace is looked for")
            assert cluster.events[0][:2] == ("web", "MeshEnrollFailed")
            assert f"no process of it is in a network namespace with {scene.web.ipv4}" in cluster.events[0][2]
            # It is not in the mesh, even if a forged or outdated annotation claims it.
            await until(lambda: enroller.steps["say out", "failed"] >= 1, "the API is away")
            cluster.away = False
            await until(lambda: cluster.annotation("web") is None, "the annotation goes")
            scene.start(scene.web)
            await until(lambda: cluster.annotation("web") == "enabled", "enrolled at last")
            assert "AnnotationIgnored" in [reason for _, reason, _ in cluster.events]
            assert has_rules(scene.web.netns)
            status = enroller.agent.pod(WEB)
            assert status is not None
            assert status.description.dns

    on_stage(lab, tmp_path, body)


def test_a_successor_takes_over_without_a_gap_and_tidies_up(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        cluster, loop = scene.cluster, asyncio.get_running_loop()
        cluster.label("shop", LABELLED)
        scene.start(scene.web, scene.db)
        async with scene.proxy() as manager:
            async with scene.enroller():
                await until(lambda: {cluster.annotation(name) for name in UIDS} == {"enabled"}, "both are in")
            sock = await connect((scene.db.ipv4, 8080), netns=scene.web.netns)
            with sock:
                assert (await loop.sock_recv(sock, 100)).startswith(b"15001")
                # While no agent runs, one is deleted and the other one's namespace is not labelled any more.
                cluster.put("Pod", "shop", "db", None)
                cluster.label("shop", {})
                cluster.annotations.clear()
                cluster.restarted()
                async with scene.enroller() as enroller:
                    await until(lambda: cluster.annotation("web") is None, "said out")
                    await until(lambda: phase_of(enroller) is Phase.LEAVING, "drains")
                    await until(lambda: manager.active_proxies == 1, "the other one is forgotten")
                    await loop.sock_sendall(sock, b"still")
                    assert await loop.sock_recv(sock, 100) == b"still"
                    sock.close()
                    await until(lambda: not enroller.agent.pods(), "released")
                assert cluster.annotations == [("web", None)]
        assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_a_restart_changes_no_annotation(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.proxy() as manager:
            for _ in range(3):
                cluster.restarted()
                async with scene.enroller() as enroller:
                    await until(lambda enroller=enroller: WEB in enroller.agent.pods(), "enrolled")
                    await until(lambda enroller=enroller: not enroller.waiting, "settled")
                    assert cluster.annotation("web") == "enabled"
            assert cluster.annotations == [("web", "enabled")]
            assert (manager.proxies_started, manager.proxies_stopped) == (1, 0)
        # The last agent of the node.
        cluster.restarted()
        async with scene.enroller() as enroller:
            await until(lambda: WEB in enroller.agent.pods(), "enrolled")
            await enroller.withdraw(0.1)
        assert cluster.annotation("web") is None
        assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_the_last_agent_leaves_no_table_for_probes(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.enroller(probe_user=0) as enroller, scene.proxy():
            await until(lambda: scene.cluster.annotation("web") == "enabled", "enabled")
            await enroller.withdraw(0.1)
        with contextlib.closing(BlockingTable(PROBE_TABLE)) as kept:
            assert kept.read() is None

    with lab.worker("w1").place.netns.entered():
        on_stage(lab, tmp_path, body)


def test_the_last_agent_also_releases_pods_that_the_container_runtime_announced(lab: Lab, tmp_path: Path) -> None:
    """Their labels still request the mesh, and their sandboxes are known without a search."""

    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        cluster.run(scene.web)
        event = Added(namespace="shop", name="web", netns=f"/run/netns/{scene.web.netns.name}", uid=WEB)
        async with scene.enroller() as enroller, scene.proxy() as manager:
            assert await enroller.added(event, WAIT_S) == "pod shop/web: in the mesh"
            await until(lambda: cluster.annotation("web") == "enabled", "enabled")
            sock = await connect((scene.db.ipv4, 8080), netns=scene.web.netns)
            with sock:
                await enroller.withdraw(0.1)
            assert not enroller.agent.pods()
            assert not manager.active_proxies
        assert cluster.annotation("web") is None
        assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_the_last_agent_releases_pods_although_the_api_server_does_not_answer(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(enroller_module, "_LAST_ANNOTATION_S", 0.1)

    async def annotate(pod: Pod, value: str | None) -> Pod | None:
        await asyncio.Event().wait()
        return None

    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.enroller() as enroller, scene.proxy():
            await until(lambda: scene.cluster.annotation("web") == "enabled", "enabled")
            enroller._annotate = annotate
            async with asyncio.timeout(WAIT_S):
                await enroller.withdraw(0.1)
            assert not enroller.agent.pods()
        assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)
    assert f"pod's annotation not changed uid={WEB} error=no answer in time" in caplog.text


def test_a_pod_that_the_last_agent_was_enrolling_leaves_the_mesh(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, end = threading.Event(), threading.Event()

    def slow(netns: Netns, description: PodDescription) -> set[str]:
        removed = take_over_rules(netns, description)
        written.set()
        assert end.wait(WAIT_S)
        return removed

    monkeypatch.setattr(node_module, "take_over_rules", slow)

    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.enroller() as enroller:
            await until(written.is_set, "the rules are in")
            withdrawal = asyncio.get_running_loop().create_task(enroller.withdraw(0.1))
            await asyncio.sleep(0)  # the task that enrols the pod is cancelled
            end.set()
            await withdrawal
        assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_a_successor_lets_kubelet_probe_all_pods_before_it_enrols_the_first(lab: Lab, tmp_path: Path) -> None:
    """In the node's namespace, whose table it is. The successor finds no process, so that it enrols nothing."""

    def probed() -> set[bytes]:
        with contextlib.closing(BlockingTable(PROBE_TABLE)) as kept:
            table = kept.read()
        return set() if table is None else {element.key for item in table.sets for element in item.elements}

    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        scene.start(scene.web, scene.db)
        everyone = {address.packed for place in (scene.web, scene.db) for address in place.addresses}
        async with scene.enroller(probe_user=0, record=None), scene.proxy():
            await until(lambda: {cluster.annotation(name) for name in UIDS} == {"enabled"}, "both are in")
            assert probed() == everyone
        remove_probes()
        cluster.restarted()
        async with scene.enroller(probe_user=0, record=None, proc=tmp_path) as enroller:
            await until(lambda: enroller.synced, "synced")
            assert enroller.agent.pods() == {}
            assert probed() == everyone

    with lab.worker("w1").place.netns.entered():
        on_stage(lab, tmp_path, body)


def test_a_new_sandbox_of_a_pod_is_found(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", 0.05)

    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.enroller() as enroller, scene.proxy():
            await until(lambda: cluster.annotation("web") == "enabled", "enabled")
            # The process that its namespace was found by ends, another one stays: nothing happens to the pod.
            status = enroller.agent.pod(WEB)
            assert status is not None
            first = Path(str(status.description.netns)).parents[1]
            scene.proc.add(77, scene.web.netns, UIDS["web"])
            first.rename(first.with_name("ended"))

            def found() -> bool:
                now = enroller.agent.pod(WEB)
                return now is not None and str(now.description.netns).endswith("/77/ns/net")

            await until(found, "found by another process")
            assert str(read_record(scene.folder / "record.json")[WEB].netns).endswith("/77/ns/net")
            assert len(scene.toys.started) == 1
            # Its sandbox is made anew, with another address: rules and proxy follow.
            (scene.proc.folder / "77").rename(scene.proc.folder / "ended-too")
            scene.proc.add(78, scene.db.netns, UIDS["web"])
            addresses = [{"ip": str(scene.db.ipv4)}]
            value = cluster.objects[ObjectKey("Pod", "shop", "web")]
            cluster.put("Pod", "shop", "web", {**value, "status": {"phase": "Running", "podIPs": addresses}})
            await until(lambda: has_rules(scene.db.netns) and len(scene.toys.started) == 2, "in the new one")
            assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


@pytest.mark.parametrize("ending", [True, False])
def test_a_deleted_pod_whose_processes_have_ended_is_no_fault(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ending: bool
) -> None:
    """Kubelet removes the sandbox first, and the pod from the API a second or two later."""
    monkeypatch.setattr(node_module, "RETRY_S", 0.01)

    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.enroller() as enroller, scene.proxy() as manager:
            await until(lambda: cluster.annotation("web") == "enabled", "enabled")
            if ending:
                cluster.run(scene.web, deletionTimestamp="2026-11-27T17:00:00Z")
                await until(lambda: enroller.pods()[WEB][0].ending, "being deleted")
            status = enroller.agent.pod(WEB)
            assert status is not None
            process = Path(str(status.description.netns)).parents[1]
            process.rename(process.with_name("ended"))
            scans = 0

            async def find(uid: PodUid) -> None:
                nonlocal scans
                scans += 1

            monkeypatch.setattr(enroller, "find", find)
            await until(lambda: scans > 1, "looked for")
            assert bool(cluster.events) is not ending
            assert (enroller.steps["enrol", "failed"] > 0) is not ending
            cluster.put("Pod", "shop", "web", None)
            await until(lambda: not enroller.agent.pods() and not manager.active_proxies, "dropped")

    on_stage(lab, tmp_path, body)
    assert ("MeshEnrollFailed" in caplog.text) is not ending


def test_the_runtime_announces_a_pod_before_it_has_an_address(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        event = Added(namespace="shop", name="web", netns=f"/run/netns/{scene.web.netns.name}", uid=UIDS["web"])
        async with scene.enroller() as enroller:
            with pytest.raises(CannotAdd, match="the API server has not named this pod"):
                await enroller.added(event, 0.1)
            cluster.run(scene.web, "Pending", addresses=False)
            with pytest.raises(CannotAdd, match="no ztunnel connection"):
                await enroller.added(event, 0.5)
            assert not has_rules(scene.web.netns)
            async with scene.proxy() as manager:
                await until(lambda: manager.ready, "a proxy")
                assert await enroller.added(event) == "pod shop/web: in the mesh"
                assert has_rules(scene.web.netns)
                assert await enroller.added(event) == "pod shop/web: in the mesh"  # multus announces each network
                await until(lambda: cluster.annotation("web") == "enabled", "said")
                cluster.run(scene.web)
                await until(lambda: not enroller.waiting, "settled")
                assert len(scene.toys.started) == 1
                # Another uid is a pod that the API server has not shown yet.
                other = Added(namespace="shop", name="web", netns=event.netns, uid=UIDS["db"])
                with pytest.raises(CannotAdd, match="has not named"):
                    await enroller.added(other, 0.1)
                cluster.run(scene.db, labels={MODE: "none"}, addresses=False)
                plain = Added(namespace="shop", name="db", netns=f"/run/netns/{scene.db.netns.name}")
                assert "not in the mesh (pod-opted-out)" in await enroller.added(plain)
                assert not has_rules(scene.db.netns)

    on_stage(lab, tmp_path, body)


def test_a_sandbox_that_is_not_ready_in_time_leaves_the_next_one_alone(lab: Lab, tmp_path: Path) -> None:
    def sandbox(place: Place) -> Added:
        netns = f"/run/netns/{place.netns.name}"
        return Added(namespace="shop", name="web", netns=netns, uid=UIDS["web"])

    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.cluster.run(scene.web, "Pending", addresses=False)
        async with scene.enroller() as enroller:
            await until(lambda: enroller.synced, "synced")
            loop = asyncio.get_running_loop()
            first = loop.create_task(enroller.added(sandbox(scene.db), 0.3))
            second = loop.create_task(enroller.added(sandbox(scene.web), WAIT_S))
            with pytest.raises(CannotAdd):
                await first
            async with scene.proxy():
                assert await second == "pod shop/web: in the mesh"
            assert not has_rules(scene.db.netns)
            assert has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_a_sandbox_waits_for_its_namespace_whose_label_decides(lab: Lab, tmp_path: Path) -> None:
    """Pods and namespaces arrive by two watches, so a pod can be known before its namespace."""

    async def body(scene: Scene) -> None:
        scene.cluster.run(scene.web, "Pending", addresses=False)
        event = Added(namespace="shop", name="web", netns=f"/run/netns/{scene.web.netns.name}", uid=WEB)
        async with scene.enroller() as enroller, scene.proxy() as manager:
            await until(lambda: enroller.synced and manager.ready, "synced")
            with pytest.raises(CannotAdd, match="the API server has not named namespace shop"):
                await enroller.added(event, 0.1)
            waiting = asyncio.get_running_loop().create_task(enroller.added(event, WAIT_S))
            await asyncio.sleep(0)
            scene.cluster.label("shop", LABELLED)
            assert await waiting == "pod shop/web: in the mesh"
            assert has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_a_new_sandbox_is_not_forgotten_when_the_old_one_is_found_gone(lab: Lab, tmp_path: Path) -> None:
    """The rules are compared between the announcement of a sandbox and the next step of its pod."""

    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        old, new = tmp_path / "old", tmp_path / "new"
        old.symlink_to(f"/run/netns/{scene.web.netns.name}")
        new.symlink_to(f"/run/netns/{scene.db.netns.name}")
        answered = asyncio.Event()

        async def annotate(pod: Pod, value: str | None) -> Pod | None:
            await answered.wait()
            return await cluster(pod, value)

        cluster.label("shop", LABELLED)
        cluster.run(scene.web, "Pending", addresses=False)
        event = Added(namespace="shop", name="web", netns=str(old), uid=WEB)
        async with scene.enroller() as enroller, scene.proxy():
            enroller._annotate = annotate
            assert await enroller.added(event, WAIT_S) == "pod shop/web: in the mesh"
            await until(lambda: enroller.next_step(WEB) is Step.SAY_ENABLED, "a slow API server")
            old.unlink()
            adding = asyncio.get_running_loop().create_task(enroller.added(replace(event, netns=str(new))))
            await until(lambda: enroller.next_step(WEB) is Step.ENROL, "announced")
            await enroller.agent.repair(WEB)
            answered.set()
            assert await adding == "pod shop/web: in the mesh"
            assert has_rules(scene.db.netns)

    on_stage(lab, tmp_path, body)


def test_an_agent_ends_while_a_failed_step_is_woken(lab: Lab, tmp_path: Path) -> None:
    """The event that ends the wait before a retry, and the cancellation, arrive in the same loop iteration."""

    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.cluster.run(scene.web)
        async with asyncio.timeout(WAIT_S), scene.enroller() as enroller:
            await until(lambda: enroller.steps["enrol", "failed"] > 0, "it has no process")
            enroller.recheck()
            await asyncio.sleep(0)

    on_stage(lab, tmp_path, body)


@pytest.mark.parametrize("announced", [False, True], ids=["old-sandbox-gone", "new-sandbox-announced"])
def test_a_pod_whose_sandbox_was_replaced_outside_of_the_mesh_is_found_again(
    lab: Lab, tmp_path: Path, announced: bool
) -> None:
    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        sandbox = tmp_path / "sandbox"
        sandbox.symlink_to(f"/run/netns/{scene.db.netns.name}")
        cluster.label("shop", LABELLED)
        cluster.run(scene.web)
        event = Added(namespace="shop", name="web", netns=str(sandbox), uid=WEB)
        async with scene.enroller() as enroller, scene.proxy():
            assert await enroller.added(event, WAIT_S) == "pod shop/web: in the mesh"
            cluster.label("shop", {})
            await until(lambda: not enroller.agent.pods(), "released")
            if announced:
                event = replace(event, netns=f"/run/netns/{scene.web.netns.name}")
                assert "not in the mesh" in await enroller.added(event)
            else:
                sandbox.unlink()
                scene.proc.add(77, scene.web.netns, UIDS["web"])
            cluster.label("shop", LABELLED)
            await until(lambda: cluster.annotation("web") == "enabled", "enrolled again")
            assert has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_a_sandbox_of_a_static_pod_is_announced_with_the_id_of_its_manifest(lab: Lab, tmp_path: Path) -> None:
    """The runtime knows kubelet's id of the pod. The uid of its mirror in the API is another one."""
    manifest = "5f1c6a0d3b7e4f8a9c2d1e0f3a4b5c6d"

    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        cluster.run(scene.web, "Pending", addresses=False, annotations={"kubernetes.io/config.hash": manifest})
        event = Added(namespace="shop", name="web", netns=f"/run/netns/{scene.web.netns.name}", uid=manifest)
        async with scene.enroller() as enroller, scene.proxy():
            assert await enroller.added(event, WAIT_S) == "pod shop/web: in the mesh"
            assert has_rules(scene.web.netns)
            assert list(enroller.agent.pods()) == [WEB]
            # A manifest that was changed is another pod, whose mirror the API server has not named yet.
            with pytest.raises(CannotAdd, match="has not named this pod"):
                await enroller.added(replace(event, uid=manifest[::-1]), 0.1)

    on_stage(lab, tmp_path, body)


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="NOT TESTED: no /usr/bin/python3 here")
def test_a_runtime_runs_the_plugin_in_a_new_sandbox(lab: Lab, tmp_path: Path) -> None:
    """The whole way: what is installed on the host, its socket, rules in the sandbox before the pod starts."""
    for name in ("bin", "net.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "net.d/10-net.conflist").write_text('{"name": "net", "plugins": [{"type": "bridge"}]}')
    plugin = tmp_path / "plugin.sock"
    options = {"socket": str(plugin)}
    install(Installation(binaries=tmp_path / "bin", configurations=tmp_path / "net.d", options=options))

    def run(netns: str) -> "subprocess.CompletedProcess[str]":
        [_, entry] = json.loads((tmp_path / "net.d/10-net.conflist").read_text())["plugins"]
        environment = {
            "CNI_COMMAND": "ADD",
            "CNI_NETNS": f"/run/netns/{netns}",
            "CNI_ARGS": f"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_UID={WEB}",
        }
        given = json.dumps({"cniVersion": "1.0.0", "prevResult": {"ips": []}, **entry})
        program = [tmp_path / "bin/ztunnel-cni"]
        return subprocess.run(program, input=given, env=environment, capture_output=True, text=True)

    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.cluster.run(scene.web, "Pending", addresses=False)
        async with scene.enroller() as enroller, CniServer(plugin, enroller.added), scene.proxy() as manager:
            await until(lambda: manager.ready, "a proxy")
            done = await asyncio.to_thread(run, scene.web.netns.name)
            assert (done.returncode, json.loads(done.stdout)) == (0, {"ips": []})
            assert has_rules(scene.web.netns)
            # The runtime makes the sandbox anew, in another namespace.
            assert (await asyncio.to_thread(run, scene.db.netns.name)).returncode == 0
            assert has_rules(scene.db.netns)
            assert not has_rules(scene.web.netns)

    on_stage(lab, tmp_path, body)


def test_misshapen_pods_are_said_and_left_alone(
    lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.cluster.put("Pod", "shop", "odd", {"metadata": {"name": "odd", "namespace": "shop"}})
        scene.start(scene.web)
        async with scene.enroller(), scene.proxy():
            await until(lambda: scene.cluster.annotation("web") == "enabled", "the other one")
        assert "object=Pod/shop/odd: it has no uid" in caplog.text

    on_stage(lab, tmp_path, body)


def dump_of(*states: tuple[str, Place]) -> bytes:
    pods = [place for _, place in states]
    return json.dumps(
        {
            "workloadState": {UIDS[place.name]: {"state": state} for state, place in states},
            "workloads": [
                {"name": place.name, "namespace": "shop", "protocol": "HBONE", "workloadIps": [str(place.ipv4)]}
                for place in pods
            ],
            "certificates": [{"identity": "spiffe://cluster.local/ns/shop/sa/default", "state": "Available"}],
        }
    ).encode()


def test_a_comparison_finds_repairs_and_says(lab: Lab, tmp_path: Path) -> None:
    """Missing listeners are restored. The proxy's report, and a second agent, become events."""

    async def body(scene: Scene) -> None:
        cluster, page = scene.cluster, [dump_of(("Up", scene.web))]
        cluster.label("shop", LABELLED)
        scene.start(scene.web)
        # The proxy's pod: it answers on its own loopback only.
        scene.proc.add(900, scene.db.netns, UIDS["db"])
        metadata = {
            "name": "ztunnel-x",
            "namespace": "istio-system",
            "uid": UIDS["db"],
            "labels": {"app": "ztunnel"},
        }
        status = {"phase": "Running", "podIP": str(scene.db.ipv4)}
        cluster.put("Pod", "istio-system", "ztunnel-x", {"metadata": metadata, "spec": {}, "status": status})

        async def answer(client: socket.socket) -> bytes:
            await asyncio.get_running_loop().sock_recv(client, 4096)
            client.shutdown(socket.SHUT_RD)
            return b"HTTP/1.0 200 OK\r\n\r\n" + page[0]

        admin = listen("127.0.0.1", 15000, netns=scene.db.netns)
        async with serving(admin, answer), scene.enroller() as enroller, scene.proxy():
            auditor = Auditor(enroller, cluster, "w1")
            await until(lambda: cluster.annotation("web") == "enabled", "enabled")
            await until(lambda: not enroller.waiting, "settled")
            await auditor.compare()
            assert auditor.findings == {}

            page[0] = dump_of(("Draining", scene.web))
            for _ in range(2):
                assert cluster.events == []
                await auditor.compare()
            assert cluster.events == [
                ("web", "MeshNotServed", "the node's proxy does not serve this pod: Draining")
            ]
            page[0] = dump_of(("Up", scene.web))
            await auditor.compare()
            assert auditor.findings == {}

            [toy] = scene.toys.pods
            await toy.stop()
            for _ in range(2):
                await auditor.compare()
            assert cluster.events[1][:2] == ("web", "MeshListenerMissing")
            assert len(scene.toys.started) == 2
            await auditor.compare()
            assert auditor.findings == {}

            # An edited annotation is set right again, because it is status.
            value = cluster.objects[ObjectKey("Pod", "shop", "web")]
            edited = {**value, "metadata": {**value["metadata"], "annotations": {REDIRECTION: "disabled"}}}
            cluster.put("Pod", "shop", "web", edited)
            await until(lambda: cluster.annotation("web") == "enabled", "put right")

            with contextlib.closing(BlockingTable("istio-ambient-nat", scene.web.netns)) as table:
                table.apply(Table("istio-ambient-nat", Family.INET, chains=(Chain("istio-output", ()),)))
            for _ in range(2):
                await auditor.compare()
            assert cluster.events[2][:2] == ("web", "MeshTwoAgents")

    on_stage(lab, tmp_path, body)


def test_an_audit_changes_nothing_and_a_repair_what_is_the_agents_own(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        cluster.label("other", {})
        scene.start(scene.web)
        cluster.run(scene.db, labels={MODE: "none"})
        async with scene.enroller() as enroller, scene.proxy():
            auditor = Auditor(enroller, cluster, "w1")
            await until(lambda: cluster.annotation("web") == "enabled", "enabled")
            await until(lambda: not enroller.waiting, "settled")

            report = await auditor.report()
            db, web = report["pods"]
            assert (report["node"], report["proxies"]) == ("w1", 0)
            assert (db["pod"], db["wanted"], db["because"]) == ("shop/db", False, "pod-opted-out")
            assert list(db["checks"].values()) == ["ok", "-", "-", "-", "-", "-"]
            assert list(web["checks"].values()) == ["ok", "ok", "ok", "ok", "?", "?"]
            assert db["findings"] == web["findings"] == []

            # Somebody removes the rules, and the proxy loses its listeners.
            assert remove_rules(scene.web.netns) > 0
            [toy] = scene.toys.pods
            await toy.stop()
            for _ in range(2):
                _, web = (await auditor.report())["pods"]
                assert [each["reason"] for each in web["findings"]] == ["MeshListenerMissing", "MeshRulesChanged"]
                assert all(each["repairable"] for each in web["findings"])
            assert counted(auditor.audited.values())["MeshRulesChanged"] == 1
            assert cluster.events == []

            report = await auditor.report(repair=True)
            assert [each["reason"] for each in report["repaired"]] == ["MeshListenerMissing", "MeshRulesChanged"]
            assert [each["pod"] for each in report["repaired"]] == ["shop/web", "shop/web"]
            assert report["pods"][1]["findings"] == []
            assert len(scene.toys.started) == 2
            assert remove_rules(scene.web.netns) > 0  # they are there again
            await auditor.compare()
            assert counted(auditor.audited.values())["MeshRulesChanged"] == 1, "the gauge of this minute"

            # Not from elsewhere.
            asked = PageRequest(method="POST", path="/audit")
            assert (await audit(auditor, asked)).status == 403
            answer = await audit(auditor, replace(asked, local=True))
            assert json.loads("".join(map(str, answer.body)))["repaired"][0]["reason"] == "MeshRulesChanged"
            facts = await check(PageRequest(method="GET", path="/check", local=True), enroller, auditor, None)
            found = json.loads("".join(map(str, facts.body)))
            assert (found["rulesRefused"], found["probes"], found["cni"]) == ("", {"fault": "", "ebpf": ""}, None)
            assert (await check(replace(asked, path="/check"), enroller, auditor, None)).status == 403

    on_stage(lab, tmp_path, body)


def test_the_trial_of_rules_passes_here_and_both_kinds_of_iptables_are_seen() -> None:
    try_rules()
    with Netns.create() as netns, netns.entered():
        assert iptables_tables() == {"legacy": [], "nft": []}


@pytest.mark.parametrize("reused", [False, True], ids=["gone", "reused"])
def test_a_pod_whose_recorded_process_has_ended_leaves_the_mesh(lab: Lab, tmp_path: Path, reused: bool) -> None:
    async def body(scene: Scene) -> None:
        cluster = scene.cluster
        cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with app(scene.db), scene.proxy() as manager:
            async with scene.enroller() as enroller:
                await until(lambda: cluster.annotation("web") == "enabled", "enabled")
                status = enroller.agent.pod(WEB)
                assert status is not None
                recorded = Path(str(status.description.netns)).parents[1]
            # While no agent runs, the process ends, and the label is removed. The pod has another process.
            recorded.rename(recorded.with_name("ended"))
            if reused:
                scene.proc.add(recorded.name, scene.db.netns, UIDS["db"])
            scene.proc.add(77, scene.web.netns, UIDS["web"], started=200)
            cluster.label("shop", {})
            cluster.restarted()
            async with scene.enroller() as enroller:
                await until(lambda: cluster.annotation("web") is None, "said out")
                await until(lambda: not enroller.agent.left_over and not enroller.agent.pods(), "released")
                assert not manager.active_proxies
                assert not has_rules(scene.web.netns)
                assert (await ask(scene.web, scene.db.ipv4)).startswith("app db")
        assert len(scene.toys.started) == 1
        assert not has_rules(scene.db.netns)

    on_stage(lab, tmp_path, body)
