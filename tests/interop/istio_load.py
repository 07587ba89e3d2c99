"""Clients that send requests while something changes, and the transfer of bytes, ends and resets on a path."""

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from socket import SHUT_WR, socket
from typing import Self

from tests.interop.apps import Reply, digest, pattern, pattern_digest, reset, rest
from tests.interop.istio_site import WAIT_S, IstioSite

#: Opens a connection to the application that takes commands.
Dial = Callable[[IstioSite], socket]
_SMALL = 300_000
_CLIENTS = 4
_PAUSE_S = 0.01


class Load:
    """``with Load(ask) as load: ...``: some hundred short requests a second from several threads, until the block
    ends.

    Attributes:
        done, failed: the number of requests, and the statuses other than 200.
    """

    def __init__(self, ask: Callable[[], Reply]) -> None:
        self._ask = ask
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(_CLIENTS)]
        self._moved = threading.Condition()
        self.done = 0
        self.failed: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self, requests: int = 60) -> None:
        """Wait for so many more answers.

        Raises:
            TimeoutError: they do not come.
        """
        with self._moved:
            wanted = self.done + requests
            if not self._moved.wait_for(lambda: self.done >= wanted, WAIT_S):
                raise TimeoutError(f"{self.done} requests, {wanted} wanted: {self.failed}")

    def __str__(self) -> str:
        return f"{len(self.failed)} failed" + (f": {sorted(set(self.failed))}" if self.failed else "")

    def _run(self) -> None:
        while not self._over.wait(_PAUSE_S):
            reply = self._ask()
            with self._moved:
                self.done += 1
                if reply.status != "200":
                    self.failed.append(reply.status)
                self._moved.notify_all()


def _command(site: IstioSite, dial: Dial, command: str) -> socket:
    sock = dial(site)
    sock.sendall(command.encode() + b"\n")
    return sock


class Bytes:
    """Cases over one path: what becomes of bytes, ends and resets.

    Args:
        dial: the path.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial

    def client_ends_first(self, site: IstioSite) -> str:
        """The client's end arrives behind its bytes, and the answer comes back."""
        return self.up(site, _SMALL)

    def up(self, site: IstioSite, length: int) -> str:
        """Send this number of bytes to the server, which reports what it has received once the client has
        ended.
        """
        with _command(site, self._dial, "sum") as sock:
            sock.settimeout(60.0)
            for block in pattern(length):
                sock.sendall(block)
            sock.shutdown(SHUT_WR)
            answer = rest(sock)
        return "byte-exact" if answer == f"{length} {pattern_digest(length)}\n closed" else answer

    def down(self, site: IstioSite, length: int) -> str:
        """So many bytes to the client, which has ended before."""
        with _command(site, self._dial, f"send {length}") as sock:
            sock.settimeout(60.0)
            sock.shutdown(SHUT_WR)
            received = digest(sock)
        return "byte-exact" if received == (length, pattern_digest(length)) else str(received)

    def server_ends_first(self, site: IstioSite) -> str:
        """The server's end arrives, and the other direction still carries everything."""
        key = f"after-{time.monotonic_ns()}"
        try:
            with _command(site, self._dial, f"send {_SMALL} {key}") as sock:
                if digest(sock) != (_SMALL, pattern_digest(_SMALL)):
                    return "cut"
                for block in pattern(_SMALL):
                    sock.sendall(block)
                sock.shutdown(SHUT_WR)
                whole = site.apps.ending(key) == str((_SMALL, pattern_digest(_SMALL)))
        except ConnectionError:
            whole = False  # whether Envoy's reset of the stream reaches the client before its own end is a race
        return "byte-exact both ways" if whole else "the other direction is lost"

    def nothing_said(self, site: IstioSite) -> str:
        """Both sides end without sending a byte."""
        with _command(site, self._dial, "echo") as sock:
            sock.shutdown(SHUT_WR)
            return rest(sock)

    def client_resets(self, site: IstioSite) -> str:
        """What the application sees."""
        key = f"reset-{time.monotonic_ns()}"
        with _command(site, self._dial, f"ended {key}") as sock:
            sock.sendall(b"x")
            sock.recv(1)
            reset(sock)
        return f"application sees {site.apps.ending(key)}"

    def server_resets(self, site: IstioSite) -> str:
        """What the client sees."""
        with _command(site, self._dial, "reset") as sock:
            return f"client sees {rest(sock)}"

    def at_once(self, site: IstioSite, count: int, meanwhile: Callable[[], str]) -> str:
        """Open this number of connections together, each with its own bytes. Return facts observed while all are
        open.
        """
        with ExitStack() as stack:
            socks = [stack.enter_context(_command(site, self._dial, "echo")) for _ in range(count)]
            payloads = [f"{number:04}".encode() * 4096 for number in range(count)]
            for sock in socks:
                sock.sendall(b"-")
            for sock in socks:
                sock.settimeout(30.0)
                sock.recv(1)
            found = meanwhile()

            def one(sock: socket, payload: bytes) -> bool:
                sock.sendall(payload)
                sock.shutdown(SHUT_WR)
                return digest(sock) == (len(payload), hashlib.sha256(payload).hexdigest())

            with ThreadPoolExecutor(count) as pool:
                exact = sum(pool.map(one, socks, payloads))
        return f"{exact} byte-exact {found}"
