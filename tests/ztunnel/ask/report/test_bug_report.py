"""``ztunnel bug-report`` of two nodes through a script in place of kubectl; then commands read the archive."""

import errno
import io
import json
import os
import random
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.ask.inspect.harness import RUST, pages
from tests.ztunnel.ask.inspect.test_kubectl import pod
from tests.ztunnel.ask.report.test_scrub import KEY, TOKEN
from ztunnel.ask.check.gather import KINDS
from ztunnel.ask.check.rules.model import Facts
from ztunnel.ask.inspect.archive import Archive, BadArchive
from ztunnel.ask.report import collect, command
from ztunnel.cli import main

Output = pytest.CaptureFixture[str]
SCRIPT = """#!/bin/sh
case "$*" in
*port-forward*pod/gone*) echo 'error: the pod does not run' >&2; exit 1 ;;
*port-forward*) echo "Forwarding from 127.0.0.1:{port} -> 15000"; exec sleep 600 ;;
*"logs --namespace"*--previous*) echo 'previous terminated container not found' >&2; exit 1 ;;
*"logs --namespace"*) head -c "$(echo "$*" | sed 's/.*--limit-bytes=\\([0-9]*\\).*/\\1/')" {folder}/log ;;
*app=ztunnel-agent*) cat {folder}/agents ;;
*app=ztunnel*) cat {folder}/ztunnels ;;
*) echo 'error: not expected' >&2; exit 1 ;;
esac
"""
LINE = f"error: could not use {TOKEN}\n{KEY}"
#: Texts that no archive may contain.
SECRETS = re.compile(rb"PRIVATE KEY|eyJ[\w-]{8,}\.|(?i:bearer) \w{16}")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    bodies = {
        "/config_dump": json.dumps({**RUST, "leak": KEY}).encode(),
        "/check": json.dumps({"node": "n1", "kernel": {}, "time": "2026-11-26T00:00:00Z"}).encode(),
        "/audit": b'{"pods": []}',
        "/metrics": b"# TYPE a counter\na_total 1\n# EOF\n",
    }
    with pages(bodies) as address:
        script = tmp_path / "bin" / "kubectl"
        script.parent.mkdir()
        script.write_text(SCRIPT.format(folder=tmp_path, port=address.rpartition(":")[2]))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
        monkeypatch.setattr(collect, "BETWEEN_S", 0.0)
        (tmp_path / "log").write_text(LINE)
        listed(tmp_path, "ztunnels", ("z1", "n1"), ("z2", "n2"))
        listed(tmp_path, "agents", ("a1", "n1"))
        yield tmp_path


def listed(folder: Path, file: str, *names: tuple[str, str]) -> None:
    items = [pod(name, "istio-system", node=node) for name, node in names]
    (folder / file).write_text(json.dumps({"items": items}))


def made(cluster: Path, *words: str, status: int = 0) -> Archive:
    path = cluster / "report.tar.gz"
    assert main(["bug-report", str(path), "--no-cluster", *words]) == status
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    return Archive.read(str(path))


def test_end_of_a_long_log_is_in_the_archive(cluster: Path) -> None:
    """kubectl's --limit-bytes ends its output, so it must not be the limit of the archive."""
    lines = [f"{number} {'x' * 100}" for number in range(20_000)]
    (cluster / "log").write_text("\n".join([*lines, "the crash", ""]))
    log = made(cluster, "--quick").files["nodes/n1/logs/proxy.log"].decode()
    assert log.endswith("the crash\n")
    assert len(log) <= collect.MAX_LOG // 10
    assert log.splitlines()[0] in lines


def test_an_archive_has_pages_logs_and_an_index_and_no_secrets(cluster: Path, capsys: Output) -> None:
    archive = made(cluster)
    names = set(archive.files)
    for node in ("n1", "n2"):
        wanted = {"proxy/config_dump", "proxy/check", "proxy/metrics", "proxy/metrics_later", "logs/proxy.log"}
        assert names >= {f"nodes/{node}/{name}" for name in wanted}
    assert names >= {"index.json", "checks.json", "nodes/n1/agent/audit", "nodes/n1/logs/agent.log"}
    index = json.loads(archive.files["index.json"])
    assert index["silent"] == []
    assert set(index["files"]) == names - {"index.json"}
    assert any("log before its restart" in each for each in index["missing"]["n1"])
    assert b"could not use" in archive.files["nodes/n1/logs/proxy.log"]
    assert [name for name, data in archive.files.items() if SECRETS.search(data)] == []
    assert "files of 2 nodes" in capsys.readouterr().out


def test_every_table_reads_an_archive(cluster: Path, capsys: Output) -> None:
    made(cluster, "--quick")
    capsys.readouterr()
    file = str(cluster / "report.tar.gz")
    assert main(["connections", "--file", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NODE", "n1", "n1", "n2", "n2"]
    assert main(["workloads", "--file", file, "--node", "n2"]) == 0
    assert "default    a " in capsys.readouterr().out
    assert main(["nodes", "--file", file, "-o", "name"]) == 1
    assert capsys.readouterr().out.split() == ["nodestatus/n1", "nodestatus/n2"]
    assert main(["check", "--file", file, "--only", "IDN1", "-o", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {each["node"] for each in found["items"]} == {"n1", "n2"}
    assert main(["services", "--file", file, "--node", "n9"]) == 2
    assert "there is no node n9; there are n1, n2" in capsys.readouterr().err


def test_a_silent_node_is_in_the_index_and_the_exit_status(cluster: Path, capsys: Output) -> None:
    listed(cluster, "ztunnels", ("z1", "n1"), ("gone", "n2"))
    archive = made(cluster, "--quick", status=2)
    assert [each["node"] for each in json.loads(archive.files["index.json"])["silent"]] == ["n2"]
    assert capsys.readouterr().err.startswith("no answer from node n2: proxy: kubectl port-forward")


def test_names_are_replaced_on_request(cluster: Path) -> None:
    archive = made(cluster, "--redact", "--quick")
    assert archive.nodes
    assert not {"n1", "n2"} & set(archive.nodes)
    for name, data in archive.files.items():
        assert b"10.0.0.3" not in data, name
        assert b"10.96.0.7" not in data, name


def test_names_of_envoys_dialect_and_of_ended_pods_are_replaced(tmp_path: Path) -> None:
    """No list of workloads has them."""
    identity = "spiffe://td/ns/shop/sa/web-account"
    flow = {"source": {"namespace": "shop", "pod_name": "web-gone"}, "node_name": "c/worker-7"}
    bodies: dict[str, Any] = {
        "/config_dump": {
            "configs": [{"@type": "x.ClustersConfigDump", "name": f"{identity}_to_cart.bank.svc.td"}]
        },
        "/denials": [{"source": "10.0.0.9", "identity": identity, "destination": "10.0.0.2:2", "count": 1}],
        "/flows": {"flow": flow},
        "/server_info": {"node": {"id": "sidecar~0.0.0.0~ztunnel-abc.mesh-system~mesh-system.svc.td"}},
    }
    path = str(tmp_path / "envoy.tar.gz")
    with pages({name: json.dumps(body).encode() for name, body in bodies.items()}) as address:
        assert main(["bug-report", path, "--no-cluster", "--address", address, "--quick", "--redact"]) == 0
    text = b"".join(Archive.read(path).files.values()).decode()
    words = ("shop", "web-account", "web-gone", "worker-7", "cart", "bank", "ztunnel-abc", "mesh-system")
    assert [word for word in words if word in text] == []
    assert "ClustersConfigDump" in text


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_one_proxy_without_a_cluster(quick: list[str], tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "one.tar.gz"
    with pages({"/config_dump": json.dumps(RUST).encode(), "/metrics": b"a 1\n"}) as address:
        words = [str(path), "--no-cluster", "--address", address, "--stats-address", address, *quick]
        assert main(["bug-report", *words, "--limit", "5s"]) == 0
    assert "nodes/node/proxy/metrics" in Archive.read(str(path)).files


def test_an_archive_has_endpoints_and_pages_of_envoys_dialect(tmp_path: Path, capsys: Output) -> None:
    """Without its endpoints, `explain` would find none. Without other pages, `status` would know no state."""
    listener = {"name": "in", "active_state": {"listener": {"name": "in"}}}
    kind = "type.googleapis.com/envoy.admin.v3.ListenersConfigDump"
    dump = {"configs": [{"@type": kind, "dynamic_listeners": [listener]}]}
    bodies = {
        "/config_dump": dump,
        "/server_info": {"version": "abc/1.36", "state": "LIVE", "uptime_current_epoch": "60s"},
        "/clusters": {"cluster_statuses": [{"name": "c"}]},
        "/certs": {"certificates": []},
        "/init_dump": {},
        "/connections": {"connections": [{"id": "7", "source": "10.0.0.1:1", "destination": "10.0.0.2:2"}]},
        "/denials": [{"source": "10.0.0.9", "destination": "10.0.0.2:2", "count": 3}],
        "/rbac": {"policies": [{"policy": "p", "action": "ALLOW", "decisions": {"allowed": 4, "denied": 5}}]},
        "/stats": {"stats": [{"name": "control_plane.connected_state", "value": 1}]},
    }
    path, asked = str(tmp_path / "envoy.tar.gz"), list[str]()
    with pages({name: json.dumps(body).encode() for name, body in bodies.items()}, asked=asked) as address:
        assert main(["bug-report", path, "--no-cluster", "--address", address, "--quick"]) == 0
    assert "/config_dump?include_eds=" in asked
    capsys.readouterr()
    assert main(["status", "--file", path]) == 0
    said = capsys.readouterr()
    shown = {line.split()[1]: line.split(maxsplit=2)[2].strip() for line in said.out.splitlines()}
    assert (shown["version"], shown["state"], shown["connections"]) == ("abc/1.36", "LIVE", "1")
    assert shown["control"] == "plane  connected to ADS"
    assert shown["denied"].startswith("3 x 10.0.0.9")
    assert main(["policies", "--file", path, "-o", "json"]) == 0
    found = capsys.readouterr()
    assert [(each["allowed"], each["denied"]) for each in json.loads(found.out)["items"]] == [(4, 5)]
    assert (said.err, found.err) == ("", "")


def test_an_archive_has_the_time_of_the_cluster(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Checks of the archive compare this time with those of certificates and denials."""
    monkeypatch.setattr(command, "gather_facts", lambda args, before: Facts(now_s=1e9))
    assert json.loads(made(cluster, "--quick").files["index.json"])["time"] == "2001-09-09T01:46:40Z"


def test_no_proxy_leaves_no_archive(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "none.tar.gz"
    assert main(["bug-report", str(path), "--no-cluster"]) == 2
    assert not path.exists()
    assert "kubectl" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_archive_that_is_not_finished_leaves_the_earlier_one(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    path = tmp_path / "report.tar.gz"
    path.write_text("yesterday's")

    def stop(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(command, "collect", stop)
    with pages({"/config_dump": json.dumps(RUST).encode()}) as address:
        words = ["bug-report", str(path), "--address", address, "--quick", "--no-cluster"]
        assert main(words) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("report.tar.gz", "yesterday's")]


def test_no_answer_removes_no_earlier_file_and_no_pipe(tmp_path: Path, capsys: Output) -> None:
    path, pipe = tmp_path / "report.tar.gz", tmp_path / "pipe"
    path.write_text("yesterday's")
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for each in (path, pipe):
        assert main(["bug-report", str(each), "--address", "127.0.0.1:1", "--no-cluster"]) == 2
    os.close(reading)
    assert path.read_text() == "yesterday's"
    assert {each.name for each in tmp_path.iterdir()} == {"report.tar.gz", "pipe"}


def test_foreign_archives_are_refused(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "other.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(__file__, arcname="a/b")
    with pytest.raises(BadArchive, match=r"no index\.json"):
        Archive.read(str(path))
    assert main(["status", "--file", str(path)]) == 2
    path.write_bytes(path.read_bytes()[:-40])
    answer: Any = main(["status", "--file", str(path)])
    assert answer == 2


def test_what_changed_since_an_archive(cluster: Path, capsys: Output) -> None:
    made(cluster, "--quick")
    archive = str(cluster / "report.tar.gz")
    capsys.readouterr()
    assert main(["changes", archive]) == 0
    assert capsys.readouterr().out == "No differences found.\n"
    later = {
        **RUST,
        "version": {**RUST["version"], "version": "1.31.0"},  # type: ignore[dict-item]  # a mapping
        "policies": [{**RUST["policies"][0], "rules": []}],  # type: ignore[index]  # a list
        "workloads": [{**RUST["workloads"][0], "status": "Unhealthy"}, {**RUST["workloads"][1], "name": "d"}],  # type: ignore[index]  # the same
    }
    with pages({"/config_dump": json.dumps(later).encode()}) as address:
        assert main(["changes", archive, "--address", address]) == 1
        lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
        assert main(["changes", archive, "--address", address, "-o", "json"]) == 1
    found = {(line[0], line[1], line[2]): line[3:] for line in lines}
    assert found["changed", "proxy", "node"] == ["version: 1.30.0 -> 1.31.0"]
    assert found["changed", "workload", "default/a"] == ["status: Healthy -> Unhealthy"]
    assert ("removed", "workload", "default/c") in found
    assert ("added", "workload", "default/d") in found
    assert ("removed", "policy", "default/no") in found
    assert found["changed", "rules", "default/few"][0].endswith("-> none")
    assert {each["change"] for each in json.loads(capsys.readouterr().out)["items"]} == {
        "added",
        "removed",
        "changed",
    }


@pytest.mark.parametrize("as_mapping", [False, True])
def test_changed_ports_of_a_service_are_a_difference(as_mapping: bool, tmp_path: Path, capsys: Output) -> None:
    service: dict[str, Any] = RUST["services"][0]  # type: ignore[index,assignment]  # a list of mappings
    files = {"index.json": b"{}", "nodes/n1/proxy/config_dump": json.dumps(RUST).encode()}
    archive = str(archived(tmp_path, files))
    changed = {**service, "ports": {"80": 9090}}
    later = {**RUST, "services": {"default/web": changed} if as_mapping else [changed]}
    with pages({"/config_dump": json.dumps(later).encode()}) as address:
        assert main(["changes", archive, "--address", address, "-o", "json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["items"]
    assert (found["kind"], found["object"], list(found["fields"])) == ("ports", "default/web", ["ports"])
    assert "9090" in found["fields"]["ports"]


def dump_of(node: str, *pods: str) -> bytes:
    state = {f"uid-{pod}": {"info": {"name": pod, "namespace": "shop"}, "state": "Up"} for pod in pods}
    return json.dumps({**RUST, "config": {"localNode": node}, "workloadState": state}).encode()


def test_one_proxy_is_compared_with_its_own_node(tmp_path: Path, capsys: Output) -> None:
    files = {f"nodes/{node}/proxy/config_dump": dump_of(node, f"pod-{node}") for node in ("n1", "n2")}
    archive = str(archived(tmp_path, {"index.json": b"{}", **files}))
    with pages({"/config_dump": dump_of("n2", "pod-n2")}) as address:
        assert main(["changes", archive, "--address", address]) == 0
        assert capsys.readouterr().out == "No differences found.\n"
    with pages({"/config_dump": dump_of("n2", "new")}) as address:
        assert main(["changes", archive, "--address", address, "-o", "name"]) == 1
        assert capsys.readouterr().out.split() == ["difference/pod/shop/new", "difference/pod/shop/pod-n2"]


def test_objects_of_a_silent_node_are_not_removed(tmp_path: Path, capsys: Output) -> None:
    """A node that does not answer, now or in the archive, says nothing about its pods."""
    nodes = ("n1", "n2", "n3")
    files = {f"nodes/{node}/proxy/config_dump": dump_of(node, f"pod-{node}") for node in nodes}
    whole = str(archived(tmp_path, {"index.json": b"{}", **files}))
    (tmp_path / "later").mkdir()
    for broken in ("n2", "n3"):
        partly = files | {f"nodes/{broken}/proxy/config_dump": b"503 not now"}
        later = str(archived(tmp_path / "later", {"index.json": b"{}", **partly}))
        for before, after in ((whole, later), (later, whole)):
            assert main(["changes", before, "--file", after]) == 2
            said = capsys.readouterr()
            assert said.out == ""
            assert f"no answer from node {broken}" in said.err


def archived(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "report.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"report/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def test_dumps_of_an_archive_are_read_like_other_saved_dumps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = {"name": "a\ud800", "namespace": "shop", "workloadIps": ["10.0.0.1"]}
    dump = json.dumps({"workloads": [workload], "certificates": []}).encode()
    files = {"index.json": b"{}", "nodes/n1/proxy/config_dump": dump, "nodes/n2/proxy/config_dump": b"[" * 100_000}
    assert main(["workloads", "-f", str(archived(tmp_path, files)), "-o", "json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["items"]] == [r"a\ud800"]
    assert [each["node"] for each in found["silent"]] == ["n2"]
    assert "nested too deeply" in found["silent"][0]["reason"]


def _two_nodes(folder: Path) -> str:
    flow = {
        "uuid": "id-1",
        "IP": {"source": "10.0.0.3", "destination": "10.0.0.2", "encrypted": True},
        "l4": {"TCP": {"source_port": 4000, "destination_port": 80}},
        "traffic_direction": "INGRESS",
        "extensions": {"value": {"source_identity": "spiffe://cluster.local/ns/default/sa/c"}},
    }
    state = {"uid-a": {"connections": {"inbound": [{"src": "10.0.0.3:4001", "actualDst": "10.0.0.2:80"}]}}}
    files = {
        "index.json": b"{}",
        "nodes/n1/proxy/config_dump": json.dumps(RUST).encode(),
        "nodes/n1/proxy/connections": json.dumps(state).encode(),
        "nodes/n1/proxy/flows": json.dumps({"flow": flow}).encode(),
        "nodes/n2/proxy/config_dump": json.dumps({**RUST, "services": []}).encode(),
    }
    return str(archived(folder, files))


def test_commands_about_one_proxy_read_a_node_of_an_archive(tmp_path: Path, capsys: Output) -> None:
    file = _two_nodes(tmp_path)
    chosen = ["--file", file, "--node", "n1"]
    assert main(["explain", "default/a", "default/c:80", *chosen]) == 1
    assert "default/few" in capsys.readouterr().out
    assert main(["explain", "--connection", "10.0.0.3:4001", *chosen]) == 0
    assert main(["explain", "--flow", "id-1", *chosen]) == 0
    capsys.readouterr()
    assert main(["explain", "--flow", "id-1", "--file", file, "--node", "n2"]) == 2
    assert "n2" in capsys.readouterr().err
    assert main(["config", "services", "web", *chosen]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "web"
    log = tmp_path / "log"
    log.write_text("info access connection complete src.addr=10.0.0.2:1 dst.addr=10.0.0.3:80 direction=inbound\n")
    assert main(["simulate", "--remove", "default/few", "--from-log", str(log), *chosen, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["totals"]["newly allowed"] == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "has several nodes: --node chooses one of n1, n2"),
        (["--node", "n3"], "there is no node n3; there are n1, n2"),
        (["--pod", "default/a"], "not with --pod"),
    ],
)
def test_commands_about_one_proxy_need_one_node(
    words: list[str], error: str, tmp_path: Path, capsys: Output
) -> None:
    file = _two_nodes(tmp_path)
    for command_ in (["explain", "default/a", "default/c:80"], ["config", "services"]):
        assert main([*command_, "--file", file, *words]) == 2
        assert error in capsys.readouterr().err


@pytest.mark.parametrize("command_", [["services"], ["config", "services"]])
def test_a_dump_is_read_from_a_pipe(command_: list[str], tmp_path: Path, capsys: Output) -> None:
    """A shell replaces `<(command)` by the path of a pipe."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        file.write(json.dumps(RUST).encode())
    try:
        assert main([*command_, "--file", f"/dev/fd/{reading}"]) == 0
    finally:
        os.close(reading)
    assert "web" in capsys.readouterr().out


def test_unreadable_files_of_an_archive_leave_the_other_facts(tmp_path: Path, capsys: Output) -> None:
    dump = json.dumps({"workloads": [], "certificates": []}).encode()
    files = {
        "index.json": b'{"time": "2026-11-26T12:00:00Z"}',
        "nodes/n1/proxy/config_dump": dump,
        "nodes/n1/agent/check": b"503 not now",
        "nodes/n1/agent/audit": b"[]",
        "objects/Pod.json": b"{cut",
        "objects/Namespace.json": b'{"items": []}',
    }
    assert main(["check", "--file", str(archived(tmp_path, files)), "--only", "IDN1,XDS4,KRN1", "-o", "json"]) == 0
    found = {each["id"]: each["fact"] for each in json.loads(capsys.readouterr().out)["items"]}
    assert "no node agent of this project has answered" in found["KRN1"]
    assert "its file in the archive has an unexpected form" in found["XDS4"]


def test_checks_of_one_node_of_an_archive_have_the_clusters_objects(tmp_path: Path, capsys: Output) -> None:
    dump = json.dumps({"workloads": [], "certificates": []}).encode()
    files = {
        "index.json": b'{"time": "2026-11-26T12:00:00Z", "silent": [{"node": "n3", "reason": "gone"}]}',
        "nodes/n1/proxy/config_dump": dump,
        "nodes/n2/proxy/config_dump": dump,
        **{f"objects/{kind.name}.json": b'{"items": []}' for kind in KINDS},
    }
    file = str(archived(tmp_path, files))
    assert main(["check", "--file", file, "--only", "POL1,POL3", "-o", "json"]) == 2
    everywhere = json.loads(capsys.readouterr().out)
    assert [each["node"] for each in everywhere.pop("silent")] == ["n3"]
    assert main(["check", "--file", file, "--node", "n2", "--only", "POL1,POL3", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == everywhere
    assert everywhere["summary"]["ok"] == 2


@pytest.mark.parametrize("index", [b"{cut", b"[]", b"1"])
def test_checks_name_an_unreadable_index_of_an_archive(index: bytes, tmp_path: Path, capsys: Output) -> None:
    dump = json.dumps({"workloads": [], "certificates": []}).encode()
    file = str(archived(tmp_path, {"index.json": index, "nodes/n1/proxy/config_dump": dump}))
    assert main(["check", "--file", file]) == 2
    assert f"{file}: index.json: not " in capsys.readouterr().err


def test_an_index_of_another_form_leaves_the_other_facts(tmp_path: Path, capsys: Output) -> None:
    dump = json.dumps({"workloads": [], "certificates": []}).encode()
    index = json.dumps({"time": 1, "silent": ["n3", 2], "kubernetes": "1.36", "clusterError": 5}).encode()
    file = str(archived(tmp_path, {"index.json": index, "nodes/n1/proxy/config_dump": dump}))
    assert main(["check", "--file", file, "--only", "IDN1,ACC3"]) == 0
    assert "IDN1  ok" in capsys.readouterr().out


def test_a_damaged_archive_is_read_or_refused(tmp_path: Path) -> None:
    noise = random.Random(1)
    flows = noise.randbytes(10_000).hex().encode()
    path = archived(tmp_path, {"index.json": b"{}", "nodes/n1/proxy/flows": flows})
    whole = path.read_bytes()
    refused = 0
    for place in range(400, len(whole) - 400, 100):
        path.write_bytes(whole[:place] + noise.randbytes(50) + whole[place + 50 :])
        try:
            Archive.read(str(path))
        except (BadArchive, OSError):
            refused += 1
    assert refused
