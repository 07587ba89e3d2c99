"""Periodic work on one process's metrics: samples their history and expires unused series."""

import asyncio
import itertools
from typing import Final

from ztunnel.proxy.flows.history import STEP_S, Totals
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.runtime.clock import Clock

#: The search for unused series runs after every sixth sample, which is once a minute.
_EXPIRY_SAMPLES: Final = 6
#: The number of series checked per event loop iteration: about a millisecond of work.
_SLICE: Final = 1000


async def sweep(metrics: Metrics, clock: Clock) -> None:
    """Sample the metrics at the end of each history interval, until cancelled. All processes sample at the same
    time.
    """
    for number in itertools.count(1):
        if metrics.history.is_due(clock.monotonic()):
            await sample(metrics, clock)
        await asyncio.sleep(STEP_S - clock.monotonic() % STEP_S)
        if not number % _EXPIRY_SAMPLES:
            metrics.expire(clock.monotonic())


async def sample(metrics: Metrics, clock: Clock) -> None:
    """Sample the totals once."""
    now_s = clock.monotonic()
    opened, moved = metrics.forgotten_traffic
    failures, denials = metrics.failures()
    for number, series in enumerate(list(metrics.series), 1):
        opened += series.opened
        moved += series.received_now + series.sent_now
        if not number % _SLICE:
            await asyncio.sleep(0)
    metrics.history.sample(now_s, Totals(opened, failures, denials, moved))
