"""The five examples: each loads with its options, has the promised effect, and is short."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ztunnel.addons import Cut, Delay, Deny, Prefer
from ztunnel.addons.testing import AddonError, Playbook, inbound, outbound, workload
from ztunnel.cli import main
from ztunnel.proxy.addons.load import find_class
from ztunnel.proxy.addons.settings import parse_spec

FOLDER = Path(__file__).parents[3] / "examples" / "addons"
OPTIONS = {
    "rate_limit": [],
    "fault_injection": ["fault-injection.labels=app=server", "fault-injection.refuse=true"],
    "egress_allow_list": ["egress-allow-list.hosts=example.com"],
    "canary": ["canary.service=server.default.svc.cluster.local"],
    "audit_log": ["audit-log.file={folder}/audit.db"],
}


def play(example: str, **options: Any) -> Playbook:
    cls, _ = find_class(parse_spec(str(FOLDER / f"{example}.py")))
    return Playbook(cls, **options)


def test_there_are_five_and_each_is_short() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(OPTIONS)
    for name in OPTIONS:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 80, name


@pytest.mark.parametrize("name", OPTIONS)
def test_an_example_has_no_fault(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--addon-option={each.format(folder=tmp_path)}" for each in OPTIONS[name]]
    assert main(["addon", "check", "--no-mypy", str(FOLDER / f"{name}.py"), *options]) == 0
    assert capsys.readouterr().err == ""


def test_identities_have_their_own_rates() -> None:
    limit = play("rate_limit", per_second=2, burst=3)
    now_s = [100.0]
    limit.addon.now_s = lambda: now_s[0]
    for _ in range(3):
        limit.accepting(inbound("noisy"), expect=None)
    denied = limit.accepting(inbound("noisy"), expect=Deny)
    assert denied == Deny("more than 2 connections per second of spiffe://cluster.local/ns/default/sa/noisy")
    limit.accepting(inbound("quiet"), expect=None)
    now_s[0] += 0.5
    limit.accepting(inbound("noisy"), expect=None)
    limit.accepting(inbound("noisy"), expect=Deny)
    assert limit.metrics()[0].values == {("default",): 2}
    with pytest.raises(AddonError, match="per_second must be above 0"):
        play("rate_limit", per_second=0)


def test_a_rate_can_be_of_some_namespaces() -> None:
    limit = play("rate_limit", per_second=1, burst=1, namespaces="shop")
    for _ in range(5):
        limit.accepting(inbound("a", "b.other"), expect=None)
    limit.accepting(inbound("a", "b.shop"), expect=None)
    limit.accepting(inbound("a", "b.shop"), expect=Deny)


def test_a_share_of_a_labels_connections_has_faults() -> None:
    faults = play(
        "fault_injection", labels="app=reviews", share=0.5, delay_s=2, refuse=True, cut_after_bytes=10, seed=1
    )
    found = [faults.connecting(outbound("a", "reviews")) for _ in range(400)]
    assert 150 < sum(each is not None for each in found) < 250
    assert {type(each) for each in found if each is not None} == {Delay, Deny, Cut}
    assert [faults.connecting(outbound("a", "ratings")) for _ in range(50)] == [None] * 50
    with pytest.raises(AddonError, match="no fault: set"):
        play("fault_injection", labels="app=reviews")


def test_what_leaves_the_mesh_needs_an_allowed_name() -> None:
    allow = play("egress_allow_list", hosts="api.example.com,*.pypi.org")
    outside = {"destination": workload("", labels={}), "service": "", "destination_address": "198.51.100.7"}

    def leaving(**more: Any) -> Any:
        return outbound("app", **(outside | more))

    allow.connecting(outbound("app", "server"), expect=None)
    allow.connecting(leaving(names=("api.example.com",)), expect=None)
    allow.connecting(leaving(server_name="files.pypi.org"), expect=None)
    allow.connecting(
        leaving(names=("evil.example",)), expect=Deny("198.51.100.7 (evil.example) has no allowed name")
    )
    allow.connecting(leaving(), expect=Deny("198.51.100.7 has no allowed name"))
    # An allowed name of the address does not excuse another one in the ClientHello.
    both = leaving(names=("api.example.com",), server_name="evil.example")
    allow.connecting(both, expect=Deny("evil.example is not allowed"))
    limited = play("egress_allow_list", hosts="api.example.com", namespaces="shop")
    limited.connecting(leaving(), expect=None)


def test_a_share_of_a_services_connections_prefers_the_canary() -> None:
    canary = play("canary", service="reviews.default.svc.cluster.local", share=0.05, seed=1)
    found = [canary.connecting(outbound("a", "reviews")) for _ in range(2000)]
    assert 60 < sum(each == Prefer({"version": "v2"}) for each in found) < 140
    canary.connecting(outbound("a", "ratings"), expect=None)
    assert canary.metrics()[0].values == {("reviews.default.svc.cluster.local",): canary.addon.chosen}


def test_pairs_are_recorded_once(tmp_path: Path) -> None:
    file = tmp_path / "audit.db"
    audit = play("audit_log", file=str(file))
    for _ in range(3):
        audit.opened(outbound("a.one", "b.two"))
    audit.opened(inbound("c", "d"))
    audit.done()
    again = play("audit_log", file=str(file))
    again.opened(outbound("a.one", "b.two"))
    again.done()
    with sqlite3.connect(file) as database:
        rows = database.execute(
            "select direction, source, destination, port from first_seen order by source"
        ).fetchall()
    database.close()
    assert rows == [("inbound", "default/c", "default/d", 8080), ("outbound", "one/a", "two/b", 8080)]


def test_the_examples_import_only_the_api_and_the_standard_library() -> None:
    for name in OPTIONS:
        for line in (FOLDER / f"{name}.py").read_text().splitlines():
            if line.startswith(("import ", "from ")):
                module = line.split()[1]
                assert module == "ztunnel.addons" or module.partition(".")[0] in sys.stdlib_module_names


def test_the_examples_are_typed() -> None:
    root = FOLDER.parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", *map(str, FOLDER.glob("*.py"))],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
