"""Runs command lines of ``ztunnel`` as processes that need not import it: one process has, and forks per command.

An interpreter with the modules of a command takes half a second to start. A forked process has its own
descriptors, environment, exit status and end of the interpreter, so a shell would see the same.
``tests/test_examples.py`` and ``tests/test_architecture.py`` start commands without this.
"""

import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 30.0
_ROOT = Path(__file__).parents[1]
_one_at_a_time = threading.Lock()  # the socket carries one request and its answers
_kept: list["subprocess.Popen[bytes]"] = []  # a Popen that is collected warns of the process that still runs
_APPLICATIONS = ("ztunnel.proxy.envoy.app", "ztunnel.proxy.istio.app")


def ztunnel(*args: str) -> subprocess.CompletedProcess[str]:
    """Return how ``ztunnel ARGS`` ended, with this process's environment and folder.

    Raises:
        subprocess.TimeoutExpired: it did not end in :data:`LIMIT_S`; it is killed.
    """
    with _one_at_a_time, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        server = _server()
        request = json.dumps({"args": args, "env": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [output.fileno(), errors.fileno()])
        server.sendall(request)
        pid = _number(server)
        try:
            server.settimeout(LIMIT_S)
            status = _number(server)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            server.settimeout(None)
            _number(server)
            raise subprocess.TimeoutExpired(["ztunnel", *args], LIMIT_S) from None
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(["ztunnel", *args], status, *texts)


@functools.cache
def _server() -> socket.socket:
    """The process that forks; it ends with this one, when the other end of its socket closes."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.commands", str(theirs.fileno())]
        _kept.append(subprocess.Popen(command, cwd=_ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL))
    return ours


def _number(server: socket.socket) -> int:
    return int.from_bytes(_exactly(server, 4), "big", signed=True)


def _exactly(server: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += (more := server.recv(size - len(data)))
        if not more:
            raise EOFError
    return data


def _serve(server: socket.socket) -> list[str] | None:
    """Fork for every request.

    Returns:
        In a new process its arguments; in the first one None, when there are no more requests.
    """
    while True:
        size, descriptors, _, _ = socket.recv_fds(server, 4, 2)
        if not size:
            return None
        request = json.loads(_exactly(server, int.from_bytes(size, "big")))
        pid = os.fork()
        if not pid:
            server.close()
            for number, descriptor in enumerate(descriptors, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["env"])
            os.chdir(request["folder"])
            args: list[str] = request["args"]
            return args
        for descriptor in descriptors:
            os.close(descriptor)
        server.sendall(pid.to_bytes(4, "big"))
        _, status = os.waitpid(pid, 0)
        server.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _main(argv: Sequence[str]) -> int:
    from ztunnel import cli

    for package in cli.COMMANDS:
        importlib.import_module(f"ztunnel.{package}")
    for module in _APPLICATIONS:
        importlib.import_module(module)
    gc.freeze()
    args = _serve(socket.socket(fileno=int(argv[1])))
    return 0 if args is None else cli.main(args)


if __name__ == "__main__":
    sys.exit(_main(sys.argv))
