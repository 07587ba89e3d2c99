"""What a process says to the kernel of itself, and how it starts its successor."""

import ctypes
import errno
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_PR_SET_DUMPABLE: Final = 4  # prctl(2)


def forbid_core_dumps() -> None:
    """Keep this process's memory out of core dumps; if it is root's, also of processes without CAP_SYS_PTRACE.

    Raises:
        OSError: the kernel refuses.
    """
    if os.geteuid():
        # Undumpable, a process of another user could not read its own /proc/self/fd. With a limit of one byte the
        # kernel writes no core, nor starts a program that takes one (core(5)).
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        except ValueError as error:
            raise OSError(errno.EPERM, str(error)) from error
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def start_again(*more: str) -> int:
    """Start this program again with the same arguments and environment, beside this process.

    Args:
        more: further arguments, if they were not given already.

    Returns:
        The id of the new process, which is a session of its own, and outlives this one.

    Raises:
        OSError: it cannot be started.
    """
    command = [sys.executable, *sys.orig_argv[1:]]
    command += [each for each in more if each not in command]
    # Not waited for: the successor replaces this process, and is init's child then.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True).pid


def start_successor(earlier: int | None, *, moves: bool) -> int | None:
    """Start a successor of this proxy in place, which takes over when it is ready; the answer to SIGUSR2.

    Args:
        earlier: what the last call has returned; ``None`` before the first.
        moves: whether open connections can move. Without that nothing is started.

    Returns:
        The process id of the successor, or ``earlier`` if none was started. The log has the reason.
    """
    if not moves:
        log.warning("SIGUSR2 has no effect: connections do not move here (ZTUNNEL_HANDOVER_DIR)")
    elif os.getpid() == 1:
        log.warning("SIGUSR2 has no effect in a container: its processes end with this one")
    elif earlier is not None and Path(f"/proc/{earlier}").exists():
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
