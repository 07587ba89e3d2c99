"""``make demo``'s program meets its expectations and leaves nothing behind, also when interrupted."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.apiserver import PROGRAMS
from tests.apiserver.programs import needed
from tests.generated import at_night
from tests.limits import WAIT_S
from tproxy.aio.netns import names

pytestmark = pytest.mark.netns
ROOT = Path(__file__).parents[2]
LIMIT_S = 90


#: What runs a command as a user without any rights.
UNPRIVILEGED = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that a user without rights may enter, with room for a Unix socket's name; pytest's is not such."""
    path = Path(tempfile.mkdtemp(prefix="demo-"))
    try:
        os.chown(path, 65534, 65534)
        yield path
    finally:
        shutil.rmtree(path)


def start(folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    command = [*prefix, sys.executable, "-m", "deploy.demo", *arguments]
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


#: How many expectations each mode prints.
EXPECTATIONS = {"node": 21, "inpod": 32}


#: Of the other mode the demo that stays up shows the same, and ends with the same status.
@pytest.mark.parametrize("mode", at_night(["node", "inpod"], ["inpod"]))
def test_everything_comes_out_as_expected(folder: Path, mode: str) -> None:
    demo = start(folder, "--mode", mode)
    output, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, output
    assert output.rstrip().endswith("Everything came out as expected.")
    assert_everything_expected(output, mode)
    assert left_behind(demo.pid, folder) == []


def assert_everything_expected(output: str, mode: str) -> None:
    assert "FAIL" not in output
    assert output.count("\nEverything came out as expected.\n") == 1, output
    assert output.count("  ok  ") == EXPECTATIONS[mode]


@pytest.mark.kube
def test_the_demo_of_a_cluster_comes_out_as_expected(folder: Path) -> None:
    for name in PROGRAMS:
        needed(name)
    demo = start(folder, "--mode", "kube")
    output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 0, output
    assert "FAIL" not in output
    assert output.count("\n  ok  ") == 21
    assert left_behind(demo.pid, folder) == []


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


def cannot_run(prefix: tuple[str, ...]) -> str:
    """Why a demo cannot run so here; empty: it can."""
    own = [*prefix, "unshare", "--user", "--net"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        return "NOT TESTED: no unprivileged user namespaces here"
    command = [*own, sys.executable, "-c", "import deploy.demo, ztunnel"]
    if subprocess.run(command, cwd=ROOT, capture_output=True).returncode:
        return "NOT TESTED: others cannot read this folder, or its interpreter"
    return ""


#: What a command of a demo that stays up must show.
SHOWN = {
    "a pod calls": "called by",
    "its rules": "table inet",
    "why, why not": "verdict: refused",
    "its state": "3 Up|denied .*intruder",
    "connections": "10.96.183.192:9080",
    "plain text": "GET /reviews/0" if shutil.which("tshark") else "packets",
    "what if": "intruder.default",
    "everything": "workloadState",
    "more log": "current log level is .*debug",
    "admin": "admin commands are",
    "live page": "<title>",
}


@pytest.mark.parametrize(("mode", "user"), [("inpod", "nobody"), ("node", "root")])
def test_what_a_demo_that_stays_up_hints_at_works_from_another_terminal(
    folder: Path, mode: str, user: str
) -> None:
    """As it is printed, by the same user, in another folder, through a pipe. All expectations have come out by
    then.
    """
    prefix = UNPRIVILEGED if user == "nobody" else ()
    if prefix and (reason := cannot_run(prefix)):
        pytest.skip(reason)
    demo = start(folder, "--mode", mode, "--keep", prefix=prefix)
    try:
        lines = _lines_of_a_demo_that_stays_up(demo)
        hints = _hints(lines)
        with ThreadPoolExecutor(3) as threads:
            running = {
                name: threads.submit(_run, command, SHOWN[name], folder, prefix) for name, command in hints.items()
            }
            shown = {name: done.result() for name, done in running.items()}
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0
    assert_everything_expected("".join(lines), mode)
    assert {"connections", "live page", "plain text", "why, why not"} <= set(hints)
    for name, text in shown.items():
        assert re.search(SHOWN[name], text), f"{name}: {hints[name]}\n{text}"
    for path in folder.glob("*.pcapng"):
        path.unlink()
    assert left_behind(demo.pid, folder) == []


def _lines_of_a_demo_that_stays_up(demo: "subprocess.Popen[str]") -> list[str]:
    """Return what a demo prints until its last hint."""
    assert demo.stdout is not None
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if line.startswith("and intruder is refused"):
            break
    return lines


def _hints(lines: list[str]) -> dict[str, str]:
    """Return the commands that a demo prints, by what they show."""
    begin = next((number for number, line in enumerate(lines) if line.startswith("Still running")), None)
    assert begin is not None, "".join(lines)
    found = {line[2:17].strip(): line[17:].partition("   (")[0].strip() for line in lines[begin + 1 : -2]}
    files = [found.pop(name) for name in ("mesh file", "logs", "pods") if name in found]
    for pattern in files:
        assert list(Path("/").glob(pattern[1:])), pattern
    if "live page" in found:
        found["live page"] = f"curl -s {found['live page']}"
    return found


def _run(command: str, wanted: str, folder: Path, prefix: tuple[str, ...]) -> str:
    """What a command prints, once it shows what it should: the calls that it shows have only just begun."""
    deadline = time.monotonic() + WAIT_S
    while True:
        done = subprocess.run(
            [*prefix, "bash", "-c", command],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        if re.search(wanted, done.stdout) or time.monotonic() > deadline:
            return done.stdout


@pytest.mark.parametrize(
    ("mode", "moment", "number"),
    [
        ("node", "Setting the stage", signal.SIGINT),
        ("node", "Setting the stage", signal.SIGTERM),
        ("inpod", "the proxy of worker2 is replaced", signal.SIGINT),
        *at_night(
            [
                ("inpod", "productpage looks up", signal.SIGTERM),
                ("node", "productpage calls the service", signal.SIGINT),
                ("node", "productpage calls the service", signal.SIGTERM),
                ("inpod", "productpage looks up", signal.SIGINT),
                ("inpod", "the proxy of worker2 is replaced", signal.SIGTERM),
                # Interrupted by a terminal in the test of the hints.
                ("node", "Still running", signal.SIGTERM),
                ("inpod", "Still running", signal.SIGTERM),
            ],
            [],
        ),
    ],
)
def test_an_interrupted_demo_leaves_nothing(folder: Path, number: signal.Signals, mode: str, moment: str) -> None:
    demo = start(folder, "--mode", mode, "--keep")
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
    assert left_behind(demo.pid, folder) == []
