"""Answers ``/ui`` and the paths below it: the page, its scripts and styles, one event as JSON, the event stream.

This module never changes the proxy: every path accepts only GET and HEAD. The page consists of our own files, and
its content security policy forbids other sources. Three rules keep out other sites in the user's browser:

- ``Host`` must be an address or ``localhost``. A malicious site can resolve its name to 127.0.0.1 (DNS rebinding),
  so that its scripts could read these pages. The browser still sends the site's name.
- ``Sec-Fetch-Site`` must not name another site, so that other sites cannot occupy the few event streams.
- Framing is forbidden.

Events are made only while clients follow them, once for all clients, and the page closes its stream while it is
hidden. Import this module with the first request, because most proxies never show the page.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

from ztunnel.proxy.ui.seen import Seen
from ztunnel.proxy.ui.view import Rates, event
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.http.page import JSON, PLAIN, Page, PageRequest, Repeated, not_found, text

PATH: Final = "/ui"
#: The most concurrent event streams. Each visible browser tab has one.
MOST_FOLLOWERS: Final = 8
#: Seconds between two events: short enough to watch changes.
INTERVAL_S: Final = 2.0
#: The interval is at least this multiple of the time for making an event, so that events use at most 2 % of a CPU.
_SHARE: Final = 50
_SECURITY: Final = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
)
#: The scripts. The page loads ``app``, which imports the other modules.
_SCRIPTS: Final = (
    *("app", "dom", "explain", "flow", "flowlog", "graph", "labels"),
    *("layout", "link", "mesh", "meshview", "past", "views", "words"),
)
_FILES: Final = {
    PATH: ("index.html", "text/html; charset=UTF-8"),
    **{f"{PATH}/{name}.js": (f"{name}.js", "text/javascript; charset=UTF-8") for name in _SCRIPTS},
    f"{PATH}/style.css": ("style.css", "text/css; charset=UTF-8"),
    f"{PATH}/icon.svg": ("icon.svg", "image/svg+xml"),
}
_DATA: Final = f"{PATH}/data"
_EVENTS: Final = f"{PATH}/events"
_STREAM: Final = "text/event-stream"
#: The values of ``Sec-Fetch-Site`` in requests by the page's own site. Clients that are not browsers do not send
#: the header.
_OWN_SITE: Final = ("", "same-origin", "none")

See = Callable[[], Awaitable[Seen]]


def is_below(path: str) -> bool:
    """Return whether a path is that of the live page or below it."""
    return path == PATH or path.startswith(f"{PATH}/")


def off(setting: str) -> Page:
    """Return the answer for a disabled page: status 404, and how to enable the page."""
    return text(f"the live page is off: only loopback serves it, unless {setting} is given\n", 404, PLAIN)


class LivePages:
    """Answers the paths of the live page for one admin server.

    Args:
        see: returns the current content. Calls are made in the event loop and never overlap.
        clock: the clock of rates and times.
        began: called when the first client begins to follow events. ``ended``: called when the last one leaves.
    """

    def __init__(
        self,
        see: See,
        clock: Clock,
        *,
        began: Callable[[], None] = lambda: None,
        ended: Callable[[], None] = lambda: None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._see = see
        self._clock = clock
        self._began = began
        self._ended = ended
        self._interval_s = interval_s
        self._wait_s = interval_s
        self._followers = 0
        self._rates = Rates()
        self._last = ""
        self._last_s = float("-inf")
        self._number = 0
        self._making = False

    @property
    def followers(self) -> int:
        """The number of open event streams."""
        return self._followers

    def answer(self, request: PageRequest) -> Page | Awaitable[Page]:
        """Answer a request below :data:`PATH`."""
        if not _is_own(request.host):
            return _secured(text("use an address or localhost: another name can be another site's\n", 403, PLAIN))
        if request.method not in ("GET", "HEAD"):
            return _secured(text("GET only: this page changes nothing\n", 405, PLAIN), ("allow", "GET, HEAD"))
        path = request.path.rstrip("/")
        found = _FILES.get(path)
        if found is not None:
            name, content_type = found
            return _secured(Page(content_type=content_type, body=(_asset(name),)))
        if path in (_DATA, _EVENTS) and request.fetch_site not in _OWN_SITE:
            return _secured(text("not for other sites\n", 403, PLAIN))
        if path == _DATA:
            return self._data()
        if path == _EVENTS:
            # A HEAD request must not occupy an event stream.
            return self._events() if request.method == "GET" else _secured(Page(content_type=_STREAM, body=()))
        return _secured(not_found((*_FILES, _DATA, _EVENTS)))

    async def _data(self) -> Page:
        """Return one event without rates. Rates are computed only for clients that follow the event stream."""
        shown = event(await self._see(), Rates(), self._clock.monotonic(), self._clock.wall())
        return _secured(text(json.dumps(shown) + "\n", content_type=JSON))

    def _events(self) -> Page:
        if self._followers >= MOST_FOLLOWERS:
            return _secured(text(f"{MOST_FOLLOWERS} pages are open; close one\n", 503, PLAIN))
        self._followers += 1
        if self._followers == 1:
            self._began()
        page = Page(
            content_type=_STREAM,
            # After this many milliseconds browsers reconnect, also to a restarted proxy.
            body=("retry: 2000\n\n",),
            rest=Repeated(make=self._next, every_s=lambda: self._wait_s, ended=self._left),
        )
        return _secured(page)

    def _left(self) -> None:
        self._followers -= 1
        if self._followers == 0:
            self._rates = Rates()
            self._last_s = float("-inf")
            self._ended()

    async def _next(self) -> str:
        """Return the next event of a stream. A request within half an interval after an event, or while an event
        is being made, gets the last event.
        """
        now_s = self._clock.monotonic()
        if not self._making and now_s - self._last_s >= self._wait_s / 2:
            self._last_s = now_s
            self._making = True
            try:
                seen = await self._see()
                self._number += 1
                # The event is written in a thread: this takes 100 ms for a mesh of 20,000 pairs, and only reads
                # immutable values.
                self._last = await asyncio.to_thread(self._written, seen, self._rates)
            finally:
                self._making = False
            taken_s = self._clock.monotonic() - now_s
            self._wait_s = max(self._interval_s, taken_s * _SHARE)
        return self._last or ": soon\n\n"

    def _written(self, seen: Seen, rates: Rates) -> str:
        shown = event(seen, rates, self._clock.monotonic(), self._clock.wall())
        # JSON escapes line breaks, so an event is one line, even if a name in it contains a line break.
        return f"id: {self._number}\ndata: {json.dumps(shown)}\n\n"


def _is_own(host: str) -> bool:
    """Return whether ``Host`` (RFC 9110, 7.2) is an address or localhost, so that it cannot be the name of another
    site.
    """
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _secured(page: Page, *more: tuple[str, str]) -> Page:
    return Page(
        status=page.status,
        content_type=page.content_type,
        body=page.body,
        headers=(*page.headers, *_SECURITY, *more),
        rest=page.rest,
    )


def _asset(name: str) -> bytes:
    return (files("ztunnel.proxy.ui") / "assets" / name).read_bytes()
