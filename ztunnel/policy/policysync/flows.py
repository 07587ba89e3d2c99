"""Sums the reports of policy servers about the flows that they evaluated. Pure.

A report has one flow and one interval, with the deciding rule, and optionally counts of packets and bytes (see
``DataplaneStats``). Felix without a collector answers that reports are not needed, and its clients then stop.
"""

from dataclasses import dataclass
from typing import Final

from xds.model import calico as c

#: The number of rules that are counted separately. Others are counted together.
COUNTED_RULES: Final = 1000
OTHERS: Final = "others"


@dataclass(slots=True)
class FlowCounts:
    """The sums of several reports."""

    flows: int = 0
    packets: int = 0
    octets: int = 0


class Flows:
    """Counts reports by the rule that decided and what it did.

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
