"""The judge."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model import policy as p
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.string_match import StringMatch
from ztunnel.policy.engine import Decision, compiled, holds, judge, reads_port

FRONT = "spiffe://cluster.local/ns/shop/sa/front"


def facts(peer: PeerCertificate | None = None, **more: object) -> ConnectionFacts:
    values = {
        "source": SocketAddress("10.0.0.1", 40000),
        "direct_source": SocketAddress("192.0.2.1", 40000),
        "destination": SocketAddress("10.0.0.2", 15008),
        "peer": peer,
    }
    return ConnectionFacts(**(values | more))  # type: ignore[arg-type]


MESH = facts(PeerCertificate(uri_sans=(FRONT,), dns_sans=("front",), subject="CN=front"))
PLAIN = facts()


def peer(*uri_sans: str) -> PeerCertificate:
    return PeerCertificate(uri_sans=uri_sans)


STRANGER = facts(peer("https://example.net/front"))
SECOND = facts(peer("https://example.net/front", FRONT, "spiffe://cluster.local/ns/shop/sa/back"))
SECURED = facts(secured=True)


def principal(value: str, kind: str = "exact") -> p.PeerPrincipal:
    return p.PeerPrincipal(StringMatch(kind, value))


def namespace(value: str, kind: str = "exact") -> p.PeerNamespace:
    return p.PeerNamespace(StringMatch(kind, value))


def name(value: str, kind: str = "exact") -> p.Authenticated:
    return p.Authenticated(StringMatch(kind, value))


def net(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text)


@pytest.mark.parametrize(
    ("condition", "connection", "verdict"),
    [
        (p.Always(), PLAIN, True),
        (p.Never(), PLAIN, False),
        (p.AllOf(()), PLAIN, True),
        (p.AnyOf(()), PLAIN, False),
        (p.AllOf((p.Always(), p.Never())), PLAIN, False),
        (p.AnyOf((p.Always(), p.Never())), PLAIN, True),
        (p.Not(p.Never()), PLAIN, True),
        (p.Authenticated(), PLAIN, False),
        (p.Authenticated(), MESH, True),
        (name(FRONT), MESH, True),
        (name(FRONT), PLAIN, False),
        (name("spiffe://cluster.local/", "prefix"), MESH, True),
        (name("/sa/front", "suffix"), MESH, True),
        (name(".*/ns/shop/.*", "regex"), MESH, True),
        (name("/ns/shop/", "regex"), MESH, False),  # a full match
        (name("front"), MESH, True),  # a DNS name counts too
        (name("CN=front"), MESH, True),  # the subject, beside other names
        (p.Authenticated(), SECURED, True),  # TLS is enough
        (name(""), SECURED, True),  # the subject of no certificate
        (name(""), MESH, False),
        (name("", "prefix"), SECURED, True),
        (name(FRONT), SECURED, False),
        (name("CN=front"), facts(PeerCertificate(subject="CN=front")), True),
        (principal("cluster.local/ns/shop/sa/front"), MESH, True),
        (principal(FRONT), MESH, False),  # principals have no scheme
        (principal("cluster.local/ns/shop/", "prefix"), MESH, True),
        (principal("/sa/front", "suffix"), MESH, True),
        (principal("", "suffix"), MESH, True),
        (principal("", "suffix"), PLAIN, False),  # no identity, no principal
        (p.PeerPrincipal(), MESH, True),
        (p.PeerPrincipal(), PLAIN, False),
        (p.PeerPrincipal(), STRANGER, False),
        (principal("cluster.local/ns/shop/sa/front"), SECOND, True),  # the first URI SAN that is an identity
        (namespace("shop"), MESH, True),
        (namespace("other"), MESH, False),
        (namespace("sh", "prefix"), MESH, True),
        (namespace(""), PLAIN, True),  # no identity: the empty namespace
        (namespace(""), STRANGER, True),
        (namespace("", "prefix"), PLAIN, True),
        (namespace(""), MESH, False),
        (p.PeerNamespace(), MESH, True),
        (p.PeerNamespace(), PLAIN, False),
        (p.PeerServiceAccount("shop", "front"), MESH, True),
        (p.PeerServiceAccount("shop", "front"), facts(peer("spiffe://other/ns/shop/sa/front")), True),
        (p.PeerServiceAccount("shop", "back"), MESH, False),
        (p.PeerServiceAccount("front", "shop"), MESH, False),
        (p.PeerServiceAccount("shop", "front"), PLAIN, False),
        (p.SourceIp(net("10.0.0.0/24")), PLAIN, True),
        (p.SourceIp(net("10.0.0.0/24"), direct=True), PLAIN, False),
        (p.SourceIp(net("fd00::/8")), PLAIN, False),
        (p.DestinationIp(net("10.0.0.2/32")), PLAIN, True),
        (p.DestinationPort(15008, 15009), PLAIN, True),
        (p.DestinationPort(15000, 15008), PLAIN, False),
        (p.ServerName(StringMatch("exact", "")), PLAIN, True),
        (p.ServerName(StringMatch("exact", "a")), facts(server_name="a"), True),
        (p.DynamicMetadata("ns", ("a",), StringMatch("exact", "b")), facts(metadata={"ns": {"a": "b"}}), True),
        (p.DynamicMetadata("ns", ("a",), StringMatch("exact", "b")), PLAIN, False),
    ],
)
def test_each_condition_matches_as_documented(
    condition: p.Condition, connection: ConnectionFacts, verdict: bool
) -> None:
    assert holds(condition, connection) is verdict
    assert compiled(condition)(connection) is verdict
    assert judge(allow(p.Never(), condition), connection).allowed is verdict


def allow(*conditions: p.Condition) -> p.PolicyList:
    policies = tuple(p.Policy(f"p{n}", p.Verdict.ALLOW, c) for n, c in enumerate(conditions))
    return p.PolicyList((p.Tier(policies),), p.Verdict.DENY)


def deny(*conditions: p.Condition) -> p.PolicyList:
    policies = tuple(p.Policy(f"p{n}", p.Verdict.DENY, c) for n, c in enumerate(conditions))
    return p.PolicyList((p.Tier(policies),), p.Verdict.ALLOW)


def test_allow_lists_deny_what_nothing_matches() -> None:
    assert judge(allow(name("other"), name(FRONT)), MESH) == Decision(True, "p1")
    assert judge(allow(name(FRONT)), PLAIN) == Decision(False, "")
    assert judge(allow(), MESH) == Decision(False, "")


def test_deny_lists_allow_what_nothing_matches() -> None:
    assert judge(deny(name(FRONT)), MESH) == Decision(False, "p0")
    assert judge(deny(name(FRONT)), PLAIN) == Decision(True, "")


@pytest.mark.parametrize(
    ("condition", "reads"),
    [
        (p.Always(), False),
        (p.DestinationPort(1, 2), True),
        (p.AllOf((p.Always(), p.AnyOf((p.Not(p.DestinationPort(1, 2)),)))), True),
        (p.AllOf((p.Authenticated(), p.DestinationIp(net("10.0.0.0/8")))), False),
    ],
)
def test_a_list_knows_whether_it_reads_the_port(condition: p.Condition, reads: bool) -> None:
    assert reads_port(allow(condition)) is reads
    assert reads_port(deny(p.Always(), condition)) is reads


def test_a_tier_that_passes_hands_on_and_a_default_does_not() -> None:
    hit = p.Policy("hit", p.Verdict.ALLOW, p.Always())
    passing = p.Policy("passing", p.Verdict.PASS, p.Always())
    assert judge(p.PolicyList((p.Tier((passing,)), p.Tier((hit,))), p.Verdict.DENY), PLAIN) == Decision(
        True, "hit"
    )
    closed = p.PolicyList((p.Tier((), p.Verdict.DENY), p.Tier((hit,))), p.Verdict.ALLOW)
    assert judge(closed, PLAIN) == Decision(False, "")


LEAVES: list[p.Condition] = [
    p.Always(),
    p.Never(),
    p.Authenticated(),
    name(FRONT),
    name("front", "contains"),
    p.PeerPrincipal(),
    principal("cluster.local/ns/shop/sa/front"),
    principal("front", "suffix"),
    principal("cluster.local/ns/sh", "prefix"),
    principal("cluster.local/ns/sh", "suffix"),
    principal("", "prefix"),
    principal("", "suffix"),
    name("spiffe://", "prefix"),
    name("front", "suffix"),
    p.Authenticated(StringMatch("prefix", "spiffe", ignore_case=True)),
    namespace("sh", "prefix"),
    namespace("", "suffix"),
    p.PeerNamespace(),
    p.SourceIp(net("0.0.0.0/0")),
    p.SourceIp(net("::/0")),
    p.DestinationIp(net("fd00::/16")),
    name(""),
    name("CN=front"),
    namespace("shop"),
    namespace(""),
    p.PeerServiceAccount("shop", "front"),
    p.SourceIp(net("10.0.0.1")),
    p.SourceIp(net("10.0.0.0/30")),
    p.SourceIp(net("192.0.2.1"), direct=True),
    p.DestinationIp(net("10.0.0.2")),
    p.DestinationIp(net("fd00::2")),
    p.DestinationPort(15008, 15009),
    p.DestinationPort(1, 2),
    p.DestinationPort(1, 20000),
    p.ServerName(StringMatch("exact", "")),
]
conditions = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(p.Not),
        st.lists(inner, max_size=3).map(lambda each: p.AllOf(tuple(each))),
        st.lists(inner, max_size=3).map(lambda each: p.AnyOf(tuple(each))),
    ),
    max_leaves=12,
)


CONNECTIONS = [
    MESH,
    PLAIN,
    STRANGER,
    SECOND,
    SECURED,
    facts(source=SocketAddress("10.0.0.3", 1), destination=SocketAddress("fd00::2", 1)),
]


@given(conditions, st.sampled_from(CONNECTIONS))
def test_a_compiled_condition_says_what_the_reference_says(
    condition: p.Condition, connection: ConnectionFacts
) -> None:
    assert compiled(condition)(connection) is holds(condition, connection)


verdicts = st.sampled_from(p.Verdict)
policies = st.builds(p.Policy, st.sampled_from("abcd"), verdicts, conditions)
tiers = st.builds(p.Tier, st.lists(policies, max_size=6).map(tuple), verdicts)


def reference(rules: p.PolicyList, connection: ConnectionFacts) -> Decision:
    for tier in rules.tiers:
        verdict, decided = tier.default, ""
        for policy in tier.policies:
            if holds(policy.condition, connection):
                verdict, decided = policy.verdict, policy.name
                break
        if verdict is not p.Verdict.PASS:
            return Decision(verdict is p.Verdict.ALLOW, decided)
    return Decision(rules.end is p.Verdict.ALLOW)


@given(
    st.builds(p.PolicyList, st.lists(tiers, max_size=3).map(tuple), verdicts),
    st.lists(st.sampled_from(CONNECTIONS), min_size=1, max_size=5),
)
def test_the_index_decides_as_trying_every_policy_in_order_does(
    rules: p.PolicyList, connections: list[ConnectionFacts]
) -> None:
    for connection in connections:  # several, since the first makes what the others use
        assert judge(rules, connection) == reference(rules, connection)


@given(conditions, st.sampled_from(CONNECTIONS))
def test_negation_follows_de_morgans_laws(condition: p.Condition, connection: ConnectionFacts) -> None:
    assert holds(p.Not(condition), connection) is not holds(condition, connection)
    both = holds(p.Not(p.AllOf((condition, p.Authenticated()))), connection)
    either = holds(p.AnyOf((p.Not(condition), p.Not(p.Authenticated()))), connection)
    assert both is either
