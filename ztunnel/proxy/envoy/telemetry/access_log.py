"""Access logs of Envoy's dialect: lines, which the process's :class:`LogWriter` writes, or entries for an access
log service.

Lines are written when 64 KiB are queued or after a flush interval (10 s by default, like in Envoy).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from xds.model.access_log import AccessLog, AnyAccessLog, GrpcAccessLog, LogFilter
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.access_log_filter import Chooses, chooser
from ztunnel.proxy.envoy.telemetry.format import Line, Renderer, log_renderer
from ztunnel.proxy.envoy.telemetry.log_entries import MakesEntry, entry_maker
from ztunnel.proxy.envoy.telemetry.log_stream import LogStreams, Sender
from ztunnel.runtime.log_writer import LogFile, LogWriter, WriteCounts


@dataclass(frozen=True, slots=True)
class LogSink:
    """A configured logger: the renderer of its lines, and their file.

    Attributes:
        chooses: returns whether to write a hop's line. None: write all lines.
    """

    render: Renderer
    file: LogFile
    writer: LogWriter
    chooses: Chooses | None = None

    def write(self, line: bytes) -> None:
        """Queue a hop's line for writing. Called once per finished hop."""
        if self.file.append(line):
            self.writer.hand_over(self.file)


@dataclass(frozen=True, slots=True)
class EntrySink:
    """A configured logger of an access log service. ``chooses`` has the same meaning as in :class:`LogSink`."""

    entry_of: MakesEntry
    sender: Sender
    chooses: Chooses | None = None


Sink: TypeAlias = LogSink | EntrySink


def write_all(sinks: Iterable[Sink], info: StreamInfo) -> None:
    """Write one line per logger about a finished hop.

    The loggers of a listener and of its filter usually print the same values, which are then read only once.
    """
    values_of: Callable[[StreamInfo], tuple[str, ...]] | None = None
    values: tuple[str, ...] = ()
    for sink in sinks:
        if sink.chooses is not None and not sink.chooses(info):
            continue
        if isinstance(sink, EntrySink):
            sink.sender.add(sink.entry_of(info))
            continue
        render = sink.render
        if type(render) is Line:
            if render.values is not values_of:
                values_of, values = render.values, render.values(info)
            line = render.of(values)
        else:
            line = render(info)
        sink.write(line.encode(errors="backslashreplace"))


class AccessLogs:
    """All access logs of the process.

    Args:
        stats: receives the statistics ``filesystem.*`` and ``access_log_file.dropped``.
        flush_interval_s: the longest time that a line waits. The owner calls :meth:`LogWriter.flush` this often.
        streams: the streams to access log services. None if no configuration names such a service.

    Attributes:
        writer: the files and their thread.
    """

    def __init__(self, stats: Stats, flush_interval_s: float = 10.0, streams: LogStreams | None = None) -> None:
        self.streams = streams
        self.flush_interval_s = flush_interval_s
        scope = stats.scope("filesystem")
        self.writer = LogWriter(
            WriteCounts(
                completed=scope.counter("write_completed"),
                failed=scope.counter("write_failed"),
                dropped=stats.scope("access_log_file").counter("dropped"),
            )
        )
        #: Maps a logger's file, ``id`` of the format, and options to its sink. The values also keep the configured
        #: log alive, so that the ``id`` is not reused.
        self._sinks: dict[tuple[str, int, bool, LogFilter | None], tuple[AccessLog, LogSink]] = {}

    def sinks(self, logs: Iterable[AnyAccessLog]) -> tuple[Sink, ...]:
        """Return one sink per configured log, opening files on first use.

        Raises:
            OSError: a file cannot be opened.
        """
        sinks: list[Sink] = []
        for entry in logs:
            if isinstance(entry, GrpcAccessLog):
                sinks.append(self._entry_sink(entry))
                continue
            file = self.writer.file(entry.path)
            # Equal formats are compiled to one object, so the ``id`` of the format lets thousands of filter chains
            # share one sink.
            key = (entry.path, id(entry.format), entry.omit_empty, entry.filter)
            known = self._sinks.get(key)
            if known is None:
                chooses = chooser(entry.filter) if entry.filter is not None else None
                sink = LogSink(log_renderer(entry), file, self.writer, chooses)
                known = self._sinks[key] = (entry, sink)
            sinks.append(known[1])
        return tuple(sinks)

    def _entry_sink(self, log: GrpcAccessLog) -> EntrySink:
        assert self.streams is not None
        chooses = chooser(log.filter) if log.filter is not None else None
        return EntrySink(entry_maker(log), self.streams.sender(log.stream), chooses)
