"""Questions to a running server, and its page of active policies."""

import json
from pathlib import Path

import pytest

from tests.ztunnel.policy.calico.test_files import PODS, POLICY
from xds.model import calico as c
from ztunnel.policy.calico.compile import compile_resources
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.explain import BadQuestion, answer
from ztunnel.policy.calico.files import read_files, updates_of
from ztunnel.policy.calico.guard import Guard
from ztunnel.policy.calico.report import in_force, state_of
from ztunnel.policy.calico.store import Store

STAGED = """
---
apiVersion: projectcalico.org/v3
kind: StagedGlobalNetworkPolicy
metadata: {name: soon}
spec: {selector: app == 'db', order: 1, ingress: [{action: Deny}]}
"""


def loaded(folder: Path, *, connections_only: bool = True) -> Evaluator:
    (folder / "all.yaml").write_text(PODS + "---" + POLICY.format(action="Allow") + STAGED)
    made = Evaluator(Store(), connections_only=connections_only)
    for update in updates_of(compile_resources(read_files([folder]))):
        made.apply(update)
    return made


def test_explain_shows_the_decision_trace_of_both_ends(tmp_path: Path) -> None:
    made = loaded(tmp_path)
    allowed, lines = answer(made, {"from": "shop/web", "to": "10.0.0.2", "port": "5432"})
    assert allowed
    assert lines == [
        "egress of shop/web",
        "  profiles",
        "    Profile/kns.shop",
        "      rule 0: allows",
        "  => allowed by __PROFILE__|Profile/kns.shop|rule 0",
        "ingress of shop/db",
        "  tier default",
        "    StagedGlobalNetworkPolicy/soon",
        "      staged, not enforced",
        "    GlobalNetworkPolicy/to-db",
        "      rule 0: allows",
        "  => allowed by default|GlobalNetworkPolicy/to-db|rule 0",
    ]
    assert not answer(made, {"from": "shop/web", "to": "shop/db", "staged": "true"})[0]
    assert not answer(made, {"from": "192.0.2.1", "to": "shop/db"})[0]


def test_before_the_first_store_the_answer_says_so() -> None:
    made = Evaluator(Store())
    allowed, lines = answer(made, {"from": "10.0.0.1", "to": "10.0.0.2"})
    assert allowed
    assert lines[1] == "  no pod here: no policy"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"to": "10.0.0.2"}, "from: '' is neither namespace/pod, an IP address nor a SPIFFE id"),
        ({"from": "shop/none", "to": "10.0.0.2"}, "from: there is no pod shop/none"),
        ({"from": "10.0.0.1", "to": "10.0.0.2", "port": "0"}, "port: '0' is no port"),
        ({"from": "10.0.0.1", "to": "10.0.0.2", "port": "٣"}, "port: '٣' is no port"),
        ({"from": "10.0.0.1", "to": "10.0.0.2", "protocol": "x"}, "'x' is no IP protocol"),
        ({"from": "10.0.0.1", "to": "10.0.0.2", "staged": "yes"}, "staged: must be true or false"),
        ({"from": "10.0.0.1", "to": "10.0.0.2", "methd": "GET"}, "methd: unknown; there are from, to, port, "),
    ],
)
def test_questions_that_cannot_be_asked(asked: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadQuestion) as error:
        answer(loaded(tmp_path), asked)
    assert str(error.value).startswith(reason)


def test_what_is_in_force_with_its_counts(tmp_path: Path) -> None:
    made = loaded(tmp_path)
    guard = Guard(lambda: made, lambda: 0.0)
    flow = c.Flow(source_ip="10.0.0.1", destination_ip="10.0.0.2")
    guard.check(c.Direction.INGRESS, flow)
    guard.check(c.Direction.INGRESS, c.Flow(source_ip="10.0.0.2", destination_ip="10.9.9.9"))
    made.apply(c.PolicyUpdate(c.PolicyId("GlobalNetworkPolicy", "", "to-db"), None))
    state = state_of("unix:/x", "gone", 12.34, in_sync=False)
    told = json.loads("".join(in_force(made.store, state, guard.uses)))
    assert told["source"] == {"name": "unix:/x", "in_sync": False, "stale_s": 12.3, "error": "gone"}
    assert told["store"]["endpoints"] == 2
    default, profiles = told["tiers"]
    assert default == {
        "tier": "default",
        "policies": [
            {
                "policy": "StagedGlobalNetworkPolicy/soon",
                "staged": True,
                "missing": False,
                "endpoints": 1,
                "rules": {"ingress": 1, "egress": 0},
                "allowed": 0,
                "denied": 0,
                "staged_denied": 1,
                "last_used": "1970-01-01T00:00:00+00:00",
            },
            {
                "policy": "GlobalNetworkPolicy/to-db",
                "staged": False,
                "missing": True,
                "endpoints": 1,
                "rules": None,
                "allowed": 1,
                "denied": 0,
                "last_used": "1970-01-01T00:00:00+00:00",
            },
        ],
        "end_of_tier": {"allowed": 0, "denied": 0, "last_used": None},
    }
    assert profiles["tier"] == "__PROFILE__"
    assert told["without_a_rule"]["PERMISSION_DENIED"]["denied"] == 1
