"""The commands that ask a proxy: transcripts in both dialects, and of a dump as the Rust ztunnel writes it."""

import asyncio
import http.server
import io
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import Reference, write_reference
from tests.ztunnel.proxy.envoy.admin.test_server import proxy_to
from tests.ztunnel.proxy.istio.admin.test_server import Rig, served
from tests.ztunnel.proxy.istio.path.test_explain import policy
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT, cart
from xds.model.authorization import Action
from xds.model.policy import Always, PeerServiceAccount
from ztunnel.cli import main

#: Shape, keys and values as in a dump of the Rust ztunnel 1.30.
RUST = {
    "certificates": [
        {
            "certChain": [
                {
                    "expirationTime": "2026-11-22T11:25:15Z",
                    "pem": "LS0t",
                    "serialNumber": "7127",
                    "validFrom": "2026-11-21T11:23:15Z",
                }
            ],
            "identity": "spiffe://cluster.local/ns/default/sa/a",
            "rootCerts": [
                {
                    "expirationTime": "2036-11-19T11:25:15Z",
                    "pem": "LS0t",
                    "serialNumber": "1",
                    "validFrom": "2026-11-21T11:23:15Z",
                }
            ],
            "state": "Available",
        },
        {
            "certChain": [],
            "identity": "spiffe://cluster.local/ns/other/sa/b",
            "rootCerts": [],
            "state": "Unavailable: no way",
        },
    ],
    "config": {"illegalPorts": [15001, 15006, 15008], "network": "", "proxyMode": "Shared"},
    "policies": [
        {
            "action": "Allow",
            "name": "few",
            "namespace": "default",
            "rules": [[[{"serviceAccounts": [{"namespace": "other", "serviceAccount": "b"}]}]]],
            "scope": "WorkloadSelector",
            "dryRun": False,
        },
        {
            "action": "Deny",
            "name": "no",
            "namespace": "default",
            "rules": [],
            "scope": "Namespace",
            "dryRun": True,
        },
    ],
    "services": [
        {
            "endpoints": {
                "c//Pod/default/a": {"port": {"80": 8080}, "status": "Healthy", "workloadUid": "c//Pod/default/a"},
                "c//Pod/default/b": {
                    "port": {"80": 8080},
                    "status": "Unhealthy",
                    "workloadUid": "c//Pod/default/b",
                },
            },
            "hostname": "web.default.svc.cluster.local",
            "name": "web",
            "namespace": "default",
            "ports": {"80": 8080},
            "vips": ["/10.96.0.7"],
            "waypoint": {"destination": "default/wp.default.svc.cluster.local", "hboneMtlsPort": 15008},
        }
    ],
    "stagedServices": {},
    "version": {"rustVersion": "1.90.0", "version": "1.30.0"},
    "workloadState": {
        "uid-a": {
            "connections": {
                "inbound": [
                    {"actualDst": "10.0.0.2:80", "originalDst": None, "protocol": "HBONE", "src": "10.0.0.3:4000"}
                ],
                "outbound": [
                    {
                        "actualDst": "10.0.0.3:15008",
                        "originalDst": "10.0.0.3:8080",
                        "protocol": "HBONE",
                        "src": "10.0.0.2:49386",
                    }
                ],
            },
            "info": {"name": "a", "namespace": "default", "serviceAccount": "a"},
            "state": "Up",
        },
        "uid-b": {"info": {"name": "b", "namespace": "other", "serviceAccount": "b"}, "state": "Pending"},
    },
    "workloads": [
        {
            "capacity": 1,
            "clusterId": "c",
            "name": "a",
            "namespace": "default",
            "networkMode": "Standard",
            "node": "n1",
            "protocol": "HBONE",
            "serviceAccount": "a",
            "services": ["default/web.default.svc.cluster.local"],
            "status": "Healthy",
            "trustDomain": "cluster.local",
            "uid": "c//Pod/default/a",
            "workloadIps": ["10.0.0.2"],
        },
        {
            "authorizationPolicies": ["default/few"],
            "capacity": 1,
            "clusterId": "c",
            "name": "c",
            "namespace": "default",
            "networkMode": "Standard",
            "node": "n2",
            "protocol": "HBONE",
            "serviceAccount": "c",
            "status": "Healthy",
            "uid": "c//Pod/default/c",
            "workloadIps": ["10.0.0.3"],
        },
    ],
}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    (tmp_path / "dump.json").write_text(json.dumps(RUST))
    return str(tmp_path / "dump.json")


Said = pytest.CaptureFixture[str]


# A dump of the Rust ztunnel

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
def test_tables_of_a_saved_dump(command: str, saved: str, capsys: Said) -> None:
    assert main([command, "--file", saved]) == (command == "status")  # a pod is not up
    assert capsys.readouterr().out.splitlines() == TRANSCRIPTS[command]


@pytest.mark.parametrize("command", TRANSCRIPTS)
def test_tables_of_a_running_rust_ztunnel(command: str, saved: str, capsys: Said) -> None:
    with pages({"/config_dump": Path(saved).read_bytes()}) as address:
        assert main([command, "--address", address]) == (command == "status")  # a pod is not up
    assert capsys.readouterr().out.splitlines() == TRANSCRIPTS[command]


def test_the_status_shows_the_last_denials(saved: str, capsys: Said) -> None:
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


def test_policies_show_what_they_decided(saved: str, capsys: Said) -> None:
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


def test_certificates_of_one_namespace(saved: str, capsys: Said) -> None:
    assert main(["certificates", "-f", saved, "-n", "default"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1:3] for line in lines[1:]] == [["Leaf", "Available"], ["Root", "Available"]]
    assert lines[1][3:] == ["1bd7", "2026-11-22T11:25:15Z", "2026-11-21T11:23:15Z"]


def test_parts_of_a_saved_dump(saved: str, capsys: Said) -> None:
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


def test_a_table_as_json_from_standard_input(capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(RUST)))
    assert main(["connections", "-f", "-", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["apiVersion"], found["kind"]) == ("ztunnel/v1", "ConnectionList")
    first = found["items"][0]
    assert (first["pod"], first["namespace"]) == ("a", "default")
    assert first["remoteTarget"] is None


# A proxy of ours in an Istio mesh


def test_an_istio_proxy_is_asked(capsys: Said) -> None:
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

    async def check(rig: Rig) -> None:
        rig.proxy.mesh.apply([CLIENT, cart(), BACK])
        address = str(rig.addresses["admin"][0])
        await asyncio.to_thread(ask, address)
        rig.proxy.mesh.apply([deny])
        await asyncio.to_thread(ask_denied, address)

    served(check)


# A proxy of ours in Envoy's dialect


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return write_reference(tmp_path)


def test_a_proxy_in_envoys_dialect_is_asked(reference: Reference, capsys: Said) -> None:
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


# Connections that were seen

LINE = (
    "2026-11-21T11:14:45.9Z\terror\taccess\tconnection complete\tsrc.addr=10.0.0.1:{port} "
    'src.identity="spiffe://cluster.local/ns/shop/sa/client" dst.addr=10.0.0.2:15008 '
    'dst.hbone_addr=10.0.0.2:8080 direction="inbound" error="http status: 401 Unauthorized"\n'
)


def test_lines_of_a_log_are_explained(capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    deny = policy("no-front", Action.DENY, PeerServiceAccount("shop", "client"))
    # A line that is no connection, and the same twice but for the client's port: one question.
    text = "ztunnel is ready\n" + LINE.format(port=4000) + LINE.format(port=4001)

    def ask(address: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["explain", "--log-line", "-", "--address", address]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "seen:",
            "  direction: inbound",
            "  source: 10.0.0.1:4000",
            "  identity: spiffe://cluster.local/ns/shop/sa/client",
            "  target: 10.0.0.2:15008",
            "  authority: 10.0.0.2:8080",
            "  error: http status: 401 Unauthorized",
            "verdict: refused by the destination",
            "source:",
            "  address: 10.0.0.1",
            "  workload: client",
            "  node: none",
            "  identity: spiffe://cluster.local/ns/shop/sa/client",
            "destination: 10.0.0.2:8080",
            "inbound:",
            "  workload: back",
            "  application: 10.0.0.2:8080",
            "  handshake: a certificate of another node is not known before the handshake",
            "  policies:",
            "    - policy: shop/no-front",
            "      action: Deny",
            "      holds: yes",
            "      because: the peer's service account is shop/client",
            "  refused: explicitly denied by: shop/no-front",
        ]
        assert main(["explain", "--log-line", LINE.format(port=1), "--address", address, "--json"]) == 1
        (told,) = json.loads(capsys.readouterr().out)["items"]
        assert list(told) == ["seen", "verdict", "source", "destination", "inbound"]
        bad = 'src.addr=10.0.0.1:9 dst.addr=10.0.0.7 direction="inbound"\n'
        monkeypatch.setattr("sys.stdin", io.StringIO(bad + LINE.format(port=1)))
        assert main(["explain", "--log-line", "-", "--address", address, "--json"]) == 2
        first, second = json.loads(capsys.readouterr().out)["items"]
        assert first["no_answer"].startswith("dst.addr is no IP:PORT: '10.0.0.7': src.addr=10.0.0.1:9")
        assert second["verdict"] == "refused by the destination"
        unknown = (
            'src.addr=10.0.0.1:9 dst.addr=10.0.0.7:1 dst.service="x.example" direction="outbound" error="gone"'
        )
        assert main(["explain", "--log-line", unknown, "--address", address]) == 2
        said = capsys.readouterr().out
        assert "error: gone" in said
        assert "no answer: " in said
        assert "destination 'x.example': no service or workload of this name" in said

    async def check(rig: Rig) -> None:
        rig.proxy.mesh.apply([CLIENT, cart(), BACK, deny])
        await asyncio.to_thread(ask, str(rig.addresses["admin"][0]))

    served(check)


def test_a_live_connection_of_an_istio_proxy_is_explained(capsys: Said) -> None:
    live = {
        "src": "10.0.0.1:4000",
        "originalDst": "10.1.0.1:80",
        "actualDst": "10.0.0.2:15008",
        "protocol": "HBONE",
    }
    table = {"uid": {"connections": {"inbound": [], "outbound": [live]}}}
    answer = {"verdict": "allowed", "ways": [{"target": "10.0.0.2:15008"}, {"target": "10.0.0.3:15008"}]}
    bodies = {"/connections": json.dumps(table).encode(), "/explain": json.dumps(answer).encode()}
    with pages(bodies) as address:
        assert main(["explain", "--connection", "10.0.0.1:4000", "--address", address]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "seen:",
            "  direction: outbound",
            "  source: 10.0.0.1:4000",
            "  destination: 10.1.0.1:80",
            "  target: 10.0.0.2:15008",
            "verdict: allowed",
            "ways:",
            "  - target: 10.0.0.2:15008",
            "    taken: yes",
            "  - target: 10.0.0.3:15008",
        ]
        assert main(["explain", "--connection", "10.0.0.9:4000", "--address", address]) == 2
        assert capsys.readouterr().err == (
            "ztunnel explain: no live connection is 10.0.0.9:4000; `ztunnel connections` lists them\n"
        )


def test_a_live_connection_in_envoys_dialect_is_explained(reference: Reference, capsys: Said) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy_to(reference, server.getsockname()[1])

        def check(running: Running) -> None:
            address = f"127.0.0.1:{reference.admin}"
            with socket.create_connection(("127.0.0.1", reference.ports[15006])) as client:
                client.sendall(b"hello")
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.recv(5) == b"hello"
                    source = "{}:{}".format(*client.getsockname())
                    (entry,) = running.admin.get("/connections").json["connections"]
                    for wanted in (source, f"{source}-{entry['upstream_host']}", str(entry["id"])):
                        assert main(["explain", "--connection", wanted, "--address", address, "--json"]) == 0
                        (told,) = json.loads(capsys.readouterr().out)["items"]
                        assert told["seen"]["id"] == str(entry["id"])
                        assert told["listener_because"] == "the question names it"
                        assert told["hop"]["chain"] == entry["filter_chain"]
                        (cluster,) = told["hop"]["clusters"]
                        taken = [host["address"] for host in cluster["endpoints"] if host.get("taken")]
                        assert taken == [entry["upstream_host"]]

        serve(reference, check)


def test_the_far_ends_proxy_says_its_part(capsys: Said) -> None:
    """Of several proxies that one which has the pod: the others end no TLS for it."""
    identity = "spiffe://cluster.local/ns/a/sa/a"
    tunnel = {"tunnel": {"authority": "10.0.0.2:80"}, "tls": {"identity": [identity]}}
    inner = {"hop": {"clusters": [{"cluster": "t", "endpoints": [tunnel]}]}}
    near = {
        "verdict": "allowed here",
        "source": "10.0.0.1:0",
        "hop": {"clusters": [{"cluster": "s", "endpoints": [inner]}]},
    }
    other = {"hop": {"clusters": [{"cluster": "blackhole", "verdict": "closed: there is no such cluster (NC)"}]}}
    refuses = {"hop": {"tls": {"identity": ["b"]}, "verdict": "closed: no policy allows it"}}
    asked: list[str] = []
    with (
        pages({"/explain": json.dumps(near).encode()}) as here,
        pages({"/explain": json.dumps(other).encode()}) as there,
        pages({"/explain": json.dumps(refuses).encode()}, asked=asked) as elsewhere,
    ):
        words = ["explain", "10.0.0.1", "10.9.9.9:80", "--address", here, "--json"]
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out) == {"apiVersion": "ztunnel/v1", "kind": "Explanation", **near}
        assert main([*words, "--far", there, "--far", elsewhere]) == 1
        told = json.loads(capsys.readouterr().out)
        assert main([*words, "--far", "127.0.0.1:1"]) == 2
        assert "127.0.0.1:1: Connection refused" in capsys.readouterr().err
    assert told["verdict"] == "refused: closed: no policy allows it"
    end = told["hop"]["clusters"][0]["endpoints"][0]["hop"]["clusters"][0]["endpoints"][0]
    assert end["inbound"] == refuses["hop"]
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(asked[0]).query)
    assert query == {"source": ["10.0.0.1:0"], "destination": ["10.0.0.2:80"], "identity": [identity]}


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--from", "a/b", "--to", "c.d:80"], {"source": ["a/b"], "destination": ["c.d:80"]}),
        (["a/b", "--to", "c.d:80"], {"source": ["a/b"], "destination": ["c.d:80"]}),
        (["--from=a/b", "c.d:80"], {"source": ["a/b"], "destination": ["c.d:80"]}),
    ],
)
def test_the_ends_may_be_flags(words: list[str], asked: dict[str, list[str]], capsys: Said) -> None:
    queries: list[str] = []
    with pages({"/explain": b'{"verdict": "allowed"}'}, asked=queries) as address:
        assert main(["explain", *words, "--address", address]) == 0
    (query,) = queries
    assert urllib.parse.parse_qs(urllib.parse.urlsplit(query).query) == asked


@pytest.mark.parametrize(
    "words", [["a", "b:1", "--from", "c"], ["a", "b:1", "--to", "c:1"], ["--from", "a"], ["--to", "a:1"], ["a"]]
)
def test_two_ends_are_wanted(words: list[str], capsys: Said) -> None:
    assert main(["explain", *words]) == 2
    assert "give SOURCE and DESTINATION" in capsys.readouterr().err


# Of a dump of the Rust ztunnel, saved or from the proxy, which has no /explain


@contextmanager
def asked(how: str, saved: str) -> Iterator[list[str]]:
    """The words by which a command asks a Rust ztunnel."""
    if how == "file":
        yield ["--file", saved]
        return
    with pages({"/config_dump": Path(saved).read_bytes()}) as address:
        yield ["--address", address]


@pytest.mark.parametrize("how", ["file", "address"])
def test_a_rust_ztunnels_dump_explains(how: str, saved: str, capsys: Said) -> None:
    with asked(how, saved) as source:
        assert main(["explain", "default/a", "default/c:8080", *source]) == 1
        said = capsys.readouterr().out.splitlines()
        place = said.index("certificate:")
        # Whether it has expired is the clock's to say.
        state, until, days_left = said[place + 1 : place + 4]
        del said[place + 1 : place + 4]
        assert state in ("  state: available", "  state: expired")
        assert (until, days_left[:13]) == ("  valid until: 2026-11-22T11:25:15Z", "  days left: ")
        assert said == [
            "verdict: refused by the destination",
            "source:",
            "  address: 10.0.0.2",
            "  workload: c//Pod/default/a",
            "  node: n1",
            "  identity: spiffe://cluster.local/ns/default/sa/a",
            "destination: 10.0.0.3:8080",
            "dialled: workload c//Pod/default/c",
            "because: a tunnel: the workload takes them",
            "ways:",
            "  - target: 10.0.0.3:15008",
            "    workload: c//Pod/default/c",
            "    node: n2",
            "    weight: 1",
            "    authority: 10.0.0.3:8080",
            "    peer must be: spiffe://cluster.local/ns/default/sa/c",
            "    inbound:",
            "      workload: c//Pod/default/c",
            "      application: 10.0.0.3:8080",
            "      policies:",
            "        - policy: default/few",
            "          action: Allow",
            "          holds: no",
            "          because: the peer's service account is other/b: no, it is default/a",
            "      dry run:",
            "        - policy: default/no",
            "          action: Deny",
            "          holds: no",
            "          because: no alternatives",
            "      refused: allow policies exist, but none allowed",
            "certificate:",
            "not in the dump:",
            "  - what an inbound client has proven: it is taken for the workload at its address",
            "  - service default/web.default.svc.cluster.local: endpoint c//Pod/default/b is no workload of the "
            "dump",
        ]


@pytest.mark.parametrize("how", ["file", "address"])
def test_live_connections_of_a_rust_ztunnel_are_explained(how: str, saved: str, capsys: Said) -> None:
    with asked(how, saved) as source:
        assert main(["explain", "--connection", "10.0.0.2:49386", *source, "--json"]) == 1
        (told,) = json.loads(capsys.readouterr().out)["items"]
        assert told["seen"]["destination"] == "10.0.0.3:8080"
        assert told["ways"][0]["taken"] is True
        assert main(["explain", "--connection", "10.0.0.3:4000", *source, "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)["items"]
        # Nothing of the dump says what was proven; the address is that of a workload that takes tunnels.
        assert told["seen"]["identity"] == "spiffe://cluster.local/ns/default/sa/c"
        assert told["inbound"]["workload"] == "c//Pod/default/a"


def test_a_dump_of_envoys_dialect_explains(reference: Reference, tmp_path: Path, capsys: Said) -> None:
    """Saved, or of an Envoy, which has no /explain."""
    words = ["explain", "10.244.2.3", "10.96.183.192:9080"]
    lacks = ["not in the dump:", "  - the proxy's flags: --tunnel-source is taken for its default"]

    def check(running: Running) -> None:
        assert main([*words, "--address", f"127.0.0.1:{reference.admin}"]) == 0
        dump = running.admin.get("/config_dump", include_eds="").body
        (tmp_path / "dump.json").write_bytes(dump)

    serve(reference, check)
    said = capsys.readouterr().out.splitlines()
    saved = str(tmp_path / "dump.json")
    assert main([*words, "--file", saved]) == 0
    assert capsys.readouterr().out.splitlines() == [*said, *lacks, "  - Calico's policies"]
    with pages(
        {"/config_dump": Path(saved).read_bytes()}, missing=b"invalid path. admin commands are:\n"
    ) as envoy:
        assert main([*words, "--address", envoy]) == 0
        assert capsys.readouterr().out.splitlines()[: len(said)] == said
        assert main(["explain", "--connection", "10.0.0.1:1", "--address", envoy]) == 2
        assert "a dump of Envoy's dialect has no connections" in capsys.readouterr().err
    line = json.dumps(
        {"source": "10.244.2.3:9", "destination": "1.2.3.4:80", "upstream": None, "termination": None}
    )
    assert main(["explain", "--log-line", line, "--file", saved]) == 0
    assert "cluster: PassthroughCluster" in capsys.readouterr().out
    assert main(["explain", "default/a", "10.0.0.1:1", "--file", saved]) == 2
    assert "not an ip:port: 'default/a'" in capsys.readouterr().err
    assert main([*words, "--listener", "none", "--file", saved]) == 2
    assert capsys.readouterr().err == "ztunnel explain: no listener none\n"


def test_a_rust_ztunnels_log_is_explained_by_its_dump(saved: str, capsys: Said) -> None:
    line = (
        '{"level":"error","scope":"access","message":"connection complete","src.addr":"10.0.0.2:9",'
        '"src.identity":"spiffe://cluster.local/ns/default/sa/a","dst.addr":"10.0.0.3:15008",'
        '"dst.hbone_addr":"10.0.0.3:8080","direction":"outbound","error":"http status: 401 Unauthorized"}'
    )
    assert main(["explain", "--log-line", line, "--file", saved]) == 1
    said = capsys.readouterr().out
    assert "  error: http status: 401 Unauthorized" in said
    assert "refused: allow policies exist, but none allowed" in said
    assert "taken: yes" in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give SOURCE and DESTINATION, or --connection, --log-line or --flow"),
        (["10.0.0.1"], "give SOURCE and DESTINATION"),
        (["10.0.0.1", "10.0.0.2:1", "--connection", "1"], "give SOURCE and DESTINATION"),
        (["--log-line", "hello"], "not a line of an access log"),
        (["--log-line", "-", "--file", "-"], "standard input is either --file or --log-line"),
    ],
)
def test_a_question_that_is_none(words: list[str], error: str, capsys: Said) -> None:
    assert main(["explain", *words, "--address", "127.0.0.1:1"]) == 2
    assert error in capsys.readouterr().err


# No answer


@contextmanager
def pages(
    bodies: Mapping[str, bytes],
    *,
    other: bytes | None = None,
    missing: bytes = b"not found\n",
    asked: list[str] | None = None,
) -> Iterator[str]:
    """Serve pages by path, and ``other`` or 404 elsewhere; yields the address.

    ``asked`` gets the target of each request.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            body = bodies.get(self.path.partition("?")[0], other)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(missing if body is None else body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def page(body: bytes) -> AbstractContextManager[str]:
    """Serve one page at every path; yields the address."""
    return pages({}, other=body)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"workloads": 7, "certificates": 1}'])
def test_something_else_that_answers_is_named(body: bytes, capsys: Said) -> None:
    with page(body) as address:
        assert main(["workloads", "--address", address]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ztunnel workloads: {address}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"7",
        b'{"workloads": [], "certificates": [], "version": 7}',
        b'{"workloads": [], "certificates": [7]}',
        b'{"workloads": [], "certificates": [], "config": [7]}',
        b'{"workloads": [], "certificates": [], "workloadState": {"a": 7}}',
        b'{"configs": [7]}',
    ],
)
def test_a_dump_of_another_shape_explains_nothing(body: bytes, tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "dump.json").write_bytes(body)
    saved = str(tmp_path / "dump.json")
    for words in (["10.0.0.1", "10.0.0.2:80"], ["--connection", "10.0.0.1:1"]):
        status = main(["explain", *words, "--file", saved])
        said = capsys.readouterr()
        # An empty mesh is one: neither end is known then.
        assert status == 2 or "not known here" in said.out
        assert said.err.count("\n") == (status == 2)
    with pages({"/connections": body, "/explain": body}) as address:
        assert main(["explain", "--connection", "10.0.0.1:1", "--address", address]) == 2


def test_nobody_there(capsys: Said) -> None:
    port = free_port()
    for command in (["status"], ["explain", "a", "b:1"], ["log"]):
        assert main([*command, "--address", f"127.0.0.1:{port}"]) == 2
        assert f"127.0.0.1:{port}: Connection refused; is a proxy's admin server there?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "error"), [(None, "No such file"), (b"\xff\xfe", "not UTF-8 text at byte 0"), (b"{", "not JSON")]
)
def test_a_bad_file_is_named(content: bytes | None, error: str, tmp_path: Path, capsys: Said) -> None:
    file = tmp_path / "dump.json"
    if content is not None:
        file.write_bytes(content)
    assert main(["services", "--file", str(file)]) == 2
    assert f"ztunnel services: {file}: {error}" in capsys.readouterr().err


def test_an_always_policy_reads_well(capsys: Said) -> None:
    async def check(rig: Rig) -> None:
        rig.proxy.mesh.apply([CLIENT, BACK, policy("all", Action.DENY, Always())])
        address = str(rig.addresses["admin"][0])
        words = ["explain", "shop/client", "shop/back:8080", "--address", address]
        assert await asyncio.to_thread(main, words) == 1

    served(check)
    said = capsys.readouterr().out
    assert "refused: explicitly denied by: shop/all" in said
    assert "because: always" in said


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
def test_the_status_says_what_the_proxy_lacks_to_serve_its_node(
    tmp_path: Path, capsys: Said, config: dict[str, str], pods: list[str], more: dict[str, object], said: str
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


def test_policies_has_a_row_for_what_no_policy_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    implied = {"allowed": 0, "denied": 180, "ended": 2, "lastTime": "2026-11-25T10:00:00Z"}
    file = tmp_path / "dump.json"
    file.write_text(json.dumps({"workloads": [], "certificates": [], "noPolicyMatched": implied}))
    assert main(["policies", "-f", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["items"]
    assert (row["name"], row["denied"], row["ended"]) == ("(no ALLOW policy matched)", 180, 2)
