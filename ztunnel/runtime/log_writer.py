"""Writes log files in one thread of the process.

Lines collect in memory per :class:`LogFile` and are handed to the thread in pieces, so that a slow disk or a
blocked pipe never stops the event loop. Memory is bounded: beyond :data:`MAX_PENDING` unwritten bytes, lines are
dropped and counted.

A file that cannot be written (disk full, collector gone) is reported at most once per :data:`COMPLAIN_EVERY_S` and
file. The report is a log line itself, possibly in the file that fails: without the limit each failed write would
cause the next one.
"""

import logging
import os
import queue
import select
import threading
import time
from dataclasses import dataclass, field
from typing import Final, Protocol

log = logging.getLogger(__name__)

FLUSH_BYTES: Final = 64 * 1024
MAX_PENDING: Final = 16 * 1024 * 1024
#: Seconds between two reports of write errors of one file. A guess between too many reports and too few.
COMPLAIN_EVERY_S: Final = 60.0
_STANDARD: Final = {"/dev/stdout": 1, "/dev/stderr": 2}


class Count(Protocol):
    """A counter. Callers increase its ``value``."""

    value: int


@dataclass(slots=True)
class PlainCount:
    """A counter that no statistics page shows."""

    value: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCounts:
    """The counters of a :class:`LogWriter`.

    Attributes:
        completed: the number of pieces that were written completely.
        failed: the number of pieces that were lost because of a file error.
        dropped: the number of lines that were dropped because the file is too slow, or lost because of an error.
    """

    completed: Count = field(default_factory=PlainCount)
    failed: Count = field(default_factory=PlainCount)
    dropped: Count = field(default_factory=PlainCount)


class WriteFailed(Exception):
    """A file did not take all bytes.

    Attributes:
        error: the reason.
        lost: the bytes that were not written.
    """

    def __init__(self, error: OSError, lost: bytes) -> None:
        super().__init__(error, lost)
        self.error = error
        self.lost = lost


class LogFile:
    """A file or standard stream, which loggers may share.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = _open(path)
        self._lines: list[bytes] = []
        self._size = 0
        self._complained_s: float | None = None
        self._lost = 0
        self._torn = False  # whether the file ends in the middle of a line

    def append(self, line: bytes) -> bool:
        """Queue one or more complete lines. Return whether there are enough for a write."""
        self._lines.append(line)
        self._size += len(line)
        return self._size >= FLUSH_BYTES

    def take(self) -> bytes:
        """Remove and return the queued lines."""
        data = b"".join(self._lines)
        self._lines.clear()
        self._size = 0
        return data

    def write(self, data: bytes) -> None:
        """Write all of ``data``, however long that takes; called by the writer's thread.

        If only a part of the last line was written before, ``data`` begins on a new line.

        Raises:
            WriteFailed: the rest of ``data`` is lost.
        """
        all_data = b"\n" + data if self._torn else data
        view = memoryview(all_data)
        try:
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    # The write would block, because standard output can be a pipe that the parent process made
                    # non-blocking.
                    waiting = select.poll()
                    waiting.register(self._fd, select.POLLOUT)
                    waiting.poll()
        except OSError as error:
            written = all_data[: len(all_data) - len(view)]
            if written:
                self._torn = not written.endswith(b"\n")
            raise WriteFailed(error, bytes(view[-len(data) :])) from None
        self._torn = False

    def failed(self, error: OSError, lost: int, now_s: float) -> str | None:
        """Add ``lost`` bytes to the count. Return a report to log, or None within ``COMPLAIN_EVERY_S`` of the last
        report.
        """
        self._lost += lost
        if self._complained_s is not None and now_s - self._complained_s < COMPLAIN_EVERY_S:
            return None
        self._complained_s = now_s
        total, self._lost = self._lost, 0
        return f"{self.path}: {error.strerror}; {total} bytes lost"

    def reopen(self) -> None:
        """Reopen the path after a rotation. Standard streams are unchanged.

        Raises:
            OSError: it cannot be opened; the old file stays in use.
        """
        if self.path not in _STANDARD:
            old, self._fd = self._fd, _open(self.path)
            self._torn = False
            os.close(old)

    def close(self) -> None:
        """Close the file; standard streams stay open."""
        if self.path not in _STANDARD:
            os.close(self._fd)


def _open(path: str) -> int:
    if path in _STANDARD:
        return _STANDARD[path]
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


#: A command for the writer thread: write bytes, reopen a file, set an event, or ``None`` to end.
_Order = tuple[LogFile, bytes] | LogFile | threading.Event | None


class LogWriter:
    """Owns the log files of the process and the thread that writes them.

    Args:
        counts: the counters to increase.
    """

    def __init__(self, counts: WriteCounts | None = None) -> None:
        self.counts = counts or WriteCounts()
        self._files: dict[str, LogFile] = {}
        self._queue: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        # Each of the two counters is written by one thread only, so neither needs a lock. Their difference is the
        # size of the queue.
        self._bytes_queued = 0
        self._bytes_done = 0
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """Whether the queue of unwritten bytes is half full."""
        return self._bytes_queued - self._bytes_done > MAX_PENDING // 2

    def file(self, path: str) -> LogFile:
        """Return the log file at a path. It is opened on first use, and shared afterwards.

        Raises:
            OSError: it cannot be opened.
        """
        if path not in self._files:
            self._files[path] = LogFile(path)
        return self._files[path]

    def flush(self) -> None:
        """Hand the queued lines of every file to the writer thread."""
        for file in self._files.values():
            self.hand_over(file)

    def hand_over(self, file: LogFile) -> None:
        """Hand the queued lines of a file to the writer thread. If the thread's queue is full, drop and count
        them.
        """
        data = file.take()
        if not data:
            return
        if self._bytes_queued - self._bytes_done + len(data) > MAX_PENDING:
            self.counts.dropped.value += data.count(b"\n")
            return
        self._bytes_queued += len(data)
        self._queue.put((file, data))

    def reopen(self) -> None:
        """Reopen the files after a rotation. Earlier lines go to the old files, later lines to the new ones.
        Returns at once.
        """
        self.flush()
        for file in self._files.values():
            self._queue.put(file)

    def drain(self, timeout_s: float = 5.0) -> None:
        """Write all lines, and wait at most ``timeout_s`` until they are written."""
        self.flush()
        written = threading.Event()
        self._queue.put(written)
        if not written.wait(timeout_s):
            log.warning("the log writer is stuck; lines can be lost")

    def close(self) -> None:
        """Write all lines, stop the thread and close the files; call it once."""
        self.drain()
        self._queue.put(None)
        self._thread.join(5.0)
        for file in self._files.values():
            file.close()

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            if isinstance(order, threading.Event):
                order.set()
            elif isinstance(order, LogFile):
                try:
                    order.reopen()
                except OSError as error:
                    log.warning("log file %s: %s; the old file stays open", order.path, error.strerror)
            else:
                self._write(*order)

    def _write(self, file: LogFile, data: bytes) -> None:
        try:
            file.write(data)
            self.counts.completed.value += 1
        except WriteFailed as failed:
            self.counts.failed.value += 1
            self.counts.dropped.value += failed.lost.count(b"\n")
            report = file.failed(failed.error, len(failed.lost), time.monotonic())
            if report is not None:
                log.warning("log file %s", report)
        finally:
            self._bytes_done += len(data)
