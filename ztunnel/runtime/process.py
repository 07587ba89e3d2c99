"""Sets this process's name and kernel settings, and starts its successor."""

import ctypes
import errno
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ztunnel.runtime.settings import boolean

log = logging.getLogger(__name__)

#: prctl(2)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_HOLD_SOCKETS: Final = "ZTUNNEL_HOLD_SOCKETS"


def forbid_core_dumps() -> None:
    """Keep this process's memory out of core dumps, and as root also hide it from processes without
    CAP_SYS_PTRACE.

    Raises:
        OSError: the kernel refuses.
    """
    if os.geteuid():
        # An undumpable process that is not root could not read its own /proc/self/fd. With a limit of one byte,
        # the kernel neither writes a core file nor starts a program that receives one (core(5)).
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        except ValueError as error:
            raise OSError(errno.EPERM, str(error)) from error
        return
    _prctl(_PR_SET_DUMPABLE, 0)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread that started it ends.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def under_holder(environment: Mapping[str, str], *, wanted: bool, serves: bool) -> Mapping[str, str]:
    """Start a parent process that holds the listening sockets, if a holder is configured. Returns in the process
    that serves.

    Args:
        environment: this process's environment.
        wanted: whether a flag requests the holder. ``ZTUNNEL_HOLD_SOCKETS`` can also request it.
        serves: whether this process will serve, instead of only checking its configuration.

    Returns:
        The environment without the variables that this has read.

    Raises:
        ValueError: a variable has an invalid value, or the descriptor it names is not a holder's channel.
    """
    text = environment.get(_HOLD_SOCKETS, "")
    try:
        wanted = wanted or (bool(text) and boolean(text))
    except ValueError as error:
        raise ValueError(f"{_HOLD_SOCKETS}={text}: {error}") from error
    from tproxy.aio import held_sockets  # only the serving process needs it

    own = (held_sockets.VARIABLE, held_sockets.CRASHES_VARIABLE)
    rest = {name: value for name, value in environment.items() if name not in (_HOLD_SOCKETS, *own)}
    if not serves:
        return rest
    holder = held_sockets.Holder.of(environment)
    if holder is not None:
        for name in own:
            os.environ.pop(name, None)
        end_with_parent(signal.SIGTERM)  # no other process would end it
        try:
            holder.take()
        except OSError as error:
            raise ValueError(f"the holder of listening sockets does not answer: {error}") from error
        held_sockets.use(holder)
    elif wanted:
        program = Path(__file__).with_name("holder.py")
        command = [sys.executable, "-I", "-S", str(program), sys.executable, *sys.orig_argv[1:]]
        os.execv(sys.executable, command)
    return rest


def start_again(*more: str) -> int:
    """Start this program again with the same arguments and environment, beside this process.

    Args:
        more: further arguments, which are added unless they were given already.

    Returns:
        The id of the new process. It has a session of its own, and outlives this process.

    Raises:
        OSError: the process cannot be started.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    command += [each for each in more if each not in command]
    # Normally the successor replaces this process and becomes a child of init.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True).pid


def start_successor(earlier: int | None, *, moves: bool) -> int | None:
    """Start a successor of this proxy as the answer to SIGUSR2. It takes over when it is ready.

    Args:
        earlier: the result of the last call, ``None`` before the first.
        moves: whether open connections can move. Without that no successor is started.

    Returns:
        The process id of the successor, or ``earlier`` if none was started. The log has the reason.
    """
    from tproxy.aio import held_sockets

    first = os.getpid() if held_sockets.holder() is None else os.getppid()
    if not moves:
        log.warning("SIGUSR2 has no effect: connections do not move here (ZTUNNEL_HANDOVER_DIR)")
    elif first == 1:
        log.warning("SIGUSR2 has no effect in a container: its processes end with this one")
    elif earlier is not None and _is_running(earlier):
        log.warning("SIGUSR2 has no effect: a successor starts already pid=%d", earlier)
    else:
        try:
            started = start_again("--replace")
        except OSError as error:
            log.error("no successor started error=%s", error.strerror)
        else:
            log.info("a successor starts pid=%d", started)
            return started
    return earlier


def _is_running(child: int) -> bool:
    """Return whether a child process runs, and reap it if it has ended."""
    try:
        ended, _ = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:  # subprocess has reaped it, as the next child was started
        return False
    return not ended
