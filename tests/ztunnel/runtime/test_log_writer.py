"""Log files that cannot be written: lines are lost and counted, the process stays idle, the report stays rare."""

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from ztunnel.runtime.log_writer import COMPLAIN_EVERY_S, LogFile, LogWriter, WriteFailed


class LogsInto(logging.Handler):
    """Like the Istio front end: writes the process's own log to one of the writer's files, at once."""

    def __init__(self, writer: LogWriter, file: LogFile) -> None:
        super().__init__()
        self._writer, self._file = writer, file
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1
        self._file.append(record.getMessage().encode() + b"\n")
        self._writer.hand_over(self._file)


def test_a_log_that_cannot_be_written_does_not_feed_itself() -> None:
    writer = LogWriter()
    file = writer.file("/dev/full")
    handler = LogsInto(writer, file)
    logger = logging.getLogger("ztunnel.runtime.log_writer")
    logger.addHandler(handler)
    try:
        for _ in range(3):
            file.append(b"a line\n")
            writer.drain()
        for _ in range(10):  # a report would be written by one of these, and fail again
            writer.drain()
    finally:
        logger.removeHandler(handler)
        writer.close()
    assert handler.lines == 1
    assert writer.counts.failed.value == 4  # three lines, and the one report
    assert writer.counts.dropped.value == 4


def test_reports_of_one_file_are_rare_and_add_up() -> None:
    file = LogFile("/dev/full")
    error = OSError(28, "No space left on device")
    assert file.failed(error, 10, 0.0) == "/dev/full: No space left on device; 10 bytes lost"
    assert file.failed(error, 10, COMPLAIN_EVERY_S - 1) is None
    assert file.failed(error, 10, COMPLAIN_EVERY_S) == "/dev/full: No space left on device; 20 bytes lost"
    file.close()


def test_a_line_cut_by_a_full_disk_ends_before_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room = tmp_path / "log", 0
    write = os.write

    def limited(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(fd, data[:room])
        room -= taken
        return taken

    monkeypatch.setattr(os, "write", limited)
    file = LogFile(str(path))
    lost = []
    for allowed, data in ((7, b"one\ntwo\nthree\n"), (0, b"four\n"), (4, b"five\n"), (9, b"six\n"), (9, b"7\n")):
        room = allowed
        try:
            file.write(data)
        except WriteFailed as failed:
            lost.append(failed.lost)
    file.close()
    assert path.read_text() == "one\ntwo\nfiv\nsix\n7\n"
    assert lost == [b"\nthree\n", b"four\n", b"e\n"]


def test_a_pipe_without_a_reader_loses_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    reader, pipe = os.pipe()
    writer = LogWriter()
    file = writer.file(f"/proc/self/fd/{pipe}")
    os.close(reader)
    file.append(b"one\ntwo\n")
    writer.close()
    os.close(pipe)
    assert writer.counts.dropped.value == 2
    assert "Broken pipe" in caplog.text


def test_a_full_pipe_that_does_not_block_is_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    file = LogFile(str(fifo))
    os.set_blocking(file._fd, False)  # as a supervisor may have left standard output; no path opens a file so
    size = 1024 * 1024
    wrote = threading.Thread(target=file.write, args=(bytes(size),))
    wrote.start()
    os.set_blocking(reader, True)
    received = 0
    while received < size:
        received += len(os.read(reader, 65536))
    wrote.join()
    file.close()
    os.close(reader)
