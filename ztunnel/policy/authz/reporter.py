"""Reports evaluated flows and their deciding rules to the PolicySync server: every five seconds, each flow once.

A server without a collector refuses reports, and is tried again in the next interval. Undeliverable reports are
dropped and counted, so that they neither delay checks nor fill memory.
"""

import asyncio
import logging
from typing import Final

from google.protobuf.message import DecodeError

from xds.aio.channel import Channel
from xds.dialects.calico.policysync import encode_report
from xds.grpc.status import RpcFailed
from xds.model import calico as c
from xds.proto.felix.policysync_pb2 import ReportResult
from ztunnel.policy.calico.verdict import Verdict

log = logging.getLogger(__name__)

METHOD: Final = "/felix.PolicySync/Report"
#: Seconds between two reports, equal to the interval of Calico's own policy server.
INTERVAL_S: Final = 5.0
#: The most flows reported per interval. Further flows are dropped and counted.
MOST_FLOWS: Final = 10_000
_CALL_S: Final = 5.0


class Reporter:
    """Collects flows, and sends them while :meth:`run` runs.

    Args:
        target: the PolicySync server's target.

    Attributes:
        sent: number of flows that the server accepted.
        left_out: number of flows that were dropped.
    """

    def __init__(self, target: str, interval_s: float = INTERVAL_S) -> None:
        self.target = target
        self.sent = 0
        self.left_out = 0
        self._interval_s = interval_s
        self._flows: dict[c.FlowReport, None] = {}

    def note(self, flow: c.Flow, verdict: Verdict) -> None:
        """Remember an evaluated flow for the next report; equal flows are reported once per interval."""
        report = c.FlowReport(
            source_ip=flow.source_ip or "",
            destination_ip=flow.destination_ip or "",
            source_port=flow.source_port,
            destination_port=flow.destination_port,
            protocol=flow.protocol,
            allowed=verdict.allowed,
            policy=verdict.rule.policy if verdict.rule is not None else None,
            index=verdict.rule.index if verdict.rule is not None else -1,
        )
        if report not in self._flows and len(self._flows) >= MOST_FLOWS:
            self.left_out += 1
            return
        self._flows[report] = None

    async def run(self) -> None:
        """Send the collected flows once per interval, until cancelled."""
        async with Channel(self.target) as channel:
            while True:
                await asyncio.sleep(self._interval_s)
                flows, self._flows = self._flows, {}
                taken = await self._send(channel, flows)
                self.sent += taken
                self.left_out += len(flows) - taken

    async def _send(self, channel: Channel, flows: dict[c.FlowReport, None]) -> int:
        """Send flows until the server refuses one, and return how many it accepted."""
        for number, flow in enumerate(flows):
            try:
                answer = ReportResult.FromString(
                    await channel.unary(METHOD, encode_report(flow), timeout_s=_CALL_S)
                )
            except (RpcFailed, DecodeError) as error:
                log.debug("flows not reported server=%s error=%s", self.target, error)
                return number
            if not answer.successful:
                return number
        return len(flows)
