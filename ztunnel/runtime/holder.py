"""The parent process of a proxy: keeps its listening sockets open, and restarts it after a crash.

    python -I -S holder.py PROGRAM ARG...

It is a separate program and imports only the interpreter's modules in C, so it takes 4 MiB beside the pages shared
with the proxy. The protocol of the channel is in :mod:`tproxy.aio.held_sockets`.

When the proxy ends, so does the holder, or it starts the proxy again:

=========================================  ==============================================================
end of the proxy                           the holder
=========================================  ==============================================================
status 0, or after SIGTERM or SIGINT       ends with its status
an error or signal before it was ready     ends with its status, as without a holder
an error or signal after it was ready      starts it again, with all sockets that it has had held
:data:`MOST_CRASHES` of these within       ends with its status, so that a supervisor sees it
:data:`WINDOW_S`
=========================================  ==============================================================

A restarted proxy counts as ready at once, so an error before it serves is another crash. Signals are forwarded. As
the first process of a container the holder also reaps orphans.
"""

from __future__ import annotations

import _socket
import os
import posix
import resource
import select
import signal
import sys
import time

VARIABLE = "ZTUNNEL_HOLDER_FD"
#: The environment variable with the number of the proxy's restarts, for its metrics.
CRASHES_VARIABLE = "ZTUNNEL_HOLDER_CRASHES"
MOST_CRASHES = 5
WINDOW_S = 60.0
#: The wait before restarting a proxy that crashed before being ready.
PAUSE_S = 0.5
MOST_BYTES = 256
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_INT_BYTES = 4


class Holder:
    """Runs one proxy process at a time, and restarts it after a crash.

    Args:
        command: the proxy's command.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._held: dict[bytes, int] = {}  # descriptors of sockets and of sealed memory, by name
        self._pid = 0
        self._was_ready = self._is_ready = self._stops = False
        self._crashes: list[float] = []
        self._started_again = 0
        self._signals: list[int] = []
        self._woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        for name in _PASSED_ON:
            signal.signal(getattr(signal, name), lambda number, frame: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> int:
        """Return the exit status of the last proxy."""
        while True:
            channel = self._start()
            status = self._watch(channel)
            channel.close()
            if not self._starts_again(status):
                return status

    def _start(self) -> _Channel:
        here, there = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self._is_ready = False
        os.set_inheritable(there.fileno(), True)
        own = {VARIABLE: str(there.fileno()), CRASHES_VARIABLE: str(self._started_again)}
        environment = {**os.environ, **own}
        self._pid = os.posix_spawn(self._command[0], self._command, environment)
        there.close()
        return _Channel(here)

    def _watch(self, channel: _Channel) -> int:
        """Start one proxy, serve its channel until it ends, and return its exit status."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(channel.fileno(), select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._pass_on()
            if channel.fileno() in ready and not self._receive(channel):
                poll.unregister(channel.fileno())  # the proxy closed its end of the channel, and is about to exit
            status = self._ended()
            if status is not None:
                self._receive(channel)  # packets that the proxy sent before it ended
                return status

    def _pass_on(self) -> None:
        numbers, self._signals = self._signals, []
        for number in numbers:
            self._stops = self._stops or number in (signal.SIGTERM, signal.SIGINT)
            try:
                os.kill(self._pid, number)
            except ProcessLookupError:
                pass

    def _receive(self, channel: _Channel) -> bool:
        """Handle the queued packets, and return whether the other end is still open."""
        while True:
            packet, numbers = channel.receive()
            if packet is None:
                return True
            if not packet:
                return False
            letter, key = packet[:1], packet[1:]
            if letter == b"K" and numbers:
                self._close(self._held.pop(key, None))
                self._held[key] = numbers.pop()
            elif letter == b"D":
                self._close(self._held.pop(key, None))
            elif letter == b"R":
                self._was_ready = self._is_ready = True
            elif letter == b"T":
                for each, number in self._held.items():
                    if not channel.send(b"H" + each, number):
                        break
                channel.send(b"E")
            for number in numbers:
                os.close(number)

    @staticmethod
    def _close(number: int | None) -> None:
        if number is not None:
            os.close(number)

    def _ended(self) -> int | None:
        """Reap ended children. If the proxy has ended, return its exit status, as a shell reports it."""
        status = None
        while True:
            try:
                pid, found = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if pid == 0:
                return status
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(found)
                status = code if code >= 0 else 128 - code

    def _starts_again(self, status: int) -> bool:
        if status == 0 or self._stops or not self._was_ready:
            return False
        now_s = time.monotonic()
        self._crashes = [each for each in self._crashes if now_s - each < WINDOW_S] + [now_s]
        how = f"by signal {status - 128}" if status > 128 else f"with status {status}"
        if len(self._crashes) >= MOST_CRASHES:
            _log(
                f"the proxy ended {how}, {len(self._crashes)} times within {WINDOW_S:g} s; it is not started again"
            )
            return False
        sockets = sum(not key.startswith(b"memory/") for key in self._held)
        _log(f"the proxy ended {how} and is started again sockets={sockets}")
        self._started_again += 1
        if not self._is_ready:
            time.sleep(PAUSE_S)
        return True


class _Channel:
    """One end of the channel. Each packet has bytes and at most one descriptor."""

    def __init__(self, sock: _socket.socket) -> None:
        self._sock = sock
        self.fileno = sock.fileno
        self.close = sock.close

    def receive(self) -> tuple[bytes | None, list[int]]:
        """Return a packet with its descriptors, ``None`` if there is none now, and empty bytes at the end."""
        try:
            packet, ancillary, _, _ = self._sock.recvmsg(
                MOST_BYTES, _socket.CMSG_SPACE(_INT_BYTES), _socket.MSG_DONTWAIT | _socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None, []
        except OSError:
            return b"", []
        numbers = []
        for level, kind, data in ancillary:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _INT_BYTES
                numbers += [
                    int.from_bytes(data[at : at + _INT_BYTES], sys.byteorder) for at in range(0, whole, _INT_BYTES)
                ]
        return packet, numbers

    def send(self, packet: bytes, number: int | None = None) -> bool:
        """Send a packet, and return whether that succeeded."""
        rights = []
        if number is not None:
            data = number.to_bytes(_INT_BYTES, sys.byteorder)
            rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, data)]
        try:
            self._sock.sendmsg([packet], rights)
        except OSError:
            return False
        return True


def _log(text: str) -> None:
    now_s = time.time()
    moment = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s % 1 * 1e6):06}Z"
    if os.environ.get("LOG_FORMAT", "").lower() == "json":
        line = f'{{"level":"warn","time":"{moment}","scope":"holder","message":"{text}"}}\n'
    else:
        line = f"{moment}\twarn\tholder\t{text}\n"
    posix.write(2, line.encode())


if __name__ == "__main__":
    # The proxy inherits this limit, which bounds its listening sockets.
    _, _most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_most, _most))
    sys.exit(Holder(sys.argv[1:]).run())
