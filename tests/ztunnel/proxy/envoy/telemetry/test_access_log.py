"""Access log files: order, sharing, rotation, and what happens when the disk does not keep up."""

import os
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.telemetry.test_format import info
from xds.model.access_log import AccessLog
from xds.model.format_string import parse_format
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs, write_all
from ztunnel.runtime import log_writer


def log(path: Path, text: str = "%CONNECTION_ID%\n") -> AccessLog:
    return AccessLog(str(path), parse_format(text))


def counter(stats: Stats, name: str) -> float:
    return next(metric.value for metric in stats if metric.name == name)  # type: ignore[union-attr]


def test_lines_in_order_and_files_shared(tmp_path: Path) -> None:
    logs = AccessLogs(Stats())
    sinks = (*logs.sinks([log(tmp_path / "a")]), *logs.sinks([log(tmp_path / "a", "x %CONNECTION_ID%\n")]))
    for number in range(3):
        write_all(sinks, info(connection_id=number))
    assert (tmp_path / "a").read_text() == ""  # buffered, as Envoy
    logs.writer.close()
    assert (tmp_path / "a").read_text() == "0\nx 0\n1\nx 1\n2\nx 2\n"


def test_a_full_buffer_is_written_without_waiting(tmp_path: Path) -> None:
    logs = AccessLogs(Stats())
    sinks = logs.sinks([log(tmp_path / "a", "x" * 1023 + "\n")])
    for _ in range(64):
        write_all(sinks, info())
    logs.writer.drain()
    assert (tmp_path / "a").stat().st_size == 64 * 1024
    logs.writer.close()


def test_reopen_follows_a_rotation(tmp_path: Path) -> None:
    logs = AccessLogs(Stats())
    sinks = logs.sinks([log(tmp_path / "a")])
    write_all(sinks, info(connection_id=1))
    logs.writer.drain()
    os.rename(tmp_path / "a", tmp_path / "a.1")
    logs.writer.reopen()
    write_all(sinks, info(connection_id=2))
    logs.writer.close()
    assert (tmp_path / "a.1").read_text() == "1\n"
    assert (tmp_path / "a").read_text() == "2\n"


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    logs = AccessLogs(Stats())
    with pytest.raises(OSError, match="no/such"):
        logs.sinks([log(tmp_path / "no/such")])
    logs.writer.close()


def test_lines_are_dropped_and_counted_when_the_writer_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "MAX_PENDING", 128 * 1024)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    stats = Stats()
    logs = AccessLogs(stats)
    sinks = logs.sinks([log(fifo, "x" * 1023 + "\n")])
    for _ in range(1024):
        write_all(sinks, info())
    dropped = counter(stats, "access_log_file.dropped")
    assert dropped > 500
    os.set_blocking(reader, True)
    kept = 1024 - int(dropped)
    received = 0
    while received < kept * 1024:
        received += len(os.read(reader, 65536))
    logs.writer.close()
    assert received == kept * 1024
    os.close(reader)


def test_write_error_is_counted_and_other_logs_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = Stats()
    logs = AccessLogs(stats)
    full, fine = logs.sinks([log(Path("/dev/full"))]), logs.sinks([log(tmp_path / "a")])
    write_all((*full, *fine), info(connection_id=5))
    logs.writer.close()
    assert (tmp_path / "a").read_text() == "5\n"
    assert counter(stats, "filesystem.write_failed") == 1
    assert "/dev/full: No space left on device" in caplog.text
