"""The process metrics with equal names in both dialects (Istio and Envoy), so that the same alerts apply."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

from tproxy.aio import held_sockets
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpen
from ztunnel.runtime import tasks
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.descriptors import Descriptors
from ztunnel.runtime.log_writer import LogWriter


class Generations(Protocol):
    """The part of :class:`ztunnel.proxy.dataplane.handover.service.Handover` that the metrics need."""

    @property
    def generations(self) -> int:
        """The number of this proxy's processes."""


class Gauge(NamedTuple):
    """A number that is read when the metrics page is requested; ``kind`` is ``gauge`` or ``counter``."""

    kind: str
    help: str
    read: Callable[[], float]


def process_gauges(
    half_open: HalfOpen, descriptors: Descriptors, writer: LogWriter, handover: Generations | None
) -> dict[str, Gauge]:
    """Return the gauges of a process, by their names.

    Args:
        half_open: the process's connections whose handshake has not finished.
        descriptors: the process's limit of file descriptors.
        writer: writes the process's log lines.
        handover: hands the process's connections over to another process. ``None`` if hand-overs are off.
    """
    holder, poller = held_sockets.holder(), half_open.poller
    rows: tuple[tuple[str, str, str, Callable[[], float]], ...] = (
        ("ztunnel_half_open_connections", "gauge", "Connections to pods before the end of their handshake",
         lambda: len(half_open)),
        ("ztunnel_half_open_turned_away", "counter",
         "Connections closed before the end of their handshake by a limit", lambda: half_open.rejected),
        ("ztunnel_accepts_paused", "counter", "Times a pod was not allowed to accept for lack of descriptors",
         lambda: descriptors.paused),
        ("ztunnel_log_lines_dropped", "counter", "Log lines lost because they could not be written",
         lambda: writer.counts.dropped.value),
        ("ztunnel_task_restarts", "counter",
         "Background tasks of the main process that failed and were started again",
         lambda: tasks.restarts.value),
        # These counts grow if connections, pods or mesh changes leak memory. ``make soak`` checks them.
        ("ztunnel_sockets", "gauge", "Sockets of the data path, listeners included", lambda: poller.registered),
        ("ztunnel_fibers", "gauge", "Coroutines of open connections", tasks.fibers_running),
        ("ztunnel_tasks", "gauge", "All other asyncio tasks", lambda: len(asyncio.all_tasks())),
        ("ztunnel_allocated_blocks", "gauge", "Blocks of memory that Python objects have",
         sys.getallocatedblocks),
        ("ztunnel_generations", "gauge",
         "Processes of this proxy: this one, and a predecessor that still drains",
         lambda: 1 if handover is None else handover.generations),
        ("ztunnel_crashes", "counter", "Times that this proxy died and its holder has started it again",
         lambda: 0 if holder is None else holder.crashes),
    )  # fmt: skip
    return {name: Gauge(kind, f"{text} (unstable)", read) for name, kind, text, read in rows}


def configuration_gauges(
    clock: Clock, staleness_s: Callable[[], float], updated_ago_s: Callable[[], float | None]
) -> dict[str, Gauge]:
    """Return the metrics of the configuration's age.

    Args:
        clock: the wall clock.
        staleness_s: returns the seconds without a connection to the control plane, or 0 while connected.
        updated_ago_s: returns the seconds since the control plane's last message, or None before the first
            message.
    """

    def updated_s() -> float:
        ago_s = updated_ago_s()
        return 0.0 if ago_s is None else round(clock.wall() - ago_s, 3)

    return {
        "ztunnel_xds_staleness_seconds": Gauge(
            "gauge",
            "Seconds since the control plane was last connected; 0 while it is (unstable)",
            lambda: round(staleness_s(), 3),
        ),
        "ztunnel_xds_last_update_seconds": Gauge(
            "gauge",
            "When the last message of the control plane came, in Unix seconds; 0 before the first (unstable)",
            updated_s,
        ),
    }
