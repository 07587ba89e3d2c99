"""Sums the reports of policy servers about the flows that they evaluated. Pure.

A report has one flow and one interval, with the deciding rule, and optionally counts of packets and bytes (see
``DataplaneStats``). A Felix without a collector answers that it needs no reports; its clients then stop sending
them.
"""

from dataclasses import dataclass
from typing import Final

from xds.model import calico as c

#: The most rules that are counted separately. All further rules are counted together.
COUNTED_RULES: Final = 1000
OTHERS: Final = "others"


@dataclass(slots=True)
class FlowCounts:
    """The sums over several reports."""

    flows: int = 0
    packets: int = 0
    octets: int = 0


class Flows:
    """Counts reports by the deciding rule and its verdict.

    Attributes:
        by_rule: (rule, ``allowed`` or ``denied``) -> counts.
        faults: reports that could not be read.
    """

    def __init__(self) -> None:
        self.by_rule: dict[tuple[str, str], FlowCounts] = {}
        self.faults = 0

    def add(self, report: c.FlowReport) -> None:
        """Count a report."""
        result = "allowed" if report.allowed else "denied"
        key = (report.rule, result)
        if key not in self.by_rule and len(self.by_rule) >= COUNTED_RULES:
            key = (OTHERS, result)
        counts = self.by_rule.setdefault(key, FlowCounts())
        counts.flows += 1
        counts.packets += report.packets
        counts.octets += report.octets
