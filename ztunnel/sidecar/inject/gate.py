"""``ztunnel gate``: the first init container of an enrolled pod, which waits until the mesh's listeners exist.

The proxy has its listeners in the pod's own network namespace, and the node agent adds the rules before announcing
the pod to the proxy. So a connection to 15008 on the pod's own loopback, which no rule redirects, is accepted only
once the pod is in the mesh. The gate closes it without sending a byte. This works with any ztunnel and any agent,
needs no file or port of its own, and no other pod can answer.

It imports only the standard library, because it starts in every pod.
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

#: The proxy's port for tunnels in a pod. 15001 and 15006 are unsuitable: there, a connection from the pod itself
#: counts as an attack.
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
    """Wait until the listeners exist. Blocks.

    Args:
        timeout_s: the longest wait.
        fail_open: whether to return 0 after the timeout, so that the application starts outside the mesh. If not,
            return 1, and kubelet starts the init container again.
        port: the listener's port.
        say: called with a line each 5 s of waiting, and for each problem.
        monotonic, sleep: the clock.

    Returns:
        0 if the listeners exist, otherwise see ``fail_open``.
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
            say(f"gate: waiting for the mesh: {reason}")
        sleep(min(wait_s, max(began_s + timeout_s - now_s, 0.001)))
        wait_s = min(wait_s * 2, _LONGEST_WAIT_S)


def _missing(port: int) -> str | None:
    """Return why the listeners do not accept connections. None if they do."""
    reasons = []
    for address in _ADDRESSES:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            # A pod with only one IP version lacks the other loopback address. The fault of the existing address is
            # reported.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                reasons.append(f"[{address}]:{port}: {os.strerror(error.errno) if error.errno else error}")
        else:
            return None
    return "; ".join(reasons) or "the pod has no loopback address"
