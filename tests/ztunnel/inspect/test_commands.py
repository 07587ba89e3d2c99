"""The commands that ask a proxy: transcripts in both dialects, and of a dump as the Rust ztunnel writes it."""

import asyncio
import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.ztunnel.envoy.admin.harness import Running, serve
from tests.ztunnel.envoy.admin.reference import Reference, write_reference
from tests.ztunnel.istio.admin.test_server import Rig, served
from tests.ztunnel.istio.test_explain import policy
from tests.ztunnel.istio.test_route import BACK, CLIENT, cart
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
    "config": {"proxyMode": "Shared"},
    "policies": [
        {"action": "Deny", "name": "no", "namespace": "default", "rules": [], "scope": "Namespace", "dryRun": True}
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
    "version": {"version": "1.30.0"},
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
            "name": "a",
            "namespace": "default",
            "node": "n1",
            "protocol": "HBONE",
            "status": "Healthy",
            "workloadIps": ["10.0.0.2"],
        }
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
    ],
    "services": [
        "NAMESPACE  SERVICE NAME  SERVICE VIP  WAYPOINT                              ENDPOINTS",
        "default    web           10.96.0.7    default/wp.default.svc.cluster.local  1/2",
    ],
    "policies": [
        "NAMESPACE  POLICY NAME  ACTION  SCOPE      ENFORCED  ALLOWED  DENIED  LAST",
        "default    no           Deny    Namespace  dry run   -        -       -",
    ],
    "connections": [
        "WORKLOAD   DIRECTION  LOCAL           REMOTE          REMOTE TARGET  PROTOCOL",
        "a.default  Inbound    10.0.0.2:80     10.0.0.3:4000   -              HBONE",
        "a.default  Outbound   10.0.0.2:49386  10.0.0.3:15008  10.0.0.3:8080  HBONE",
    ],
    "status": [
        "version         1.30.0",
        "pods            1 Pending, 1 Up",
        "connections     1 inbound, 1 outbound",
        "certificates    1 Available, 1 Unavailable",
        "the mesh        1 workloads, 1 services, 1 policies",
        "no certificate  spiffe://cluster.local/ns/other/sa/b: no way",
        "not up          b.other: Pending",
    ],
}


@pytest.mark.parametrize("command", TRANSCRIPTS)
def test_tables_of_a_saved_dump(command: str, saved: str, capsys: Said) -> None:
    assert main([command, "--file", saved]) == 0
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
    assert main(["status", "-f", saved]) == 0
    lines = [
        line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("denied")
    ]
    what = "cart.default:80: explicitly denied by: default/p; last 2026-11-23T00:00:00Z from 10.0.0.1:1"
    assert lines[:2] == [
        f"1 x inbound client-0.shop to {what}",
        f"2 x inbound client-1.shop (spiffe://td/ns/shop/sa/c) to {what}",
    ]
    assert lines[10:] == ["and 2 pairs more: see /denials"]
    assert main(["status", "-f", saved, "-n", "other"]) == 0
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
    assert lines[1][3:] == ["7127", "2026-11-22T11:25:15Z", "2026-11-21T11:23:15Z"]


def test_a_table_as_json_from_standard_input(capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(RUST)))
    assert main(["connections", "-f", "-", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first["workload"] == "a.default"
    assert first["remote_target"] == "-"


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
        assert "state    LIVE" in capsys.readouterr().out
        assert main(["connections", "--address", address]) == 0
        assert capsys.readouterr().out.split()[:2] == ["ID", "AGE"]
        assert main(["workloads", "--address", address]) == 2
        assert "in Envoy's dialect has listeners and clusters instead" in capsys.readouterr().err

    serve(reference, check)


# No answer


@contextmanager
def page(body: bytes) -> Iterator[str]:
    """Serve one page at every path; yields the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"workloads": 7, "certificates": 1}'])
def test_something_else_that_answers_is_named(body: bytes, capsys: Said) -> None:
    with page(body) as address:
        assert main(["workloads", "--address", address]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ztunnel workloads: {address}: ")
    assert error.count("\n") == 1


def test_nobody_there(capsys: Said) -> None:
    port = free_port()
    for command in (["status"], ["explain", "a", "b:1"], ["log"]):
        assert main([*command, "--address", f"127.0.0.1:{port}"]) == 2
        assert f"127.0.0.1:{port}: Connection refused; is a proxy's admin server there?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "error"), [(None, "No such file"), (b"\xff\xfe", "not text"), (b"{", "not JSON")]
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
