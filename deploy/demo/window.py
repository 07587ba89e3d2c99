"""Forwards a port of this machine to the admin server of a proxy in the demo, for a browser.

The proxies are in network namespaces, which a browser cannot reach. The port is opened before the demo leaves its
initial namespace, and connections to it are forwarded to the proxy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Final

from deploy.lab import Place

_READ_BYTES: Final = 64 * 1024
_VARIABLE: Final = "ZTUNNEL_DEMO_WINDOW"


class Window:
    """Opens a port of this machine when created. :meth:`towards` starts forwarding its connections. The port is
    closed when the process ends.
    """

    def __init__(self) -> None:
        number = os.environ.pop(_VARIABLE, "")
        self._listening = socket.socket(fileno=int(number)) if number else socket.create_server(("127.0.0.1", 0))

    def keep(self) -> None:
        """Keep the port open when this program is started again in other namespaces."""
        self._listening.set_inheritable(True)
        os.environ[_VARIABLE] = str(self._listening.fileno())

    def kept(self) -> None:
        """Undo :meth:`keep`, so that the demo's own programs do not inherit the port."""
        self._listening.set_inheritable(False)
        os.environ.pop(_VARIABLE, None)

    def towards(self, place: Place, port: int) -> str:
        """Forward connections to a loopback port of a namespace. Return the ``HOST:PORT`` for a browser."""
        threading.Thread(target=self._accept, args=(place, port), name="window", daemon=True).start()
        host, own = self._listening.getsockname()
        return f"{host}:{own}"

    def _accept(self, place: Place, port: int) -> None:
        while True:
            near, _ = self._listening.accept()
            far = place.socket()
            try:
                far.connect(("127.0.0.1", port))
            except OSError:  # a proxy is being replaced
                far.close()
                near.close()
                continue
            threading.Thread(target=_pass_on, args=(near, far), name="window: connection", daemon=True).start()


def _pass_on(near: socket.socket, far: socket.socket) -> None:
    """Copy both ways until both have ended, and close both."""
    with near, far:
        answers = threading.Thread(target=_copy, args=(far, near), name="window: answers", daemon=True)
        answers.start()
        _copy(near, far)
        answers.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_READ_BYTES):
            sink.sendall(data)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)
