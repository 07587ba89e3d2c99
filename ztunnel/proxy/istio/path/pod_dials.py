"""Dials the applications of one pod, without a coroutine if the application accepts at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any

from hbone.aio.poller import Poller
from hbone.aio.socket import LASTING_S, PlainSocket
from hbone.native import mypyc_attr
from tproxy.aio import socket_calls
from tproxy.aio.netns import Netns
from xds.model.address import SocketAddress
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.socket_stock import SocketStock


@mypyc_attr(allow_interpreted_subclasses=True)
class PodDials:
    """Dials addresses from one pod, without a coroutine where possible. The base class of
    :class:`ztunnel.proxy.istio.path.pod_sockets.PodSockets`, which describes the arguments.
    """

    def __init__(self, node: Node, netns: Netns | None, *, only_tunnels: bool) -> None:
        config = node.config
        self._poller: Poller = node.poller
        self._mark = config.packet_mark if not only_tunnels else None
        self._sidecar = config.sidecar
        self._keepalive = node.keepalive
        self._options: tuple[socket_calls.SocketOption, ...] = ()
        if config.socket.user_timeout and config.socket.keepalive_time_s is not None:
            limit_s = (
                config.socket.keepalive_time_s
                + config.socket.keepalive_retries * config.socket.keepalive_interval_s
            )
            self._options = ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000)),)
        # This is a partial function: a bound method would create a reference cycle between the stock and this
        # object.
        made = partial(socket_calls.prepared, mark=self._mark, netns=netns, socket_options=self._options)
        self._stock = SocketStock(node.poller, made)

    # Methods that the subclass implements

    def redial(self, address: SocketAddress, source: str) -> Coroutine[Any, Any, PlainSocket]:
        """Return a coroutine that dials ``address``, and tries further source ports if one is in use."""
        raise NotImplementedError

    def finished(self, end: PlainSocket, address: SocketAddress) -> Coroutine[Any, Any, PlainSocket]:
        """Return a coroutine that waits until ``end`` is connected to ``address``, and returns ``end``."""
        raise NotImplementedError

    # Connections

    def original_destination(self, sock: socket.SocketType, source: SocketAddress) -> SocketAddress:
        """Return the address that an accepted socket's peer dialled, before the kernel redirected the connection.

        Args:
            sock: the socket.
            source: the peer.

        Raises:
            OSError: the peer has disconnected.
        """
        return SocketAddress.of(socket_calls.dialled_address(sock, 6 if ":" in source.host else 4))

    def dial_now(
        self, address: SocketAddress, *, source: str | None = None
    ) -> PlainSocket | Coroutine[Any, Any, PlainSocket]:
        """Connect like ``PodSockets.dial``, but return the connection itself, not a coroutine, if it is
        established at once.

        This is usual within one machine, where the SYN-ACK arrives before connect(2) returns.

        Raises:
            TproxyError: the address refused or is unreachable at once, or no socket could be created.
        """
        if source == address.host:
            source = None
        sock = self._stock.take(6 if ":" in address.host else 4)
        try:
            connected = socket_calls.connect_at_once(sock, address, source=source, own_source=self._sidecar)
        except BaseException as error:
            sock.close()
            if source is not None and socket_calls.port_is_taken(error):
                return self.redial(address, source)
            raise
        end = PlainSocket(sock, self._poller, fresh=True)
        if connected:
            self.when_lasting(end)
            return end
        return self.finished(end, address)

    def when_lasting(self, end: PlainSocket) -> None:
        """Enable keepalive once the connection has lasted :data:`LASTING_S`. Shorter connections save 4 system
        calls.
        """
        if self._keepalive is None:
            return
        if self._keepalive.idle_s > LASTING_S:
            end.when_lasting(self._keep_alive)
        else:
            self._keep_alive(end.sock)

    def _keep_alive(self, sock: socket.SocketType) -> None:
        assert self._keepalive is not None
        with contextlib.suppress(OSError):  # reset meanwhile
            socket_calls.set_keepalive(sock, self._keepalive)
