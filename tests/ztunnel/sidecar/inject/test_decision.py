"""The table of decisions, row by row and under random pods."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.sidecar.inject.decision import IGNORED_NAMESPACES, INJECT, Decision, Reason, Rules, decide
from ztunnel.sidecar.inject.selector import BadSelector, Requirement, Selector, selector

NEVER = Selector((Requirement("app", "In", ("job",)),))
ALWAYS = Selector((Requirement("team", "Exists"),))
EMPTY = Selector(())


def pod(
    labels: dict[str, Any] | None = None, annotations: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    return {"metadata": {"labels": labels or {}, "annotations": annotations or {}}, "spec": spec}


ASK_IN, ASK_OUT = {INJECT: "true"}, {INJECT: "false"}


@pytest.mark.parametrize("policy", ["enabled", "disabled"])
@pytest.mark.parametrize(
    ("given_pod", "namespace", "inject", "reason"),
    [
        (pod(ASK_IN, hostNetwork=True), "a", False, Reason.HOST_NETWORK),
        (pod(ASK_IN, os={"name": "windows"}), "a", False, Reason.OTHER_OS),
        (pod(ASK_IN, nodeSelector={"kubernetes.io/os": "windows"}), "a", False, Reason.OTHER_OS),
        (pod({"team": "x"}, os={"name": "linux"}), "a", True, Reason.ALWAYS_SELECTOR),
        (pod({"team": "x"}, os=None, nodeSelector=None), "a", True, Reason.ALWAYS_SELECTOR),
        (pod({"team": "x"}, nodeSelector={"kubernetes.io/os": "linux"}), "a", True, Reason.ALWAYS_SELECTOR),
        (pod(ASK_IN), "kube-system", False, Reason.IGNORED_NAMESPACE),
        (pod(ASK_IN | {"app": "job"}), "a", True, Reason.ASKED_IN),
        (pod({}, ASK_IN), "a", True, Reason.ASKED_IN),
        (pod(ASK_OUT, ASK_IN), "a", False, Reason.ASKED_OUT),
        (pod(ASK_OUT | {"team": "x"}), "a", False, Reason.ASKED_OUT),
        (pod({"app": "job", "team": "x"}), "a", False, Reason.NEVER_SELECTOR),
        (pod({"team": "x"}), "a", True, Reason.ALWAYS_SELECTOR),
        (pod({INJECT: "True", "team": "x"}), "a", True, Reason.ALWAYS_SELECTOR),
        (pod(hostNetwork=False, labels={"team": "x"}), "a", True, Reason.ALWAYS_SELECTOR),
    ],
)
def test_rows_that_hold_with_both_policies(
    policy: str, given_pod: dict[str, Any], namespace: str, inject: bool, reason: Reason
) -> None:
    decision = decide(given_pod, namespace, Rules(policy=policy, never=(EMPTY, NEVER), always=(EMPTY, ALWAYS)))
    assert (decision.inject, decision.reason) == (inject, reason)


@pytest.mark.parametrize(
    ("policy", "inject", "reason"),
    [
        ("enabled", True, Reason.POLICY),
        ("disabled", False, Reason.POLICY),
        ("on", False, Reason.BAD_POLICY),
        ("", False, Reason.BAD_POLICY),
    ],
)
def test_the_policy_decides_what_no_row_speaks_of(policy: str, inject: bool, reason: Reason) -> None:
    decision = decide(pod({"app": "web"}), "a", Rules(policy=policy, never=(NEVER,), always=(ALWAYS,)))
    assert (decision.inject, decision.reason) == (inject, reason)
    assert bool(decision.warning) == (reason is Reason.BAD_POLICY)


@pytest.mark.parametrize("word", ["True", "yes", "", "1", "enabled"])
def test_an_unknown_value_is_ignored_and_reported(word: str) -> None:
    assert decide(pod({INJECT: word}), "a", Rules()) == Decision(
        True, Reason.POLICY, f'sidecar.istio.io/inject={word!r} is ignored: only "true" and "false" count'
    )


_WORDS = st.sampled_from(["true", "false", "True", "", "x"])
_LABELS = st.dictionaries(st.sampled_from([INJECT, "app", "team", "z"]), _WORDS)
_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_SELECTORS = st.lists(
    st.sampled_from([EMPTY, NEVER, ALWAYS, Selector((Requirement("app", "In", ("x", "true")),))]), max_size=3
)


@given(
    labels=_LABELS,
    annotations=_LABELS,
    host=st.booleans(),
    namespace=st.sampled_from(["a", "b", *IGNORED_NAMESPACES]),
    policy=st.sampled_from(["enabled", "disabled", "other"]),
    never=_SELECTORS,
    always=_SELECTORS,
)
def test_the_table_read_literally_says_the_same(
    labels: dict[str, str],
    annotations: dict[str, str],
    host: bool,
    namespace: str,
    policy: str,
    never: list[Selector],
    always: list[Selector],
) -> None:
    rules = Rules(policy=policy, never=tuple(never), always=tuple(always))
    asked = labels[INJECT] if INJECT in labels else annotations.get(INJECT)
    rows = [
        (host, False),
        (namespace in IGNORED_NAMESPACES, False),
        (asked == "true", True),
        (asked == "false", False),
        (any(each.selects(labels) for each in never), False),
        (any(each.selects(labels) for each in always), True),
        (policy == "enabled", True),
        (True, False),
    ]
    expected = next(verdict for holds, verdict in rows if holds)
    assert decide(pod(labels, annotations, hostNetwork=host), namespace, rules).inject is expected


@given(junk=_JUNK, spec=_JUNK)
def test_a_misshapen_pod_gets_a_decision(junk: Any, spec: Any) -> None:
    decide({"metadata": junk, "spec": spec}, "a", Rules(never=(NEVER,)))
    decide({"metadata": {"labels": junk, "annotations": junk}, "spec": spec}, "a", Rules(always=(ALWAYS,)))


@pytest.mark.parametrize(
    ("value", "labels", "selects"),
    [
        ({"matchLabels": {"a": "1", "b": "2"}}, {"a": "1", "b": "2"}, True),
        ({"matchLabels": {"a": "1", "b": "2"}}, {"a": "1"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, {"a": "2"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": ""}, False),
        ({}, {"a": "1"}, False),
    ],
)
def test_selectors(value: Any, labels: dict[str, str], selects: bool) -> None:
    assert selector(value, "it").selects(labels) is selects


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "it: must be a mapping"),
        ({"matchLabel": {}}, "it.matchLabel: is not a known member"),
        ({"matchLabels": {"a": 1}}, "it.matchLabels.a: must be a string"),
        ({"matchLabels": []}, None),
        ({"matchLabels": ["a"]}, "it.matchLabels: must be a mapping"),
        ({"matchExpressions": {"a": 1}}, "it.matchExpressions: must be a list"),
        ({"matchExpressions": [{"operator": "In"}]}, r"it.matchExpressions\[0\].key: must be a string"),
        ({"matchExpressions": [{"key": "a", "operator": "in"}]}, "must be one of In, NotIn"),
        ({"matchExpressions": [{"key": "a", "operator": "In"}]}, "In needs at least one"),
        ({"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}, "Exists takes none"),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": [1]}]}, "must be a list of strings"),
    ],
)
def test_bad_selectors_are_named_by_place(value: Any, said: str | None) -> None:
    if said is None:
        assert selector(value, "it") == Selector(())
        return
    with pytest.raises(BadSelector, match=said):
        selector(value, "it")
