"""``istio.security.Authorization``: the meaning of each part, and how unsupported parts fail closed."""

import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.dialects.istio.authorization import compile_authorization
from xds.errors import ConfigError
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.policy import Always, Never
from xds.proto.istio.security import authorization_pb2 as security
from ztunnel.policy.engine import compiled, holds

FRONT = "cluster.local/ns/shop/sa/front"


def policy(rules: list[Any], action: int = security.ALLOW, **more: Any) -> AuthorizationPolicy:
    """A policy whose rules are lists of clauses, and those lists of matches."""
    message = security.Authorization(
        name="p",
        namespace="shop",
        action=action,  # type: ignore[arg-type]
        rules=[{"clauses": [{"matches": matches} for matches in clauses]} for clauses in rules],  # type: ignore[misc]
        **more,
    )
    return compile_authorization(message.SerializeToString())


def connection(identity: str = "", source: str = "10.0.0.1", destination: str = "10.0.0.2:80") -> ConnectionFacts:
    address = SocketAddress(source, 40000)
    return ConnectionFacts(
        source=address,
        direct_source=address,
        destination=SocketAddress.parse(destination),
        peer=PeerCertificate(uri_sans=(f"spiffe://{identity}",)) if identity else None,
    )


TLS = connection(FRONT)
OTHER = connection("cluster.local/ns/other/sa/back", "10.9.0.1", "10.0.9.2:81")
PLAIN = connection()


def matches(rules: list[Any], facts: ConnectionFacts) -> bool:
    value = policy(rules)
    assert value.faults == ()
    assert compiled(value.condition)(facts) is holds(value.condition, facts)
    return holds(value.condition, facts)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], False),  # no rules
        ([[]], True),  # a rule without clauses
        ([[[]]], True),  # a clause without matches
        ([[[{}]]], False),  # a match without anything
        ([[[{}, {"destination_ports": [80]}]]], True),
        ([[[{"destination_ports": [80]}], []]], True),
        ([[[{"destination_ports": [80]}], [{}]]], False),
        ([[[{}]], [[{"destination_ports": [80]}]]], True),
    ],
)
def test_empty_lists_match_as_documented(rules: list[Any], expected: bool) -> None:
    assert matches(rules, PLAIN) is expected


def test_any_rule_every_clause_any_match() -> None:
    yes, no = {"destination_ports": [80]}, {"destination_ports": [1]}
    assert matches([[[no]], [[yes]]], TLS)
    assert not matches([[[yes], [no]]], TLS)
    assert matches([[[yes], [no, yes]]], TLS)
    assert not matches([[[{"destination_ports": [80], "not_source_ips": [cidr("10.0.0.0/8")]}]]], TLS)


def cidr(text: str) -> dict[str, Any]:
    network = ipaddress.ip_network(text)
    return {"address": network.network_address.packed, "length": network.prefixlen}


ATTRIBUTES = [
    ("namespaces", [{"exact": "shop"}]),
    ("principals", [{"exact": FRONT}]),
    ("source_ips", [cidr("10.0.0.0/24")]),
    ("destination_ips", [cidr("10.0.0.2/32")]),
    ("destination_ports", [80]),
    ("service_accounts", [{"namespace": "shop", "serviceAccount": "front"}]),
]


@pytest.mark.parametrize(("attribute", "values"), ATTRIBUTES, ids=[name for name, _ in ATTRIBUTES])
@pytest.mark.parametrize("negative", [False, True])
def test_every_attribute_and_its_negation(attribute: str, values: list[Any], negative: bool) -> None:
    rules = [[[{f"not_{attribute}" if negative else attribute: values}]]]
    assert matches(rules, TLS) is not negative
    assert matches(rules, OTHER) is negative
    about_identity = attribute in ("namespaces", "principals", "service_accounts")
    assert matches(rules, PLAIN) is (negative == about_identity)


@pytest.mark.parametrize(
    ("attribute", "value", "tls", "plain"),
    [
        ("principals", {"exact": FRONT}, True, False),
        ("principals", {"exact": "front"}, False, False),
        ("principals", {"prefix": "cluster.local/"}, True, False),
        ("principals", {"prefix": "other"}, False, False),
        ("principals", {"prefix": ""}, True, False),
        ("principals", {"suffix": "/front"}, True, False),
        ("principals", {"presence": {}}, True, False),
        ("namespaces", {"exact": "shop"}, True, False),
        ("namespaces", {"exact": ""}, False, True),
        ("namespaces", {"prefix": "sh"}, True, False),
        ("namespaces", {"suffix": "op"}, True, False),
        ("namespaces", {"presence": {}}, True, False),
    ],
)
def test_string_matches(attribute: str, value: dict[str, Any], tls: bool, plain: bool) -> None:
    assert matches([[[{attribute: [value]}]]], TLS) is tls
    assert matches([[[{attribute: [value]}]]], PLAIN) is plain
    assert matches([[[{f"not_{attribute}": [value]}]]], TLS) is not tls
    assert matches([[[{f"not_{attribute}": [value]}]]], PLAIN) is not plain


def test_no_identity_is_how_plain_text_is_denied() -> None:
    strict = [[[{"not_principals": [{"presence": {}}]}]]]
    assert matches(strict, PLAIN)
    assert not matches(strict, TLS)


def test_blocks_of_the_other_family_do_not_hit() -> None:
    assert not matches([[[{"source_ips": [cidr("::/0")]}]]], TLS)
    assert matches([[[{"source_ips": [cidr("fd00::/8")]}]]], connection(source="fd00::1"))
    mapped = {"address": ipaddress.ip_address("::ffff:10.0.0.0").packed, "length": 120}
    assert matches([[[{"source_ips": [mapped]}]]], TLS)


def test_scope_action_and_dry_run_are_kept() -> None:
    value = policy([], security.DENY, scope=security.WORKLOAD_SELECTOR, dry_run=True)
    assert (value.scope, value.action, value.dry_run) == (PolicyScope.WORKLOAD_SELECTOR, Action.DENY, True)
    assert value.key == "shop/p"


# What is not understood


def raw(field: int, data: bytes = b"") -> bytes:
    """A field of bytes, as a message of a newer version would have it."""
    return bytes([*_varint(field << 3 | 2), len(data)]) + data


def _varint(number: int) -> list[int]:
    return [number] if number < 128 else [number & 127 | 128, number >> 7]


def wrapped(inner: bytes, *fields: int) -> bytes:
    for field in reversed(fields):
        inner = raw(field, inner)
    return inner


NAME = raw(1, b"p") + raw(2, b"shop")
GOOD = security.Rule(
    clauses=[security.Clause(matches=[security.Match(destination_ports=[80])])]
).SerializeToString()
MATCH = (5, 1, 2)
NEW = raw(99)

FAULTS = [
    (NAME + NEW + raw(5, GOOD), "unknown field number 99"),
    (NAME + raw(5, GOOD + NEW), "rules[0]: unknown field number 99"),
    (
        NAME + wrapped(security.Match(destination_ports=[80]).SerializeToString() + NEW, *MATCH),
        "matches[0]: unknown",
    ),
    (NAME + raw(5, raw(1, raw(2, b"J\x01P") + NEW)), "rules[0].clauses[0]: unknown field number 99"),
    (NAME + raw(5, GOOD) + raw(7, raw(1, b"x")), "extensions[0]: 'x' is not supported"),
    (NAME + wrapped(b"J\x01P" + raw(13, raw(1, b"x")), *MATCH), "matches[0].extensions[0]: 'x' is not supported"),
    (NAME + wrapped(raw(3), *MATCH), "matches[0].principals[0]: a string match without a kind"),
    (NAME + wrapped(raw(4), *MATCH), "matches[0].not_principals[0]: a string match without a kind"),
    (NAME + wrapped(raw(3, raw(1, b"x") + NEW), *MATCH), "principals[0]: unknown field number 99"),
    (NAME + wrapped(raw(5, raw(1, b"abc")), *MATCH), "source_ips[0]: failed to parse address, had 3 bytes"),
    (NAME + wrapped(raw(6, raw(1, b"abcd") + b"\x10\x21"), *MATCH), "not_source_ips[0]: prefix length 33 is more"),
    (NAME + wrapped(raw(7, b""), *MATCH), "destination_ips[0]: failed to parse address, had 0 bytes"),
    (NAME + wrapped(raw(9, b"\x80\x80\x04"), *MATCH), "destination_ports[0]: 65536 is no port"),
    (NAME + wrapped(raw(11, raw(1, b"a") + NEW), *MATCH), "service_accounts[0]: unknown field number 99"),
]


@pytest.mark.parametrize(("data", "fault"), FAULTS, ids=[fault for _, fault in FAULTS])
def test_unknown_parts_of_a_policy_fail_closed_and_are_listed(data: bytes, fault: str) -> None:
    allow = compile_authorization(data)
    deny = compile_authorization(data + b"\x20\x01")
    assert (allow.action, deny.action) == (Action.ALLOW, Action.DENY)
    for value in (allow, deny):
        assert len(value.faults) == 1
        assert fault in value.faults[0]
    for facts in (TLS, OTHER, PLAIN):
        assert not holds(allow.condition, facts)
        assert holds(deny.condition, facts)


def test_every_fault_is_listed_with_its_place() -> None:
    bad = {"source_ips": [cidr("10.0.0.0/8"), {"address": b"a"}, {"address": b"ab"}]}
    value = policy([[[{"destination_ports": [80]}]], [[{"destination_ports": [80]}], [{}, bad]]])
    place = "rules[1].clauses[1].matches[1].source_ips"
    assert value.faults == (
        f"{place}[1]: failed to parse address, had 1 bytes",
        f"{place}[2]: failed to parse address, had 2 bytes",
    )


def test_rules_beside_a_faulty_one_still_let_in() -> None:
    rules = [[[{"source_ips": [{}]}]], [[{"destination_ports": [80]}]]]
    assert holds(policy(rules).condition, TLS)
    assert not holds(policy(rules).condition, OTHER)


def test_a_deny_with_a_faulty_part_denies_what_its_other_clauses_say() -> None:
    value = policy([[[{"source_ips": [{}]}], [{"destination_ports": [80]}]]], security.DENY)
    assert holds(value.condition, TLS)
    assert not holds(value.condition, OTHER)


def test_principals_with_a_scheme_never_match_and_are_reported() -> None:
    value = policy([[[{"principals": [{"exact": f"spiffe://{FRONT}"}]}]]], security.DENY)
    assert not holds(value.condition, TLS)
    assert value.faults == (
        "rules[0].clauses[0].matches[0].principals[0]: never matches: principals are written without spiffe://",
    )


def test_an_unknown_action_denies_everything_in_its_scope() -> None:
    value = policy([[[{"destination_ports": [1]}]]], 7, scope=security.NAMESPACE)
    assert (value.action, value.condition, value.scope) == (Action.DENY, Always(), PolicyScope.NAMESPACE)
    assert value.faults == ("action: unknown enumeration value 7; everything is denied",)


def test_an_unknown_scope_is_the_whole_mesh_where_an_allow_matches_nothing() -> None:
    rules = [[[{"destination_ports": [80]}]]]
    allow, deny = policy(rules, scope=7), policy(rules, security.DENY, scope=7)
    assert allow.scope is deny.scope is PolicyScope.GLOBAL
    assert allow.condition == Never()
    assert holds(deny.condition, TLS)
    assert not holds(deny.condition, OTHER)
    assert allow.faults == ("scope: unknown enumeration value 7; taken for the whole mesh",)


def test_bytes_that_are_no_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="decode: failed to decode Protobuf message"):
        compile_authorization(b"\xff")
    with pytest.raises(ConfigError, match="a policy needs a name"):
        compile_authorization(b"")


@given(st.binary(max_size=60))
def test_no_bytes_in_a_match_open_a_policy_that_could_not_be_read(data: bytes) -> None:
    try:
        value = compile_authorization(NAME + wrapped(data, *MATCH))
    except ConfigError:
        return
    if any("never matches" not in fault for fault in value.faults):
        assert not holds(value.condition, PLAIN)


# Dumps


def test_rules_are_shown_as_dumps_have_them() -> None:
    everything = {
        "namespaces": [{"exact": "a"}, {"prefix": "b"}, {"suffix": "c"}, {"presence": {}}],
        "not_principals": [{"exact": "d"}],
        "source_ips": [cidr("10.0.0.0/8")],
        "not_destination_ips": [cidr("fd00::/16")],
        "destination_ports": [80],
        "service_accounts": [{"namespace": "n", "serviceAccount": "s"}],
    }
    value = policy([[[everything, {}]], []])
    assert json.loads(json.dumps(value.rules)) == [
        [
            [
                {
                    "namespaces": [{"Exact": "a"}, {"Prefix": "b"}, {"Suffix": "c"}, {"Presence": []}],
                    "notPrincipals": [{"Exact": "d"}],
                    "sourceIps": ["10.0.0.0/8"],
                    "notDestinationIps": ["fd00::/16"],
                    "destinationPorts": [80],
                    "serviceAccounts": [{"namespace": "n", "serviceAccount": "s"}],
                },
                {},
            ]
        ],
        [],
    ]
