"""``ztunnel check`` from end to end: objects of an API server, a running proxy, the handshake of port 15008."""

import argparse
import asyncio
import base64
import contextlib
import json
import ssl
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from tests.hbone.certificates import Authority
from tests.limits import WAIT_S
from tests.ports import free_port
from tests.ztunnel.kube.fake_api import FakeApi
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_explain import policy
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT
from xds.dialects.istio.local_file import parse_local_file
from xds.model.authorization import Action, AuthorizationPolicy
from xds.model.policy import Never
from xds.model.workload import GatewayAddress, NetworkAddress, WorkloadUid
from ztunnel.ask.check import gather
from ztunnel.ask.check.gather import Shared, clock, look, targets
from ztunnel.ask.check.rules.model import Facts, NodeFacts
from ztunnel.cli import main
from ztunnel.proxy.istio.admin import check_page
from ztunnel.proxy.istio.admin.check_page import fingerprint, reach, token_facts

Output = pytest.CaptureFixture[str]
SCHEMA = Path(__file__).parents[4] / "docs" / "schemas" / "CheckResultList.json"


def printed_json(capsys: Output) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))
    return found


def by_id(found: dict[str, Any]) -> dict[str, Any]:
    return {each["id"]: each for each in found["items"]}


# A cluster


def test_a_cluster_before_installation(tmp_path: Path, capsys: Output) -> None:
    async def run() -> int:
        api = FakeApi()
        async with api.serve():
            await api.put("namespaces", "", "shop", labels={"istio.io/dataplane-mode": "ambient"})
            spec = {"action": "DENY", "rules": [{"to": [{"operation": {"methods": ["GET"]}}]}]}
            await api.put("authorizationpolicies", "shop", "no-get", spec=spec)
            await api.put("sidecars", "shop", "default", spec={})
            words = ["check", "--pre", "-o", "json", "--kubeconfig", str(api.kubeconfig(tmp_path)), "--as", "bob"]
            status = await asyncio.to_thread(main, words)
            assert {headers.get("impersonate-user") for headers in api.headers} == {"bob"}
            return status

    assert asyncio.run(run()) == 1
    found = by_id(printed_json(capsys))
    assert found["ACC1"]["severity"] == found["ACC3"]["severity"] == "ok"
    assert found["POL1"]["severity"] == "error"
    assert found["POL1"]["object"] == "authorizationpolicy shop/no-get"
    assert found["OBJ4"]["object"] == "sidecar shop/default"
    assert "IDN1" not in found


@pytest.mark.parametrize("ahead_s", [-1e6, 1e6])
def test_ages_are_measured_with_the_clock_of_the_api_server(
    ahead_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the clock of this machine, each certificate could look expired."""
    monkeypatch.setattr(gather, "time", SimpleNamespace(time=lambda: time.time() + ahead_s))

    async def run() -> Facts:
        api = FakeApi()
        async with api.serve():
            words = {"kubeconfig": str(api.kubeconfig(tmp_path)), "context": "", "as_user": ""}
            args = argparse.Namespace(**words, request_timeout=WAIT_S)
            return await asyncio.to_thread(gather.cluster_facts, args)

    facts = asyncio.run(run())
    assert facts.cluster_error == ""
    assert facts.now_s == pytest.approx(time.time(), abs=1e5)


def test_a_proxy_that_does_not_answer_is_named_and_is_the_exit_status(capsys: Output) -> None:
    """With all checks skipped and status 0, a script would take a dead proxy for a healthy one."""
    address = f"127.0.0.1:{free_port()}"
    for words in (["--address", address], ["--address", address, "--fail-on", "warning"]):
        assert main(["check", "--no-cluster", *words]) == 2
        assert f"no answer from node {address}: {address}: Connection refused" in capsys.readouterr().err
    assert main(["check", "--no-cluster", "--address", address, "-o", "json"]) == 2
    found = printed_json(capsys)
    assert [each["node"] for each in found["silent"]] == [address]
    assert {each["severity"] for each in found["items"]} == {"skipped"}
    assert main(["check", "--no-cluster", "--pre", "--address", address]) == 0  # before the proxy is installed


def test_a_refusal_of_the_api_server_is_the_finding(tmp_path: Path, capsys: Output) -> None:
    async def run() -> int:
        api = FakeApi()
        api.accept_token = "another"
        async with api.serve():
            words = ["check", "--only", "ACC", "-o", "json", "--kubeconfig", str(api.kubeconfig(tmp_path))]
            return await asyncio.to_thread(main, [*words, "--pre"])

    assert asyncio.run(run()) == 1
    found = by_id(printed_json(capsys))
    assert "the token or certificate is expired" in found["ACC1"]["fact"]
    assert found["ACC2"]["severity"] == "skipped"


@pytest.mark.parametrize("words", [["--only", "NET99"], ["--wait", "soon"], ["--file", "/nonexistent"]])
def test_a_wrong_command_line(words: list[str], capsys: Output) -> None:
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err.startswith("ztunnel check: ")


def test_checks_are_listed(capsys: Output) -> None:
    assert main(["check", "--list", "--only", "IDN", "-o", "name"]) == 0
    assert capsys.readouterr().out.split() == [f"checkresult/IDN{number}" for number in range(1, 5)]


# A proxy


def test_a_running_proxy_is_judged_by_its_own_facts(capsys: Output) -> None:
    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, BACK, policy("nothing", Action.DENY, Never())])
        address = str(harness.addresses["admin"][0])
        words = ["check", "--no-cluster", "--address", address, "-o", "json"]
        await asyncio.to_thread(main, words)

    served(check)
    found = by_id(printed_json(capsys))
    assert found["NET3"]["severity"] == "ok"  # this machine's clock against itself
    assert found["ACC1"]["severity"] == "skipped"
    assert {found[name]["severity"] for name in ("KRN6", "XDS2", "IDN1")} <= {"ok", "warning"}


def test_the_page_tries_only_what_takes_tunnels() -> None:
    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, BACK])
        for wanted, reason in (
            ("x", "no address"),
            ("192.0.2.1", "no workload or gateway of the mesh takes tunnels"),
        ):
            answer = await harness.ask("admin", f"/check?reach={wanted}")
            assert answer.status == 400
            assert reason in answer.text
        port = free_port()
        gateway = GatewayAddress(destination=NetworkAddress("far", "127.0.0.1"), hbone_mtls_port=port)
        harness.proxy.mesh.apply([replace(BACK, uid=WorkloadUid("far"), network="far", network_gateway=gateway)])
        tried = json.loads((await harness.ask("admin", "/check?reach=127.0.0.1")).text)
        assert tried["port"] == port
        assert "Connect" in tried["error"]
        harness.proxy.mesh.apply([], ["far"])
        page = json.loads((await harness.ask("admin", "/check")).text)
        assert page["mesh"]["workloads"]["number"] == 2
        assert page["kernel"]["process"]["descriptors"] > 0

    served(check)


def test_a_handshake_is_timed_and_a_closed_port_is_named(tmp_path: Path) -> None:
    issued = Authority().issue("spiffe://td/ns/a/sa/b")
    (tmp_path / "chain").write_bytes(issued.chain_pem)
    (tmp_path / "key").write_bytes(issued.key_pem)
    (tmp_path / "root").write_bytes(Authority().pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain", tmp_path / "key")
    context.load_verify_locations(tmp_path / "root")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])

    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with server:
            found = await reach("127.0.0.1", port)
        assert (found["error"], found["largeArrives"]) == ("", True)
        assert found["seconds"] > 0
        closed = await reach("127.0.0.1", free_port())
        assert closed["error"]

    asyncio.run(run())


def test_a_path_that_drops_large_packets_is_told_from_a_closed_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = Authority().issue("spiffe://td/ns/a/sa/b")
    (tmp_path / "chain").write_bytes(issued.chain_pem)
    (tmp_path / "key").write_bytes(issued.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain", tmp_path / "key")
    monkeypatch.setattr(check_page, "_REACH_S", 0.3)

    async def run() -> None:
        behind = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        port = behind.sockets[0].getsockname()[1]

        done = asyncio.Semaphore(0)

        async def drop_large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            first = await reader.read(65536)
            if len(first) > 4096:
                await reader.read()  # until the client gives up
            else:
                answers, onward = await asyncio.open_connection("127.0.0.1", port)
                onward.write(first)
                writer.write(await answers.read(65536))
                await reader.read()
                onward.close()
                await onward.wait_closed()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            done.release()

        path = await asyncio.start_server(drop_large, "127.0.0.1", 0)
        async with behind, path:
            found = await reach("127.0.0.1", path.sockets[0].getsockname()[1])
            await done.acquire()
            await done.acquire()
        assert (found["error"], found["largeArrives"]) == ("", False)

    asyncio.run(run())


# Parts


def test_a_fingerprint_does_not_depend_on_the_order() -> None:
    one, other = {"a": 1}, {"b": [1, 2]}

    async def run() -> None:
        first = await fingerprint(iter([one, other]))
        assert await fingerprint(iter([other, one])) == first
        assert (await fingerprint(iter([one])))["hash"] != first["hash"]
        assert first["number"] == 2

    asyncio.run(run())


def test_one_pod_of_each_other_node_is_tried() -> None:
    def workload(node: str, address: str, **more: Any) -> dict[str, Any]:
        return {"node": node, "workloadIps": [address], "protocol": "HBONE", "status": "Healthy", **more}

    dump = {
        "config": {"localNode": "n1"},
        "workloads": [
            workload("n1", "10.0.1.1"),
            workload("n2", "10.0.2.9", status="Unhealthy"),
            workload("n2", "10.0.2.1"),
            workload("n2", "10.0.2.2"),
            workload("n3", "10.0.3.1", protocol="TCP"),
            workload("n4", "10.0.0.4", networkMode="HostNetwork"),
            *(workload(f"m{number:02}", f"10.1.0.{number}") for number in range(30)),
        ],
    }
    found = targets(dump, most=5)
    assert len(found) == 5
    nodes = {"node n2", *(f"node m{number:02}" for number in range(30))}
    assert ("node n2", "10.0.2.1") in targets(dump, most=99)
    assert {place for place, _ in targets(dump, most=99)} == nodes
    far = workload("f1", "10.9.0.1", network="b", networkGateway={"destination": "b/192.0.2.9"}, protocol="TCP")
    named = workload(
        "f2", "10.9.0.2", network="c", networkGateway={"destination": "ns/gw.example"}, protocol="TCP"
    )
    assert targets({**dump, "workloads": [far, named]}) == [("the gateway of network b", "192.0.2.9")]
    # A pod of another network is reached through its gateway only.
    apart = workload("f3", "10.9.0.3", network="b")
    assert targets({**dump, "workloads": [apart]}) == []
    assert targets({"config": {"localNode": "n1", "network": "b"}, "workloads": [apart]}) == [
        ("node f3", "10.9.0.3")
    ]


def test_a_page_without_a_time_has_no_clock() -> None:
    class Pages:
        name, saved = "here", False

        def text(self, path: str, parameters: Any = None) -> str:
            raise AssertionError(path)

        def json(self, path: str, parameters: Any = None) -> Any:
            return {"workloads": [], "certificates": []} if path == "/config_dump" else {"node": "n1"}

    assert look(Pages()).clock_s is None


def test_a_servers_clock_is_compared_at_the_middle_of_the_request() -> None:
    assert clock("Thu, 26 Nov 2026 12:00:00 GMT", 1795694399.5, 1795694401.5) == 0.0
    assert clock("Thu, 26 Nov 2026 12:00:10 GMT", 1795694399.5, 1795694401.5) == 10.0
    assert clock("soon", 0.0, 0.0) is None


def test_equal_lists_of_many_nodes_are_kept_once() -> None:
    shared = Shared()

    def facts(name: str) -> NodeFacts:
        return NodeFacts(dump={"workloads": [{"name": name}], "services": [], "certificates": [name]})

    first, second, third = (shared.of(facts(name)).dump for name in ("a", "a", "b"))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first["workloads"] is second["workloads"]
    assert third["workloads"] == [{"name": "b"}]


def test_a_token_says_its_audience_and_end_and_is_not_shown(tmp_path: Path) -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"aud": ["istio-ca"], "exp": 1795694400}).encode()).decode()
    token = f"eyJhbGciOiJub25lIn0.{claims.rstrip('=')}.c2ln"
    file = tmp_path / "token"
    file.write_text(token)
    assert token_facts(str(file)) == {"present": True, "audiences": ["istio-ca"], "expires": 1795694400}
    file.write_text("opaque")
    assert token_facts(str(file)) == {"present": True}
    file.write_text("")
    assert "is empty" in token_facts(str(file))["error"]


def test_policies_without_effect_are_a_gauge() -> None:
    """Kept up to date by changes: a scrape does not look at all policies of a mesh."""
    nothing = read_policy("nothing", [[[{}]]])
    something = read_policy("nothing", [[[{"namespaces": [{"Exact": "shop"}]}]]])

    async def check(harness: Harness) -> None:
        async def gauge() -> str:
            page = (await harness.ask("stats", "/metrics")).text
            return next(line for line in page.splitlines() if line.startswith("ztunnel_policies_without_effect"))

        assert (await gauge()).endswith(" 0.0")
        harness.proxy.mesh.apply([nothing])
        assert (await gauge()).endswith(" 1.0")
        harness.proxy.mesh.apply([something])
        assert (await gauge()).endswith(" 0.0")

    served(check)


def read_policy(name: str, rules: Any) -> AuthorizationPolicy:
    local = {
        "name": name,
        "namespace": "shop",
        "scope": "Namespace",
        "action": "Deny",
        "rules": rules,
        "dryRun": False,
    }
    (found,) = parse_local_file(json.dumps({"policies": [local]})).policies
    return found
