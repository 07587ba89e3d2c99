"""``make demo``'s program meets its expectations and leaves nothing behind, also when interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.apiserver import PROGRAMS
from tests.apiserver.programs import needed
from tproxy.aio.netns import names

pytestmark = pytest.mark.netns
ROOT = Path(__file__).parents[2]
LIMIT_S = 90


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "deploy.demo", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_behind(pid: int, folder: Path) -> list[str]:
    namespaces = [name for name in names() if name.startswith(f"pt-{pid}-")]
    processes = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and str(folder).encode() in _environment(entry)
    ]
    return namespaces + processes + [path.name for path in folder.iterdir()]


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(("mode", "expectations"), [("node", 21), ("inpod", 30)])
def test_everything_comes_out_as_expected(tmp_path: Path, mode: str, expectations: int) -> None:
    demo = start(tmp_path, "--mode", mode)
    output, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, output
    assert "FAIL" not in output
    assert output.rstrip().endswith("Everything came out as expected.")
    assert output.count("  ok  ") == expectations
    assert left_behind(demo.pid, tmp_path) == []


@pytest.mark.kube
def test_the_demo_of_a_cluster_comes_out_as_expected(tmp_path: Path) -> None:
    for name in PROGRAMS:
        needed(name)
    demo = start(tmp_path, "--mode", "kube")
    output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 0, output
    assert "FAIL" not in output
    assert output.count("  ok  ") == 20
    assert left_behind(demo.pid, tmp_path) == []


def test_without_an_api_server_its_demo_says_how_to_get_one(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": "/nowhere",
        "ETCD": "",
        "KUBE_APISERVER": "",
    }
    command = [sys.executable, "-m", "deploy.demo", "--mode", "kube"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stderr.startswith("demo: this demo needs etcd and kube-apiserver: run `make kube` once")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        ("node", "Setting the stage"),
        ("node", "productpage calls the service"),
        ("node", "Still running"),
        ("inpod", "productpage looks up"),
        ("inpod", "the proxy of worker2 is replaced"),
        ("inpod", "Still running"),
    ],
)
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, number: signal.Signals, mode: str, moment: str
) -> None:
    demo = start(tmp_path, "--mode", mode, "--keep")
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(moment):
            break
    demo.send_signal(number)
    try:
        demo.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        demo.terminate()  # or it would stay beside every later test
        demo.communicate(timeout=LIMIT_S)
        raise
    assert demo.returncode != 0 or moment == "Still running"
    assert left_behind(demo.pid, tmp_path) == []
