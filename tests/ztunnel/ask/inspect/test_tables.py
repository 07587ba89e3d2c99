"""Tables of a running proxy or a saved dump: workloads, services, policies, connections, certificates, status."""

import asyncio
import io
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.ztunnel.ask.inspect.harness import RUST, Output, page, pages
from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import Reference
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_explain import policy
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT, cart
from xds.model.authorization import Action
from xds.model.policy import PeerServiceAccount
from ztunnel.ask.inspect.source import AskFailed
from ztunnel.cli import main
from ztunnel.runtime.console.terminal import print_text

TRANSCRIPTS = {
    "workloads": [
        "NAMESPACE  POD NAME  ADDRESS   NODE  WAYPOINT  PROTOCOL  STATUS",
        "default    a         10.0.0.2  n1    None      HBONE     Healthy",
        "default    c         10.0.0.3  n2    None      HBONE     Healthy",
    ],
    "services": [
        "NAMESPACE  SERVICE NAME  SERVICE VIP  WAYPOINT                              ENDPOINTS",
        "default    web           10.96.0.7    default/wp.default.svc.cluster.local  1/2",
    ],
    "policies": [
        "NAMESPACE  POLICY NAME  ACTION  SCOPE             ENFORCED            ALLOWED  DENIED  LAST",
        "default    few          Allow   WorkloadSelector  yes                 -        -       -",
        "default    no           Deny    Namespace         dry run, NO EFFECT  -        -       -",
    ],
    "connections": [
        "WORKLOAD   DIRECTION  LOCAL           REMOTE          REMOTE TARGET  PROTOCOL",
        "a.default  Inbound    10.0.0.2:80     10.0.0.3:4000   -              HBONE",
        "a.default  Outbound   10.0.0.2:49386  10.0.0.3:15008  10.0.0.3:8080  HBONE",
    ],
    "status": [
        "version                1.30.0",
        "pods                   1 Pending, 1 Up",
        "connections            1 inbound, 1 outbound",
        "certificates           1 Available, 1 Unavailable",
        "the mesh               2 workloads, 1 service, 2 policies",
        "node                   NODE_NAME is not set: the control plane cannot know which node this proxy serves",
        "no certificate         spiffe://cluster.local/ns/other/sa/b: no way",
        "not up                 b.other: Pending",
        "policy without effect  default/no: it has no rules",
    ],
}


@pytest.mark.parametrize("command", TRANSCRIPTS)
def test_tables_of_a_saved_dump(command: str, saved: str, capsys: Output) -> None:
    assert main([command, "--file", saved]) == (command == "status")  # a pod is not up
    assert capsys.readouterr().out.splitlines() == TRANSCRIPTS[command]


@pytest.mark.parametrize("command", TRANSCRIPTS)
def test_tables_of_a_running_rust_ztunnel(command: str, saved: str, capsys: Output) -> None:
    with pages({"/config_dump": Path(saved).read_bytes()}) as address:
        assert main([command, "--address", address]) == (command == "status")  # a pod is not up
    assert capsys.readouterr().out.splitlines() == TRANSCRIPTS[command]


def test_the_status_shows_the_last_denials(saved: str, capsys: Output) -> None:
    def denial(number: int) -> dict[str, object]:
        return {
            "direction": "inbound",
            "source": f"client-{number}.shop",
            "identity": "spiffe://td/ns/shop/sa/c" if number else "",
            "destination": "cart.default:80",
            "reason": "explicitly denied by: default/p",
            "count": number + 1,
            "lastAddress": "10.0.0.1:1",
            "lastTime": "2026-11-23T00:00:00Z",
        }

    Path(saved).write_text(json.dumps({**RUST, "denials": [denial(number) for number in range(12)]}))
    assert main(["status", "-f", saved]) == 1
    lines = [
        line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("denied")
    ]
    what = "cart.default:80: explicitly denied by: default/p; last 2026-11-23T00:00:00Z from 10.0.0.1:1"
    assert lines[:2] == [
        f"1 x inbound client-0.shop to {what}",
        f"2 x inbound client-1.shop (spiffe://td/ns/shop/sa/c) to {what}",
    ]
    assert lines[10:] == ["and 2 pairs more: see /denials"]
    assert main(["status", "-f", saved, "-n", "other"]) == 1
    assert "denied" not in capsys.readouterr().out


def test_policies_show_how_many_connections_they_allowed_and_denied(saved: str, capsys: Output) -> None:
    policy = {"action": "Deny", "namespace": "shop", "scope": "Namespace"}
    last = {"lastTime": "2026-11-23T00:00:00Z"}
    made = [
        {"name": "a", "decisions": {"allowed": 3, "denied": 0, "ended": 0, **last}},
        {"name": "b", "decisions": {"allowed": 0, "denied": 7, "ended": 2, **last}},
        {"name": "c", "dryRun": True, "decisions": {"denied": 5}},
    ]
    Path(saved).write_text(json.dumps({**RUST, "policies": [policy | each for each in made]}))
    assert main(["policies", "-f", saved]) == 0
    assert [line.split("Namespace")[1].split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["yes", "3", "0", "2026-11-23T00:00:00Z"],
        ["yes", "0", "7,", "2", "ended", "2026-11-23T00:00:00Z"],
        ["dry", "run", "-", "5", "-"],
    ]


def test_certificates_of_one_namespace(saved: str, capsys: Output) -> None:
    assert main(["certificates", "-f", saved, "-n", "default"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1:3] for line in lines[1:]] == [["Leaf", "Available"], ["Root", "Available"]]
    assert lines[1][3:] == ["1bd7", "2026-11-22T11:25:15Z", "2026-11-21T11:23:15Z"]


def test_config_prints_the_part_of_a_saved_dump_that_a_path_names(saved: str, capsys: Output) -> None:
    assert main(["config", "-f", saved]) == 0
    assert json.loads(capsys.readouterr().out) == RUST
    assert main(["config", "workloads", "default/a", "-f", saved]) == 0
    assert json.loads(capsys.readouterr().out) == RUST["workloads"][:1]
    assert main(["config", "config", "proxyMode", "-f", saved]) == 0
    assert capsys.readouterr().out == "Shared\n"
    assert main(["config", "config", "proxyMode", "-f", saved, "--json"]) == 0
    assert capsys.readouterr().out == '"Shared"\n'
    assert main(["config", "services", "x", "-f", saved]) == 2
    assert capsys.readouterr().err == f"ztunnel config: {saved}: services has no 'x'; there are web\n"


def test_a_table_as_json_from_standard_input(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(RUST)))
    assert main(["connections", "-f", "-", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["apiVersion"], found["kind"]) == ("ztunnel/v1", "ConnectionList")
    first = found["items"][0]
    assert (first["pod"], first["namespace"]) == ("a", "default")
    assert first["remoteTarget"] is None


def test_commands_ask_a_running_proxy_of_an_istio_mesh(capsys: Output) -> None:
    deny = policy("no-front", Action.DENY, PeerServiceAccount("shop", "client"))

    def ask(address: str) -> None:
        assert main(["explain", "shop/client", "cart.example:80", "--address", address]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[:2] == ["verdict: allowed", "source:"]
        assert "because: a tunnel: the workload takes them" in said
        assert "  - target: 10.0.0.2:15008" in said
        assert "  state: none here: no pod of this node has the identity" in said
        assert main(["workloads", "--address", address, "-n", "shop"]) == 0
        assert "shop       back      10.0.0.2" in capsys.readouterr().out
        assert main(["log", "debug", "--address", address]) == 0
        assert "debug" in capsys.readouterr().out
        assert main(["log", "ztunnel::proxy=warn", "--address", address, "--json"]) == 0
        items = json.loads(capsys.readouterr().out)["items"]
        levels = {item["target"]: item["level"] for item in items}
        assert (levels["default"], levels["ztunnel::proxy"]) == ("debug", "warn")
        assert main(["config", "config", "localNode", "--address", address]) == 0
        assert capsys.readouterr().out == "null\n"
        assert main(["connections", "--address", address]) == 0
        assert capsys.readouterr().out == "No connections found.\n"

    def ask_denied(address: str) -> None:
        assert main(["explain", "shop/client", "cart.example:80", "--address", address, "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert told["ways"][0]["inbound"]["refused"] == "explicitly denied by: shop/no-front"
        assert main(["explain", "shop/nobody", "cart.example:80", "--address", address]) == 2
        assert "explain: 400 source 'shop/nobody': no workload" in capsys.readouterr().err

    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, cart(), BACK])
        address = str(harness.addresses["admin"][0])
        await asyncio.to_thread(ask, address)
        harness.proxy.mesh.apply([deny])
        await asyncio.to_thread(ask_denied, address)

    served(check)


def test_commands_ask_a_running_proxy_in_envoys_dialect(reference: Reference, capsys: Output) -> None:
    def check(running: Running) -> None:
        address = f"127.0.0.1:{reference.admin}"
        assert main(["explain", "10.244.2.3", "10.96.183.192:9080", "--address", address]) == 0
        assert "listener: ztunnel_outbound" in capsys.readouterr().out
        nobody = "spiffe://cluster.local/ns/default/sa/ratings"
        denied = ["explain", "10.244.2.3", "10.244.2.23:9080", "--identity", nobody, "--address", address]
        assert main(denied) == 1
        assert "verdict: closed: rbac_access_denied_matched_policy[none]" in capsys.readouterr().out
        assert main(["status", "--address", address]) == 0
        said = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in said] == [
            *("version", "state", "up for", "node"),
            *("listeners", "clusters", "connections", "certificates"),
        ]
        assert "state         LIVE" in said
        assert "listeners     4 active" in said
        assert said[-1].startswith("certificates  2, the first ends 20")
        assert main(["connections", "--address", address]) == 0
        assert capsys.readouterr().out == "No connections found.\n"
        assert main(["policies", "--address", address]) == 0
        heading, first, *_ = capsys.readouterr().out.splitlines()
        assert heading.split() == ["POLICY", "NAME", "ACTION", "MODE", "CHAINS", "ALLOWED", "DENIED", "LAST"]
        assert first.split()[-6:] == ["ALLOW", "enforced", "2", "-", "-", "-"]
        assert main(["certificates", "--address", address, "--json"]) == 0
        leaves = [each for each in json.loads(capsys.readouterr().out)["items"] if each["type"] == "Leaf"]
        assert "spiffe://cluster.local/ns/default/sa/bookinfo-productpage" in [each["identity"] for each in leaves]
        assert main(["nodes", "--address", address, "-o", "json"]) == 0
        (node,) = json.loads(capsys.readouterr().out)["items"]
        assert (node["ready"], node["certificates"], node["denials"], node["connections"]) == (True, 2, 0, 0)
        assert node["firstExpiry"] == min(each["notAfter"] for each in leaves)
        assert main(["log", "--address", address, "--json"]) == 0
        items = json.loads(capsys.readouterr().out)["items"]
        assert "hbone" in [item["target"] for item in items]
        assert main(["config", "listeners", "ztunnel_outbound", "--address", address]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert found["active_state"]["listener"]["name"] == "ztunnel_outbound"
        assert main(["config", "workloads", "--address", address]) == 2
        assert "no part 'workloads'; there are bootstrap, clusters, listeners" in capsys.readouterr().err
        assert main(["connections", "-n", "x", "--address", address]) == 2
        assert "namespaces are of an Istio mesh" in capsys.readouterr().err
        assert main(["workloads", "--address", address]) == 2
        assert "in Envoy's dialect has listeners and clusters instead" in capsys.readouterr().err

    serve(reference, check)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_local_admin_server_is_asked_without_the_proxy_of_the_environment(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Like kubectl: behind a company's HTTP proxy, 127.0.0.1 would be the HTTP proxy's own address."""
    with page(b'{"workloads": [], "certificates": []}') as address:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)
        assert main(["workloads", "--address", f"{host}:{address.rpartition(':')[2]}"]) == 0
    assert "No workloads found" in capsys.readouterr().out


def test_other_admin_servers_are_asked_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    with page(b'{"workloads": [], "certificates": []}') as address:
        monkeypatch.setenv("http_proxy", f"http://{address}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert main(["workloads", "--address", "proxy.example:15000"]) == 0


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"workloads": 7, "certificates": 1}'])
def test_an_address_that_is_no_proxys_admin_server_is_named_in_the_error(body: bytes, capsys: Output) -> None:
    with page(body) as address:
        assert main(["workloads", "--address", address]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ztunnel workloads: {address}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "no whole answer of HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "no whole answer of HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{", "no whole answer of HTTP"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nnot", "/config_dump: 503 Busy"),
    ],
)
def test_half_an_answer_is_named_in_the_error(answer: bytes, error: str, capsys: Output) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_once() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(answer)

        serving = threading.Thread(target=serve_once)
        serving.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert main(["services", "--address", address]) == 2
        serving.join()
    assert error in capsys.readouterr().err


def test_commands_name_the_address_where_no_admin_server_listens(capsys: Output) -> None:
    port = free_port()
    for command in (["status"], ["explain", "a", "b:1"], ["log"]):
        assert main([*command, "--address", f"127.0.0.1:{port}"]) == 2
        assert f"127.0.0.1:{port}: Connection refused; is a proxy's admin server there?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "not UTF-8 text at byte 0"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "JSON that is nested too deeply"),
    ],
)
def test_an_unreadable_dump_is_named_with_the_reason(
    content: bytes | None, error: str, tmp_path: Path, capsys: Output
) -> None:
    file = tmp_path / "dump.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["services", "--file", str(file)]) == 2
    assert f"ztunnel services: {file}: {error}" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(("connected", "status"), [(True, 0), (False, 1)])
def test_a_lost_control_plane_is_the_first_line_of_the_status_and_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], connected: bool, status: int, as_json: list[str]
) -> None:
    plane = {"address": "istiod:15012", "connected": connected, "awaySeconds": 0.0 if connected else 191.0}
    file = tmp_path / "dump.json"
    file.write_text(json.dumps({"workloads": [], "certificates": [], "controlPlane": plane}))
    assert main(["status", "-f", str(file), *as_json]) == status
    said = capsys.readouterr().out
    assert ("NOT CONNECTED for 3m11s: istiod:15012" in said) is not connected
    if not as_json:
        assert said.startswith("control plane")


@pytest.mark.parametrize(
    ("config", "pods", "more", "said"),
    [
        ({"localNode": None}, [], {}, "node NODE_NAME is not set"),
        ({"localNode": "n1"}, ["a"], {}, ""),
        ({"localNode": "typo"}, [], {}, ""),
        ({"localNode": "typo"}, ["a"], {}, "the mesh has no workload on node typo"),
        ({"localNode": "n1"}, [], {"pending": ["workload proxy manager"]}, "waits for workload proxy manager"),
    ],
)
def test_status_reports_a_node_name_that_is_not_set_or_not_in_the_mesh(
    tmp_path: Path, capsys: Output, config: dict[str, str], pods: list[str], more: dict[str, object], said: str
) -> None:
    state = {name: {"state": "Up", "info": {"name": name, "namespace": "shop"}} for name in pods}
    dump = {"workloads": [{"node": "n1"}], "certificates": [], "config": {"proxyMode": "Shared", **config}}
    file = tmp_path / "dump.json"
    file.write_text(json.dumps(dump | more | {"workloadState": state}))
    is_error = bool(said) and "NODE_NAME is not" not in said
    assert main(["status", "-f", str(file)]) == int(is_error)
    shown = " ".join(capsys.readouterr().out.split())
    assert " ".join(said.split()) in shown
    assert ("node " in shown) is ("node" in said)


def test_policies_has_a_row_for_connections_that_no_allow_policy_matched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    implied = {"allowed": 0, "denied": 180, "ended": 2, "lastTime": "2026-11-25T10:00:00Z"}
    file = tmp_path / "dump.json"
    file.write_text(json.dumps({"workloads": [], "certificates": [], "noPolicyMatched": implied}))
    assert main(["policies", "-f", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["items"]
    assert (row["name"], row["denied"], row["ended"]) == ("(no ALLOW policy matched)", 180, 2)


HOSTILE = "a\x1b[2J\x9b31mb"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["config", "version"], 0),
        (["config", "workloads", "-o", "json"], 0),
        (["config", "workloads", "-o", "yaml"], 0),
        (["workloads"], 0),
        (["workloads", "-o", "name"], 0),
        (["workloads", "-o", "jsonpath={.items[*].name}"], 0),
        (["workloads", "--file", "no\x1b[2J"], 2),
        (["log"], 0),
        (["log", "debug"], 2),
        (["flows", "-f", "--since", "2026-11-26T12:00:00Z"], 0),
        (["flows", "-f", "--since", "2026-11-26T12:00:00Z", "-o", "json"], 0),
        (["flows", "-o", "jsonpath={.items[*].reason}"], 0),
    ],
)
def test_control_characters_reach_a_pipe_and_no_terminal(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    flow = {"time": "2026-11-26T12:00:01.000000001Z", "extensions": {"value": {"reason": HOSTILE}}}
    answers = {
        "/config_dump": json.dumps({"workloads": [{"name": HOSTILE}], "certificates": [], "version": HOSTILE}),
        "/flows": json.dumps({"flow": flow}),
    }

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    def answer(server: str, path: str, parameters: Any = None, method: str = "GET", **limits: Any) -> str:
        if (parameters or {}).get("level"):
            raise AskFailed(f"{server}: {path}: 400 {HOSTILE}", 400)
        return answers.get(path, HOSTILE)

    monkeypatch.setattr("ztunnel.ask.flows.command.time.sleep", interrupt)
    for place in ("source.ask", "command.ask"):
        monkeypatch.setattr(f"ztunnel.ask.inspect.{place}", answer)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True)
    assert main(words) == status
    said = capsys.readouterr()
    text = said.out + said.err
    assert "[2J" in text
    assert "\x1b[2J" not in text
    assert "\x9b" not in text
    monkeypatch.undo()
    print_text(HOSTILE)
    assert HOSTILE in capsys.readouterr().out
