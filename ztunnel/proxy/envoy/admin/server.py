"""The HTTP servers of the proxy: admin, readiness and metrics.

This module binds the ports and owns work that outlives a request (a graceful drain).
:mod:`ztunnel.proxy.envoy.admin.commands` and the modules below create every page from the current state, without
caching.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from tproxy.errors import PortTaken
from xds.model.address import SocketAddress
from ztunnel.proxy.envoy.admin import commands, metrics, process, readiness
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.runtime.http.page import Page, PageRequest
from ztunnel.runtime.http.server import Pages, PageServer
from ztunnel.runtime.tasks import Tasks

if TYPE_CHECKING:
    from ztunnel.proxy.ui.pages import LivePages

Concerns = Callable[[object], bool]


class AlreadyRunning(PortTaken):
    """The port is in use, perhaps by a running proxy that this process should replace."""

    def __str__(self) -> str:
        return f"{super().__str__()}; to take the place of a proxy that runs, start with --restart-epoch 1"


class AdminServer:
    """An async context manager that serves the three ports of one proxy.

    The bootstrap's ``admin.address`` has precedence over the setting. An address of ``None`` disables its server.

    Attributes:
        admin, readiness, metrics: the bound addresses; ``None`` if off.

    Raises:
        PortTaken: from ``async with``; names the address.
    """

    def __init__(self, proxy: InspectedProxy) -> None:
        self._proxy = proxy
        self._tasks = Tasks("admin")
        self._stack = AsyncExitStack()
        self._live: LivePages | None = None
        self.admin: SocketAddress | None = None
        self.readiness: SocketAddress | None = None
        self.metrics: SocketAddress | None = None

    async def __aenter__(self) -> AdminServer:
        proxy = self._proxy
        process.register(proxy)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._tasks.close)
            self.admin = await self._serve(
                stack, "admin", proxy.bootstrap.admin or proxy.settings.admin, self._admin_page
            )
            self.readiness = await self._serve(
                stack, "readiness", proxy.settings.readiness, lambda request: readiness.page(proxy, request)
            )
            self.metrics = await self._serve(
                stack,
                "metrics",
                proxy.settings.metrics,
                lambda request: metrics.page(proxy, request),
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _serve(
        self, stack: AsyncExitStack, name: str, address: SocketAddress | None, pages: Pages
    ) -> SocketAddress | None:
        if address is None:
            return None
        settings = self._proxy.settings
        alone = settings.restart_epoch == 0 and not settings.handover_dir
        server = PageServer(name, address, pages, self._proxy.clock, reuse_port=True, alone=alone)
        try:
            await stack.enter_async_context(server)
        except PortTaken as error:
            raise (AlreadyRunning(error.address, error.port) if alone else error) from None
        scope = self._proxy.stats.scope(f"listener.{name}")
        scope.gauge("downstream_cx_active", lambda: float(server.connections))
        scope.gauge("downstream_cx_total", lambda: float(server.connections_total))
        return server.address

    def _admin_page(self, request: PageRequest) -> Page | Awaitable[Page]:
        return commands.answer(self._proxy, self.drain, self._live_page, request)

    def _live_page(self, request: PageRequest) -> Page | Awaitable[Page]:
        from ztunnel.proxy.envoy.admin import live_page  # most proxies never show it
        from ztunnel.proxy.ui import pages, setting

        proxy = self._proxy
        if self.admin is None or not setting.is_on(proxy.settings.ui, self.admin.host):
            return pages.off(f"{setting.VARIABLE}=true (--ui true)")
        if self._live is None:
            traffic = live_page.Traffic(proxy)
            self._live = pages.LivePages(
                lambda: live_page.seen(proxy, traffic), proxy.clock, began=traffic.begin, ended=traffic.end
            )
        return self._live.answer(request)

    # Draining listeners for /drain_listeners

    def drain(self, *, inbound_only: bool, graceful: bool, skip_exit: bool) -> None:
        """Drain listeners. They stop accepting now, after the drain time (``graceful``) or never (``skip_exit``).

        GOAWAY is sent to the peers when a graceful drain begins, and when listeners stop accepting. Until then,
        new connections are accepted.
        """

        def concerns(listener: object) -> bool:
            return not inbound_only or (
                isinstance(listener, LiveListener) and listener.model.direction == "inbound"
            )

        if not graceful and not skip_exit:
            self._stop(concerns)
            return
        self._leave(concerns)
        if not skip_exit:
            self._tasks.start(self._stop_later(concerns), "graceful drain")

    async def _stop_later(self, concerns: Concerns) -> None:
        await asyncio.sleep(self._proxy.settings.drain_s)
        self._stop(concerns)

    def _stop(self, concerns: Concerns) -> None:
        self._proxy.listeners.stop(keep=lambda listener: not concerns(listener))
        self._tasks.start(self._leave_soon(concerns), "peers leave")

    async def _leave_soon(self, concerns: Concerns) -> None:
        """Send GOAWAY also to the peers of connections that were accepted when the sockets closed, or during a
        graceful drain. Otherwise these peers could open tunnels here until the process ends.
        """
        await asyncio.sleep(0)  # connections accepted just now enter the table
        self._leave(concerns)

    def _leave(self, concerns: Concerns) -> None:
        for connection in self._proxy.connections:
            if concerns(connection.owner):
                connection.leave()
