"""An audit has for each pod one answer per question, and each difference by name."""

from dataclasses import replace
from ipaddress import ip_address

import pytest

from ztunnel.node.agent.audit import (
    ANNOTATION_WRONG,
    CHECK_OF,
    NOT_ENROLLED,
    NOT_RELEASED,
    OWN,
    RULES_CHANGED,
    Answer,
    Audited,
    Check,
    counted,
    own_findings,
    page,
    repaired,
)
from ztunnel.node.agent.comparison import LISTENER_MISSING, NO_CERTIFICATE, TOLD, WORKLOAD_WRONG, Finding
from ztunnel.node.agent.enrolment import REDIRECTION, Decision, Pod, Reason, Step
from ztunnel.node.agent.phase import Phase
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

IN, OUT = Decision(True, Reason.NAMESPACE_IN), Decision(False, Reason.NOT_ASKED)


def a_pod(name: str = "web", annotation: str | None = "enabled") -> Pod:
    return Pod(
        uid=PodUid(f"u-{name}"),
        info=PodInfo(name=name, namespace="shop", service_account="till"),
        addresses=frozenset({ip_address("10.0.0.1")}),
        annotations={REDIRECTION: annotation} if annotation is not None else {},
    )


def audited(*reasons: str, decision: Decision = IN, phase: Phase | None = Phase.ENABLED, **more: bool) -> Audited:
    given = {"compared": True, "asked": True, **more}
    return Audited(
        pod=a_pod(),
        decision=decision,
        phase=phase,
        findings=frozenset(Finding(reason, "because") for reason in reasons),
        **given,
    )


@pytest.mark.parametrize(
    ("audited", "shown"),
    [
        (audited(), "ok ok ok ok ok ok"),
        (audited(decision=OUT, phase=None), "ok - - - - -"),
        (audited(phase=None), "ok - - - - -"),
        (audited(NOT_ENROLLED, phase=None), "wrong - - - - -"),
        (audited(ANNOTATION_WRONG, decision=OUT, phase=None), "ok wrong - - - -"),
        (audited(compared=False), "ok ok ? ? ok ok"),
        (audited(asked=False), "ok ok ok ok ? ?"),
        (audited(RULES_CHANGED, LISTENER_MISSING), "ok ok wrong wrong ok ok"),
        (audited(WORKLOAD_WRONG), "ok ok ok ok wrong ?"),
        (audited(NO_CERTIFICATE), "ok ok ok ok ok wrong"),
    ],
)
def test_answers(audited: Audited, shown: str) -> None:
    assert list(audited.answers()) == list(Check)
    assert " ".join(audited.answers().values()) == shown


@pytest.mark.parametrize(
    ("annotation", "what", "said"),
    [
        (None, Step.NOTHING, []),
        (None, Step.ENROL, ["MeshNotEnrolled: its labels request the mesh, but it is not enrolled: no rights"]),
        ("enabled", Step.RELEASE, ["MeshNotReleased: it must not be in the mesh, but has its rules: no rights"]),
        ("enabled", Step.DROP, ["MeshNotReleased: it must not be in the mesh, but has its rules: no rights"]),
        ("no", Step.SAY_ENABLED, ["MeshAnnotationWrong: it is annotated 'no', but is in the mesh: no rights"]),
        (None, Step.SAY_ENABLED, ["MeshAnnotationWrong: it has no annotation, but is in the mesh: no rights"]),
        (
            None,
            Step.SAY_PENDING,
            ["MeshAnnotationWrong: it has no annotation, not 'pending': no proxy listens in it yet: no rights"],
        ),
        (
            "enabled",
            Step.SAY_OUT,
            ["MeshAnnotationWrong: it is annotated 'enabled', but is not in the mesh: no rights"],
        ),
    ],
)
def test_what_the_agent_has_left_to_do_is_a_difference(
    annotation: str | None, what: Step, said: list[str]
) -> None:
    found = own_findings(a_pod(annotation=annotation), what, 0, "no rights")
    assert [f"{each.reason}: {each.text}" for each in found] == said
    assert all(each.reason in OWN for each in found)


def test_rules_of_others_making_are_counted() -> None:
    assert own_findings(a_pod(), Step.NOTHING, 3, "") == [
        Finding(RULES_CHANGED, "its rules were changed by others: 3 differences")
    ]


@pytest.mark.parametrize(
    ("before", "now", "counted"),
    [
        (audited(NOT_ENROLLED, phase=None), audited(), [NOT_ENROLLED]),
        (audited(NOT_ENROLLED, phase=None), audited(phase=None), []),
        (audited(NOT_ENROLLED, phase=None), audited(ANNOTATION_WRONG, phase=None), []),
        (audited(NOT_ENROLLED, phase=None), None, []),
        (audited(RULES_CHANGED), audited(), [RULES_CHANGED]),
        (audited(RULES_CHANGED), audited(compared=False), []),
        (audited(RULES_CHANGED), audited(NOT_ENROLLED, phase=None), []),
        (audited(LISTENER_MISSING), audited(phase=None), []),
        (audited(NOT_RELEASED, decision=OUT), audited(decision=OUT, phase=None), [NOT_RELEASED]),
        (audited(NOT_RELEASED, decision=OUT), audited(decision=OUT), []),
        (audited(ANNOTATION_WRONG), audited(), []),
        (audited(ANNOTATION_WRONG), replace(audited(), pod=a_pod(annotation=None)), [ANNOTATION_WRONG]),
        (audited(WORKLOAD_WRONG), audited(), []),
    ],
)
def test_only_what_a_repair_has_put_right_is_counted(
    before: Audited, now: Audited | None, counted: list[str]
) -> None:
    assert [finding.reason for finding in repaired(before, now)] == counted


def test_every_kind_has_a_number_and_a_question() -> None:
    found = counted([audited(RULES_CHANGED), audited(RULES_CHANGED, NO_CERTIFICATE)])
    assert set(found) == set(CHECK_OF) >= TOLD | OWN
    assert (found[RULES_CHANGED], found[NO_CERTIFICATE], found[NOT_ENROLLED]) == (2, 1, 0)
    assert set(CHECK_OF.values()) == set(Check)


def test_the_page() -> None:
    gone = Finding(ANNOTATION_WRONG, "it said something")
    found = page("w1", 1, [audited(LISTENER_MISSING, NO_CERTIFICATE)], [("shop/db", gone)])
    assert found == {
        "node": "w1",
        "proxies": 1,
        "pods": [
            {
                "pod": "shop/web",
                "uid": "u-web",
                "wanted": True,
                "because": "namespace-label",
                "annotation": "enabled",
                "phase": "enabled",
                "checks": {
                    "label": "ok",
                    "annotation": "ok",
                    "rules": "ok",
                    "listeners": "wrong",
                    "workload": "ok",
                    "certificate": "wrong",
                },
                "findings": [
                    {
                        "check": "certificate",
                        "reason": "MeshCertificateMissing",
                        "text": "because",
                        "repairable": False,
                    },
                    {"check": "listeners", "reason": "MeshListenerMissing", "text": "because", "repairable": True},
                ],
            }
        ],
        "repaired": [{"pod": "shop/db", "reason": "MeshAnnotationWrong", "text": "it said something"}],
    }
    assert Answer.WRONG in audited(NO_CERTIFICATE).answers().values()
