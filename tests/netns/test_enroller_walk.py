"""Random changes of pods, namespaces, sandboxes, agents and proxies: at rest, each pod is what its labels request.

After some changes everything that is missing is started, and the node is checked. At the end the last agent
withdraws while changes are still in progress. Each sandbox is a new network namespace, and its address is one of a
few. A failed seed prints its changes.
"""

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
from pathlib import Path

import pytest

from deploy.processes import Proc
from tests.netns.test_agent import Toys, has_rules
from tests.netns.test_enroller import Cluster
from tests.netns.toys import WAIT_S
from tproxy.aio.netns import Netns
from ztunnel.kube.objects import ObjectKey
from ztunnel.node.agent import node as node_module
from ztunnel.node.agent.enroller import Added, Enroller
from ztunnel.node.agent.enrolment import MODE, REDIRECTION, Settings, decide, read_pod
from ztunnel.node.agent.errors import CannotAdd
from ztunnel.node.agent.namespaces import remove_rules
from ztunnel.node.agent.phase import Phase
from ztunnel.proxy.istio.zds.manager import PodManager
from ztunnel.proxy.istio.zds.pods import PodUid

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
AMBIENT, PLAIN = {MODE: "ambient"}, {MODE: "none"}
ADDRESSES = ("10.9.0.1", "10.9.0.2", "10.9.0.3", "10.9.0.4")
_NUMBERS = itertools.count(1000)


class Sandbox:
    """A network namespace with one address, and with a process once a container runs in it."""

    def __init__(self, address: str) -> None:
        self.name, self.address = f"walk-{os.getpid()}-{next(_NUMBERS)}", address
        self.netns = Netns.create(self.name)
        for words in ("link set lo up", "link add d0 type veth peer name d1", f"addr add {address}/32 dev d0"):
            subprocess.run(["ip", "-n", self.name, *words.split()], check=True)
        self.process: Path | None = None

    def run(self, proc: Proc, uid: str) -> None:
        if self.process is None:
            number = next(_NUMBERS)
            proc.add(number, self.netns, uid, started=number)
            self.process = proc.folder / str(number)

    def end(self) -> None:
        if self.process is not None:
            self.process.rename(self.process.with_name(f"ended-{self.process.name}"))
        self.netns.remove_name()
        self.netns.close()


class PodState:
    """A pod, and what the API server shows of it. An empty uid means that there is no such pod."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uid = ""
        self.labels: dict[str, str] = {}
        self.phase = "Pending"
        self.address = ""
        self.sandbox: Sandbox | None = None

    @property
    def running(self) -> bool:
        return bool(self.uid) and self.phase != "Succeeded"

    def end_sandbox(self) -> None:
        if self.sandbox is not None:
            self.sandbox.end()
            self.sandbox = None


class Walk:
    """A node, and the changes that a seed chooses."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.cluster, self.toys, self.proc = Cluster(), Toys(), Proc(folder / "proc")
        self.proc.add(1, None)
        self.pods = [PodState("web"), PodState("db")]
        self.namespace: dict[str, str] | None = None
        self.agent: Enroller | None = None
        self.proxy: PodManager | None = None
        self.adding: set[asyncio.Task[str]] = set()
        self.changes = (
            self.label_namespace, self.label_pod, self.switch_agent, self.switch_proxy, self.new_sandbox,
            self.new_sandbox, self.new_sandbox, self.create, self.delete, self.finish, self.switch_api,
            self.break_rules, self.recheck,
        )  # fmt: skip

    async def change(self) -> None:
        pod, change = self.random.choice(self.pods), self.random.choice(self.changes)
        print(change.__name__, pod.name, pod.uid)
        await change(pod)
        await asyncio.sleep(self.random.choice((0, 0, 0.005, 0.05, 0.2)))

    def show(self, pod: PodState) -> None:
        """Write a pod to the API server. The annotation that the agent has written stays."""
        before = self.cluster.objects.get(ObjectKey("Pod", "shop", pod.name))
        same = before is not None and before["metadata"]["uid"] == pod.uid
        metadata = {"name": pod.name, "namespace": "shop", "uid": pod.uid, "labels": pod.labels}
        metadata["annotations"] = before["metadata"]["annotations"] if before is not None and same else {}
        status = {"phase": pod.phase, "podIPs": [{"ip": pod.address}] if pod.address else []}
        self.cluster.put("Pod", "shop", pod.name, {"metadata": metadata, "spec": {}, "status": status})

    async def label_namespace(self, _: PodState) -> None:
        self.namespace = self.random.choice((AMBIENT, AMBIENT, {}, None))
        if self.namespace is None:
            self.cluster.put("Namespace", "", "shop", None)
        else:
            self.cluster.label("shop", self.namespace)

    async def label_pod(self, pod: PodState) -> None:
        if pod.uid:
            pod.labels = self.random.choice(({}, AMBIENT, PLAIN))
            self.show(pod)

    async def create(self, pod: PodState) -> None:
        """Create a pod. If it exists, its successor has the same name."""
        pod.end_sandbox()
        if pod.uid and self.random.random() < 0.5:
            self.cluster.put("Pod", "shop", pod.name, None)
        pod.uid = f"00000000-0000-0000-0000-{self.random.getrandbits(40):012x}"
        pod.phase, pod.address = "Pending", ""
        pod.labels = self.random.choice(({}, {}, AMBIENT))
        self.show(pod)
        await self.new_sandbox(pod)

    async def delete(self, pod: PodState) -> None:
        if pod.uid:
            self.cluster.put("Pod", "shop", pod.name, None)
            pod.uid = ""
            pod.end_sandbox()

    async def finish(self, pod: PodState) -> None:
        if pod.running:
            pod.phase = "Succeeded"
            pod.address = self.random.choice((pod.address, ""))
            if self.random.random() < 0.7:
                pod.end_sandbox()
            self.show(pod)

    async def new_sandbox(self, pod: PodState) -> None:
        """Replace a pod's sandbox. The container runtime usually announces it, and the agent can refuse it."""
        if not pod.running:
            return
        if self.random.random() < 0.5:
            pod.end_sandbox()
        taken = {each.sandbox.address for each in self.pods if each.sandbox is not None}
        made = Sandbox(self.random.choice([each for each in ADDRESSES if each not in taken]))
        if self.agent is not None and self.random.random() < 0.8:
            event = Added(namespace="shop", name=pod.name, netns=f"/run/netns/{made.name}", uid=pod.uid)
            adding = asyncio.get_running_loop().create_task(
                self.agent.added(event, self.random.choice((0.2, 1.5)))
            )
            self.adding.add(adding)
            adding.add_done_callback(self.adding.discard)
            await asyncio.sleep(self.random.choice((0, 0.01)))
            if self.random.random() < 0.2:
                await self.switch_agent(pod)
            try:
                print(await adding)
            except (CannotAdd, asyncio.CancelledError) as error:
                print("refused", error)
                made.end()
                return
        pod.end_sandbox()
        pod.sandbox, pod.phase = made, "Running"
        made.run(self.proc, pod.uid)
        if self.random.random() < 0.9:
            pod.address = made.address
            self.show(pod)

    async def switch_agent(self, _: PodState) -> None:
        if self.agent is None:
            await self.start_agent()
        else:
            await self.stop_agent()

    async def start_agent(self) -> None:
        if self.agent is None:
            self.cluster.restarted()
            agent = Enroller(
                self.folder / "zds", self.cluster, self.cluster, self.cluster, Settings(),
                record=self.folder / "record.json", proc=self.proc.folder, grace_s=self.random.choice((0.0, 0.3)),
            )  # fmt: skip
            self.agent = await agent.__aenter__()

    async def stop_agent(self) -> None:
        if self.agent is not None:
            agent, self.agent = self.agent, None
            for adding in self.adding:  # as the CNI server does
                adding.cancel()
            await asyncio.gather(*self.adding, return_exceptions=True)
            async with asyncio.timeout(WAIT_S):
                await agent.__aexit__()

    async def switch_proxy(self, _: PodState) -> None:
        if self.proxy is None:
            await self.start_proxy()
        else:
            await self.stop_proxy()

    async def start_proxy(self) -> None:
        if self.proxy is None:
            self.proxy = await PodManager(self.folder / "zds", self.toys).__aenter__()

    async def stop_proxy(self) -> None:
        if self.proxy is not None:
            proxy, self.proxy = self.proxy, None
            await proxy.__aexit__(None, None, None)

    async def switch_api(self, _: PodState) -> None:
        self.cluster.away = not self.cluster.away

    async def break_rules(self, pod: PodState) -> None:
        if pod.sandbox is not None:
            remove_rules(pod.sandbox.netns)

    async def recheck(self, _: PodState) -> None:
        if self.agent is not None:
            for uid in self.agent.agent.pods():
                await self.agent.agent.repair(uid)
            self.agent.recheck()

    # Rest

    async def rest(self) -> None:
        """Start what is missing, and wait until every pod is in its desired state."""
        self.cluster.away = False
        if self.namespace is None:
            self.namespace = AMBIENT
            self.cluster.label("shop", AMBIENT)
        await self.start_proxy()
        for pod in self.pods:
            while pod.running and pod.sandbox is None:
                await self.start_agent()
                await self.new_sandbox(pod)
            if pod.running and pod.sandbox is not None:
                pod.sandbox.run(self.proc, pod.uid)
                pod.address = pod.sandbox.address
                self.show(pod)
        await self.start_agent()
        wrong: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    await self.recheck(self.pods[0])
                    await asyncio.sleep(0.1)
                    wrong = self.wrong()
                    if not wrong:
                        return
        assert wrong == []

    def wrong(self) -> list[str]:
        """Return how the node differs from what labels request."""
        assert self.agent is not None
        assert self.proxy is not None
        found = ["steps are pending"] if self.agent.waiting else []
        inside = set()
        for pod in self.pods:
            if not pod.uid:
                continue
            shown = read_pod(self.cluster.objects[ObjectKey("Pod", "shop", pod.name)])
            wanted = decide(shown, self.namespace, Settings()).enrol
            status = self.agent.agent.pod(PodUid(pod.uid))
            if pod.sandbox is not None and has_rules(pod.sandbox.netns) is not wanted:
                found.append(f"{pod.name} has rules: {not wanted}")
            if shown.annotation != ("enabled" if wanted else None):
                found.append(f"{pod.name} is annotated {shown.annotation}")
            if wanted:
                inside.add(pod.uid)
            if (status is not None and status.phase is Phase.ENABLED) is not wanted:
                found.append(f"{pod.name} has the state {status}")
            netns = self.agent.agent.netns(PodUid(pod.uid))
            if netns is not None and pod.sandbox is not None and netns.inode != pod.sandbox.netns.inode:
                found.append(f"{pod.name} is enrolled in another sandbox")
        if set(self.agent.agent.pods()) != inside or self.agent.agent.left_over or self.agent.agent.expected:
            found.append(f"the agent has the pods {self.agent.agent.pods()}")
        if self.proxy.active_proxies != len(inside):
            found.append(f"{self.proxy.active_proxies} pods have a proxy")
        return found

    async def withdraw(self) -> None:
        await self.start_agent()
        assert self.agent is not None
        self.cluster.away = False
        await asyncio.sleep(self.random.choice((0, 0.01, 0.1, 0.5)))
        async with asyncio.timeout(WAIT_S):
            await self.agent.withdraw(0.3)
        for pod in self.pods:
            assert pod.sandbox is None or not has_rules(pod.sandbox.netns)
            value = self.cluster.objects.get(ObjectKey("Pod", "shop", pod.name))
            assert value is None or REDIRECTION not in value["metadata"]["annotations"]


#: Seeds whose walks have found defects.
SEEDS = (2, 3, 16, 17)


@pytest.mark.parametrize("seed", SEEDS)
def test_pods_become_what_their_labels_request(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", 0.2)
    monkeypatch.setattr(node_module, "RECHECK_S", 0.5)

    async def body() -> None:
        walk = Walk(seed, tmp_path)
        try:
            for _ in range(3):
                for _ in range(walk.random.randint(3, 10)):
                    await walk.change()
                await walk.rest()
            for _ in range(walk.random.randint(1, 6)):
                await walk.change()
            await walk.withdraw()
        finally:
            await walk.stop_agent()
            await walk.stop_proxy()
            for pod in walk.pods:
                pod.end_sandbox()

    asyncio.run(body())
