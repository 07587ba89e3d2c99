"""Ports of loopback for programs that are told where to listen."""

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

_FIRST = 16_000
_SIZE = 1000
_lock = threading.Lock()
_blocks: dict[int, "_Block"] = {}  # by process: a forked one takes its own


class _Block:
    """Ports that one process hands out. A name in the network namespace holds them until it ends."""

    def __init__(self) -> None:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        self._holder = socket.socket(socket.AF_UNIX)
        for first in range(_FIRST, end - _SIZE + 1, _SIZE):
            try:
                self._holder.bind(f"\0ztunnel-tests-ports-{first}")
            except OSError:
                continue
            self.ports: Iterator[int] = itertools.cycle(range(first, first + _SIZE))
            return
        raise RuntimeError(f"ports {_FIRST} to {end} of loopback: other processes of tests hold all of them")


def free_port() -> int:
    """Return a port that nobody uses: the kernel never gives it to anybody, no other process of tests gets it, and
    this process gets it again only after all others of its thousand.

    The port that the kernel names for a socket bound to 0 is free again once that socket is closed: the next
    server or client of the machine may get it before the program does that the port was meant for. And servers
    share a port without an error if both set SO_REUSEPORT.
    """
    with _lock:
        if (pid := os.getpid()) not in _blocks:
            _blocks[pid] = _Block()
        return next(port for port in itertools.islice(_blocks[pid].ports, _SIZE) if _is_free(port))


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
