"""``ztunnel drain``: asks this pod's proxy to drain its connections. It is the preStop hook of a sidecar.

A native sidecar gets SIGTERM after the application has ended, so its hook need not wait. A sidecar that is an
ordinary container gets SIGTERM together with the application, which can still have connections to finish or to
open. Its hook delays SIGTERM until no connection is left, for at most ``wait_s``.

Like the gate, it imports only the standard library.
"""

import http.client
import sys
import time
from collections.abc import Callable
from typing import Final

#: The metrics port of a sidecar.
PORT: Final = 15020
_POLL_S: Final = 0.5
_ANSWER_S: Final = 5.0


def drain(
    wait_s: float,
    least_s: float,
    *,
    port: int = PORT,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Ask the pod's proxy to drain, and wait for the end of its connections if requested. Blocks.

    Args:
        wait_s: the longest wait for open connections to end; 0: none.
        least_s: the shortest wait, for connections that the application opens while it ends.
        port: the proxy's metrics port.
        say: called with a line about each problem.
        monotonic, sleep: the clock.

    Returns:
        0, or 1 if no proxy answers. Kubelet then continues with SIGTERM.
    """
    began_s = monotonic()
    while True:
        try:
            left = _asked(port)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            say(f"drain: the proxy of this pod does not answer on port {port}: {reason}")
            return 1
        passed_s = monotonic() - began_s
        if passed_s >= wait_s or (not left and passed_s >= least_s):
            if left and wait_s:
                say(f"drain: {left} connections are left after {passed_s:.1f} s")
            return 0
        sleep(min(_POLL_S, max(wait_s - passed_s, 0.001)))


def _asked(port: int) -> int:
    """Ask the proxy to drain, and return the number of open connections in its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    try:
        connection.request("POST", "/drain", headers={"Content-Length": "0"})
        answer = connection.getresponse()
        said = answer.read(4096).decode("ascii", "replace")
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {said.strip()}")
        return int(said.partition(" ")[0])
    finally:
        connection.close()
