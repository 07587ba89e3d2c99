"""The result of an audit: for each pod of the node, the answers to fixed questions and all differences by kind.
Pure.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ztunnel.node.agent.comparison import (
    LISTENER_MISSING,
    NO_CERTIFICATE,
    NOT_SERVED,
    TWO_AGENTS,
    WORKLOAD_WRONG,
    Finding,
)
from ztunnel.node.agent.enrolment import Decision, Pod, Step
from ztunnel.node.agent.phase import Phase

NOT_ENROLLED, NOT_RELEASED, ANNOTATION_WRONG, RULES_CHANGED = (
    "MeshNotEnrolled",
    "MeshNotReleased",
    "MeshAnnotationWrong",
    "MeshRulesChanged",
)


class Check(StrEnum):
    """A question about a pod. Each question is a column of the table."""

    LABEL = "label"
    ANNOTATION = "annotation"
    RULES = "rules"
    LISTENERS = "listeners"
    WORKLOAD = "workload"
    CERTIFICATE = "certificate"


class Answer(StrEnum):
    """The answer to a question about a pod."""

    OK = "ok"
    WRONG = "wrong"
    NONE = "-"
    """The question does not apply: the pod is not in the mesh, or not yet."""
    UNKNOWN = "?"
    """The answer is unknown: no proxy answers, or the pod's namespace cannot be entered."""


#: For each kind of finding, the question that it answers.
CHECK_OF: Final[Mapping[str, Check]] = {
    NOT_ENROLLED: Check.LABEL,
    NOT_RELEASED: Check.LABEL,
    ANNOTATION_WRONG: Check.ANNOTATION,
    RULES_CHANGED: Check.RULES,
    TWO_AGENTS: Check.RULES,
    LISTENER_MISSING: Check.LISTENERS,
    NOT_SERVED: Check.WORKLOAD,
    WORKLOAD_WRONG: Check.WORKLOAD,
    NO_CERTIFICATE: Check.CERTIFICATE,
}
#: Findings that the agent repairs itself, each minute and on request.
OWN: Final = frozenset({NOT_ENROLLED, NOT_RELEASED, ANNOTATION_WRONG, RULES_CHANGED, LISTENER_MISSING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """The result of comparing one pod with its desired state.

    Attributes:
        phase: the pod's phase in the node agent. ``None`` if the pod has no rules of this agent.
        compared: whether the pod's namespace was examined. If not, its rules and listeners are unknown.
        asked: whether a proxy of the node has answered.
        findings: all faults.
        fault: the fault of the agent's last step. Empty without a fault.
    """

    pod: Pod
    decision: Decision
    phase: Phase | None
    compared: bool
    asked: bool
    findings: frozenset[Finding]
    fault: str = ""

    def answers(self) -> dict[Check, Answer]:
        """Return the answers to the questions about this pod, in the order of the columns."""
        wrong = {CHECK_OF[finding.reason] for finding in self.findings}
        inside = self.decision.enrol and self.phase is not None
        found = {}
        for check in Check:
            if check in wrong:
                found[check] = Answer.WRONG
            elif check is Check.LABEL:
                found[check] = Answer.OK
            elif not inside:
                found[check] = Answer.NONE
            elif check is Check.ANNOTATION:
                found[check] = Answer.OK
            elif check in (Check.RULES, Check.LISTENERS):
                found[check] = Answer.OK if self.compared else Answer.UNKNOWN
            elif not self.asked:
                found[check] = Answer.UNKNOWN
            elif check is Check.CERTIFICATE and Check.WORKLOAD in wrong:
                found[check] = Answer.UNKNOWN  # the pod's account is in doubt, and so is its certificate
            else:
                found[check] = Answer.OK
        return found


def own_findings(pod: Pod, what: Step, rule_changes: int, fault: str) -> list[Finding]:
    """Return the findings about those parts of a pod that this agent writes itself.

    Args:
        pod: the pod.
        what: the step that the agent would take next.
        rule_changes: the number of changes that would correct its rules.
        fault: why the last step failed. Empty if it succeeded.
    """
    because = f": {fault}" if fault else ""
    says = f"is annotated {pod.annotation!r}" if pod.annotation is not None else "has no annotation"
    found = []
    match what:
        case Step.ENROL:
            found.append(Finding(NOT_ENROLLED, f"its labels request the mesh, but it is not enrolled{because}"))
        case Step.RELEASE | Step.DROP:
            found.append(Finding(NOT_RELEASED, f"it must not be in the mesh, but has its rules{because}"))
        case Step.SAY_ENABLED:
            found.append(Finding(ANNOTATION_WRONG, f"it {says}, but is in the mesh{because}"))
        case Step.SAY_PENDING:
            found.append(
                Finding(ANNOTATION_WRONG, f"it {says}, not 'pending': no proxy listens in it yet{because}")
            )
        case Step.SAY_OUT:
            found.append(Finding(ANNOTATION_WRONG, f"it {says}, but is not in the mesh{because}"))
        case Step.NOTHING:
            pass
    if rule_changes:
        found.append(Finding(RULES_CHANGED, f"its rules were changed by others: {rule_changes} differences"))
    return found


def repaired(before: Audited, now: Audited | None) -> list[Finding]:
    """Return those findings of an earlier comparison that a repair has corrected, according to a later comparison.

    A finding does not count as repaired if another finding replaced it, if its pod was deleted, or if the agent
    does not write the faulty part itself.
    """
    if now is None:
        return []
    left = {finding.reason for finding in now.findings}
    answers = now.answers()
    right = {
        NOT_ENROLLED: now.phase is not None and now.phase is not Phase.LEAVING,
        NOT_RELEASED: now.phase is None or now.phase is Phase.LEAVING,
        ANNOTATION_WRONG: now.pod.annotation != before.pod.annotation and answers[Check.LABEL] is Answer.OK,
        RULES_CHANGED: answers[Check.RULES] is Answer.OK,
        LISTENER_MISSING: answers[Check.LISTENERS] is Answer.OK,
    }
    return [each for each in before.findings if right.get(each.reason, False) and each.reason not in left]


def counted(audited: Iterable[Audited]) -> Counter[str]:
    """Return the number of pods with each kind of finding, including kinds without any pod, for a gauge."""
    found = Counter(dict.fromkeys(CHECK_OF, 0))
    for each in audited:
        found.update(finding.reason for finding in each.findings)
    return found


def page(
    node: str, proxies: int, audited: Collection[Audited], repaired: Collection[tuple[str, Finding]] = ()
) -> dict[str, Any]:
    """Return an audit as a JSON value.

    Args:
        node: the node's name.
        proxies: the number of proxies that have answered.
        audited: every pod of the node.
        repaired: the repaired findings, by pod.
    """
    return {
        "node": node,
        "proxies": proxies,
        "pods": [_entry(each) for each in sorted(audited, key=lambda each: _named(each.pod))],
        "repaired": [
            {"pod": pod, "reason": finding.reason, "text": finding.text}
            for pod, finding in sorted(repaired, key=lambda each: (each[0], each[1].reason))
        ],
    }


def _entry(audited: Audited) -> dict[str, Any]:
    pod, decision = audited.pod, audited.decision
    return {
        "pod": _named(pod),
        "uid": pod.uid,
        "wanted": decision.enrol,
        "because": decision.reason.value,
        "annotation": pod.annotation,
        "phase": audited.phase.value if audited.phase is not None else None,
        "checks": {check.value: answer.value for check, answer in audited.answers().items()},
        "findings": [
            {
                "check": CHECK_OF[finding.reason].value,
                "reason": finding.reason,
                "text": finding.text,
                "repairable": finding.reason in OWN,
            }
            for finding in sorted(audited.findings, key=lambda each: (each.reason, each.text))
        ],
    }


def _named(pod: Pod) -> str:
    return f"{pod.info.namespace}/{pod.info.name}"
