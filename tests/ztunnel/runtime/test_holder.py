"""The holder of listening sockets: what becomes of ports and connections when the program under it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ztunnel.runtime.holder as holder_module
from tests.ports import free_port
from tproxy.aio import held_sockets, sockets

HOLDER = holder_module.__file__
#: A server with one-line commands. It answers each with its process id before executing it.
SERVER = textwrap.dedent("""
    import os, signal, sys, time
    from tproxy.aio import held_sockets, sockets

    holder = held_sockets.Holder.of(os.environ)
    taken = holder.take()
    held_sockets.use(holder)
    udp = sockets.datagrams("127.0.0.1", int(sys.argv[2]))
    udp.setblocking(True)
    listener = sockets.listen("127.0.0.1", int(sys.argv[1]))
    listener.setblocking(True)
    if len(sys.argv) > 3:
        sys.exit(int(sys.argv[3]))
    holder.settle()
    while True:
        client, _ = listener.accept()
        word = client.recv(100).decode()
        client.sendall(f"{os.getpid()} {taken}".encode())
        client.close()
        if word.startswith("exit"):
            os._exit(int(word.split()[1]))
        if word == "udp":
            udp.sendto(b"got " + udp.recvfrom(100)[0], ("127.0.0.1", int(sys.argv[2]) + 1))
        if word == "close":
            listener.close()
            time.sleep(60)
""")


class Held:
    """A server under a holder."""

    def __init__(self, folder: Path, *more: str) -> None:
        script = folder / "server.py"
        script.write_text(SERVER)
        self.port, self.udp_port = free_port(), free_port()
        command = [sys.executable, str(script), str(self.port), str(self.udp_port), *more]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HOLDER), *command],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stderr=subprocess.PIPE,
        )

    def ask(self, word: str = "who") -> tuple[int, int]:
        """Return the process id of the server, and how many sockets it has taken over."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as client:
            client.sendall(word.encode())
            pid, taken = client.recv(100).split()
            return int(pid), int(taken)

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Kill the server, and return its process id once it is dead: until then it can accept a connection."""
        pid = self.ask()[0]
        os.kill(pid, number)
        while _state(pid) not in ("", "Z"):
            time.sleep(0.005)
        return pid

    def up(self) -> int:
        """Wait until it serves, and return its process id."""
        while True:
            assert self.process.poll() is None
            with contextlib.suppress(ConnectionRefusedError):
                return self.ask()[0]
            time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def connected(port: int) -> int:
    """Return how many connections to a port of loopback are established, accepted or not."""
    fields = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(each[1] == f"0100007F:{port:04X}" and each[3] == "01" for each in fields)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    try:
        made.up()
        yield made
    finally:
        made.process.terminate()
        made.process.wait(20)
        assert made.process.stderr is not None
        made.process.stderr.close()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit 3"])
def test_no_connection_is_refused_while_a_server_has_died(held: Held, how: str) -> None:
    if how.startswith("exit"):
        first = held.ask(how)[0]
        while _state(first) not in ("", "Z"):
            time.sleep(0.005)
    else:
        first = held.kill(getattr(signal, how))
    answers = [held.ask() for _ in range(20)]  # a refused one raises
    assert {pid for pid, _ in answers} != {first}
    assert answers[-1] == (answers[-1][0], 2)


def test_what_waits_in_the_queue_is_served_by_the_next(held: Held) -> None:
    first = held.ask()[0]
    os.kill(first, signal.SIGSTOP)
    while _state(first) != "T":  # until then it can accept one more connection in accept(2)
        time.sleep(0.005)
    found: list[int] = []
    waiting = [threading.Thread(target=lambda: found.append(held.ask()[0])) for _ in range(5)]
    for each in waiting:
        each.start()
    while connected(held.port) < 5:
        time.sleep(0.01)
    os.kill(first, signal.SIGKILL)
    for each in waiting:
        each.join(20)
    assert len(found) == 5
    assert first not in found


def test_datagrams_wait_as_well(held: Held) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.bind(("127.0.0.1", held.udp_port + 1))
        client.settimeout(20)
        held.kill()
        client.sendto(b"late", ("127.0.0.1", held.udp_port))
        held.ask("udp")
        assert client.recvfrom(100)[0] == b"got late"


def test_a_socket_that_the_server_closes_is_not_held(held: Held) -> None:
    held.ask("close")
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", held.port), timeout=1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise AssertionError("the port stays open")


@pytest.mark.parametrize(("status", "started"), [(0, True), (5, False)])
def test_an_end_that_is_no_crash_ends_the_holder_with_its_status(
    tmp_path: Path, status: int, started: bool
) -> None:
    """Status 0 at any time, and an error before the server was ready."""
    made = Held(tmp_path, *([] if started else [str(status)]))
    if started:
        made.up()
        made.ask(f"exit {status}")
    assert made.process.wait(20) == status
    assert made.process.stderr is not None
    assert b"started again" not in made.process.stderr.read()
    made.process.stderr.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_reach_the_proxy_and_its_end_ends_the_parent(tmp_path: Path, name: str) -> None:
    made = Held(tmp_path)
    pid = made.up()
    made.process.send_signal(getattr(signal, name))
    made.process.wait(20)
    assert not Path(f"/proc/{pid}").exists()
    assert made.process.stderr is not None
    assert b"holder" not in made.process.stderr.read()
    made.process.stderr.close()


def test_the_holder_gives_up_after_too_many_crashes(tmp_path: Path) -> None:
    made = Held(tmp_path)
    for number in range(holder_module.MOST_CRASHES):
        made.up()
        made.ask(f"exit {7 + number}")
    assert made.process.wait(20) == 7 + holder_module.MOST_CRASHES - 1
    assert made.process.stderr is not None
    said = made.process.stderr.read().decode()
    assert said.count("is started again") == holder_module.MOST_CRASHES - 1
    assert "5 times within 60 s; it is not started again" in said
    made.process.stderr.close()


# The end of the channel in the server


@pytest.fixture
def channel() -> Iterator[tuple[held_sockets.Holder, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = held_sockets.Holder(ours)
    held_sockets.use(made)
    yield made, theirs
    held_sockets.use(None)
    made.close()
    theirs.close()


def test_a_socket_is_held_while_it_listens(channel: tuple[held_sockets.Holder, socket.socket]) -> None:
    _, far = channel
    sock = sockets.listen("127.0.0.1", free_port(), backlog=0)
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(100)
    sock.listen(5)
    packet, (number,), _, _ = socket.recv_fds(far, 100, 1)
    os.close(number)
    sock.close()
    assert packet[:1] == held_sockets.KEEP
    assert far.recv(100) == held_sockets.DROP + packet[1:]
    sock.close()
    with pytest.raises(BlockingIOError):
        far.recv(100)


def test_a_port_that_the_kernel_chooses_is_not_held(channel: tuple[held_sockets.Holder, socket.socket]) -> None:
    with sockets.listen("127.0.0.1", 0) as sock:
        assert not isinstance(sock, held_sockets.HeldSocket)


def test_what_is_not_claimed_is_closed_when_the_server_is_ready(
    channel: tuple[held_sockets.Holder, socket.socket],
) -> None:
    made, far = channel
    left = socket.create_server(("127.0.0.1", 0))
    socket.send_fds(far, [held_sockets.HELD + b"1/tcp/127.0.0.1/9"], [left.fileno()])
    far.send(held_sockets.END)
    assert made.take() == 1
    assert far.recv(100) == held_sockets.TAKE
    address = left.getsockname()
    left.close()
    socket.create_connection(address).close()
    made.settle()
    assert [far.recv(100), far.recv(100)] == [held_sockets.DROP + b"1/tcp/127.0.0.1/9", held_sockets.READY]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_a_holder_that_has_gone_costs_no_socket(
    channel: tuple[held_sockets.Holder, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    made, far = channel
    far.close()
    with pytest.raises(OSError):
        made.take()
    with sockets.listen("127.0.0.1", free_port()) as sock:
        assert sock.getsockname()[1]
    assert [record.getMessage() for record in caplog.records] == [
        "the process that holds the listening sockets has ended: Broken pipe"
    ]


def test_a_malformed_holder_descriptor_is_named() -> None:
    with pytest.raises(ValueError, match="ZTUNNEL_HOLDER_FD=abc: no descriptor"):
        held_sockets.Holder.of({"ZTUNNEL_HOLDER_FD": "abc"})
