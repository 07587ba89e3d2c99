"""Pods' namespaces found by processes: a folder like /proc whose namespaces are real."""

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from deploy.lab import Lab
from deploy.processes import Proc
from ztunnel.node.agent.scan import kubelet_user, pod_namespaces

pytestmark = pytest.mark.netns
UID, OTHER = "2b1c7f0e-8a4d-4d5c-9c1a-0f6e2a7b3c4d", "00000000-8a4d-4d5c-9c1a-0f6e2a7b3c4d"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["web", "db"]}) as lab:
        yield lab


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    proc = Proc(tmp_path)
    proc.add(1, None)
    (tmp_path / "self").symlink_to("1")
    (tmp_path / "meminfo").write_text("")
    return proc


def test_the_oldest_process_of_the_pod_names_its_namespace(lab: Lab, proc: Proc) -> None:
    web = lab.pod("web")
    proc.add(30, web.netns, UID, started=300)
    proc.add(20, web.netns, UID, started=200)
    proc.add(10, web.netns, "", started=100)  # an intruder without a pod
    found = pod_namespaces({UID: frozenset({web.ipv6})}, proc.folder)
    assert found[UID].path == str(proc.folder / "20/ns/net")
    assert found[UID].inode == web.netns.inode


def test_any_address_of_the_pod_suffices_and_none_does_not(lab: Lab, proc: Proc) -> None:
    web = lab.pod("web")
    proc.add(20, web.netns, UID)
    tailscale = ip_address("100.64.0.1")
    assert UID in pod_namespaces({UID: frozenset({web.ipv4, tailscale})}, proc.folder)
    assert pod_namespaces({UID: frozenset({tailscale})}, proc.folder) == {}
    assert pod_namespaces({UID: frozenset()}, proc.folder) == {}
    assert pod_namespaces({OTHER: frozenset({web.ipv4})}, proc.folder) == {}


def test_a_process_in_a_foreign_namespace_does_not_make_it_the_pods(lab: Lab, proc: Proc) -> None:
    web, db = lab.pod("web"), lab.pod("db")
    proc.add(10, db.netns, UID, started=1)  # older, but there is no address of web
    proc.add(20, web.netns, UID, started=2)
    proc.add(21, None, UID, started=0)  # host network
    assert pod_namespaces({UID: frozenset({web.ipv4})}, proc.folder)[UID].inode == web.netns.inode
    assert pod_namespaces({UID: frozenset({web.ipv4})}, proc.folder, taken=[web.netns.inode]) == {}


def test_what_cannot_be_read_is_passed_over(lab: Lab, proc: Proc) -> None:
    web = lab.pod("web")
    (proc.folder / "5").mkdir()
    proc.add(6, web.netns, UID)
    (proc.folder / "6/cgroup").unlink()
    proc.add(7, web.netns, UID)
    (proc.folder / "7/stat").write_text("7 (x) S")
    proc.add(8, web.netns, UID)
    (proc.folder / "8/ns/net").unlink()
    (proc.folder / "8/ns/net").symlink_to("/nowhere")
    assert pod_namespaces({UID: frozenset({web.ipv4})}, proc.folder) == {}
    proc.add(9, web.netns, UID)
    assert UID in pod_namespaces({UID: frozenset({web.ipv4})}, proc.folder)


def test_kubelets_user_is_that_of_its_process(proc: Proc) -> None:
    assert kubelet_user(proc.folder) is None
    proc.add(44, None, name="kubelet")
    assert kubelet_user(proc.folder) == 8
