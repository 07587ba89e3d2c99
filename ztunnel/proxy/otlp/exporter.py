"""Exports metrics at an interval, and access lines and spans as they are written, to the configured collector."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ztunnel.proxy.otlp.line import Field, Line, SharedFields
from ztunnel.proxy.otlp.outbox import Outbox
from ztunnel.proxy.otlp.settings import OtlpSettings
from ztunnel.proxy.otlp.spans import Span, span_of
from ztunnel.proxy.otlp.trace import parse_traceparent
from ztunnel.runtime.clock import Clock

if TYPE_CHECKING:
    from ztunnel.proxy.otlp.client import LogClient, MetricClient, SpanClient
    from ztunnel.proxy.otlp.samples import Slice
    from ztunnel.runtime.http.exposition import Family

#: The largest number of data points per request. This is less than 1 MiB, and collectors accept at least 4 MiB.
_POINTS: Final = 2000
#: The most queued metric requests. Above this limit the oldest are dropped.
REQUESTS: Final = 200
#: The time limit for sending queued data at shutdown, because an unreachable collector must not delay an upgrade.
_CLOSE_S: Final = 2.0

Families = Callable[[], Awaitable[Iterable["Family"]]]


class LogExport:
    """Exports access lines. Its owner closes it.

    Args:
        settings: the settings, with a destination for logs.
        attributes: the proxy's resource attributes. The settings' attributes replace them.
    """

    def __init__(self, settings: OtlpSettings, attributes: Mapping[str, str]) -> None:
        self._settings = settings
        self._attributes = {**attributes, **dict(settings.attributes)}
        self._client: LogClient | None = None  # used by the sending thread only
        assert settings.logs is not None
        self._outbox: Outbox[Line] = Outbox(
            f"access lines for {settings.logs.url}",
            self._send,
            most=settings.lines.queue,
            batch=settings.lines.batch,
            delay_s=settings.lines.delay_s,
        )

    @property
    def dropped(self) -> int:
        """The number of access lines that were lost before they reached the collector."""
        return self._outbox.dropped

    def write(self, line: Line) -> None:
        """Queue a line without blocking the event loop."""
        self._outbox.put(line)

    async def close(self) -> None:
        """Send queued data within a time limit, and close the export. Idempotent."""
        await asyncio.to_thread(self._outbox.close, _CLOSE_S)
        if self._client is not None:
            self._client.close()

    def _send(self, lines: Sequence[Line]) -> None:
        if self._client is None:
            from ztunnel.proxy.otlp.client import LogClient  # slow to import

            assert self._settings.logs is not None
            self._client = LogClient(self._settings.logs, self._attributes)
        self._client.send(lines)


class SpanExport:
    """Exports a span for each connection with a sampled trace. Its owner closes it.

    Args:
        settings: the settings, with a destination for traces.
        attributes: the proxy's resource attributes. The settings' attributes replace them.
    """

    def __init__(self, settings: OtlpSettings, attributes: Mapping[str, str]) -> None:
        self._settings = settings
        self._attributes = {**attributes, **dict(settings.attributes)}
        self._client: SpanClient | None = None  # used by the sending thread only
        assert settings.traces is not None
        self._outbox: Outbox[Span] = Outbox(
            f"spans for {settings.traces.url}",
            self._send,
            most=settings.spans.queue,
            batch=settings.spans.batch,
            delay_s=settings.spans.delay_s,
        )

    @property
    def dropped(self) -> int:
        """The number of spans that were lost before they reached the collector."""
        return self._outbox.dropped

    def write(self, span: Span) -> None:
        """Queue a span without blocking the event loop."""
        self._outbox.put(span)

    async def close(self) -> None:
        """Send queued data within a time limit, and close the export. Idempotent."""
        await asyncio.to_thread(self._outbox.close, _CLOSE_S)
        if self._client is not None:
            self._client.close()

    def _send(self, spans: Sequence[Span]) -> None:
        if self._client is None:
            from ztunnel.proxy.otlp.client import SpanClient  # slow to import

            assert self._settings.traces is not None
            self._client = SpanClient(self._settings.traces, self._attributes)
        self._client.send(spans)


class AccessExport:
    """Exports access lines, spans, or both. Its owner closes it.

    Args:
        settings: the settings, with a destination for logs, traces, or both.
        attributes: the resource's attributes, as for :class:`LogExport`.
        rng: generates the identifiers of spans.
    """

    def __init__(self, settings: OtlpSettings, attributes: Mapping[str, str], rng: random.Random) -> None:
        self._lines = LogExport(settings, attributes) if settings.logs else None
        self._spans = SpanExport(settings, attributes) if settings.traces else None
        self._rng = rng

    @property
    def dropped(self) -> Mapping[str, int]:
        """The numbers of lines and spans that were lost before they reached the collector, by signal."""
        found = {"logs": self._lines, "traces": self._spans}
        return {signal: export.dropped for signal, export in found.items() if export is not None}

    def write(
        self, time_s: float, level: str, message: str, fields: Iterable[Field | SharedFields], traceparent: bytes
    ) -> None:
        """Queue an access line and its span without blocking the event loop.

        Args:
            time_s: wall clock.
            level: ``trace`` to ``error``.
            message: without fields.
            fields: the fields, which must not be changed any more.
            traceparent: the ``traceparent`` of the connection's tunnel, sent or received, or empty.
        """
        line = Line(time_s, level, message, fields, parse_traceparent(traceparent) if traceparent else None)
        if self._spans is not None and line.trace is not None and line.trace.sampled:
            span = span_of(line, line.trace, self._rng)
            if span is not None:
                self._spans.write(span)
                line = span.line
        if self._lines is not None:
            self._lines.write(line)

    async def close(self) -> None:
        """Send queued data within a time limit, and close the export. Idempotent."""
        async with asyncio.TaskGroup() as closing:
            for name, export in (("lines", self._lines), ("spans", self._spans)):
                if export is not None:
                    closing.create_task(export.close(), name=f"otlp {name} close")


class MetricExport:
    """Exports the families of the metrics page. Its owner runs :meth:`run` as a task, and closes it.

    Args:
        settings: the settings, with a destination for metrics.
        attributes: the proxy's resource attributes. The settings' attributes replace them.
        families: makes the families of one page.
        clock: the clock of data points.
    """

    def __init__(
        self, settings: OtlpSettings, attributes: Mapping[str, str], families: Families, clock: Clock
    ) -> None:
        self._settings = settings
        self._attributes = {**attributes, **dict(settings.attributes)}
        self._families = families
        self._clock = clock
        self._start_ns = self._now_ns()
        self._client: MetricClient | None = None  # used by the sending thread only
        assert settings.metrics is not None
        self._outbox: Outbox[tuple[int, list[Slice]]] = Outbox(
            f"metrics for {settings.metrics.url}", self._send, most=REQUESTS, batch=1, delay_s=0.0
        )

    @property
    def dropped(self) -> int:
        """The number of metric requests that were lost before they reached the collector. A later request has
        newer values of the same counters.
        """
        return self._outbox.dropped

    async def run(self) -> None:
        """Export at each interval, without end."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            await self.export()

    async def export(self) -> None:
        """Queue the current values, slice by slice, so that a page of many thousand samples does not block the
        loop.
        """
        from ztunnel.proxy.otlp.samples import slices  # imported at the first export

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
            await asyncio.sleep(0)
        if request:
            self._outbox.put((now_ns, request))

    async def close(self) -> None:
        """Send the last values within a time limit, and close the export. Idempotent."""
        await self.export()
        await asyncio.to_thread(self._outbox.close, _CLOSE_S)
        if self._client is not None:
            self._client.close()

    def _now_ns(self) -> int:
        return round(self._clock.wall() * 1e9)

    def _send(self, requests: Sequence[tuple[int, Sequence["Slice"]]]) -> None:
        if self._client is None:
            from ztunnel.proxy.otlp.client import MetricClient  # slow to import

            assert self._settings.metrics is not None
            self._client = MetricClient(self._settings.metrics, self._attributes, self._start_ns)
        for now_ns, slices in requests:
            self._client.send(now_ns, slices)
