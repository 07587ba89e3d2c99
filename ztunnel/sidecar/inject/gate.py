"""``ztunnel gate``: the first init container of an enrolled pod, which waits until the mesh's listeners exist.

The proxy has its listeners in the pod's own network namespace, and the node agent adds the rules before announcing
the pod to the proxy. So a connection to 15008 on the pod's own loopback, which no rule redirects, is accepted only
once the pod is in the mesh. It is closed without sending a byte. This works with any ztunnel and any agent, needs
no file or port of its own, and no other pod can answer.

Imports are the standard library's: this starts in every pod.
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

#: Where a proxy listens for tunnels in a pod; 15001 and 15006 take a connection to themselves for an attack.
PORT: Final = 15008
_ADDRESSES: Final = ("127.0.0.1", "::1")
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 0.5
_SAY_S: Final = 5.0
_CONNECT_S: Final = 1.0


def wait(
    timeout_s: float,
    *,
    fail_open: bool = False,
    port: int = PORT,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Return 0 once the listeners exist. Blocks.

    Args:
        timeout_s: after this the answer is 1, and kubelet starts the init container again, or
        fail_open: 0, and the application starts outside of the mesh.
        port: the listener's port.
        say: gets a line when it waits, each 5 s, and for a result that is not plain.
        monotonic, sleep: the clock.
    """
    began_s = monotonic()
    wait_s, said_s = _FIRST_WAIT_S, began_s - _SAY_S + 1
    while True:
        reason = _missing(port)
        now_s = monotonic()
        if reason is None:
            say(f"gate: the mesh's listeners are in this pod after {now_s - began_s:.1f} s")
            return 0
        if now_s - began_s >= timeout_s:
            if fail_open:
                say(f"gate: {reason} after {timeout_s:g} s; the application starts OUTSIDE the mesh")
                return 0
            say(f"gate: {reason} after {timeout_s:g} s; is a node agent on this node, and its proxy connected?")
            return 1
        if now_s - said_s >= _SAY_S:
            said_s = now_s
            say(f"gate: waits for the mesh: {reason}")
        sleep(min(wait_s, max(began_s + timeout_s - now_s, 0.001)))
        wait_s = min(wait_s * 2, _LONGEST_WAIT_S)


def _missing(port: int) -> str | None:
    """Return why the listeners do not accept connections, None if they do."""
    reasons = []
    for address in _ADDRESSES:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            # A pod without one of the two versions has no such address. The other one's reason is reported.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                reasons.append(f"[{address}]:{port}: {os.strerror(error.errno) if error.errno else error}")
        else:
            return None
    return "; ".join(reasons) or "the pod has no loopback address"
