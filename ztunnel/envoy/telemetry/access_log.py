"""Access log files: rendered lines, written off the data path.

Lines collect in memory and are written when 64 KiB are there or after a flush interval (as Envoy: 10 s unless told
otherwise). Writing happens in one thread, so that a slow disk or a blocked pipe stops nobody's bytes; when
that thread falls behind by more than :data:`MAX_PENDING` bytes, lines are dropped and counted, never queued
without end.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xds.model.access_log import AccessLog
from ztunnel.envoy.stream_info import StreamInfo
from ztunnel.envoy.telemetry.format import Line, Renderer, log_renderer
from ztunnel.envoy.telemetry.stats import Stats

log = logging.getLogger(__name__)

FLUSH_BYTES = 64 * 1024
MAX_PENDING = 16 * 1024 * 1024
_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}


class LogFile:
    """One file (or standard stream) that access logs share."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = _open(path)
        self._lines: list[bytes] = []
        self._size = 0

    def append(self, line: bytes) -> bool:
        """Keep a line; whether it is time to write."""
        self._lines.append(line)
        self._size += len(line)
        return self._size >= FLUSH_BYTES

    def take(self) -> bytes:
        """What is to be written now."""
        data = b"".join(self._lines)
        self._lines.clear()
        self._size = 0
        return data

    def write(self, data: bytes) -> None:
        """Write everything, waiting as long as it takes (writer thread)."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def reopen(self) -> None:
        """Open the path anew: somebody rotated the file."""
        if self.path not in _STANDARD:
            old, self._fd = self._fd, _open(self.path)
            os.close(old)

    def close(self) -> None:
        """Close the file."""
        if self.path not in _STANDARD:
            os.close(self._fd)


def _open(path: str) -> int:
    if path in _STANDARD:
        return _STANDARD[path]
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


@dataclass(frozen=True, slots=True)
class LogSink:
    """One configured logger: how a line reads, and the file it goes to."""

    render: Renderer
    file: LogFile
    owner: "AccessLogs"

    def write(self, line: bytes) -> None:
        """Keep one line."""
        if self.file.append(line):
            self.owner.hand_over(self.file)


def write_all(sinks: Iterable[LogSink], info: StreamInfo) -> None:
    """One line per logger about a finished hop.

    A listener and the filter behind it usually print the same values: they are read once for all of them.
    """
    values_of: Callable[[StreamInfo], tuple[str, ...]] | None = None
    values: tuple[str, ...] = ()
    for sink in sinks:
        render = sink.render
        if isinstance(render, Line):
            if render.values is not values_of:
                values_of, values = render.values, render.values(info)
            line = render.of(values)
        else:
            line = render(info)
        sink.write(line.encode(errors="backslashreplace"))


#: What the writer is told: write, reopen, say when you are here, end.
_Order = tuple[LogFile, bytes] | LogFile | threading.Event | None


class AccessLogs:
    """All access logs of the process.

    Args:
        stats: gets ``filesystem.*`` and ``access_log_file.dropped``.
        flush_interval_s: how long a line may wait.
    """

    def __init__(self, stats: Stats, flush_interval_s: float = 10.0) -> None:
        self.flush_interval_s = flush_interval_s
        self._files: dict[str, LogFile] = {}
        #: With the model, which keeps its ``id`` from being given away.
        self._sinks: dict[tuple[str, int, bool], tuple[AccessLog, LogSink]] = {}
        self._queue: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        # Each of the two has one writer, so neither needs a lock; their difference is what waits.
        self._bytes_queued = 0
        self._bytes_done = 0
        scope = stats.scope("filesystem")
        self._written = scope.counter("write_completed")
        self._failed = scope.counter("write_failed")
        self._dropped = stats.scope("access_log_file").counter("dropped")
        self._thread = threading.Thread(target=self._write, name="access log", daemon=True)
        self._thread.start()

    def sinks(self, logs: Iterable[AccessLog]) -> tuple[LogSink, ...]:
        """Open the files that ``logs`` name.

        Raises:
            OSError: a file cannot be opened.
        """
        sinks = []
        for entry in logs:
            file = self.file(entry.path)
            # Compilers give equal formats as one object, of which thousands of chains make one sink.
            key = (entry.path, id(entry.format), entry.omit_empty)
            known = self._sinks.get(key)
            if known is None:
                sink = LogSink(log_renderer(entry), file, self)
                known = self._sinks[key] = (entry, sink)
            sinks.append(known[1])
        return tuple(sinks)

    def file(self, path: str) -> LogFile:
        """A file for lines rendered by somebody else.

        Raises:
            OSError: it cannot be opened.
        """
        if path not in self._files:
            self._files[path] = LogFile(path)
        return self._files[path]

    def flush(self) -> None:
        """Hand every kept line to the writer; call every :attr:`flush_interval_s`."""
        for file in self._files.values():
            self.hand_over(file)

    def hand_over(self, file: LogFile) -> None:
        """Hand a file's kept lines to the writer."""
        data = file.take()
        if not data:
            return
        if self._bytes_queued - self._bytes_done + len(data) > MAX_PENDING:
            self._dropped.value += data.count(b"\n")
            return
        self._bytes_queued += len(data)
        self._queue.put((file, data))

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if isinstance(item, LogFile):
                try:
                    item.reopen()
                except OSError as error:
                    log.warning("access log %s: %s; the old file stays open", item.path, error.strerror)
                continue
            file, data = item
            try:
                file.write(data)
                self._written.value += 1
            except OSError as error:
                self._failed.value += 1
                log.warning("access log %s: %s; %d bytes lost", file.path, error.strerror, len(data))
            self._bytes_done += len(data)

    def reopen(self) -> None:
        """``POST /reopen_logs``: lines so far go to the old files, later ones to new ones. Waits for nothing."""
        self.flush()
        for file in self._files.values():
            self._queue.put(file)

    def drain(self, timeout_s: float = 5.0) -> None:
        """Write everything kept so far; waits for the writer, not for ever."""
        self.flush()
        written = threading.Event()
        self._queue.put(written)
        if not written.wait(timeout_s):
            log.warning("access log: the writer is stuck; lines may be lost")

    def close(self) -> None:
        """Write what is left and stop the writer."""
        self.drain()
        self._queue.put(None)
        self._thread.join(5.0)
        for file in self._files.values():
            file.close()
