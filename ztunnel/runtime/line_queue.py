"""Collects the lines of one log file, and hands them to the writer soon, or at once if there are many."""

import asyncio
import threading

from ztunnel.runtime.log_writer import LogFile, LogWriter

#: How long a line is delayed, so that one write can carry several lines.
_FLUSH_S = 0.05


class LineQueue:
    """The queue of one file.

    Args:
        writer: writes in its own thread.
        file: one of the writer's files.
    """

    def __init__(self, writer: LogWriter, file: LogFile) -> None:
        self._writer = writer
        self._file = file
        self._timer: asyncio.TimerHandle | None = None
        self._queueing = threading.RLock()  # other threads log, too

    def pass_on(self, lines: bytes) -> None:
        """Queue complete lines for the writer; safe in every thread."""
        with self._queueing:
            if self._file.append(lines):
                self._writer.hand_over(self._file)
            elif self._timer is None:
                try:
                    self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)
                except RuntimeError:  # there is no running loop, or this is another thread
                    self._writer.hand_over(self._file)

    def flush(self) -> None:
        """Pass queued lines to the writer now; idempotent."""
        with self._queueing:
            self._timer = None
            self._writer.hand_over(self._file)
