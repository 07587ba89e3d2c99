"""Collects the lines of one log file, and hands them to the writer after a short time, or at once if there are
many.
"""

import asyncio
import threading

from ztunnel.runtime.log_writer import LogFile, LogWriter

#: The longest delay of a line, during which more lines can join the same write.
_FLUSH_S = 0.05


class LineQueue:
    """The queue of lines for one log file.

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
        """Queue complete lines for the writer. Any thread may call this."""
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
