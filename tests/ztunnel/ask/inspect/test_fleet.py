"""All nodes at once: a script in kubectl's place connects to two proxies, of which one can be silent."""

import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.ztunnel.ask.inspect.harness import RUST, pages
from tests.ztunnel.ask.inspect.test_kubectl import pod
from ztunnel.ask.inspect.fleet import MOST_AT_ONCE, ask_all
from ztunnel.ask.inspect.kubectl import PROXY, Kubectl
from ztunnel.ask.inspect.nodes import NODE_STATUS, of_mesh
from ztunnel.ask.inspect.source import ADDRESS
from ztunnel.cli import main
from ztunnel.runtime.console.output import Answer, table

Output = pytest.CaptureFixture[str]
SCHEMAS = Path(__file__).parents[4] / "docs" / "schemas"

SCRIPT = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
*port-forward*pod/ztunnel-3*) echo 'error: unable to forward port: the pod does not run' >&2; exit 1 ;;
*port-forward*pod/*)
    name=${{6#pod/}}; name=$(echo "$*" | sed 's/.*pod\\/\\([^ ]*\\).*/\\1/')
    echo "Forwarding from 127.0.0.1:$(cat {folder}/$name) -> 15000"
    exec sleep 600 ;;
*app=ztunnel*) cat {folder}/ztunnels ;;
*app=web*) cat {folder}/webs ;;
*) echo 'error: not expected' >&2; exit 1 ;;
esac
"""
OTHER = {
    **RUST,
    "workloads": [{**RUST["workloads"][0], "status": "Unhealthy"}, *RUST["workloads"][1:]],
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two nodes with answers."""
    first, second = (json.dumps(dump).encode() for dump in (RUST, OTHER))
    with pages({"/config_dump": first}) as one, pages({"/config_dump": second}) as two:
        script = tmp_path / "bin" / "kubectl"
        script.parent.mkdir()
        script.write_text(SCRIPT.format(folder=tmp_path))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
        for name, address in (("ztunnel-1", one), ("ztunnel-2", two)):
            (tmp_path / name).write_text(address.rpartition(":")[2])
        proxies(tmp_path, ("ztunnel-1", "n1"), ("ztunnel-2", "n2"))
        yield tmp_path


def proxies(folder: Path, *names: tuple[str, str]) -> None:
    pods = [pod(name, "istio-system", node=node, labels={"app": "ztunnel"}) for name, node in names]
    old = pod("ztunnel-0", "istio-system", node="n1", labels={"app": "ztunnel"}, created="2020-01-01T00:00:00Z")
    (folder / "ztunnels").write_text(json.dumps({"items": [*pods, old]}))


def printed_json(capsys: Output) -> Any:
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads((SCHEMAS / f"{found['kind']}.json").read_text()))
    return found


def test_a_column_says_which_node(cluster: Path, capsys: Output) -> None:
    assert main(["connections", "-A"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["NODE", "WORKLOAD"]
    assert [line.split()[0] for line in lines[1:]] == ["n1", "n1", "n2", "n2"]
    assert main(["connections", "-A", "-o", "json"]) == 0
    assert [item["node"] for item in printed_json(capsys)["items"]] == ["n1", "n1", "n2", "n2"]


def test_a_silent_node_is_listed_and_is_the_exit_status(cluster: Path, capsys: Output) -> None:
    proxies(cluster, ("ztunnel-1", "n1"), ("ztunnel-3", "n3"))
    assert main(["certificates", "-A"]) == 2
    said = capsys.readouterr()
    assert {line.split()[0] for line in said.out.splitlines()[1:]} == {"n1"}
    assert said.err.startswith("no answer from node n3: kubectl port-forward to istio-system/ztunnel-3: error: un")
    assert main(["certificates", "-A", "-o", "json"]) == 2
    assert [silent["node"] for silent in printed_json(capsys)["silent"]] == ["n3"]


def test_a_node_whose_proxy_does_not_run_is_named(cluster: Path, capsys: Output) -> None:
    found = json.loads((cluster / "ztunnels").read_text())["items"]
    waiting = [
        pod(
            name, "istio-system", node=node, labels={"app": "ztunnel"}, phase=phase, created="2027-01-01T00:00:00Z"
        )
        for name, node, phase in (
            ("ztunnel-3", "n3", "Pending"),
            ("ztunnel-4", "n1", "Pending"),  # another one runs there
            ("ztunnel-5", "n5", "Succeeded"),
        )
    ]
    (cluster / "ztunnels").write_text(json.dumps({"items": [*found, *waiting]}))
    assert main(["nodes", "-o", "json"]) == 2
    said = printed_json(capsys)
    assert [each["node"] for each in said["items"]] == ["n1", "n2"]
    assert [each["node"] for each in said["silent"]] == ["n3"]
    assert "the pod does not run" in said["silent"][0]["reason"]


def test_what_proxies_say_of_the_mesh_is_said_once(cluster: Path, capsys: Output) -> None:
    assert main(["workloads", "-A", "-o", "wide"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[1], line[6], line[-1]) for line in lines] == [
        ("a", "Healthy", "n1"),
        ("c", "Healthy", "all"),
        ("a", "Unhealthy", "n2"),
    ]


def test_labels_choose_nodes_and_connections(cluster: Path, capsys: Output) -> None:
    (cluster / "webs").write_text(json.dumps({"items": [pod("a", "default", node="n2")]}))
    assert main(["connections", "-l", "app=web"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["n2", "a.default"]] * 2
    (cluster / "webs").write_text(json.dumps({"items": [pod("z", "default", node="n2")]}))
    assert main(["connections", "-l", "app=web"]) == 0
    assert capsys.readouterr().out == "No connections found.\n"


def test_kubectls_flags_are_passed_on(cluster: Path, capsys: Output) -> None:
    words = ["--context", "prod", "--kubeconfig", "/k", "--as", "bob", "--request-timeout", "7s"]
    assert main(["services", "-A", *words]) == 0
    calls = (cluster / "calls").read_text().splitlines()
    assert all(call.startswith("--context prod --kubeconfig /k --as bob ") for call in calls)
    with pytest.raises(SystemExit):
        main(["services", "-A", "--request-timeout", "soon"])


def test_no_proxy_at_all(cluster: Path, capsys: Output) -> None:
    (cluster / "ztunnels").write_text('{"items": []}')
    assert main(["status", "-A"]) == 2
    assert capsys.readouterr().err == "ztunnel status: no ztunnel runs: no pod has the label app=ztunnel\n"


def test_few_nodes_are_asked_at_a_time(cluster: Path) -> None:
    port = (cluster / "ztunnel-1").read_text()
    places = {f"n{number}": ("istio-system", f"many-{number}") for number in range(3 * MOST_AT_ONCE)}
    for _, name in places.values():
        (cluster / name).write_text(port)
    running, most, lock = 0, 0, threading.Lock()
    gate = threading.Barrier(MOST_AT_ONCE, timeout=60)

    def ask(node: str, address: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait()
        with lock:
            running -= 1
        return address

    found = ask_all(Kubectl(), PROXY, places, ask)
    assert list(found.by_node) == list(places)
    assert not found.silent
    assert most == MOST_AT_ONCE


def test_a_line_for_each_node(cluster: Path, capsys: Output) -> None:
    assert main(["nodes"]) == 1  # a certificate is missing
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["NODE", "VERSION", "READY"]
    assert [line.split()[0] for line in lines] == ["n1", "n2"]
    assert main(["nodes", "-o", "json"]) == 1
    first, _ = printed_json(capsys)["items"]
    assert (first["podsUp"], first["pods"], first["certificates"], first["certificatesMissing"]) == (1, 2, 1, 1)
    assert (first["ready"], first["denials"], first["connections"]) == (None, None, 2)
    assert first["firstExpiry"] == "2026-11-22T11:25:15Z"


def test_the_oldest_connection_of_our_proxy_is_named() -> None:
    def connection(age: float, source: str) -> dict[str, Any]:
        return {"src": source, "actualDst": "10.0.0.9:80", "ageSeconds": age}

    dump = {
        "workloads": [],
        "certificates": [],
        "controlPlane": {"address": "i:1", "connected": False, "awaySeconds": 70.0},
        "denials": [{"count": 3}, {"count": 4}],
        "workloadState": {
            "u": {
                "info": {"name": "a", "namespace": "shop"},
                "connections": {"inbound": [connection(5.0, "x:1")], "outbound": [connection(90.0, "y:2")]},
            }
        },
    }
    check = {"ready": True, "controlPlane": {"updatedSecondsAgo": 12.5}}
    found = of_mesh(dump, check)
    assert (found.oldest_seconds, found.oldest) == (90.0, "shop/a y:2 to 10.0.0.9:80")
    assert (found.ready, found.connected, found.away_seconds, found.last_update_seconds) == (
        True,
        False,
        70.0,
        12.5,
    )
    assert found.denials == 7
    assert table(Answer(kind=NODE_STATUS, items=[found]))[1][3:5] == ("LOST 1m10s ago", "12s")


@pytest.mark.parametrize("command", ["check --no-cluster", "nodes", "connections", "services", "flows"])
def test_an_answer_of_an_unexpected_form_does_not_hide_other_nodes(
    cluster: Path, capsys: Output, command: str
) -> None:
    flow = b'{"flow": {"time": "2026-11-26T12:00:01Z", "IP": {"source": "nonsense"}}}'
    odd = {"workloads": 5, "services": [7], "workloadState": {"a": {"info": 5, "connections": 5}}}
    words = [*command.split(), "-A", *(["--from", "10.0.0.0/8"] if command == "flows" else [])]
    with pages({"/config_dump": json.dumps(odd).encode(), "/check": b"[1]", "/flows": flow}) as address:
        (cluster / "ztunnel-2").write_text(address.rpartition(":")[2])
        assert main([*words, "-o", "json"]) == 2
    silent = {each["node"]: each["reason"] for each in json.loads(capsys.readouterr().out)["silent"]}
    assert "n2" in silent
    assert ("n1" in silent) == (command == "flows")  # it has no recorder
    assert "unexpected form" in silent["n2"] or "not a config_dump" in silent["n2"]


def test_a_node_of_the_other_dialect_is_named(cluster: Path, capsys: Output) -> None:
    table = {"/connections": b'{"connections": []}', "/config_dump": b'{"configs": []}'}
    with pages(table) as address:
        (cluster / "ztunnel-2").write_text(address.rpartition(":")[2])
        assert main(["connections", "-A"]) == 2
    said = capsys.readouterr()
    assert {line.split()[0] for line in said.out.splitlines()[1:]} == {"n1"}
    assert said.err.startswith("no answer from node n2: its table is one of EnvoyConnection, not of Connection")


@pytest.mark.parametrize(
    "words",
    [
        ["nodes"],
        ["stat", "--total"],
        ["edges", "--total"],
        ["changes", "DUMP"],
        ["bug-report", "ARCHIVE", "--no-cluster", "--quick"],
    ],
    ids=lambda words: words[0],
)
def test_the_default_address_is_a_choice_as_well(words: list[str], cluster: Path) -> None:
    """These commands query all nodes without it; a laptop has no nodes, and an archive of all is another one."""
    files = {"DUMP": str(cluster / "dump"), "ARCHIVE": str(cluster / "archive")}
    (cluster / "dump").write_text(json.dumps(RUST))
    main([*(files.get(word, word) for word in words), "--address", ADDRESS])
    assert not (cluster / "calls").exists()


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["status"],
            ["flows"],
            ["config"],
            ["config", "services"],
            ["log"],
            ["log", "debug"],
            ["addons"],
            ["audit"],
        ),
        *(["handover"], ["handover", "now"], ["explain", "10.0.0.1", "10.0.0.2:80"], ["edges", "--total"]),
        *(["explain", "--connection", "10.0.0.1:1"], ["explain", "--flow", "x"]),
        *(["simulate", "--remove", "a/b", "--live", "1s"], ["bug-report", "x.tar.gz", "--no-cluster"]),
    ],
    ids=" ".join,
)
def test_every_request_has_the_time_limit_of_its_flag(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: set[float] = set()

    def hang(url: str, *, method: str, limit_s: float) -> Any:
        limits.add(limit_s)
        raise TimeoutError("timed out")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ztunnel.ask.inspect.source.open_page", hang)
    assert main([*words, "--address", "127.0.0.1:1", "--request-timeout", "7s"]) == 2
    assert limits == {7.0}
