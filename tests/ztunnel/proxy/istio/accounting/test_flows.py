"""Connections of an Istio mesh in the flight recorder: outcomes, Hubble's shape, and the page."""

import json
from dataclasses import replace
from typing import Any

import pytest

from hbone.aio.relay import ByteCounts
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT
from xds.model.address import SocketAddress
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.flows.hubble import Ended, verdict_of
from ztunnel.proxy.istio.accounting import flows
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.metrics import PeerLabels
from ztunnel.proxy.istio.accounting.outcome import REJECTED, Failed

DENIED = Failed(f"{REJECTED}: explicitly denied by: shop/no-web", Reason.POLICY, policy="shop/no-web")


@pytest.mark.parametrize(
    ("reason", "policy", "verdict", "event", "drop"),
    [
        (None, "", "FORWARDED", (4, 11), 0),
        (Reason.POLICY, "shop/no-web", "DROPPED", (5, 0), 181),
        (Reason.POLICY, "", "DROPPED", (5, 0), 133),
        (Reason.POLICY_MISSING, "a/b", "DROPPED", (5, 0), 133),
        (Reason.POLICY_CHANGE, "", "DROPPED", (1, 133), 133),
        (Reason.REVOKED, "", "DROPPED", (1, 189), 189),
        (Reason.DRAIN, "", "FORWARDED", (4, 11), 0),
        (Reason.REFUSED, "", "ERROR", (4, 11), 0),
    ],
)
def test_hubble_verdict_of_each_failure(
    reason: Reason | None, policy: str, verdict: str, event: Any, drop: int
) -> None:
    assert verdict_of(Ended(reason, policy=policy), outbound=True, tunnelled=True) == (verdict, event, drop)


def test_observation_points_of_passthrough_and_inbound_flows() -> None:
    assert verdict_of(Ended(), outbound=True, tunnelled=False)[1] == (4, 3)
    assert verdict_of(Ended(), outbound=False, tunnelled=True)[1] == (4, 0)


def record(harness: Harness, direction: Direction) -> Record:
    found = Record(
        harness.proxy.node, direction, SocketAddress("10.0.0.1", 4000), SocketAddress("10.0.0.2", 15008)
    )
    found.source_workload, found.destination_workload = CLIENT, BACK
    found.source_labels, found.destination_labels = PeerLabels.of(CLIENT), PeerLabels.of(BACK)
    found.source_identity, found.destination_identity = CLIENT.identity, BACK.identity
    found.hbone_authority, found.secured = "10.0.0.2:8080", True
    return found


def test_flows_page_has_hubbles_fields() -> None:
    async def check(harness: Harness) -> None:
        ended = record(harness, Direction.OUTBOUND)
        ended.opened()
        ended.complete()
        refused = record(harness, Direction.INBOUND)
        refused.opened()
        refused.complete(DENIED)
        failed = Record(
            harness.proxy.node,
            Direction.OUTBOUND,
            SocketAddress("10.0.0.1", 4001),
            SocketAddress("192.0.2.1", 443),
        )
        failed.opened()
        failed.complete(Failed("io error: Connection refused\x1b[2J", Reason.REFUSED))
        lines = [json.loads(line) for line in (await harness.ask("admin", "/flows")).text.splitlines()]
        first, second, third = (line["flow"] for line in lines)
        assert [each["verdict"] for each in (first, second, third)] == ["FORWARDED", "DROPPED", "ERROR"]
        for line, flow in zip(lines, (first, second, third), strict=True):
            assert (line["time"], line["node_name"]) == (flow["time"], flow["node_name"])
            assert flow["l4"]["TCP"]["destination_port"] in (8080, 443)  # never the tunnel's
            assert flow["source"]
            assert flow["destination"]
            assert flow["is_reply"] is False
            assert "destination_names" not in flow
            assert flow["node_name"].count("/") == 1
            assert flow["extensions"]["@type"] == "type.googleapis.com/google.protobuf.Struct"
        assert len({line["time"] for line in lines}) == 3
        assert first["IP"] == {
            "source": "10.0.0.1",
            "destination": "10.0.0.2",
            "ipVersion": "IPv4",
            "encrypted": True,
        }
        assert (first["traffic_direction"], first["auth_type"]) == ("EGRESS", "SPIRE")
        assert first["source"]["pod_name"] == CLIENT.name
        assert first["extensions"]["value"]["hbone_address"] == "10.0.0.2:15008"
        assert second["ingress_denied_by"] == [
            {"name": "no-web", "namespace": "shop", "kind": "AuthorizationPolicy"}
        ]
        assert (second["drop_reason"], second["drop_reason_desc"]) == (181, "POLICY_DENY")
        assert third["destination"] == {"identity": 2, "labels": ["reserved:world"]}
        assert third["Summary"].isprintable()
        one = (await harness.ask("admin", "/flows?last=1")).text.splitlines()
        assert [json.loads(line)["flow"]["verdict"] for line in one] == ["ERROR"]
        assert (await harness.ask("admin", "/flows?after=x")).status == 400

    served(check)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("authority", "destination"),
    [
        ("10.0.0.2:8080", ("10.0.0.2", 8080)),
        ("[fd00::2]:8080", ("fd00::2", 8080)),
        ("[2001:db8::2]:8080", ("2001:db8::2", 8080)),
        ("web.shop.svc.cluster.local:80", ("fd00::9", 15008)),  # the tunnel's destination if only a name is known
        ("1st.example:80", ("fd00::9", 15008)),
    ],
)
def test_flow_of_a_tunnel_has_the_applications_address(
    direction: Direction, authority: str, destination: tuple[str, int]
) -> None:
    async def check(harness: Harness) -> None:
        ended = record(harness, direction)
        ended.destination, ended.hbone_authority = SocketAddress("fd00::9", 15008), authority
        ended.opened()
        ended.complete()
        (line,) = (await harness.ask("admin", "/flows")).text.splitlines()
        flow = json.loads(line)["flow"]
        assert (flow["IP"]["destination"], flow["l4"]["TCP"]["destination_port"]) == destination
        tunnel = "[fd00::9]:15008" if direction is Direction.OUTBOUND else None
        assert flow["extensions"]["value"].get("hbone_address") == tunnel

    served(check)


@pytest.mark.parametrize(
    ("workload_type", "kind"),
    [("deployment", "Deployment"), ("cronjob", "CronJob"), ("pod", "Pod"), ("job", "Job"), ("", "Pod")],
)
def test_workloads_of_flows_have_kubernetes_kinds(workload_type: str, kind: str) -> None:
    assert flows.side(replace(CLIENT, workload_type=workload_type), None, None).kind == kind


def test_workloads_of_one_account_have_different_identities() -> None:
    from ztunnel.proxy.flows.hubble import identity_of

    other = replace(CLIENT, name="other", workload_name="other")
    first, second = (identity_of(flows.side(each, None, None)) for each in (CLIENT, other))
    assert first != second
    assert min(first, second) >= 65536
    assert first == identity_of(flows.side(CLIENT, None, CLIENT.identity))


def test_flight_recorder_can_be_disabled() -> None:
    async def check(harness: Harness) -> None:
        ended = record(harness, Direction.OUTBOUND)
        ended.counts = ByteCounts()
        ended.opened()
        ended.complete()
        assert (await harness.ask("admin", "/flows")).text == ""

    served(check, {"ZTUNNEL_FLOWS": "0"})
