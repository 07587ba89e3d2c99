"""Who may come in: verdicts, dry runs, policies that are late."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.nodes import LOCAL, a_node
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.policy import Always, Never
from xds.model.workload import PolicyKey
from ztunnel.policy.ledger import Tally
from ztunnel.proxy.dataplane.life_table import ALLOWED
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.metrics import NONE_MATCHED
from ztunnel.proxy.istio.path.authorizer import Authorizer, Denied
from ztunnel.proxy.istio.path.node import Node

SOURCE, TARGET = SocketAddress("10.0.0.1", 1), SocketAddress("127.0.0.1", 80)
FACTS = ConnectionFacts(
    source=SOURCE, direct_source=SOURCE, destination=TARGET, peer=PeerCertificate(uri_sans=("spiffe://a/b",))
)
NAMED = replace(LOCAL, authorization_policies=(PolicyKey("default/late"),))


def policy(name: str, action: Action, *, holds: bool = True, dry_run: bool = False) -> AuthorizationPolicy:
    scope = PolicyScope.WORKLOAD_SELECTOR if name == "late" else PolicyScope.GLOBAL
    condition = Always() if holds else Never()
    return AuthorizationPolicy(
        name=name, namespace="default", scope=scope, action=action, condition=condition, dry_run=dry_run
    )


def judged(folder: Path, work: Callable[[Node, Authorizer, Record], Awaitable[None]]) -> None:
    async def main() -> None:
        with a_node(folder, {"AUTHZ_POLICY_INFO_LOGGING": "true"}) as (node, _, _):
            node.mesh.apply([LOCAL])
            await work(node, Authorizer(node), Record(node, Direction.INBOUND, SOURCE, TARGET))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("policies", "refusal"),
    [
        ([], ""),
        ([policy("a", Action.ALLOW)], ""),
        ([policy("a", Action.ALLOW, holds=False)], "allow policies exist, but none allowed"),
        ([policy("d", Action.DENY)], "explicitly denied by: default/d"),
        ([policy("d", Action.DENY), policy("a", Action.ALLOW)], "explicitly denied by: default/d"),
        ([policy("d", Action.DENY, holds=False)], ""),
        ([policy("d", Action.DENY, dry_run=True)], ""),
        ([policy("a", Action.ALLOW, holds=False, dry_run=True)], ""),
    ],
)
def test_policies_decide_about_a_connection(
    tmp_path: Path, policies: list[AuthorizationPolicy], refusal: str
) -> None:
    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        node.mesh.apply(policies)
        assert bool(judge.verdict(LOCAL, FACTS).reason) is bool(refusal)
        if not refusal:
            await judge.authorize(LOCAL, FACTS, record, 0.0)
            return
        with pytest.raises(Denied, match=refusal):
            await judge.authorize(LOCAL, FACTS, record, 0.0)

    judged(tmp_path, work)


def test_decisions_are_counted_by_policy(tmp_path: Path) -> None:
    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        uses = node.metrics.ledger.own
        await judge.authorize(LOCAL, FACTS, record, 0.0)
        assert not len(uses), "without a policy there is no decision"
        node.mesh.apply([policy("a", Action.ALLOW)])
        await judge.authorize(LOCAL, FACTS, record, 0.0)
        assert not judge.verdict(LOCAL, FACTS).reason
        node.mesh.apply([policy("a", Action.ALLOW, holds=False)])
        with pytest.raises(Denied):
            await judge.authorize(LOCAL, FACTS, record, 0.0)
        node.mesh.apply([policy("d", Action.DENY)])
        assert judge.verdict(LOCAL, FACTS).reason
        with pytest.raises(Denied):
            await judge.authorize(LOCAL, FACTS, record, 0.0)
        node.mesh.apply([NAMED])
        with pytest.raises(Denied):
            await judge.authorize(NAMED, FACTS, record, 0.0)
        now_s = node.clock.wall()
        assert {use.policy: tuple(use.tally[:3]) for use in uses} == {
            "default/a": (1, 0, 0),
            NONE_MATCHED: (0, 1, 0),
            "default/d": (0, 1, 1),
            "default/late": (0, 1, 0),
        }
        assert all(0 <= now_s - use.last_s < 60 for use in uses)

    judged(tmp_path, work)


def test_dry_runs_are_counted_and_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        node.mesh.apply(
            [
                policy("d", Action.DENY, dry_run=True),
                policy("n", Action.ALLOW, holds=False, dry_run=True),
            ]
        )
        await judge.authorize(LOCAL, FACTS, record, 0.0)
        assert record.dry_run == "denied by default/d"
        assert {use.policy: use.tally for use in node.metrics.ledger.own} == {
            "default/d": Tally(would_deny=1),
            "default/n": Tally(would_not_allow=1),
        }

    caplog.set_level("INFO")
    judged(tmp_path, work)
    assert "dry-run: deny policy match policy=default/d" in caplog.messages
    assert "dry-run: no allow policies match" in caplog.messages


@pytest.mark.parametrize("holds", [True, False])
def test_dry_run_allow_policy_denies_nothing_beside_an_enforced_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, holds: bool
) -> None:
    """A further ALLOW policy can only allow more."""

    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        node.mesh.apply(
            [
                policy("enforced", Action.ALLOW, holds=holds),
                policy("n", Action.ALLOW, holds=False, dry_run=True),
            ]
        )
        with contextlib.nullcontext() if holds else pytest.raises(Denied):
            await judge.authorize(LOCAL, FACTS, record, 0.0)
        assert record.dry_run == ""
        assert not any(use.tally.would_not_allow for use in node.metrics.ledger.own)

    caplog.set_level("INFO")
    judged(tmp_path, work)
    assert not any("dry-run" in message for message in caplog.messages)


def test_connection_waits_for_a_late_policy(tmp_path: Path) -> None:
    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        node.mesh.apply([NAMED])
        assert judge.verdict(NAMED, FACTS).reason
        async with asyncio.TaskGroup() as group:
            admitted = group.create_task(judge.authorize(NAMED, FACTS, record, 10.0))
            await asyncio.sleep(0)
            assert not admitted.done()
            node.mesh.apply([policy("late", Action.ALLOW)])
        assert not judge.verdict(NAMED, FACTS).reason

    judged(tmp_path, work)


def test_missing_policy_denies_after_its_grace_period(tmp_path: Path) -> None:
    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        node.mesh.apply([NAMED])
        with pytest.raises(Denied, match="policy default/late has not arrived"):
            await judge.authorize(NAMED, FACTS, record, 0.01)

    judged(tmp_path, work)


def test_missing_policy_about_plain_text_denies_plain_text_only(tmp_path: Path) -> None:
    # istiod never sends some of the policies that it makes of a PeerAuthentication with port levels, although it
    # lists them for the workload.
    named = replace(LOCAL, authorization_policies=(PolicyKey("default/converted_peer_authentication_ports"),))
    identified = replace(FACTS, peer=PeerCertificate(uri_sans=("spiffe://cluster.local/ns/default/sa/client",)))

    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        node.mesh.apply([named])
        async with asyncio.timeout(WAIT_S):  # does not wait for the policy
            await judge.authorize(named, identified, record, 3600.0)
        judge.changed(named)
        assert judge.verdict(named, identified) == ALLOWED
        for facts in (FACTS, replace(FACTS, peer=None)):
            assert judge.verdict(named, facts).until_s < math.inf  # within the grace period
            with pytest.raises(Denied, match="policy default/converted_peer_authentication_ports has not arrived"):
                await judge.authorize(named, facts, record, 0.0)
        node.mesh.apply([policy("d", Action.DENY)])
        with pytest.raises(Denied, match="explicitly denied by: default/d"):
            await judge.authorize(named, identified, record, 0.0)
        node.mesh.apply([replace(named, authorization_policies=(*named.authorization_policies, "default/late"))])
        with pytest.raises(Denied, match="policy default/late has not arrived"):
            await judge.authorize(named, identified, record, 0.0)

    judged(tmp_path, work)


def test_connection_is_allowed_if_the_workload_drops_the_missing_policy(tmp_path: Path) -> None:
    async def work(node: Node, judge: Authorizer, record: Record) -> None:
        node.mesh.apply([NAMED])
        async with asyncio.TaskGroup() as group:
            group.create_task(judge.authorize(NAMED, FACTS, record, 10.0))
            await asyncio.sleep(0)
            node.mesh.apply([LOCAL])

    judged(tmp_path, work)
