"""Which clauses of a rule match a flow: the rows of Calico's own scenarios."""

from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest

from tests.ztunnel.policy.calico.evaluator_case import (
    ALLOW,
    FLOW,
    NET_SET,
    ONE,
    POD,
    PORT_SET,
    TWO,
    destination,
    flow,
    matches,
    source,
    with_rule,
)
from xds.model import calico as c
from ztunnel.policy.calico.verdict import Code

SHOP = c.NamespaceUpdate("shop", {"env": "prod"})
ACCOUNT = c.ServiceAccountUpdate("shop", "web", {"role": "web"})
NET = ip_network("10.0.0.0/24")
SIX = ip_network("fd00::/8")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, True),
        ({"protocol": 6}, True),
        ({"protocol": "TCP"}, True),
        ({"protocol": 17}, False),
        ({"protocol": "nonsense"}, False),
        ({"not_protocol": "udp"}, True),
        ({"not_protocol": 6}, False),
        ({"not_protocol": "nonsense"}, True),
        ({"ip_version": 4}, True),
        ({"ip_version": 6}, False),
        ({"icmp": c.IcmpMatch(8)}, False),
        ({"not_icmp": c.IcmpMatch(8)}, True),
        (source(nets=(NET,)), True),
        (source(nets=(SIX,)), False),
        (source(nets=(SIX, NET)), True),
        (source(nets=(NET, None)), True),
        (source(nets=(None, NET)), False),
        (source(not_nets=(NET,)), False),
        (source(not_nets=(SIX,)), True),
        (source(not_nets=(SIX, None)), False),
        (destination(ports=((80, 80),)), True),
        (destination(ports=((81, 90), (70, 80))), True),
        (destination(ports=((1, 65535),)), True),
        (destination(ports=((81, 81),)), False),
        (destination(not_ports=((80, 80),)), False),
        (destination(not_ports=((81, 81),)), True),
        (source(ports=((80, 80),)), False),
        (source(ip_sets=("s:a",)), True),
        (source(ip_sets=("s:a", "s:never")), False),
        (source(ip_sets=("s:never",)), False),
        (source(not_ip_sets=("s:a",)), False),
        (source(not_ip_sets=("s:never",)), False),
        (destination(named_ports=("n:http",)), True),
        (destination(named_ports=("n:never",), ports=((80, 80),)), True),
        (destination(named_ports=("n:never",)), False),
        (source(named_ports=("n:http",)), False),
        (destination(not_named_ports=("n:http",)), False),
        (destination(not_named_ports=("n:never",)), False),
        (destination(ip_port_sets=("n:http",)), True),
        (destination(ip_port_sets=("n:never",)), False),
        (source(account_names=("web",)), True),
        (source(account_names=("db", "web")), True),
        (source(account_names=("db",)), False),
        (source(account_selector="role == 'web'"), True),
        (source(account_selector="role != 'web'"), False),
        (source(account_selector="role =="), False),
        (source(account_names=("web",), account_selector="has(nothing)"), False),
        (source(namespace_selector="env == 'prod'"), True),
        (source(namespace_selector="env == 'test'"), False),
        (source(namespace_selector="env =="), False),
        (destination(account_names=("web",)), True),  # the destination has no principal: plain text
    ],
)
def test_each_clause_of_a_rule_matches_a_tcp_flow_or_not(rule: dict[str, Any], expected: bool) -> None:
    assert matches(rule, FLOW, NET_SET, PORT_SET, SHOP, ACCOUNT) is expected


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [
        (destination(ip_port_sets=("n:http",)), {"protocol": 132, "destination_port": 81}, True),
        (destination(ip_port_sets=("n:http",)), {"destination_port": 81}, False),
        (source(nets=(NET,)), {"source_ip": None}, False),
        (source(ip_sets=("s:a",)), {"source_ip": None}, False),
        (source(nets=(SIX,)), {"source_ip": "fd00::1"}, True),
        (source(account_names=("db",)), {"source_principal": ""}, True),
        (source(account_selector="has(nothing)"), {"source_principal": ""}, True),
        (source(namespace_selector="has(nothing)"), {"source_principal": ""}, True),
        (source(account_selector="team == 'x'"), {"source_labels": (("team", "x"),)}, True),
        (source(account_selector="role == 'x'"), {"source_labels": (("role", "x"),)}, False),
        ({"protocol": 6}, {"protocol": 300}, False),
        ({"not_protocol": 6}, {"protocol": 300}, False),
    ],
)
def test_clauses_match_flows_without_the_usual_facts(
    rule: dict[str, Any], changes: dict[str, Any], expected: bool
) -> None:
    assert matches(rule, flow(**changes), NET_SET, PORT_SET, SHOP, ACCOUNT) is expected


@pytest.mark.parametrize(
    ("clauses", "namespace", "expected"),
    [
        ({"selector": "app == 'x'"}, "shop", True),
        ({"selector": "app == 'x'"}, "prod", False),
        ({"not_selector": "app == 'x'"}, "prod", False),
        ({"account_names": ("web",)}, "prod", False),
        ({"account_selector": "all()"}, "prod", False),
        ({}, "prod", True),
        ({"selector": "app == 'x'", "namespace_selector": "all()"}, "prod", True),
    ],
)
def test_a_policy_of_a_namespace_means_pods_and_accounts_of_its_own(
    clauses: dict[str, Any], namespace: str, expected: bool
) -> None:
    peer = flow(source_principal=f"spiffe://cluster.local/ns/{namespace}/sa/web")
    assert matches(source(**clauses), peer, of=TWO) is expected
    assert matches(source(**clauses), peer, of=ONE)


@pytest.mark.parametrize(
    "clauses",
    [
        {"ip_sets": ("s:never",)},
        {"not_ip_sets": ("s:never",)},
        {"named_ports": ("n:never",)},
        {"not_named_ports": ("n:never",)},
        {"ip_port_sets": ("n:never",)},
        {"nets": (None,)},
        {"not_nets": (None,)},
        {"account_selector": "broken =="},
        {"namespace_selector": "broken =="},
    ],
)
@pytest.mark.parametrize("action", [c.Action.DENY, c.Action.UNKNOWN])
def test_a_denial_that_cannot_be_evaluated_is_an_error_unless_another_clause_fails(
    clauses: dict[str, Any], action: c.Action
) -> None:
    rule = c.Rule(action, c.PeerMatch(**clauses))
    assert with_rule(rule, ALLOW).check(POD, FLOW).code is Code.INTERNAL
    other = replace(rule, destination=c.PeerMatch(ports=((81, 81),)))
    assert with_rule(other, ALLOW).check(POD, FLOW).allowed


def test_a_set_that_arrives_or_goes_counts_at_once() -> None:
    found = with_rule(c.Rule(c.Action.ALLOW, c.PeerMatch(ip_sets=("s:a",))))
    assert not found.check(POD, FLOW).allowed
    for update, allowed in (
        (NET_SET, True),
        (c.IpSetDelta("s:a", (), ("10.0.0.0/24",)), False),
        (c.IpSetDelta("s:a", ("10.0.0.1/32",), ()), True),
        (c.IpSetRemove("s:a"), False),
    ):
        found.apply(update)
        assert found.check(POD, FLOW).allowed is allowed
