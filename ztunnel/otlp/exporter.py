"""Exports metrics at an interval, and access lines as they come, to the collector that the settings name."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ztunnel.otlp.line import Field, Line, SharedFields
from ztunnel.otlp.outbox import Outbox
from ztunnel.otlp.settings import OtlpSettings
from ztunnel.runtime.clock import Clock

if TYPE_CHECKING:
    from ztunnel.http.exposition import Family
    from ztunnel.otlp.client import LogClient, MetricClient
    from ztunnel.otlp.samples import Slice

#: Points of one request at most: below a MiB, where collectors take 4 and more.
_POINTS: Final = 2000
#: Requests of metrics that wait; of more, the oldest are dropped.
REQUESTS: Final = 200
#: For what waits at the end of the process; a collector that is away must not hold up an upgrade.
_CLOSE_S: Final = 2.0

Families = Callable[[], Awaitable[Iterable["Family"]]]


class LogExport:
    """Exports access lines. Its owner closes it.

    Args:
        settings: with a destination of logs.
        attributes: what the resource says of this proxy; the settings' replace them.
    """

    def __init__(self, settings: OtlpSettings, attributes: Mapping[str, str]) -> None:
        self._settings = settings
        self._attributes = {**attributes, **dict(settings.attributes)}
        self._client: LogClient | None = None  # of the thread
        assert settings.logs is not None
        self._outbox: Outbox[Line] = Outbox(
            f"access lines for {settings.logs.url}",
            self._send,
            most=settings.queue,
            batch=settings.batch,
            delay_s=settings.delay_s,
        )

    @property
    def dropped(self) -> int:
        """Lines that no collector got, ever."""
        return self._outbox.dropped

    def write(
        self, time_s: float, level: str, message: str, fields: Iterable[Field | SharedFields], trace: bytes
    ) -> None:
        """Queue a line; for the event loop, which never waits. See :class:`ztunnel.otlp.line.Line`."""
        self._outbox.put(Line(time_s, level, message, fields, trace))

    async def close(self) -> None:
        """Send what waits, for a moment, and end; idempotent."""
        await asyncio.to_thread(self._outbox.close, _CLOSE_S)
        if self._client is not None:
            self._client.close()

    def _send(self, lines: Sequence[Line]) -> None:
        if self._client is None:
            from ztunnel.otlp.client import LogClient  # see there

            assert self._settings.logs is not None
            self._client = LogClient(self._settings.logs, self._attributes)
        self._client.send(lines)


class MetricExport:
    """Exports what the metrics page shows. Its owner runs :meth:`run` as a task, and closes it.

    Args:
        settings: with a destination of metrics.
        attributes: what the resource says of this proxy; the settings' replace them.
        families: makes the families of one page.
        clock: for the times of points.
    """

    def __init__(
        self, settings: OtlpSettings, attributes: Mapping[str, str], families: Families, clock: Clock
    ) -> None:
        self._settings = settings
        self._attributes = {**attributes, **dict(settings.attributes)}
        self._families = families
        self._clock = clock
        self._start_ns = self._now_ns()
        self._client: MetricClient | None = None  # of the thread
        assert settings.metrics is not None
        self._outbox: Outbox[tuple[int, list[Slice]]] = Outbox(
            f"metrics for {settings.metrics.url}", self._send, most=REQUESTS, batch=1, delay_s=0.0
        )

    @property
    def dropped(self) -> int:
        """Requests that no collector got, ever; later ones have newer values of the same counters."""
        return self._outbox.dropped

    async def run(self) -> None:
        """Export at each interval, for ever."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            await self.export()

    async def export(self) -> None:
        """Queue the values of now, slice by slice: a page of many thousand samples holds nobody up."""
        from ztunnel.otlp.samples import slices  # with the first export, as the page with its first scrape

        now_ns = self._now_ns()
        request: list[Slice] = []
        points = 0
        for family in await self._families():
            for each in slices(family):
                request.append(each)
                points += len(each.samples)
                if points >= _POINTS:
                    self._outbox.put((now_ns, request))
                    request, points = [], 0
                await asyncio.sleep(0)
        if request:
            self._outbox.put((now_ns, request))

    async def close(self) -> None:
        """Send the last values, for a moment, and end; idempotent."""
        await self.export()
        await asyncio.to_thread(self._outbox.close, _CLOSE_S)
        if self._client is not None:
            self._client.close()

    def _now_ns(self) -> int:
        return round(self._clock.wall() * 1e9)

    def _send(self, requests: Sequence[tuple[int, Sequence["Slice"]]]) -> None:
        if self._client is None:
            from ztunnel.otlp.client import MetricClient  # see there

            assert self._settings.metrics is not None
            self._client = MetricClient(self._settings.metrics, self._attributes, self._start_ns)
        for now_ns, slices in requests:
            self._client.send(now_ns, slices)
