"""An operator's questions to a mesh of two nodes: each is one command, with its table and its validated JSON.

``docs/asking.md`` lists the questions. Each is answered here by real proxies with real connections. A script in
kubectl's place connects to the admin server of each node.
"""

import asyncio
import contextlib
import json
import re
import shlex
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.netns.istio import AmbientMesh, ask, eventually, mesh_of
from tests.netns.test_istio_policy import CAPTURED, NODES, app, held
from ztunnel.ask.report import collect
from ztunnel.cli import main

pytestmark = pytest.mark.netns
ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
#: The table of questions in the documentation: a question and its command in each row.
ASKED = re.compile(r"^\| (.+?\?) \| `ztunnel ([^`]+)` \|", re.MULTILINE)

SCRIPT = """#!/bin/sh
case "$*" in
*port-forward*pod/*)
    name=$(echo "$*" | sed 's/.*pod\\/\\([^ ]*\\) :\\([0-9]*\\).*/\\1-\\2/')
    echo "Forwarding from 127.0.0.1:$(cat {folder}/$name) -> 0"; exec sleep 600 ;;
*logs*--previous*) echo 'previous terminated container not found' >&2; exit 1 ;;
*logs*) echo a line ;;
*app=ztunnel-agent*) echo '{{"items": []}}' ;;
*spec.nodeName=*) cat {folder}/ztunnel-$(echo "$*" | sed 's/.*spec.nodeName=\\([^ ]*\\).*/\\1/') ;;
*app=ztunnel*) cat {folder}/ztunnels ;;
*) echo 'error: not expected' >&2; exit 1 ;;
esac
"""


@contextlib.contextmanager
def bridge(mesh: AmbientMesh, node: str, port: int, here: int = 0) -> Iterator[int]:
    """Yield a port of this namespace (``here``, or a free one) that leads to a loopback port of a node's proxy."""
    place = mesh.proxies[node].place

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve(client: socket.socket) -> None:
        with client, place.socket() as server, contextlib.suppress(ConnectionRefusedError):
            server.connect(("127.0.0.1", port))
            back = threading.Thread(target=pump, args=(server, client))
            back.start()
            pump(client, server)
            back.join()

    with socket.create_server(("127.0.0.1", here)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=serve, args=(client,), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def kubectl(mesh: AmbientMesh, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    script = folder / "bin" / "kubectl"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(folder=folder))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin:/usr/sbin:/sbin")
    pods = []
    with contextlib.ExitStack() as stack:
        for node in mesh.proxies:
            for port in (15000, 15020):
                (folder / f"ztunnel-{node}-{port}").write_text(str(stack.enter_context(bridge(mesh, node, port))))
            metadata = {"name": f"ztunnel-{node}", "namespace": "istio-system", "labels": {"app": "ztunnel"}}
            pods.append({"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}})
            (folder / f"ztunnel-{node}").write_text(json.dumps({"items": pods[-1:]}))
        (folder / "ztunnels").write_text(json.dumps({"items": pods}))
        yield


class Operator:
    """Runs commands as a person would, in a thread: the loop of the test serves the control plane."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.answered: set[str] = set()

    async def table(self, command: str, status: int = 0) -> list[str]:
        """Return the lines of the table."""
        assert await asyncio.to_thread(main, shlex.split(command)) == status, self._capsys.readouterr()
        self.answered.add(command)
        return self._capsys.readouterr().out.splitlines()

    async def json(self, command: str, status: int = 0) -> Any:
        """Return the document, held to its schema."""
        answered = await asyncio.to_thread(main, [*shlex.split(command), "-o", "json"])
        said = self._capsys.readouterr()
        assert said.out, said.err
        found = json.loads(said.out)
        assert answered == status, found
        if not found["kind"].startswith("Explanation"):  # docs/asking.md has its keys
            jsonschema.validate(found, json.loads((SCHEMAS / f"{found['kind']}.json").read_text()))
        return found


def test_ten_questions_of_an_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = dict(ASKED.findall((ROOT / "docs" / "asking.md").read_text()))
    monkeypatch.setattr(collect, "BETWEEN_S", 0.1)
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh, contextlib.AsyncExitStack() as stack:
            for name in ("near", "far"):
                await stack.enter_async_context(app(mesh.lab.pod(name)))
            with kubectl(mesh, tmp_path, monkeypatch):
                await questions(mesh, stack, Operator(capsys), documented)

    asyncio.run(run())


async def questions(
    mesh: AmbientMesh, stack: contextlib.AsyncExitStack, operator: Operator, documented: dict[str, str]
) -> None:
    far = mesh.lab.pod("far").ipv4
    await ask(mesh.lab.pod("client"), far, 8080)
    await stack.enter_async_context(held(mesh, "client", "far"))
    report = "yesterday.tar.gz"
    assert "files of 2 nodes" in (await operator.table(f"bug-report {report} --no-cluster --quick"))[0]

    nodes = await operator.table("nodes")
    assert {line.split()[0] for line in nodes[1:]} == {"w1", "w2"}
    items = (await operator.json("nodes"))["items"]
    assert all(each["connected"] and each["ready"] for each in items)

    assert "No differences found." in await operator.table(f"changes {report}")
    rules = [{"from": {"principals": ["cluster.local/ns/default/sa/near"]}}]
    mesh.write_mesh(policies={"no-near": {"action": "DENY", "rules": rules}})
    await eventually(lambda: "no-near" in str(mesh.proxies["w2"].dump()["policies"]), "the policy arrives")
    changed = await operator.table(f"changes {report}", 1)
    assert any("added" in line and "no-near" in line for line in changed)

    with pytest.raises((OSError, AssertionError)):
        assert await ask(mesh.lab.pod("near"), far, 8080)
    await ask(mesh.lab.pod("outside"), far, 8080)  # plain
    refused = await operator.table("flows -A --since 5m --verdict dropped --why -o wide")
    assert any("default/near" in line and "default/no-near" in line for line in refused[1:])
    flows = (await operator.json("flows -A --since 5m --verdict dropped --why"))["items"]
    assert "the peer's identity is cluster.local/ns/default/sa/near" in str(flows[0]["clause"])

    why = await operator.json(f"explain --flow {flows[0]['uuid']} --node {flows[0]['node']}", 1)
    assert why["items"][0]["inbound"]["refused"] == "explicitly denied by: default/no-near"

    edges = await operator.table("edges --total --fail-on plain", 1)
    assert "plain" in edges[1]
    await operator.table("edges --total")
    found = (await operator.json("edges --total"))["items"]
    secured = [each for each in found if each["security"] == "mTLS" and each["connections"]]
    assert secured
    assert any(each["connectP99Seconds"] is not None for each in secured)

    ends = (await operator.json("certificates -A --sort-by .notAfter"))["items"]
    await operator.table("certificates -A --sort-by .notAfter")
    moments = [each["notAfter"] for each in ends if each["notAfter"]]
    assert moments == sorted(moments)

    oldest = (await operator.json("connections -A --sort-by .ageSeconds -o wide"))["items"]
    assert (await operator.table("connections -A --sort-by .ageSeconds -o wide"))[0].split()[0] == "NODE"
    assert {each["node"] for each in oldest} == {"w1", "w2"}
    assert oldest[-1]["ageSeconds"] > 0

    assert any("1" in line.split() for line in (await operator.table("stat --total --sort-by .open"))[1:])
    await operator.json("stat --total --sort-by .open")

    checks = (await operator.json("check --no-cluster -A --skip KRN", status=0))["items"]
    by_id = {each["id"]: each for each in checks}
    assert {by_id[name]["severity"] for name in ("IDN1", "IDN3", "XDS1", "XDS3", "NET3", "POL2")} == {"ok"}
    assert by_id["NET1"]["severity"] in ("ok", "warning")  # each node has reached 15008 of a pod on the other

    for command in ("status -A", "workloads -A", "services -A", "policies -A", "denials -A", "log -A"):
        await operator.table(command)
        await operator.json(command)
    for question, command in documented.items():
        words = command.replace("yesterday.tar.gz", report)
        if not words.startswith(("audit", "check")):  # these ask an agent of a cluster, and an API server
            assert words in operator.answered, f"{question} {command}"
    assert len(documented) == 10
