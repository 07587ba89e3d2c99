"""The plugin as a container runtime runs it: a program, its environment, its configuration on standard input."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ztunnel.node.agent.cni.installer import Installation, install
from ztunnel.node.agent.cni_server import CniServer
from ztunnel.node.agent.enroller import Added
from ztunnel.node.agent.errors import CannotAdd

pytestmark = pytest.mark.skipif(
    not Path("/usr/bin/python3").exists(), reason="NOT TESTED: the plugin needs /usr/bin/python3 on its host"
)
PREVIOUS = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "sandbox": "/var/run/netns/cni-1"}],
    "ips": [{"address": "10.0.0.7/24", "gateway": "10.0.0.1", "interface": 0}, {"address": "fd00::7/64"}],
}


class Host:
    """A host's folders with the plugin installed, and an agent."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "plugin.sock"
        for name in ("bin", "net.d"):
            (folder / name).mkdir()
        (folder / "net.d/10-net.conflist").write_text('{"name": "net", "plugins": [{"type": "bridge"}]}')
        options = {
            "socket": str(self.socket),
            "exclude_namespaces": ["kube-system"],
            "agent_namespace": "istio-system",
        }
        install(Installation(binaries=folder / "bin", configurations=folder / "net.d", options=options))
        self.program = folder / "bin/ztunnel-cni"
        [_, self.entry] = json.loads((folder / "net.d/10-net.conflist").read_text())["plugins"]
        self.seen: list[Added] = []

    def run(self, command: str, pod: str = "shop/web", stdin: str | None = None, **config: Any) -> tuple[int, Any]:
        namespace, _, name = pod.partition("/")
        environment = {
            "CNI_COMMAND": command,
            "CNI_NETNS": "/var/run/netns/cni-1",
            "CNI_IFNAME": "eth0",
            "CNI_ARGS": f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID=u-1",
        }
        given = {"cniVersion": "1.0.0", "prevResult": PREVIOUS, **self.entry, **config}
        done = subprocess.run(
            [str(self.program)], input=stdin if stdin is not None else json.dumps(given), env=environment,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout) if done.stdout else None

    async def add(self, event: Added) -> str:
        self.seen.append(event)
        if event.name == "refused":
            raise CannotAdd("pod shop/refused: no ztunnel connection")
        return "in the mesh"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def beside_an_agent(host: Host, body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with CniServer(host.socket, host.add):
            await body()

    asyncio.run(main())


def test_a_sandbox_is_announced_and_the_result_before_it_passed_on(host: Host) -> None:
    async def body() -> None:
        assert await asyncio.to_thread(host.run, "ADD") == (0, PREVIOUS)
        status, answer = await asyncio.to_thread(host.run, "ADD", "shop/refused")
        assert (status, answer["code"]) == (1, 11)
        assert answer["msg"] == "ztunnel-cni: pod shop/refused: no ztunnel connection"

    beside_an_agent(host, body)
    assert host.seen[0] == Added(namespace="shop", name="web", netns="/var/run/netns/cni-1", uid="u-1")


def test_without_an_agent_a_pod_fails_and_the_agents_own_pass(host: Host) -> None:
    status, answer = host.run("ADD")
    assert (status, answer["code"]) == (1, 11)
    assert f"does not answer at {host.socket}" in answer["msg"]
    for pod in ("istio-system/ztunnel-agent-x7", "istio-system/ztunnel-5", "kube-system/coredns", "/"):
        assert host.run("ADD", pod) == (0, PREVIOUS)
    assert host.run("ADD", "shop/ztunnel-agent-x7")[0] == 1


def test_the_other_commands(host: Host) -> None:
    status, versions = host.run("VERSION")
    assert status == 0
    assert "1.0.0" in versions["supportedVersions"]
    for command in ("DEL", "CHECK", "STATUS", "GC"):
        assert host.run(command) == (0, None)


def test_what_it_cannot_use_is_an_answer_in_the_runtimes_form(host: Host) -> None:
    assert host.run("ADD", prevResult=None)[1]["code"] == 7
    for stdin in ("", "[]"):
        status, answer = host.run("ADD", stdin=stdin)
        assert (status, answer["code"]) == (1, 7)


@pytest.mark.parametrize("ips", [None, [], [None], [{}], [{"address": None}]])
def test_previous_result_without_addresses_is_announced(host: Host, ips: Any) -> None:
    previous = {**PREVIOUS, "ips": ips}

    async def body() -> None:
        assert await asyncio.to_thread(lambda: host.run("ADD", prevResult=previous)) == (0, previous)

    beside_an_agent(host, body)
    assert [each.name for each in host.seen] == ["web"]


def test_members_that_are_null_have_their_defaults(host: Host) -> None:
    nothing = {"exclude_namespaces": None, "agent_prefix": None, "cniVersion": None}
    assert host.run("ADD", "istio-system/ztunnel-5", **nothing) == (0, PREVIOUS)
    status, answer = host.run("ADD", **nothing)
    assert (status, answer["code"]) == (1, 11)
