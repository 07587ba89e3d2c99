"""The agent of a cluster's nodes against a real API server: namespaces as pods, the test as kubelet."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from deploy.lab import Lab, may_make_namespaces
from deploy.processes import Proc
from tests.apiserver.mesh import annotation, create_namespace, proc_of, run_pod, told_control_plane
from tests.apiserver.server import ADMIN, ApiServer
from tests.netns.istio import ROOT, WAIT_S, AmbientMesh, ask, eventually, mesh_of
from tests.netns.test_agent import Toys, has_rules
from tests.netns.toys import app
from tests.ports import free_port
from tests.ztunnel.node.agent.test_cni_server import asked
from tproxy.aio.sockets import connect
from ztunnel.kube.client import Client
from ztunnel.kube.client import connect as connect_api
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.kinds import DAEMON_SET as DAEMON_SETS
from ztunnel.kube.kinds import NAMESPACE, NODE, POD, SERVICE_ACCOUNT, Kind
from ztunnel.node.agent.enrolment import MODE
from ztunnel.proxy.istio.zds.manager import PodManager

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]


class Agent:
    """``ztunnel agent --kube`` of one node as a process, which a test may end in any way and start anew."""

    def __init__(
        self, cluster: ApiServer, folder: Path, node: str, proc: Proc, *options: str, token: str = ADMIN
    ) -> None:
        self.log_path = folder / f"agent-{node}.log"
        self.command = [
            sys.executable, "-m", "ztunnel", "agent", "--kube", f"--kubeconfig={cluster.kubeconfig(token)}",
            f"--node={node}", f"--socket={folder / node}.zds", f"--proc={proc.folder}", "--probe-user=none",
            *options,
        ]  # fmt: skip
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self.command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=log)
        return self.process

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)


async def set_mode(client: Client, namespace: str, mode: str | None) -> None:
    await client.merge_patch(NAMESPACE, "", namespace, {"metadata": {"labels": {MODE: mode}}})


async def until_annotated(client: Client, names: list[str], wanted: str | None) -> None:
    async with asyncio.timeout(WAIT_S):
        for name in names:
            while await annotation(client, "default", name) != wanted:
                await asyncio.sleep(0.02)


class Conversation:
    """A long connection, which is checked from time to time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.said = 0

    async def lives(self) -> None:
        loop = asyncio.get_running_loop()
        self.said += 1
        line = f"line {self.said}\n".encode()
        async with asyncio.timeout(WAIT_S):
            await loop.sock_sendall(self.sock, line)
            heard = b""
            while not heard.endswith(line):
                data = await loop.sock_recv(self.sock, 4096)
                assert data, "the connection has ended"
                heard += data


async def tunnelled(mesh: AmbientMesh) -> bool:
    """Make a connection, and return whether its proxy tunnelled it, which needs a certificate."""
    before = len(mesh.proxies["w1"].access("outbound"))
    await ask(mesh.lab.pod("client"), mesh.lab.pod("server").ipv4, 8080)
    try:
        lines = await mesh.proxies["w1"].lines("outbound", before + 1)
    except AssertionError:
        return False
    return "dst.identity" in lines[-1] and "error" not in lines[-1]


@contextlib.asynccontextmanager
async def scene(cluster: ApiServer, folder: Path) -> AsyncIterator[tuple[AmbientMesh, dict[str, Agent], Client]]:
    """Two nodes with agents and proxies, and on each a pod with an application that is not in the mesh yet."""
    procs = {node: proc_of(folder / f"proc-{node}") for node in ("w1", "w2")}
    agents = {node: Agent(cluster, folder, node, proc) for node, proc in procs.items()}
    try:
        async with (
            connect_api(cluster.kubeconfig()) as client,
            mesh_of({"w1": ["client"], "w2": ["server"]}, folder, captured=[], agents=False) as mesh,
            app(mesh.lab.pod("server")),
        ):
            try:
                for node, name in (("w1", "client"), ("w2", "server")):
                    await run_pod(client, "default", mesh.lab.pod(name), node, procs[node])
                async with told_control_plane(client, "default", mesh):
                    yield mesh, agents, client
            finally:
                await set_mode(client, "default", None)
    finally:
        for agent in agents.values():
            agent.close()
            print(f"--- {agent.log_path.name}\n{agent.log_path.read_text()[-4000:]}")


def test_a_label_brings_pods_in_and_out_and_restarts_break_nothing(cluster: ApiServer, tmp_path: Path) -> None:
    """A connection from before the mesh and one through it stay open all the time."""

    async def main() -> None:
        async with scene(cluster, tmp_path) as (mesh, agents, client), contextlib.AsyncExitStack() as stack:

            async def talk() -> Conversation:
                sock = await connect((mesh.lab.pod("server").ipv4, 8080), netns=mesh.lab.pod("client").netns)
                return Conversation(stack.enter_context(sock))

            talks = [await talk()]
            await talks[0].lives()
            assert mesh.proxies["w1"].access() == []

            await set_mode(client, "default", "ambient")
            await until_annotated(client, ["client", "server"], "enabled")
            await eventually(lambda: len(mesh.captured) == 2, "the control plane knows")
            async with asyncio.timeout(WAIT_S):
                captured = False
                while not captured:
                    with contextlib.suppress(ConnectionResetError):  # made at the moment of capture
                        captured = await tunnelled(mesh)
            line = mesh.proxies["w1"].access("outbound")[-1]
            assert line["src.identity"] == "spiffe://cluster.local/ns/default/sa/client"
            assert line["dst.identity"] == "spiffe://cluster.local/ns/default/sa/server"
            talks.append(await talk())

            async def all_is_well() -> None:
                for each in talks:
                    await each.lives()
                assert await tunnelled(mesh)
                for name in ("client", "server"):
                    assert await annotation(client, "default", name) == "enabled"

            await all_is_well()
            for number in (signal.SIGTERM, signal.SIGKILL):
                for agent in agents.values():
                    agent.end(number)
                await all_is_well()
                known = {agent: agent.log_path.read_text().count("pods known") for agent in agents.values()}
                for agent in agents.values():
                    agent.start()
                await eventually(
                    lambda known=known: all(
                        agent.log_path.read_text().count("pods known") > count for agent, count in known.items()
                    ),
                    "the successors know their pods",
                )
                await all_is_well()

            # Killing a proxy ends its own connections only. Its successor serves new ones.
            victim = mesh.proxies["w1"]
            victim.process.kill()
            victim.process.wait(WAIT_S)
            await talks[0].lives()
            talks.pop().sock.close()
            victim.process = mesh.start_proxy(mesh.lab.worker("w1"))
            await eventually(victim.ready, "the proxy's successor")
            await all_is_well()
            talks.append(await talk())
            await all_is_well()

            await set_mode(client, "default", None)
            await until_annotated(client, ["client", "server"], None)
            for each in talks:
                await each.lives()
            before = len(mesh.proxies["w1"].access("outbound"))
            async with asyncio.timeout(WAIT_S):
                while has_rules(mesh.lab.pod("server").netns) and len(mesh.captured):
                    await asyncio.sleep(0.05)
            await ask(mesh.lab.pod("client"), mesh.lab.pod("server").ipv4, 8080)
            assert len(mesh.proxies["w1"].access("outbound")) == before
            for each in talks:
                await each.lives()
                each.sock.close()
            await eventually(lambda: not has_rules(mesh.lab.pod("client").netns), "released")
            await eventually(lambda: not has_rules(mesh.lab.pod("server").netns), "released")

    asyncio.run(main())


FOLDER = ROOT / "deploy" / "kustomize" / "agent"
RBAC = "rbac.authorization.k8s.io/v1"
KINDS = {
    "ServiceAccount": SERVICE_ACCOUNT,
    "ClusterRole": Kind("ClusterRole", RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind("ClusterRoleBinding", RBAC, "clusterrolebindings", namespaced=False),
    "Role": Kind("Role", RBAC, "roles"),
    "RoleBinding": Kind("RoleBinding", RBAC, "rolebindings"),
    "DaemonSet": DAEMON_SETS,
}
SYSTEM = "istio-system"


async def deployed(client: Client) -> tuple[str, list[str]]:
    """Create what is deployed; return its account's token and its arguments."""
    with contextlib.suppress(ApiRefused):  # another test has it already
        await create_namespace(client, SYSTEM)
    arguments: list[str] = []
    for name in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]:
        for document in yaml.safe_load_all((FOLDER / name).read_text()):
            made = await client.create(
                KINDS[document["kind"]], document["metadata"].get("namespace", ""), document
            )
            if document["kind"] == "DaemonSet":
                arguments = made["spec"]["template"]["spec"]["containers"][0]["args"]
    account = Kind("TokenRequest", "v1", "serviceaccounts/ztunnel-agent/token")
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return (await client.create(account, SYSTEM, request))["status"]["token"], arguments


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_as_deployed_an_upgrade_leaves_pods_and_the_end_takes_them_out(cluster: ApiServer, tmp_path: Path) -> None:
    """The agent has the deployed arguments and role. Also: readiness, the page of pods, and a plugin's sandbox."""
    space, port, plugin = "ending", free_port(), tmp_path / "cni" / "pluginevent.sock"

    async def main(lab: Lab) -> None:
        proc = proc_of(tmp_path / "proc")
        async with connect_api(cluster.kubeconfig()) as client:
            await create_namespace(client, space, **{MODE: "ambient"})
            labels = {"kubernetes.io/os": "linux"}
            await client.create(
                NODE, "", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "ending", "labels": labels}}
            )
            token, arguments = await deployed(client)
            here = {
                "--node=$(NODE_NAME)": "--node=ending",
                "--proc=/host/proc": f"--proc={proc.folder}",
                "--daemonset=$(POD_NAMESPACE)/ztunnel-agent": f"--daemonset={SYSTEM}/ztunnel-agent",
                "--system-namespace=$(POD_NAMESPACE)": f"--system-namespace={SYSTEM}",
                "--cni-socket=/var/run/istio-cni/pluginevent.sock": f"--cni-socket={plugin}",
                "--metrics=15014": f"--metrics=127.0.0.1:{port}",
            }
            assert arguments == ["agent", "--kube", *here]
            agent = Agent(cluster, tmp_path, "ending", proc, *here.values(), token=token)
            stack.callback(agent.close)

            async def page(path: str, wanted: str) -> None:
                async with asyncio.timeout(WAIT_S):
                    while wanted not in (found := (await asyncio.to_thread(get, port, path))[1]):
                        await asyncio.sleep(0.05)
                assert found

            await page("/readyz", "no ztunnel is connected")
            await run_pod(client, space, lab.pod("web"), "ending", proc)
            await page("/pods", '"phase": "pending"')
            async with PodManager(tmp_path / "ending.zds", Toys()):
                await page("/readyz", "ready")
                await page("/pods", '"phase": "enabled"')
                body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "new"},
                        "spec": {"nodeName": "ending", "containers": [{"name": "a", "image": "a"}]}}  # fmt: skip
                await client.create(POD, space, body)
                event = {
                    "Netns": f"/run/netns/{lab.pod('new').netns.name}",
                    "PodName": "new",
                    "PodNamespace": space,
                }
                answer = await asyncio.to_thread(asked, plugin, json.dumps(event).encode())
                assert answer == (200, f"pod {space}/new: in the mesh\n")
                assert has_rules(lab.pod("new").netns)
                await page("/metrics", 'ztunnel_agent_sandboxes_total{status="200"} 1.0')
                await page("/metrics", 'ztunnel_agent_pods{phase="enabled"} 2.0')

                assert await asyncio.to_thread(agent.end) == 0
                assert has_rules(lab.pod("web").netns)
                assert await annotation(client, space, "web") == "enabled"
                agent.start()
                await page("/pods", '"phase": "enabled"')
                await client.delete(DAEMON_SETS, SYSTEM, "ztunnel-agent")
                assert await asyncio.to_thread(agent.end) == 0
                for name in ("web", "new"):
                    assert await annotation(client, space, name) is None
                    assert not has_rules(lab.pod(name).netns)
            assert "RBAC" not in agent.log_path.read_text()
            assert "the DaemonSet is being deleted" in (log := agent.log_path.read_text()) or "not found" in log

    with Lab({"ending": ["web", "new"]}) as lab, contextlib.ExitStack() as stack:
        asyncio.run(main(lab))
