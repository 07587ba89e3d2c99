"""Checks that the files of ``examples/``, and those printed in their documentation, load and run."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.interop.loopback import application, echoes, listening, serving, until
from tests.ports import free_port
from xds.dialects.istio.local_file import parse_local_file
from ztunnel.control_plane import mesh
from ztunnel.node.agent import description as pods
from ztunnel.node.intercept import description as node

EXAMPLES = Path(__file__).parents[1] / "examples"


def ztunnel(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ztunnel", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def tries() -> list[str]:
    """Return the commands of the page about the examples that end by themselves."""
    found = re.findall(r"\| `([^`|]*\bztunnel [^`|]*)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return [line for line in found if " agent " not in line and not line.endswith("ztunnel proxy")]


@pytest.mark.parametrize("line", tries())
def test_each_command_of_the_page_works(line: str) -> None:
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        ["sh", "-c", line], cwd=EXAMPLES.parent, env={**os.environ, "PATH": path}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()[:200] if done.returncode else "") == (0, "")


def test_the_example_mesh_file_is_valid() -> None:
    done = ztunnel("control-plane", str(EXAMPLES / "mesh.yaml"), "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("2 nodes, 3 pods, 1 services\n")


def test_the_pods_are_those_of_a_node_of_the_mesh() -> None:
    described = pods.parse_pods((EXAMPLES / "pods.yaml").read_text())
    known = mesh.parse_mesh((EXAMPLES / "mesh.yaml").read_text()).pods
    for each in described:
        in_mesh = known[f"{each.info.namespace}/{each.info.name}"]
        assert in_mesh.node == "worker-1"
        assert in_mesh.identity.service_account == each.info.service_account


def test_the_example_node_file_is_valid() -> None:
    described = node.parse((EXAMPLES / "node.yaml").read_text(), node.Flags())
    assert [member.uid for member in described.node.members] == ["productpage"]


def test_the_example_local_mesh_is_valid() -> None:
    read = parse_local_file((EXAMPLES / "local.yaml").read_text())
    assert [workload.name for workload in read.workloads] == ["productpage", "reviews"]


@pytest.mark.parametrize(
    "options",
    [["--template", "sidecar", "--image", "example.com/ztunnel:1"], ["--config", str(EXAMPLES / "injector.yaml")]],
)
def test_the_application_gets_what_belongs_to_the_mesh(options: list[str]) -> None:
    done = ztunnel("inject", "-f", str(EXAMPLES / "app.yaml"), *options)
    assert (done.returncode, done.stderr) == (0, "Deployment web: policy\n")
    text = (EXAMPLES / "app.yaml").read_text()
    before, comment = "\n---\n", "# What belongs to a pod is in the template of its workload.\n"
    assert done.stdout.startswith(text[: text.index(before)] + before + comment)
    _, deployment = yaml.safe_load_all(done.stdout)
    pod = deployment["spec"]["template"]["spec"]
    added = [each["name"] for each in pod["initContainers"]]
    if options[0] == "--config":
        assert added == ["mesh-gate"]
        return
    assert added == ["mesh-init", "istio-proxy"]
    assert pod["initContainers"][0]["args"][-2:] == ["-d", "15090,15021,15020"]
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/app-health/web/readyz"


def test_an_unknown_template_of_the_command_line_is_named() -> None:
    done = ztunnel("inject", "-f", str(EXAMPLES / "app.yaml"), "--template", "nope")
    assert (done.returncode, done.stdout) == (1, "")
    assert "document 1, Deployment web: there is no template 'nope'" in done.stderr


def test_the_bootstrap_carries_a_connection() -> None:
    path = EXAMPLES / "bootstrap.yaml"
    assert ztunnel("proxy", "--bootstrap", str(path), "--validate").returncode == 0
    with ExitStack() as stack:
        port = free_port()
        text = path.read_text().replace("15101", str(port)).replace("8080", str(application(echoes, stack)))
        copy = Path(stack.enter_context(_folder())) / "bootstrap.yaml"
        copy.write_text(text)
        stack.enter_context(serving("ours", copy))
        until(lambda: listening(port))
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(b"hi")
            assert client.recv(2) == b"hi"


def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()


def test_every_file_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.yaml"):
        assert f"`{path.name}`" in table


@pytest.mark.parametrize("module", [mesh, pods, node])
def test_what_the_reader_documents_is_what_it_reads(module: ModuleType) -> None:
    """Each key of the documented file is accepted by the reader, which reports no unknown key."""
    assert module.__doc__ is not None
    block = module.__doc__.partition("::\n\n")[2]
    lines = [line for line in block.splitlines() if line.startswith("    ") or not line]
    text = "\n".join(line[4:] for line in lines).replace("[...]", "[x]")
    assert yaml.safe_load(text)
    read = {mesh: mesh.parse_mesh, pods: pods.parse_pods, node: lambda text: node.parse(text, node.Flags())}
    faults: list[str] = []
    try:
        read[module](text)  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001  each reader has an error of its own, with faults
        faults = getattr(error, "faults", [str(error)])
    assert not [fault for fault in faults if "unknown" in fault]
