"""The command line, without pods."""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.limits import WAIT_S
from ztunnel.cli import main
from ztunnel.node.agent.cluster import serve
from ztunnel.node.agent.cni.conflist import TYPE
from ztunnel.node.agent.command import add_arguments
from ztunnel.node.agent.description import PodDescription
from ztunnel.node.agent.enroller import Enroller
from ztunnel.node.agent.pods_file import PodsFile


def test_check_counts_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("pods: {a: {netns: x}, b: {pid: 1}}")
    assert main(["agent", "--check", "--state", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 2 pods\n"


@pytest.mark.parametrize("check", [["--check"], []], ids=["check", "serve"])
def test_faults_are_listed_with_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: list[str]
) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("pods: {a: {netns: 1}, b: {}}")
    assert main(["agent", *check, "--state", str(path), "--socket", str(tmp_path / "zds.sock")]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{path}: pods.a.netns: must be a name or a path, not 1",
        f"{path}: pods.b: needs netns or pid, and not both",
    ]
    assert not (tmp_path / "zds.sock").exists()


def polled_twice(file: PodsFile) -> tuple[PodDescription, ...] | None:
    """Return the second of two polls: a file that is written in place has to stay the same for two."""
    assert file.edited() is None
    return file.edited()


def test_an_edit_that_is_no_text_leaves_the_last_good_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("pods: {a: {netns: x}}")
    file = PodsFile(path)
    assert len(file.read()) == 1
    path.write_bytes(b"\xff\xfe")
    assert polled_twice(file) is None
    assert f"{path}: not UTF-8 text at byte 0; the last good state stays active" in caplog.text
    path.write_text("pods: {}")
    assert polled_twice(file) == ()


def test_emptied_file_leaves_the_last_good_state_until_it_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("pods: {a: {netns: x}}")
    file = PodsFile(path)
    pods = file.read()
    path.write_text("")
    assert polled_twice(file) is None
    assert polled_twice(file) is None
    assert caplog.text.count(f"{path}: is empty, as while it is written; the last good state stays active") == 1
    path.write_text("pods: {a: {netns: x}} # the same")
    assert polled_twice(file) == pods
    path.write_text("# no pods")
    assert polled_twice(file) == ()


def test_pods_at_the_end_of_a_file_stay_while_it_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("pods:\n a: {netns: x}\n b: {netns: y}\n")
    file = PodsFile(path)
    assert len(file.read()) == 2
    with path.open("w") as writing:
        for part in ("pods:\n", " a: {netns: x}\n", " b: {netns: z}\n"):
            writing.write(part)
            writing.flush()
            assert file.edited() is None
    changed = file.edited()
    assert changed is not None
    assert [pod.netns for pod in changed] == ["x", "z"]


def test_a_replaced_file_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("pods: {a: {netns: x}}")
    file = PodsFile(path)
    assert len(file.read()) == 1
    tmp_path.joinpath("new").write_text("pods: {}")
    tmp_path.joinpath("new").rename(path)
    assert file.edited() == ()


def test_a_socket_that_cannot_be_had_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "--socket", str(tmp_path / "missing" / "zds.sock")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ztunnel agent: ")
    assert "missing" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kubeconfig=/nowhere"], "ztunnel agent: /nowhere: "),
        (["--metrics=x"], "ztunnel agent: --metrics: 'x' is neither a port nor ip:port"),
        (
            ["--install-cni=/opt/cni/bin"],
            "ztunnel agent: --install-cni: needs BIN:CONF, two folders, and --cni-socket",
        ),
        (["--daemonset=x"], "ztunnel agent: --daemonset: 'x' is not namespace/name"),
    ],
)
def test_what_an_agent_of_a_cluster_cannot_use_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["agent", "--kube", f"--socket={tmp_path}/zds.sock", *options]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(said)
    assert not (tmp_path / "zds.sock").exists()


def serve_until(tmp_path: Path, ready: Callable[[], bool]) -> None:
    """Run an agent with --remove and --install-cni, without an API server, until it is ready."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {}}],"
        " clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]}"
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers())
    flags = [f"--socket={tmp_path}/zds", f"--kubeconfig={kubeconfig}", "--probe-user=none", "--remove"]
    cni = [f"--install-cni={tmp_path}/bin:{tmp_path}/net.d", f"--cni-socket={tmp_path}/cni"]
    args = parser.parse_args(["agent", "--kube", *flags, *cni])

    async def end(stop: asyncio.Event) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                await asyncio.sleep(0.01)
        stop.set()

    async def body() -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(end(stop))
            await serve(args, tmp_path / "record", stop)

    asyncio.run(body())


def test_removed_plugin_is_not_installed_again_while_pods_leave_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tmp_path / "net.d" / "10-net.conflist"
    for folder in ("bin", "net.d"):
        (tmp_path / folder).mkdir()
    network.write_text('{"name": "net", "plugins": [{"type": "bridge"}]}')

    async def withdraw(self: Enroller, grace_s: float) -> None:
        await asyncio.sleep(1.0)  # the installer checks its folders 50 ms after a change

    monkeypatch.setattr(Enroller, "withdraw", withdraw)
    serve_until(tmp_path, lambda: TYPE in network.read_text())
    assert TYPE not in network.read_text()
    assert not list((tmp_path / "bin").iterdir())


def test_pods_leave_the_mesh_also_if_the_plugin_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    withdrawn = []

    async def withdraw(self: Enroller, grace_s: float) -> None:
        withdrawn.append(grace_s)

    monkeypatch.setattr(Enroller, "withdraw", withdraw)
    serve_until(tmp_path, lambda: (tmp_path / "zds").exists())
    assert len(withdrawn) == 1
    assert f"cni: not removed: {tmp_path}/net.d: no such file or directory" in caplog.text
