"""Plans of requests against their target, verdict and labels found anew, in meshes that change."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from hbone.events import RequestHead
from tests.ztunnel.proxy.istio.pods import APP_PORT, CLIENT, NODE, SERVER, SHOP, endpoint, identity, shop, workload
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.facts import PeerCertificate
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from xds.model.policy import Always, Condition, DestinationPort, PeerPrincipal, SourceIp
from xds.model.workload import Workload
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.workload_labels import labels_of
from ztunnel.proxy.istio.path.authorizer import Authorizer
from ztunnel.proxy.istio.path.inbound_target import RequestRefused, inbound_facts, inbound_service, inbound_target
from ztunnel.proxy.istio.path.judgement import judgement
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.request_plans import Peer, RequestPlan, RequestPlans

AUTHORITIES = (f"{SERVER}:{APP_PORT}", f"{SERVER}:80", "127.0.1.3:80", "shop.example:80", "nonsense")
IDENTITY = SpiffeId.parse(identity("client"))


class Around:
    """The parts of a pod, its node and a peer that plans need."""

    def __init__(self) -> None:
        self.mesh = Mesh(node=NODE)
        self.mesh.apply([workload("server", SERVER), workload("client", CLIENT)])
        self.node = SimpleNamespace(
            mesh=self.mesh,
            config=SimpleNamespace(network="", authz_info_logging=False, baggage=True),
            clock=SimpleNamespace(monotonic=lambda: 0.0, wall=lambda: 0.0),
            addons=None,
            metrics=Metrics("1", 100),
            labels_of=labels_of,
        )
        local = SimpleNamespace(known=lambda: self.labels)
        sockets = SimpleNamespace(application_source=lambda port, client, host: None)
        pod = cast("PodContext", SimpleNamespace(node=self.node, local=local, sockets=sockets))
        self.labels = labels_of(self.here)
        self.authorizer = Authorizer(cast("Node", self.node))
        self.plans = RequestPlans(pod, self.authorizer, (15008,))
        self.peer = Peer(
            SocketAddress(CLIENT, 1234),
            SocketAddress(SERVER, 15008),
            certificate=PeerCertificate(uri_sans=(str(IDENTITY),)),
            identity=IDENTITY,
        )

    @property
    def here(self) -> Workload:
        found = self.mesh.local_workload("server", "default", "server")
        assert found is not None
        return found

    def check(self, authority: str) -> RequestPlan | None:
        """Compare the plan of a request with what is found anew."""
        if self.labels.workload is not self.here:
            self.labels = labels_of(self.here)
        head = RequestHead(
            method=b"CONNECT",
            authority=authority.encode(),
            headers=((b"forwarded", b'for="1.2.3.4:5";host=shop.example'),),
        )
        plan = self.plans.plan(self.peer, head)
        mesh, here = self.mesh, self.here
        policies = mesh.policies_for(here)
        client = mesh.workload_at("", CLIENT)
        try:
            target = inbound_target(authority, here, SERVER, mesh, network="", illegal_ports=(15008,))
        except RequestRefused:
            assert plan is None
            return None
        facts = inbound_facts(self.peer.source, target.address, self.peer.certificate)
        decided = judgement(policies, facts)
        if plan is None:
            reported = policies.dry_run_deny or policies.dry_run_allow
            assert client is None or decided.refusal or policies.missing or reported
            return None
        assert not decided.refusal
        assert not policies.missing
        assert plan.decision.policy == decided.policy
        assert plan.decision.address == target.address
        assert plan.facts == facts
        assert plan.described.destination_workload is here
        assert plan.described.source_workload is client
        assert plan.described.service is inbound_service(target, here, mesh, "shop.example")
        assert plan.described.references[:2] == (client, here)
        assert plan.described.references[6] is plan.described.service
        return plan


conditions: st.SearchStrategy[Condition] = st.sampled_from(
    [
        Always(),
        DestinationPort(APP_PORT, APP_PORT + 1),
        SourceIp(IPv4Network(f"{CLIENT}/32")),
        PeerPrincipal(None),
    ]
)
policies = st.builds(
    lambda name, action, condition, dry_run: AuthorizationPolicy(
        name=name,
        namespace="default",
        scope=PolicyScope.NAMESPACE,
        action=action,
        condition=condition,
        dry_run=dry_run,
    ),
    st.sampled_from(["p", "q"]),
    st.sampled_from([Action.ALLOW, Action.DENY]),
    conditions,
    st.sampled_from([False, False, True]),
)
changes = st.one_of(
    st.tuples(st.just("put"), policies),
    st.tuples(st.just("policy gone"), st.sampled_from(["default/p", "default/q"])),
    st.tuples(
        st.just("put"), st.builds(lambda name: workload("server", SERVER, canonical_name=name), st.text("ab"))
    ),
    st.tuples(st.just("put"), st.just(endpoint("server", SERVER, key=SHOP))),
    st.tuples(st.just("put"), st.just(shop())),
    st.tuples(st.just("put"), st.just(workload("client", CLIENT))),
    st.tuples(st.just("client gone"), st.just("")),
)


@given(st.lists(st.one_of(changes, st.sampled_from(AUTHORITIES)), max_size=40))
def test_request_plan_equals_a_new_decision_after_any_changes(steps: Iterable[Any]) -> None:
    around = Around()
    for step in steps:
        if isinstance(step, str):
            around.check(step)
            continue
        kind, what = step
        if kind == "put":
            around.mesh.apply([what])
        elif kind == "policy gone":
            around.mesh.apply(removed_policies=[what])
        else:
            around.mesh.apply((), [workload("client", CLIENT).uid])
    for authority in AUTHORITIES:
        around.check(authority)
        around.check(authority)


def test_request_plan_stays_until_its_decision_changes() -> None:
    around = Around()
    plan = around.check(AUTHORITIES[0])
    assert plan is not None
    around.mesh.apply([workload("unrelated", "127.0.7.7")])
    assert around.check(AUTHORITIES[0]) is plan
    deny = AuthorizationPolicy(
        name="deny", namespace="default", scope=PolicyScope.NAMESPACE, action=Action.DENY, condition=Always()
    )
    around.mesh.apply([deny])
    assert around.check(AUTHORITIES[0]) is None
    around.mesh.apply(removed_policies=[deny.key])
    assert around.check(AUTHORITIES[0]) is not None


def test_the_plans_of_a_peer_are_bounded() -> None:
    around = Around()
    for port in range(1, 200):
        around.check(f"{SERVER}:{port}")
        assert len(around.peer.plans) <= 64
