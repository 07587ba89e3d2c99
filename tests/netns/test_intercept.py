"""The command, as an operator uses it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.lab import Lab
from tests.commands import ztunnel
from tests.netns.dumps import everything
from tests.netns.toys import WAIT_S
from tests.programs import needed

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "ztunnel", "intercept"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["productpage", "ratings"]}, rp_filter=1) as lab:
        yield lab


@pytest.fixture
def file(lab: Lab, tmp_path: Path) -> Path:
    path = tmp_path / "node.yaml"
    path.write_text(describe(lab, ["productpage", "ratings"]))
    return path


def describe(lab: Lab, pods: list[str], **changes: object) -> str:
    worker = lab.worker("w1")
    document = {
        "host": {
            "namespace": f"{lab.prefix}w1",
            "addresses": [str(item) for item in worker.wanted().host_addresses],
        },
        "ztunnel": {
            "namespace": f"/run/netns/{lab.prefix}w1-ztunnel",
            "interface": worker.ztunnel.device,
            "addresses": [str(item) for item in worker.ztunnel.addresses],
        }
        | changes,
        "pods": [
            {
                "uid": f"uid-{name}",
                "addresses": [str(item) for item in worker.pods[name].addresses],
                "interface": worker.pods[name].device,
            }
            for name in pods
        ],
    }
    return yaml.safe_dump(document)


def intercept(*words: str | Path, prefix: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    if not prefix:
        return ztunnel("intercept", *map(str, words))
    return subprocess.run(
        [*prefix, *COMMAND, *map(str, words)], capture_output=True, text=True, cwd=ROOT, timeout=30, check=False
    )


def test_show_apply_show_remove(lab: Lab, file: Path) -> None:
    before = everything(lab.worker("w1").place.netns)
    shown = intercept("show", "-f", file)
    assert shown.returncode == 1
    assert "the state differs; apply would do:" in shown.stdout
    applied = intercept("apply", "-f", file)
    assert (applied.returncode, applied.stderr) == (0, "")
    assert "host: + -6 rule priority 103 lookup 100" in applied.stdout
    again = intercept("apply", "-f", file)
    assert again.stdout == "nothing to change\n"
    shown = intercept("show", "-f", file)
    assert shown.returncode == 0
    assert 'ip saddr @mesh_pods4 meta mark set meta mark | 0x100 comment "sent by a member"' in shown.stdout
    assert shown.stdout.endswith("as wanted\n")
    removed = intercept("remove", "-f", file)
    assert removed.returncode == 0
    assert intercept("remove", "-f", file).stdout == "nothing to remove\n"
    assert everything(lab.worker("w1").place.netns) == before


def test_flags_instead_of_a_file(lab: Lab) -> None:
    worker = lab.worker("w1")
    pod = worker.pods["productpage"]
    spaces = ["--host-netns", f"{lab.prefix}w1", "--ztunnel-netns", f"{lab.prefix}w1-ztunnel"]
    node = [
        *("--host-ip", str(worker.place.ipv4), "--ztunnel-ip", str(worker.ztunnel.ipv4)),
        *("--ztunnel-veth", worker.ztunnel.device or "", "--pod", f"uid-1={pod.ipv4},{pod.ipv6}@{pod.device}"),
    ]
    try:
        applied = intercept("apply", *spaces, *node)
        assert (applied.returncode, applied.stderr) == (0, "")
        assert "-6" not in applied.stdout, "only IPv4 was described"
    finally:
        assert intercept("remove", *spaces).returncode == 0


def test_watch_repairs_and_takes_up_an_edited_file(lab: Lab, file: Path) -> None:
    file.write_text(describe(lab, ["productpage"]))
    worker = lab.worker("w1")
    try:
        with subprocess.Popen(
            [*COMMAND, "apply", "-f", str(file), "--watch"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as watching:
            assert watching.stdout is not None
            lines = iter(watching.stdout.readline, "")
            assert any(line.endswith("changes\n") for line in lines)
            assert worker.place.popen([needed("ip"), "rule", "del", "priority", "101"]).wait(WAIT_S) == 0
            assert next(lines) == "host: + rule priority 101 fwmark 0x100/0x100 lookup 101\n"
            assert next(lines) == "1 repairs\n"
            file.write_text(describe(lab, ["productpage", "ratings"]))
            assert next(lines) == "description changed\n"
            assert any("uid-ratings" in line for line in lines)
            watching.send_signal(signal.SIGTERM)
            assert watching.wait(WAIT_S) == 0
        assert intercept("show", "-f", file).returncode == 0, "stopping leaves everything in place"
    finally:
        intercept("remove", "-f", file)


def test_errors_are_one_line_with_what_to_do(lab: Lab, file: Path) -> None:
    def error(text: str, *prefix: str) -> str:
        file.write_text(text)
        done = intercept("apply", "-f", file, prefix=prefix)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line.startswith("ztunnel intercept: ")
        return line

    try:
        good = describe(lab, ["ratings"])
        assert "no interface 'vethgone' in the host namespace" in error(describe(lab, [], interface="vethgone"))
        assert "no network namespace 'gone'" in error(describe(lab, [], namespace="gone"))
        assert "same namespace" in error(describe(lab, [], namespace=f"{lab.prefix}w1"))
        assert "ztunnel.addresses: must be IP addresses, not '10.0.0.300'" in error(
            describe(lab, [], addresses=["10.0.0.300"])
        )
        assert "file: not valid JSON" in error("{")
        unprivileged = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
        assert "needs CAP_SYS_ADMIN; run as root" in error(good, *unprivileged)
        # May enter namespaces, may not change them.
        half = ("setpriv", "--bounding-set=-all,+sys_admin", "--inh-caps=-all")
        assert "needs CAP_NET_ADMIN; run as root" in error(good, *half)
    finally:
        file.write_text(good)
        intercept("remove", "-f", file)


@pytest.mark.parametrize("had_something", [False, True])
def test_what_fails_leaves_what_was_there(lab: Lab, file: Path, had_something: bool) -> None:
    worker = lab.worker("w1")
    before = everything(worker.place.netns)
    wrong = file.with_name("wrong.yaml")
    wrong.write_text(file.read_text().replace(worker.pods["productpage"].device or "", "nosuch0"))
    if had_something:
        assert intercept("apply", "-f", file).returncode == 0
    failed = intercept("apply", "-f", wrong)
    assert failed.returncode == 2
    assert "nosuch0" in failed.stderr
    if had_something:
        assert "uid-productpage" in intercept("show", "-f", file).stdout
        assert intercept("remove", "-f", file).returncode == 0
    assert everything(worker.place.netns) == before


def test_removal_works_when_the_ztunnel_is_gone(lab: Lab, file: Path) -> None:
    before = everything(lab.worker("w1").place.netns)
    assert intercept("apply", "-f", file).returncode == 0
    removed = intercept("remove", "--host-netns", f"{lab.prefix}w1", "--ztunnel-netns", "gone")
    assert removed.returncode == 0
    assert "removing the node's side only" in removed.stdout
    assert everything(lab.worker("w1").place.netns) == before
    assert intercept("remove", "-f", file).returncode == 0
    assert os.path.exists(f"/run/netns/{lab.prefix}w1-ztunnel")
