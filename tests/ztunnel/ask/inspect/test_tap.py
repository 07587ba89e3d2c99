"""``ztunnel tap``: its files, its output, and its answers without a capture."""

import asyncio
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.tap.reader import read
from tests.ztunnel.proxy.tap.tapping import POD, Source
from tests.ztunnel.proxy.tap.test_server import a_connection
from ztunnel.ask.inspect import tap
from ztunnel.cli import main
from ztunnel.proxy.tap.server import TapServer
from ztunnel.runtime.clock import SystemClock

Output = pytest.CaptureFixture[str]


@contextmanager
def proxy(path: Path, *, root: int | None = None) -> Iterator[None]:
    """A proxy of one pod, in a thread, whose every tap sees one connection."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        source = Source()
        async with TapServer(path, source, SystemClock(), root=os.getuid() if root is None else root):
            ready.set()
            while not over.is_set():
                capture = source.capture()
                if capture is not None and not capture.ended:  # a tap may have ended before it is seen here
                    a_connection(capture, b"hello")
                    while source.capture() is capture and not over.is_set():
                        await asyncio.sleep(0.005)
                await asyncio.sleep(0.005)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_file_that_only_its_owner_reads(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "web.pcapng"
    with proxy(tmp_path / "tap"):
        arguments = ["--socket", str(tmp_path / "tap"), "--for", "300ms", "--peer", "db", "-w", str(file)]
        assert main(["tap", POD, *arguments]) == 0
    assert [sent for sent, _ in read(file.read_bytes()).streams().values()] == [b"hello"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = capsys.readouterr()
    assert said.out == ""
    first, last = said.err.splitlines()
    assert (
        first == "ztunnel tap: default/web, peer db for 0.3s; 3 connections are open already and will not be seen"
    )
    assert last == f"ztunnel tap: 1 connections, 9 packets, {file.stat().st_size} bytes; the time limit is reached"


def test_an_interrupt_ends_a_capture_in_order(tmp_path: Path) -> None:
    with proxy(tmp_path / "tap"):
        command = [sys.executable, "-m", "ztunnel", "tap", POD, "--socket", str(tmp_path / "tap"), "-w", "-"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            assert running.stderr is not None
            assert b"default/web" in running.stderr.readline()
            running.send_signal(signal.SIGINT)
            output, errors = running.communicate(timeout=20)
    assert running.returncode == 0
    assert b"the reader has ended it" in errors
    assert read(output).interfaces[0].statistics is not None


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    with proxy(tmp_path / "tap"):
        command = (
            f"{sys.executable} -m ztunnel tap {POD} --socket {tmp_path}/tap --for 1s -w - | head -c 10 >/dev/null"
        )
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=20
        )
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr


def test_a_refused_tap_leaves_the_capture_that_was_there(tmp_path: Path) -> None:
    earlier, new = tmp_path / "earlier.pcapng", tmp_path / "new.pcapng"
    earlier.write_bytes(b"an earlier capture")
    with proxy(tmp_path / "tap"):
        for name in (earlier, new):
            assert main(["tap", "default/no", "--socket", str(tmp_path / "tap"), "-w", str(name)]) == 2
    assert earlier.read_bytes() == b"an earlier capture"
    assert not new.exists()


def test_a_new_capture_replaces_a_longer_one(tmp_path: Path) -> None:
    there = tmp_path / "tap.pcapng"
    there.write_bytes(b"x" * 1_000_000)
    with proxy(tmp_path / "tap"):
        assert main(["tap", POD, "--socket", str(tmp_path / "tap"), "--for", "1s", "-w", str(there)]) == 0
    assert read(there.read_bytes()).interfaces


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["default/no", "-w", "-"], "no pod default/no here"),
        ([POD, "--for", "1h", "-w", "-"], "for: 1h must be more than 0 and at most 900s"),
        ([POD, "-w", "/no/such/file"], "/no/such/file: No such file or directory"),
        (
            [POD, "--socket", "/no/socket", "-w", "-"],
            "/no/socket: no proxy listens there; is a proxy here, and does its",
        ),
    ],
)
def test_a_tap_that_cannot_start_names_the_reason(
    arguments: list[str], reason: str, tmp_path: Path, capsys: Output
) -> None:
    socket = [] if "--socket" in arguments else ["--socket", str(tmp_path / "tap")]
    with proxy(tmp_path / "tap"):
        assert main(["tap", *arguments, *socket]) == 2
    assert capsys.readouterr().err.startswith(f"ztunnel tap: {reason}")


def test_a_user_who_is_not_root_gets_a_clear_error(tmp_path: Path, capsys: Output) -> None:
    with proxy(tmp_path / "tap", root=os.getuid() + 1):
        assert main(["tap", POD, "--socket", str(tmp_path / "tap"), "-w", "-"]) == 2
    assert capsys.readouterr().err == "ztunnel tap: a tap is for root only\n"


def test_a_terminal_gets_no_capture(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with proxy(tmp_path / "tap"):
        assert main(["tap", POD, "--socket", str(tmp_path / "tap"), "-w", "-"]) == 2
    assert "a capture is nothing for a terminal" in capsys.readouterr().err


def test_an_interrupt_that_no_system_call_has_seen_is_handled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    waits: list[float] = []
    original = select.select

    def waited(read: Any, write: Any, error: Any, timeout_s: float) -> Any:
        waits.append(timeout_s)
        if len(waits) == 3:
            far.send(b"packets")
        return original(read, write, error, 0)

    with near, far, monkeypatch.context() as patch:
        patch.setattr(select, "select", waited)
        assert tap._received(near) == b"packets"
    assert all(0 < wait_s <= 1 for wait_s in waits)
    assert len(waits) == 3
