"""The command line, without pods."""

from pathlib import Path

import pytest

from ztunnel.cli import main
from ztunnel.node.agent.description import PodDescription
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
