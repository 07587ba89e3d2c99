"""Policies that decide about nothing: as istiod delivers them, and as they are written by mistake."""

from typing import Any

import pytest

from xds.dialects.istio.rules import shown
from ztunnel.policy.effect import EMPTY_MATCH, NEVER, NO_RULES, without_effect

EMPTY = shown({})
NAMESPACE = {"namespaces": [{"Exact": "shop"}]}
SCHEME = {"principals": [{"Exact": "spiffe://td/ns/a/sa/b"}]}


def policy(*rules: Any, action: str = "Deny") -> dict[str, Any]:
    return {"name": "p", "namespace": "shop", "action": action, "rules": list(rules)}


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([[[EMPTY]]], EMPTY_MATCH),
        ([[[{"namespaces": [], "destinationPorts": []}]]], EMPTY_MATCH),  # the Rust ztunnel's dump has all lists
        ([[[EMPTY]], [[EMPTY]]], EMPTY_MATCH),
        ([[[NAMESPACE], [EMPTY]]], EMPTY_MATCH),  # all clauses must hold
        ([[[SCHEME]]], NEVER),
        ([], NO_RULES),
        ([[[EMPTY]], [[NAMESPACE]]], ""),  # one rule is enough
        ([[[EMPTY, NAMESPACE]]], ""),  # one match of a clause is enough
        ([[[]]], ""),  # an empty clause always holds
        ([[]], ""),
        ([[[{**SCHEME, "principals": [{"Exact": "td/ns/a/sa/b"}]}]]], ""),
    ],
)
def test_a_deny_without_effect(rules: list[Any], reason: str) -> None:
    assert without_effect(policy(*rules)) == reason


def test_an_allow_that_never_matches_refuses_everything() -> None:
    assert without_effect(policy([[EMPTY]], action="Allow")) == ""


@pytest.mark.parametrize("rules", [None, 7, [7], [[7]], [[[7]]]])
def test_rules_of_another_shape_have_no_verdict_about_their_effect(rules: Any) -> None:
    assert without_effect({"action": "Deny", "rules": rules}) == ""
