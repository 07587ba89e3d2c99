"""One hop of a connection with what its log line needs; counted and logged exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ztunnel.proxy.envoy.listeners.connections import LiveHop
from ztunnel.proxy.envoy.stream.outcome import Refused, UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.access_log import Sink, write_all
from ztunnel.runtime.clock import Clock


@dataclass(slots=True, eq=False)
class Hop:
    """One hop, until its log line is written.

    Attributes:
        info: the facts about it.
        life: its entry among everything alive.
        filter_sinks: loggers of the TCP proxy or connection manager; ``listener_sinks`` follow them.
    """

    info: StreamInfo
    clock: Clock
    life: LiveHop
    listener_sinks: Sequence[Sink] = ()
    filter_sinks: Sequence[Sink] = ()
    finished: bool = field(default=False)

    def refused(self, error: Refused) -> None:
        """Record the reason why the connection ends before bytes flow."""
        if error.flag is not None:
            self.info.flags.add(error.flag)
        if error.details:
            self.info.termination_details = error.details
        if error.response_details:
            self.info.response_details = error.response_details
        if isinstance(error, UpstreamFailed):
            self.info.upstream_failure = error.reason

    def finish(self) -> None:
        """Give back what the hop held, and write its log lines; idempotent."""
        if self.finished:
            return
        self.finished = True
        for give_back in self.info.held:
            give_back()
        self.info.duration_s = self.clock.monotonic() - self.info.started
        write_all((*self.filter_sinks, *self.listener_sinks), self.info)
