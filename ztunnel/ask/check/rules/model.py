"""Defines checks as values: each has an id, a remedy, and a pure function that derives findings from gathered
facts. Pure.

An id is never reused. If a check needs a fact that could not be gathered, it raises :class:`NotGathered` and is
reported as skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from ztunnel.runtime.console.output import Column, Item, Kind

Object = Mapping[str, Any]


class Severity(StrEnum):
    """The severity of a finding, or of the worst finding of a check."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


class NotGathered(Exception):
    """A fact could not be gathered; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a check found.

    Attributes:
        fact: one sentence.
        about: the affected object, such as ``pod shop/web``. Empty for the cluster.
        node: empty if the finding is not about a node.
        severity: ``WARNING`` or ``ERROR``.
    """

    fact: str
    about: str = ""
    node: str = ""
    severity: Severity = Severity.ERROR


def warning(fact: str, about: str = "", node: str = "") -> Finding:
    """Return a finding of severity ``WARNING``."""
    return Finding(fact, about, node, Severity.WARNING)


def error(fact: str, about: str = "", node: str = "") -> Finding:
    """Return a finding of severity ``ERROR``."""
    return Finding(fact, about, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts from a node's proxy and agent.

    Attributes:
        dump: the page ``/config_dump`` of a proxy in an Istio mesh, ours or the Rust ztunnel's.
        check: the page ``/check`` of our proxy. ``None`` for the Rust ztunnel.
        clock_s: how far the proxy's clock is ahead of this machine's, at the middle of the request.
        reached: the attempts to reach other nodes and gateways, each with place, address, port, seconds and error.
        agent: the page ``/check`` of our node agent.
        audit: the page ``/audit`` of our node agent.
    """

    dump: Mapping[str, Any] | None = None
    check: Mapping[str, Any] | None = None
    clock_s: float | None = None
    reached: Sequence[Mapping[str, Any]] = ()
    agent: Mapping[str, Any] | None = None
    audit: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that checks evaluate.

    Attributes:
        now_s: Unix time.
        cluster_error: why the API server does not answer. Empty if it does.
        cluster_asked: whether an API server was queried, even without an answer. False with ``--no-cluster``, and
            for a saved dump.
        version: the body of the API server's ``/version``.
        clock_s: how far the API server's clock is ahead of this machine's, in seconds.
        objects: the objects by kind, or a text that says why a kind's objects are unknown.
        access: whether each permission that checks need is granted, by verb and resource, such as ``list pods``.
        nodes: the facts by node.
        silent: nodes with a proxy that does not answer, and why.
        no_nodes: the reason why no proxy was queried. Empty if at least one was.
        selected: whether the flags select only some of the nodes.
    """

    now_s: float
    cluster_error: str = ""
    cluster_asked: bool = True
    version: Mapping[str, Any] = field(default_factory=dict)
    clock_s: float | None = None
    objects: Mapping[str, Sequence[Object] | str] = field(default_factory=dict)
    access: Mapping[str, bool] = field(default_factory=dict)
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    no_nodes: str = ""

    def listed(self, kind: str) -> Sequence[Object]:
        """Return the objects of a kind.

        Raises:
            NotGathered: they are not known.
        """
        if self.cluster_error:
            raise NotGathered(self.cluster_error)
        found = self.objects.get(kind, f"{kind} was not asked for")
        if isinstance(found, str):
            raise NotGathered(found)
        return found

    def dumps(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the dump of each node's proxy.

        Raises:
            NotGathered: no node has one.
        """
        yield from self._of_nodes(lambda node: node.dump, "no proxy of an Istio mesh has answered")

    def checks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield ``/check`` of each node's proxy.

        Raises:
            NotGathered: no node has one.
        """
        yield from self._of_nodes(lambda node: node.check, "no proxy of this project has answered")

    def agents(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield ``/check`` of each node's agent.

        Raises:
            NotGathered: no node has one.
        """
        yield from self._of_nodes(lambda node: node.agent, "no node agent of this project has answered")

    def kernels(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield node, ``proxy`` or ``agent``, and the facts of the kernel as that process sees them.

        Raises:
            NotGathered: no node has them.
        """
        found = False
        for name, node in self.nodes.items():
            for who, page in (("proxy", node.check), ("agent", node.agent)):
                if page is not None and isinstance(page.get("kernel"), Mapping):
                    found = True
                    yield name, who, page["kernel"]
        if not found:
            raise NotGathered(self.no_nodes or "no proxy or agent of this project has answered")

    def _of_nodes(
        self, get: Callable[[NodeFacts], Mapping[str, Any] | None], nothing: str
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        found = False
        for name, node in self.nodes.items():
            page = get(node)
            if page is not None:
                found = True
                yield name, page
        if not found:
            raise NotGathered(self.no_nodes or nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check: a question about the cluster, and a function that answers it.

    Attributes:
        id: the check's id, such as ``NET3``.
        asks: the question, as the output shows it.
        remedy: what to do about a finding.
        judge: yields findings. If there are none, the result is ok.
        before: whether the check also makes sense before installation.
    """

    id: str
    asks: str
    remedy: str
    judge: Callable[[Facts], Iterable[Finding]]
    before: bool = False

    @property
    def category(self) -> str:
        """The letters of the id."""
        return self.id.rstrip("0123456789")


class CheckResult(Item, frozen=True, kw_only=True):
    """One result of a check: a finding, ok or skipped. ``reference`` is the check's anchor in docs/check.md."""

    id: str
    category: str
    severity: Literal["ok", "warning", "error", "skipped"]
    object: str | None = None
    fact: str
    remedy: str | None = None
    reference: str


_MARKS: Final = {"ok": "ok", "warning": "WARNING", "error": "ERROR", "skipped": "skipped"}

CHECK_RESULT: Final[Kind[CheckResult]] = Kind(
    name="CheckResult",
    several="checks",
    item=CheckResult,
    identity=lambda item: item.id,
    columns=(
        Column("ID", "id"),
        Column("RESULT", lambda item: _MARKS[item.severity]),
        Column("NODE", "node"),
        Column("OBJECT", "object"),
        Column("FACT", "fact"),
        Column("REMEDY", "remedy"),
    ),
)


def run(checks: Iterable[Check], facts: Facts) -> list[CheckResult]:
    """Return the results of checks, in their order. A check that is skipped halfway keeps its findings so far."""
    results: list[CheckResult] = []
    for check in checks:
        findings: list[Finding] = []
        skipped = ""
        try:
            for each in check.judge(facts):
                findings.append(each)  # noqa: PERF402  a later one can raise
        except NotGathered as reason:
            skipped = f"not known: {reason}"
        except (TypeError, AttributeError, LookupError, ValueError) as wrong:  # an object with unexpected fields
            skipped = f"unexpected form: {wrong!r}"
        if skipped:
            results.append(_result(check, Severity.SKIPPED, f"{check.asks}: {skipped}"))
        elif not findings:
            results.append(_result(check, Severity.OK, check.asks))
        results += [
            _result(check, each.severity, each.fact, each.about or None, each.node or None, check.remedy)
            for each in findings
        ]
    return results


def _result(
    check: Check,
    severity: Severity,
    fact: str,
    about: str | None = None,
    node: str | None = None,
    remedy: str | None = None,
) -> CheckResult:
    return CheckResult(
        id=check.id,
        category=check.category,
        severity=severity.value,
        object=about,
        node=node,
        fact=fact,
        remedy=remedy,
        reference=f"docs/check.md#{check.id.lower()}",
    )
