"""The gate in a real pod is closed until the mesh's listeners exist, whatever rules and agents are already
there.
"""

import asyncio
import subprocess
from pathlib import Path

import pytest

from deploy.lab import Lab, Place
from tests.commands import Ztunnel
from tests.netns.istio import HELLO, ask, eventually, mesh_of
from tests.netns.toys import app
from ztunnel.node.agent.description import PodDescription
from ztunnel.node.agent.node import NodeAgent, Phase
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]


def gate(pod: Place, log: Path, timeout_s: float) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return pod.popen(["gate", f"--timeout={timeout_s}"], start=Ztunnel, env={}, stderr=output)


def test_the_gate_opens_when_the_pod_is_in_the_mesh(tmp_path: Path) -> None:
    async def main() -> None:
        async with mesh_of({"w1": ["late"], "w2": ["server"]}, tmp_path, captured=["server"]) as mesh:
            late = mesh.lab.pod("late")
            waiting = gate(late, tmp_path / "gate.txt", 60)
            try:
                said = tmp_path / "gate.txt"
                await eventually(lambda: "Connection refused" in said.read_text(), "the gate waits")
                assert waiting.poll() is None
                agent = mesh.proxies["w1"].agent
                mesh.captured.append("late")
                mesh.write_mesh()
                await agent.enrol(mesh.described(late))
                await eventually(lambda: waiting.poll() is not None, "the gate opens")
                assert waiting.returncode == 0
                # The very first connection of the application is in the mesh.
                async with app(mesh.lab.pod("server")):
                    await ask(late, mesh.lab.pod("server").ipv4, 8080, HELLO)
                line = await mesh.node_of("late").ended("outbound", "server")
                assert line["src.identity"] == "spiffe://cluster.local/ns/default/sa/late"
            finally:
                if waiting.poll() is None:
                    waiting.kill()
                waiting.wait(10)

    asyncio.run(main())


def test_rules_without_a_proxy_do_not_open_the_gate(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        pod = lab.pod("alone")
        info = PodInfo(name="alone", namespace="default", service_account="default")
        described = PodDescription(uid=PodUid("alone"), info=info, netns=pod.netns.name)
        async with NodeAgent(tmp_path / "zds.sock", remove_on_exit=True) as agent:
            assert await agent.enrol(described) is Phase.PENDING
            waiting = gate(pod, tmp_path / "gate.txt", 1)
            assert await asyncio.to_thread(waiting.wait, 30) == 1
            assert "is a node agent on this node, and its proxy connected?" in (tmp_path / "gate.txt").read_text()

    with Lab({"w1": ["alone"]}) as lab:
        asyncio.run(main(lab))
