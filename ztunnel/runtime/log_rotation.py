"""The signals of log rotation: SIGUSR1 reopens log files, and SIGHUP has no effect.

Envoy's logrotate recipes send SIGUSR1 after a rename, and daemons get SIGHUP when their terminal or session ends.
Without a handler either signal ends the process and every connection of the node.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGUSR1, signal.SIGHUP)


def ignore_rotation() -> None:
    """Ignore the rotation signals: before :func:`reopen_on_rotation`, and in processes without log files."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def reopen_on_rotation(reopen: Callable[[], None]) -> None:
    """Call ``reopen`` in the running loop for each SIGUSR1, and ignore SIGHUP."""

    def reopened() -> None:
        log.info("SIGUSR1: log files are reopened")
        reopen()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, reopened)
    loop.add_signal_handler(signal.SIGHUP, lambda: log.info("SIGHUP is ignored; SIGUSR1 reopens log files"))
