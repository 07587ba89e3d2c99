"""Runs ``ztunnel`` in processes that need not import it: one process has imported it, and forks for each command.

An interpreter takes half a second of processor time to start and import a command's modules, and a run of all
tests starts more than a thousand commands. A forked process has its own descriptors, environment, network
namespace and exit status, so a shell would see no difference; ``sys.argv`` is that of ``python -m ztunnel``.

A forked process ends like an interpreter, but does not clear the modules that it shares with the forking process.
That copies all their pages, which is four fifths of the time of a short command. ``make nightly`` clears them.

The workers of a run (``tests/forking.py``) get their forking processes from one that has imported everything once;
any other process of tests starts its own with its first command.

``tests/test_examples.py`` and ``tests/test_architecture.py`` start commands without this, and so do tests of an
interpreter's imports, of its memory and of its command line in ``/proc``.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.generated import every_example
from tproxy.aio.netns import CLONE_NEWNS, mount, unshare

LIMIT_S = 30.0
_ROOT = Path(__file__).parents[1]
_one_at_a_time = threading.Lock()  # the socket carries one request and its answer
_servers: dict[int, socket.socket] = {}  # by the process that uses it: a copy in a forked one is not its own
_kept: list["subprocess.Popen[bytes]"] = []  # a Popen that is collected warns of the process that still runs
#: Modules that most proxies and commands import once they run.
_IMPORTED = (
    "uvloop",
    "ztunnel.policy.calico.explain",
    "ztunnel.policy.calico.files",
    "ztunnel.proxy.envoy.app",
    "ztunnel.proxy.istio.accounting.families",
    "ztunnel.proxy.istio.app",
    "ztunnel.proxy.istio.command",
    "ztunnel.proxy.istio.dns",
    "ztunnel.proxy.istio.environment",
    "ztunnel.runtime.process",
)
# mount(2)
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
#: Instead of an exit status: the process runs.
_RUNS = -(1 << 31)


def ztunnel(*args: str) -> subprocess.CompletedProcess[str]:
    """Return how ``ztunnel ARGS`` ended, with this process's environment and folder.

    Raises:
        subprocess.TimeoutExpired: it did not end in :data:`LIMIT_S`; it is killed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = Ztunnel(args, stdout=output, stderr=errors)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(["ztunnel", *args], process.returncode, *texts)


class Ztunnel(subprocess.Popen[bytes]):
    """``ztunnel ARGS`` as a running process, with the part of :class:`subprocess.Popen` that tests use.

    It starts in the network namespace of the calling thread. It is a child of the forking process, which keeps its
    status until :meth:`poll` or :meth:`wait` has returned it, so its pid is not reused before.

    Args:
        args: the arguments after the program's name.
        stdout, stderr: files; without one, this process's own.
        env, cwd: like those of :class:`subprocess.Popen`.
        resolv_conf: a file that the process finds as ``/etc/resolv.conf``, in a mount namespace of its own.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        resolv_conf: Path | None = None,
    ) -> None:
        self.args = ["ztunnel", *args]
        self.stdin = self.stdout = self.stderr = None
        self.returncode: int | Any = None
        output = _descriptor(stdout, 1)
        request = {
            "args": list(args),
            "env": dict(os.environ if env is None else env),
            "folder": os.path.abspath(cwd or os.getcwd()),
            "resolv_conf": str(resolv_conf or ""),
        }
        netns = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            files = [output, output if stderr == subprocess.STDOUT else _descriptor(stderr, 2), netns]
            self.pid = _asked(request, files)
        finally:
            os.close(netns)
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None and (status := _asked({"status": self.pid})) != _RUNS:
            self.returncode = status
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        while self.poll() is None:
            poller = select.poll()
            poller.register(self._ended, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self.returncode)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _descriptor(file: IO[bytes] | int | None, default: int) -> int:
    if file is None:
        return default
    return file if isinstance(file, int) else file.fileno()


def _asked(request: Mapping[str, Any], files: Sequence[int] = ()) -> int:
    """Return the answer of the process that forks: a pid, or an exit status."""
    text = json.dumps(request).encode()
    with _one_at_a_time:
        server = _server(os.getpid())
        socket.send_fds(server, [len(text).to_bytes(4, "big")], files)
        server.sendall(text)
        return int.from_bytes(_exactly(server, 4), "big", signed=True)


def start(count: int) -> list[socket.socket]:
    """Run forking processes, each for one process of tests.

    Returns:
        The sockets for :func:`use`. A forking process ends when all copies of its socket are closed.
    """
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [pair[1].fileno() for pair in pairs]
    command = [sys.executable, "-m", "tests.commands", *map(str, theirs)]
    _kept.append(subprocess.Popen(command, cwd=_ROOT, pass_fds=theirs, stdin=subprocess.DEVNULL))
    for _, socket_of_server in pairs:
        socket_of_server.close()
    return [ours for ours, _ in pairs]


def use(server: socket.socket) -> None:
    """Use a forking process for the commands of this process."""
    _servers[os.getpid()] = server


def _server(pid: int) -> socket.socket:
    if pid not in _servers:
        (_servers[pid],) = start(1)
    return _servers[pid]


def _one_of(servers: list[socket.socket]) -> socket.socket:
    """Fork a process for each socket but the last; return the socket of the current process, the only one open."""
    for place, server in enumerate(servers[:-1], 1):
        if not os.fork():
            for other in servers[place:]:
                other.close()
            return server
        server.close()
    return servers[-1]


def _exactly(server: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += (more := server.recv(size - len(data)))
        if not more:
            raise EOFError
    return data


def _serve(server: socket.socket) -> list[str] | None:
    """Answer requests: fork, or return the exit status of a process.

    Returns:
        In a new process its arguments; in the first one None, when there are no more requests.
    """
    while True:
        size, descriptors, _, _ = socket.recv_fds(server, 4, 3)
        if not size:
            return None
        request = json.loads(_exactly(server, int.from_bytes(size, "big")))
        if (asked := request.get("status")) is not None:
            pid, status = os.waitpid(asked, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else _RUNS
        else:
            answer = os.fork()
            if not answer:
                server.close()
                return _become(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        server.sendall(answer.to_bytes(4, "big", signed=True))


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> list[str]:
    """Take the descriptors, namespaces, environment and folder of a request; return its arguments."""
    *files, netns = descriptors
    for number, descriptor in enumerate(files, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    if os.fstat(netns).st_ino != os.stat("/proc/self/ns/net").st_ino:  # an ordinary user could not enter its own
        setns = ctypes.CDLL(None, use_errno=True).setns
        if setns(netns, 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.close(netns)
    if file := request["resolv_conf"]:
        unshare(CLONE_NEWNS)
        mount("", "/", "", _MS_REC | _MS_PRIVATE)
        mount(file, "/etc/resolv.conf", "", _MS_BIND)
    args: list[str] = request["args"]
    sys.argv = [str(_ROOT / "ztunnel" / "__main__.py"), *args]
    sys.orig_argv = [sys.executable, "-m", "ztunnel", *args]
    return args


def _main(argv: Sequence[str]) -> int:
    from ztunnel import cli

    for package in cli.COMMANDS:
        importlib.import_module(f"ztunnel.{package}")
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    args = _serve(_one_of([socket.socket(fileno=int(number)) for number in argv[1:]]))
    if args is None:
        return 0
    try:
        status = cli.main(args)
    except SystemExit as leaving:
        if not isinstance(leaving.code, int):
            raise
        status = leaving.code
    if not every_example():
        _end(status)
    return status


def _end(status: int) -> None:
    """End the process in the order of the interpreter: threads, exit functions, output, garbage with finalizers.

    Returns if the output cannot be written, because the interpreter has a message and an exit status for that.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    gc.collect()
    try:
        for output in (sys.stdout, sys.stderr):
            if output is not None and not output.closed:
                output.flush()
    except (OSError, ValueError):
        return
    os._exit(status & 0xFF)


if __name__ == "__main__":
    sys.exit(_main(sys.argv))
