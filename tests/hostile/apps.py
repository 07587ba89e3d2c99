"""The applications behind a proxy under attack: ``python -m tests.hostile.apps [--fair] NAME ...`` prints ports.

The bystander's application has its own process: threads of one interpreter delay each other by milliseconds, which
would be measured as the proxy's delay.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable

#: The groups of applications; each group is one process.
GROUPS = (("echo",), ("sink", "unread", "speaks"))


def echo(sock: socket.socket) -> None:
    """Answer everything with itself."""
    while data := sock.recv(65_536):
        sock.sendall(data)


def sink(sock: socket.socket) -> None:
    """Read to the end."""
    buffer = bytearray(1 << 20)
    while sock.recv_into(buffer):
        pass


def unread(sock: socket.socket) -> None:
    """Read nothing."""
    threading.Event().wait()


def speaks(sock: socket.socket) -> None:
    """Send without end."""
    data = bytes(1 << 20)
    while True:
        sock.sendall(data)


def _serve(listener: socket.socket, application: Callable[[socket.socket], None]) -> None:
    def run(sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            application(sock)

    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=run, args=(sock,), daemon=True).start()


def main() -> None:
    """Serve until standard input ends."""
    names = sys.argv[1:]
    if names[0] == "--fair":
        del names[0]
    elif "echo" not in names:
        # In a cluster the attacked pod has its own processors. What is measured is what the server takes from its
        # other clients, not what 2,000 connections as 2,000 threads take from all processes of a small machine.
        os.nice(19)
    ports = {}
    applications = {each.__name__: each for each in (echo, sink, unread, speaks)}
    for application in map(applications.__getitem__, names):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        if application is unread:
            # Thousands of receive buffers of megabytes make the kernel short of memory for all of TCP, which the
            # bystander then meets. In a cluster a pod's own cgroup pays for its receive buffers.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        ports[application.__name__] = listener.getsockname()[1]
        threading.Thread(target=_serve, args=(listener, application), daemon=True).start()
    print(json.dumps(ports), flush=True)
    with contextlib.suppress(EOFError):
        input()


if __name__ == "__main__":
    main()
