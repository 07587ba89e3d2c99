"""Serves the live page with values of a test, and drives a browser that shows it."""

import asyncio
from collections.abc import Callable

from tests.ui.browser import Browser, browser, chromium
from xds.model.address import SocketAddress
from ztunnel.proxy.ui.pages import LivePages, is_below
from ztunnel.proxy.ui.seen import Seen
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.http.page import Page, PageRequest, text
from ztunnel.runtime.http.server import PageServer


def served(
    seen: Callable[[], Seen],
    use: Callable[[Browser, str], None],
    others: Callable[[PageRequest], Page] = lambda request: text("", 404),
) -> None:
    """Serve the page, and call ``use`` with a browser and the page's origin.

    Args:
        seen: returns what an event shows.
        use: runs in a thread.
        others: answers requests beside the page's own.
    """
    chromium()

    async def see() -> Seen:
        return seen()

    live = LivePages(see, SystemClock(), interval_s=0.05)

    def drive(port: int) -> None:
        with browser() as page:
            use(page, f"http://127.0.0.1:{port}")

    async def main() -> None:
        def pages(request: PageRequest) -> object:
            return live.answer(request) if is_below(request.path) else others(request)

        async with PageServer("test", SocketAddress("127.0.0.1", 0), pages, SystemClock()) as server:  # type: ignore[arg-type]
            await asyncio.to_thread(drive, server.address.port)

    asyncio.run(main())
