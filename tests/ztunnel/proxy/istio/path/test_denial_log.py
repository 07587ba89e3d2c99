"""Lines about denials: their text, when they are written, and how many."""

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.istio.nodes import LOCAL, StoppedClock, a_node
from xds.dialects.istio.local_file import read_policy
from xds.model.address import SocketAddress
from xds.model.authorization import AuthorizationPolicy
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.policy import Always, DestinationPort, SourceIp
from xds.model.workload import PolicyKey, Workload, WorkloadUid
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.path.authorizer import Authorizer, Denied
from ztunnel.proxy.istio.path.denial_log import deciding_rule
from ztunnel.proxy.istio.path.node import Node
from ztunnel.runtime.line_limit import BURST

QUIET = {"RUST_LOG": "info,access=off"}
ID = "spiffe://cluster.local/ns/shop/sa/client"
CLIENT = Workload(uid=WorkloadUid("c"), name="client", namespace="shop", addresses=("10.0.0.1",))
SOURCE, TARGET = SocketAddress("10.0.0.1", 4000), SocketAddress(LOCAL.addresses[0], 80)
FACTS = ConnectionFacts(
    source=SOURCE, direct_source=SOURCE, destination=TARGET, peer=PeerCertificate(uri_sans=(ID,))
)
ACCOUNT = {"serviceAccounts": [{"namespace": "shop", "serviceAccount": "client"}]}


def policy(name: str, action: str, *rules: Any) -> AuthorizationPolicy:
    return read_policy(
        {
            "name": name,
            "namespace": "default",
            "scope": "Namespace",
            "action": action,
            "dryRun": False,
            "rules": [[[match]] for match in rules],
        }
    )


def lines(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    policies: list[AuthorizationPolicy],
    env: dict[str, str],
    *,
    facts: ConnectionFacts = FACTS,
    times: int = 1,
    then: Callable[[Node, Authorizer, StoppedClock], None] = lambda node, judge, clock: None,
) -> list[str]:
    """What is logged at level info about a connection to LOCAL that is denied so often."""

    async def main() -> None:
        with a_node(folder, env) as (node, clock, _):
            node.mesh.apply([LOCAL, CLIENT, *policies])
            judge = Authorizer(node)
            for _ in range(times):
                with pytest.raises(Denied):
                    await judge.authorize(LOCAL, facts, Record(node, Direction.INBOUND, SOURCE, TARGET), 0.0)
            then(node, judge, clock)

    with caplog.at_level(logging.INFO, "ztunnel.proxy.istio.path.denial_log"):
        asyncio.run(main())
    return [each.getMessage() for each in caplog.records if each.name == "ztunnel.proxy.istio.path.denial_log"]


BEGIN = (
    f"connection denied by policy src.addr=10.0.0.1:4000 src.workload=client.shop src.identity={ID} "
    f"dst.addr={TARGET} dst.workload={LOCAL.name}.{LOCAL.namespace} "
)


@pytest.mark.parametrize(
    ("policies", "end"),
    [
        (
            [policy("p", "Deny", {"destinationPorts": [81]}, ACCOUNT)],
            "policy=default/p rule=rules[1]: the peer's service account is shop/client",
        ),
        (
            [policy("p", "Deny", {"destinationPorts": [80]})],
            "policy=default/p rule=rules[0]: the port is 80",
        ),
        (
            [policy(name, "Allow", {"destinationPorts": [81]}) for name in "abcdef"],
            "policy=- rule=none of the ALLOW policies matches: "
            "default/a, default/b, default/c, default/d and 2 more",
        ),
    ],
)
def test_denial_line_names_workloads_policy_and_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policies: list[AuthorizationPolicy], end: str
) -> None:
    assert lines(tmp_path, caplog, policies, QUIET) == [BEGIN + end]


def test_unknown_values_in_a_denial_line_are_dashes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stranger = SocketAddress("192.0.2.1", 9)
    plain = ConnectionFacts(source=stranger, direct_source=stranger, destination=TARGET)
    (line,) = lines(tmp_path, caplog, [policy("p", "Deny", {"destinationPorts": [80]})], QUIET, facts=plain)
    assert "src.addr=192.0.2.1:9 src.workload=- src.identity=- " in line


def test_a_live_connection_that_is_ended_has_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(node: Node, judge: Authorizer, clock: StoppedClock) -> None:
        assert judge.verdict(LOCAL, FACTS).reason

    found = lines(tmp_path, caplog, [policy("p", "Deny", ACCOUNT)], QUIET, times=0, then=change)
    assert found == [
        BEGIN.replace("denied", "ended")
        + "policy=default/p rule=rules[0]: the peer's service account is shop/client"
    ]


def test_a_policy_that_has_not_arrived_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def named(node: Node, judge: Authorizer, clock: StoppedClock) -> None:
        late = replace(LOCAL, authorization_policies=(PolicyKey("default/late"),))
        assert judge.verdict(late, FACTS).reason

    (line,) = lines(tmp_path, caplog, [], QUIET, times=0, then=named)
    assert line.endswith("policy=default/late rule=the policy has not arrived")


@pytest.mark.parametrize(
    ("env", "written"),
    [
        ({}, 0),  # the access line says it
        ({"RUST_LOG": "info,access=off"}, 1),
        ({"AUTHZ_POLICY_INFO_LOGGING": "true"}, 1),
    ],
)
def test_denial_line_is_written_only_without_access_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, env: dict[str, str], written: int
) -> None:
    assert len(lines(tmp_path, caplog, [policy("p", "Deny", ACCOUNT)], env)) == written


def test_denial_lines_are_rate_limited_and_suppressed_ones_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def later(node: Node, judge: Authorizer, clock: StoppedClock) -> None:
        clock.passed_s += 60.0
        assert judge.verdict(LOCAL, FACTS).reason

    found = lines(tmp_path, caplog, [policy("p", "Deny", ACCOUNT)], QUIET, times=BURST + 7, then=later)
    assert len(found) == BURST + 2
    assert found[BURST] == "log lines about denials were suppressed count=7"


def test_condition_without_separate_rules_has_no_rule_number() -> None:
    one = policy("p", "Deny", {"destinationPorts": [81, 80]})
    assert deciding_rule(one, FACTS) == "rules[0]: the port is 80"
    two = policy("p", "Deny", ACCOUNT, {"destinationPorts": [81]})
    closed = replace(two, condition=Always(), faults=("rules[0]: hosts",))
    assert deciding_rule(closed, FACTS) == "always"
    whole = replace(one, condition=DestinationPort(80, 81))
    assert deciding_rule(whole, FACTS) == "rules[0]: the port is 80"
    network = SourceIp(ipaddress.ip_network("10.0.0.0/8"))
    assert deciding_rule(replace(two, condition=network), FACTS) == "the source address is in 10.0.0.0/8"
