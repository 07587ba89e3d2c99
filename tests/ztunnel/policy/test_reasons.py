"""Why a condition holds or not, in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.policy.test_engine import (
    CONNECTIONS,
    FRONT,
    MESH,
    PLAIN,
    conditions,
    name,
    namespace,
    net,
    principal,
)
from xds.model import policy as p
from xds.model.facts import ConnectionFacts
from ztunnel.policy.reasons import describe, reason

PORTS = p.AnyOf((p.DestinationPort(80, 81), p.DestinationPort(8000, 8100)))


@pytest.mark.parametrize(
    ("condition", "connection", "words"),
    [
        (namespace("shop"), MESH, "the peer's namespace is shop"),
        (namespace("other"), MESH, "the peer's namespace is other: no, it is shop"),
        (namespace("shop"), PLAIN, "the peer's namespace is shop: no, it is without an identity"),
        (principal("td/", "prefix"), MESH, "the peer's identity begins with td/: no, it is "),
        (p.PeerServiceAccount("shop", "back"), MESH, "service account is shop/back: no, it is shop/front"),
        (name("x", "suffix"), MESH, f"a name of the peer ends with x: no, it is {FRONT}, front"),
        (p.SourceIp(net("10.1.0.0/16")), PLAIN, "the source address is in 10.1.0.0/16: no, it is 10.0.0.1"),
        (
            p.SourceIp(net("10.0.0.0/8"), direct=True),
            PLAIN,
            "the socket address is in 10.0.0.0/8: no, it is 192.0.2.1",
        ),
        (p.DestinationIp(net("10.0.0.0/8")), PLAIN, "the destination address is in 10.0.0.0/8"),
        (PORTS, PLAIN, "the port is 80: no, it is 15008 or the port is 8000 to 8099: no, it is 15008"),
        (p.AnyOf((PORTS, namespace("shop"))), MESH, "the peer's namespace is shop"),
        (p.AllOf((namespace("shop"), p.DestinationPort(80, 81))), MESH, "the port is 80: no, it is 15008"),
        (
            p.AllOf((namespace("shop"), p.DestinationIp(net("10.0.0.2")))),
            MESH,
            "namespace is shop and the destination",
        ),
        (p.AnyOf((p.Never(),) * 4), PLAIN, "none of 4 alternatives holds"),
        (p.Not(namespace("shop")), MESH, "not (the peer's namespace is shop)"),
        (p.AllOf(()), PLAIN, "always"),
    ],
)
def test_conditions_are_explained_in_words(
    condition: p.Condition, connection: ConnectionFacts, words: str
) -> None:
    assert words in reason(condition, connection)


def test_what_always_holds_is_said_only_if_there_is_nothing_else() -> None:
    anything = p.AnyOf((p.Always(),))
    assert reason(p.AllOf((anything, anything)), PLAIN) == "always"
    assert reason(p.AllOf((anything, p.DestinationPort(15008, 15009), anything)), PLAIN) == "the port is 15008"


@given(conditions, st.sampled_from(CONNECTIONS))
def test_every_condition_has_an_explanation(condition: p.Condition, connection: ConnectionFacts) -> None:
    assert reason(condition, connection)
    assert describe(condition)
