"""Reports objects that are not enforced as written, once for each fault."""

import logging
from collections.abc import Mapping

from ztunnel.kube.objects import EventSink, ObjectKey
from ztunnel.policy.calico.objects import Problem

log = logging.getLogger(__name__)


class LoggedEvents:
    """An :class:`~ztunnel.kube.objects.EventSink` that writes log lines, and forwards to another sink."""

    def __init__(self, other: EventSink | None = None) -> None:
        self._other = other

    def event(self, key: ObjectKey, reason: str, message: str) -> None:
        """Write one warning."""
        log.warning("%s object=%s: %s", reason, key, message)
        if self._other is not None:
            self._other.event(key, reason, message)


class ProblemReports:
    """Reports faulty objects to their owners as ``PolicyNotApplied``. A fault that lasts is reported once."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._reported: dict[ObjectKey, str] = {}

    def report(self, problems: Mapping[ObjectKey, Problem]) -> None:
        """Report each object whose fault is new or has changed since the last call."""
        for key in self._reported.keys() - problems.keys():
            del self._reported[key]
        for key, problem in problems.items():
            if self._reported.get(key) != str(problem):
                self._reported[key] = str(problem)
                self._events.event(key, "PolicyNotApplied", str(problem))
