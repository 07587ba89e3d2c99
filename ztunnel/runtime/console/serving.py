"""The common part of commands that serve until a signal: logging, stopping, and the metrics server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ztunnel.runtime.console import log_form
from ztunnel.runtime.settings import plain_reason

if TYPE_CHECKING:
    from xds.model.address import SocketAddress
    from ztunnel.runtime.http.exposition import Family
    from ztunnel.runtime.http.page import Page, PageRequest
    from ztunnel.runtime.http.server import PageServer


def log_lines(level: int = logging.INFO) -> None:
    """Log to standard error, starting with this level."""
    log_form.install(level)


def failed(command: str, error: Exception | str, status: int = 1) -> int:
    """Print why a command has failed, and return its exit status."""
    print(f"ztunnel {command}: {plain_reason(error) if isinstance(error, Exception) else error}", file=sys.stderr)
    return status


def stop_event() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@contextlib.contextmanager
def until_signal() -> Iterator[None]:
    """Cancel the block at SIGINT or SIGTERM, and continue after the block. Errors and other cancellations
    propagate.
    """
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    assert running is not None
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not stopped:
            raise
        running.uncancel()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def bound_address(text: str | None, flag: str = "", host: str = "0.0.0.0") -> SocketAddress | None:
    """Read the ``[IP:]PORT`` of a flag. Without an IP the address is ``host``.

    Raises:
        ValueError: the text has another form. The error begins with the flag's name.
    """
    from xds.model.address import SocketAddress

    if text is None:
        return None
    try:
        return SocketAddress.parse(text if ":" in text else f"{host}:{text}")
    except ValueError:
        raise ValueError(f"{flag}{': ' if flag else ''}{text!r} is neither a port nor ip:port") from None


def metrics_server(
    address: SocketAddress,
    families: Callable[[], Iterable[Family] | Awaitable[Iterable[Family]]],
    unready: Callable[[], str] | None = None,
) -> PageServer:
    """Return a server of ``/metrics``, which calls ``families`` for each scrape.

    Args:
        unready: returns why the process is not ready. Empty if it is ready. If given, there are also the pages
            ``/readyz`` (503 with the reason if it is not ready) and ``/healthz``, for kubelet's probes.
    """
    from ztunnel.runtime.clock import SystemClock
    from ztunnel.runtime.http.page import not_found, text
    from ztunnel.runtime.http.server import PageServer

    async def pages(request: PageRequest) -> Page:
        if unready is not None and request.path == "/healthz":
            return text("ok\n")
        if unready is not None and request.path == "/readyz":
            missing = unready()
            return text(f"{missing}\n", 503) if missing else text("ready\n")
        if request.path != "/metrics":
            return not_found(["/metrics", *(["/readyz", "/healthz"] if unready is not None else [])])
        from ztunnel.runtime.http.exposition import page

        found = families()
        return page(await found if isinstance(found, Awaitable) else found, request)

    return PageServer("metrics", address, pages, SystemClock())
