"""Ports of loopback for programs that are told where to listen."""

import random
import socket
from pathlib import Path

_FIRST = 16_000
_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody uses: the kernel never gives it to anybody, and no second call returns it.

    The port that the kernel names for a socket bound to 0 is free again once that socket is closed: the next
    server or client of the machine may get it before the program does that the port was meant for.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(_FIRST, end)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
