"""Fast, explained and literal evaluation give one answer for random policies, sets, endpoints and flows."""

from dataclasses import replace
from ipaddress import ip_network

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.ztunnel.policy.calico.evaluator_case import POD, identities
from tests.ztunnel.policy.calico.literal import UNREADABLE, Literal
from tests.ztunnel.policy.strategies import mostly, some
from xds.model import calico as c
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import Code
from ztunnel.policy.calico.walk import walk

ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.1.0.1", "fd00::1", None)
SETS = ("s:a", "s:b", "n:http", "s:never")
PRINCIPALS = ("", "spiffe://cluster.local/ns/shop/sa/web", "spiffe://cluster.local/ns/prod/sa/db")
PATHS = (None, "", "/", "/public", "/public/..%2fadmin", "/admin", "/%XY", "relative")
NETS = (ip_network("10.0.0.0/24"), ip_network("10.0.0.1/32"), ip_network("fd00::/8"), None)
SELECTORS = ("", "role == 'web'", "!has(role)", "broken ==")


PORTS = ((80, 80), (1, 1024), (8080, 8090))
PEERS = st.builds(
    c.PeerMatch,
    nets=some(NETS),
    not_nets=mostly((), some(NETS)),
    ports=some(PORTS),
    not_ports=mostly((), some(PORTS)),
    named_ports=mostly((), some(SETS)),
    not_named_ports=mostly((), some(SETS)),
    ip_sets=some(SETS),
    not_ip_sets=mostly((), some(SETS)),
    ip_port_sets=mostly((), some(SETS)),
    selector=st.sampled_from(SELECTORS[:2]),
    namespace_selector=mostly("", st.sampled_from(("env == 'prod'", "broken =="))),
    account_names=mostly((), some(("web", "db"))),
    account_selector=mostly("", st.sampled_from(SELECTORS)),
)
HTTP = st.builds(
    c.HttpMatch,
    methods=some(("GET", "POST", "*")),
    paths=some((c.PathMatch("/public", True), c.PathMatch("/admin", False), c.PathMatch("/%XY", True))),
)
ICMP = st.builds(c.IcmpMatch, st.sampled_from((3, 8)), st.sampled_from((None, 0, 1)))
RULES = st.builds(
    c.Rule,
    action=st.sampled_from(list(c.Action)),
    source=mostly(c.PeerMatch(), PEERS),
    destination=mostly(c.PeerMatch(), PEERS),
    protocol=st.sampled_from((None, None, 6, 17, "TCP", "udp", "nonsense")),
    not_protocol=mostly(None, st.sampled_from((6, "udp", "nonsense"))),
    ip_version=mostly(0, st.sampled_from((4, 6))),
    http=mostly(c.HttpMatch(), HTTP),
    icmp=mostly(None, ICMP),
    not_icmp=mostly(None, ICMP),
)
POLICIES = st.builds(
    c.Policy,
    namespace=st.sampled_from(("", "shop")),
    inbound=st.lists(RULES, max_size=4).map(tuple),
    outbound=st.lists(RULES, max_size=2).map(tuple),
)
IDS = tuple(
    c.PolicyId(kind, "", name)
    for kind in ("GlobalNetworkPolicy", "StagedGlobalNetworkPolicy")
    for name in ("one", "two", "three")
)
TIERS = st.builds(
    c.Tier, name=st.sampled_from(("first", "last")), ingress=some(IDS, 4), egress=some(IDS), passes=st.booleans()
)
ENDPOINTS = st.builds(
    c.Endpoint, tiers=st.lists(TIERS, max_size=3).map(tuple), profiles=some(("kns.shop", "ksa.web"))
)
MEMBERS = {
    c.IpSetType.NET: ("10.0.0.0/24", "10.0.0.1/32", "10.1.0.1/32", "fd00::/64", "0.0.0.0/0", UNREADABLE),
    c.IpSetType.IP_AND_PORT: ("10.0.0.1,tcp:80", "10.0.0.2,udp:80", "fd00::1,tcp:8080", UNREADABLE),
    c.IpSetType.IP: ("10.0.0.1", "fd00::1", UNREADABLE),
}
#: The set that an id stands for never changes, so that deltas fit.
KINDS = {"s:a": c.IpSetType.NET, "s:b": c.IpSetType.IP, "n:http": c.IpSetType.IP_AND_PORT}


@st.composite
def set_updates(draw: st.DrawFn) -> c.Update:
    set_id = draw(st.sampled_from(tuple(KINDS)))
    members = some(MEMBERS[KINDS[set_id]], 5)
    return draw(
        st.one_of(
            st.builds(c.IpSetUpdate, st.just(set_id), st.just(KINDS[set_id]), members),
            st.builds(c.IpSetDelta, st.just(set_id), members, st.just(())),
            st.builds(c.IpSetDelta, st.just(set_id), st.just(()), members),
            st.just(c.IpSetRemove(set_id)),
        )
    )


LABELS = st.dictionaries(st.sampled_from(("role", "env")), st.sampled_from(("web", "prod")), max_size=2)
UPDATES = st.one_of(
    set_updates(),
    st.builds(c.PolicyUpdate, st.sampled_from(IDS), st.one_of(st.none(), POLICIES, POLICIES, POLICIES)),
    st.builds(c.ProfileUpdate, st.sampled_from(("kns.shop", "ksa.web")), st.one_of(st.none(), POLICIES, POLICIES)),
    st.builds(c.EndpointUpdate, st.just(POD), ENDPOINTS),
    st.builds(c.ServiceAccountUpdate, st.just("shop"), st.just("web"), LABELS),
    st.builds(c.NamespaceUpdate, st.sampled_from(("shop", "prod")), LABELS),
)
FLOWS = st.builds(
    c.Flow,
    source_ip=st.sampled_from(ADDRESSES),
    destination_ip=st.sampled_from(ADDRESSES),
    source_port=st.sampled_from((0, 80, 50000)),
    destination_port=st.sampled_from((0, 80, 8080, 9999)),
    protocol=st.sampled_from((6, 6, 17, 1, 58, 0, 300)),
    icmp=st.sampled_from((None, (8, 0), (3, 1))),
    source_principal=st.sampled_from(PRINCIPALS),
    destination_principal=st.sampled_from(PRINCIPALS),
    source_labels=st.sampled_from(((), (("role", "web"),))),
    method=st.sampled_from((None, "GET", "DELETE", "")),
    path=st.sampled_from(PATHS),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(UPDATES, min_size=3, max_size=14),
    st.lists(st.tuples(st.integers(0, 14), UPDATES), max_size=3),
    st.lists(FLOWS, min_size=1, max_size=6),
    st.sampled_from(list(c.Direction)),
    st.booleans(),
    st.booleans(),
)
def test_index_cache_and_walk_answer_as_the_literal_reading(
    updates: list[c.Update],
    later: list[tuple[int, c.Update]],
    flows: list[c.Flow],
    direction: c.Direction,
    enforced: bool,
    connections_only: bool,
) -> None:
    """Also after each further update, with tiers compiled before it and answers kept from before it."""
    evaluator = Evaluator(Store(), connections_only=connections_only)
    literal = Literal(connections_only=connections_only)
    for update in (*updates, c.InSync()):
        evaluator.apply(update)
        literal.apply(update)
    for _, update in ((0, c.InSync()), *later):
        evaluator.apply(update)
        literal.apply(update)
        for flow in (*flows, *flows):
            verdict = evaluator.check(POD, flow, direction, enforced=enforced)
            assert verdict.code == literal.check(POD, flow, direction, enforced=enforced)
            endpoint = evaluator.store.endpoints.get(POD)
            if endpoint is not None and 0 < flow.protocol < 256:
                steps = walk(
                    evaluator.store,
                    endpoint,
                    flow,
                    identities(flow),
                    direction,
                    enforced=enforced,
                    connections_only=connections_only,
                )
                assert steps.verdict.code == verdict.code
                assert verdict.code is Code.INTERNAL or steps.verdict == verdict


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(UPDATES, min_size=3, max_size=14), FLOWS, st.sampled_from(list(c.Direction)))
def test_judging_connections_never_opens_more_than_judging_requests(
    updates: list[c.Update], flow: c.Flow, direction: c.Direction
) -> None:
    """What is let through as a connection is let through as any well-formed request of it, and as a connection."""
    requests, connections = Evaluator(Store()), Evaluator(Store(), connections_only=True)
    for update in (*updates, c.InSync()):
        requests.apply(update)
        connections.apply(update)
    if connections.check(POD, replace(flow, method=None, path=None), direction).allowed:
        for method, path in ((None, None), ("GET", "/public"), ("POST", "/admin"), ("DELETE", "/public/x")):
            assert requests.check(POD, replace(flow, method=method, path=path), direction).allowed
