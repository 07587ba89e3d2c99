"""The sockets of one pod, created in its network namespace.

The process enters the namespace only to create a socket. In dedicated mode there is no namespace to enter, and the
only workload is the "pod".
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from hbone.aio.socket import PlainSocket
from tproxy.aio import sockets
from tproxy.aio.netns import Netns
from tproxy.errors import KernelRefused, NeedCapability, TproxyError
from xds.model.address import SocketAddress
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod_dials import PodDials
from ztunnel.proxy.istio.settings.config import (
    HBONE_PORT,
    OUTBOUND_PORT,
    PLAINTEXT_PORT,
    SOCKS_PORT,
    IstioConfig,
    OriginalSource,
)
from ztunnel.runtime.accepting import Accepted, Gate, ListeningSocket, hand_over

log = logging.getLogger(__name__)

BACKLOG = 1024
#: Equal to :data:`tproxy.sidecar.PASSTHROUGH`, which is not imported, to avoid loading the code for nftables
#: rules.
PASSTHROUGH4, PASSTHROUGH6 = "127.0.0.6", "::6"


class Bound(NamedTuple):
    """A socket that is bound to one of a pod's ports, but does not listen yet.

    Attributes:
        transparent: whether connections to applications can use the client's address.
    """

    sock: socket.socket
    address: SocketAddress
    transparent: bool


def ports(config: IstioConfig, *, only_tunnels: bool = False) -> dict[int, str]:
    """Return the ports to listen on in a pod, with their purposes, in the order of binding."""
    if not config.proxy:
        return {}
    if only_tunnels:
        return {HBONE_PORT: "inbound"}
    found = {HBONE_PORT: "inbound", PLAINTEXT_PORT: "inbound plaintext", OUTBOUND_PORT: "outbound"}
    if config.socks5:
        found[SOCKS_PORT] = "socks5"
    return found


def bind(node: Node, netns: Netns | None, *, only_tunnels: bool = False) -> list[Bound]:
    """Bind every port of a pod. The caller closes the sockets.

    Raises:
        TproxyError: a port is taken, or a capability is missing.
    """
    bound: list[Bound] = []
    try:
        for port, component in ports(node.config, only_tunnels=only_tunnels).items():
            try:
                each = _bound(node, netns, port, only_tunnels=only_tunnels)
            except TproxyError as error:
                raise TproxyError(f"failed to bind to port {port} ({component}): {error}") from error
            bound.append(each)
            log.info(
                "listener established address=%s component=%s transparent=%s",
                each.address,
                component,
                str(each.transparent).lower(),
            )
    except BaseException:
        for each in bound:
            each.sock.close()
        raise
    return bound


def _bound(node: Node, netns: Netns | None, port: int, *, only_tunnels: bool) -> Bound:
    config = node.config
    hosts = ("127.0.0.1",) if port == SOCKS_PORT else ("::", "0.0.0.0") if config.ipv6 else ("0.0.0.0",)
    wanted = config.original_source is not OriginalSource.OFF and not only_tunnels
    for host in hosts:
        try:
            try:
                sock, transparent = _unheard(config, netns, host, port, transparent=wanted), wanted
            except NeedCapability:
                if config.original_source is OriginalSource.REQUIRED or not wanted:
                    raise
                sock, transparent = _unheard(config, netns, host, port, transparent=False), False
        except KernelRefused as error:
            if host == "::" and error.code in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # a pod without IPv6
            raise
        if port in (OUTBOUND_PORT, PLAINTEXT_PORT) and node.keepalive is not None:
            sockets.set_keepalive(sock, node.keepalive)  # accepted sockets inherit this
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Bound(sock, SocketAddress(host, port), transparent)
    raise AssertionError("the last host of the list raises")


def _unheard(
    config: IstioConfig, netns: Netns | None, host: str, port: int, *, transparent: bool
) -> socket.socket:
    shared = netns is not None
    return sockets.listen(
        host,
        port,
        transparent=transparent,
        mark=config.packet_mark if shared else None,
        reuse_port=config.inpod_port_reuse
        if shared
        else config.moves,  # a successor can listen on the port beside this process
        netns=netns,
        backlog=0,
    )


class PodSockets(PodDials):
    """Listens in one pod and dials from the pod.

    Args:
        node: the shared state of the node's pods.
        netns: the namespace of new sockets. ``None``: the process's own.
        only_tunnels: whether this is the proxy's own pod. It accepts only tunnels, and its own traffic is not
            captured and needs no mark.

    Attributes:
        only_tunnels: see the argument.
        preserves_source: for each listening port, whether applications get connections from the client's address.
    """

    def __init__(self, node: Node, netns: Netns | None, *, only_tunnels: bool = False) -> None:
        super().__init__(node, netns, only_tunnels=only_tunnels)
        self.preserves_source = {HBONE_PORT: False, PLAINTEXT_PORT: False}
        config = node.config
        self._node = node
        self._netns = netns
        self.only_tunnels = only_tunnels
        self._listening: list[ListeningSocket] = []
        self._timeout_s = config.connect_timeout_s

    # Listening

    def listen(
        self, accepted: Mapping[int, Accepted], bound: Sequence[Bound] | None = None, *, gate: Gate | None = None
    ) -> None:
        """Listen on every port of the pod until :meth:`close`.

        Args:
            accepted: callback for the connections of a port.
            bound: sockets bound by another process. This object becomes the owner. ``None``: bind here.
            gate: decides before each connection whether it is accepted now.

        Raises:
            TproxyError: a port is taken, or a capability is missing.
        """
        node = self._node
        for each in bind(node, self._netns, only_tunnels=self.only_tunnels) if bound is None else bound:
            port = each.address.port
            listener = ListeningSocket(
                each.sock, each.address, BACKLOG, node.poller, is_ours=node.is_ours, gate=gate
            )
            self._listening.append(listener)
            if port in self.preserves_source:
                self.preserves_source[port] = each.transparent and not self.only_tunnels
        for listener in self._listening:
            listener.start(accepted[listener.address.port])
            node.predecessor_ports.listening(listener.sock)

    async def hand_over(self) -> None:
        """Let a successor receive new connections, accept the queued ones, and only then close the listeners.

        The order matters, because closing a listener resets the connections in its queue.
        """
        await hand_over(self._listening)
        self.close()

    def close(self) -> None:
        """Stop listening. Idempotent. Open connections stay."""
        for listener in self._listening:
            listener.close()
        self._listening = []
        self._stock.close()

    # Connections

    def application_source(self, port: int, client: str, application: str) -> str | None:
        """Return the source address for connections to the application. ``None`` leaves the choice to the kernel.

        Args:
            port: the accepting listener's port.
            client: the client's address.
            application: the address to dial.
        """
        if self.preserves_source[port]:
            return client
        if self._sidecar:
            # The nftables rules recognise the proxy's connections by this source address, and distinguish them
            # from a pod's connections to itself (tproxy/sidecar.py).
            return PASSTHROUGH6 if ":" in application else PASSTHROUGH4
        return None

    async def dial(self, address: SocketAddress, *, source: str | None = None) -> PlainSocket:
        """Connect to the destination of one user connection, like :meth:`connect`. The caller closes the result.

        Keepalive is enabled only after the connection has lasted some seconds. Most connections end earlier, and
        save four of about twenty system calls.
        """
        sock = await self.connect(address, source=source, keepalive=False)
        end = PlainSocket(sock, self._node.poller, fresh=True)
        self.when_lasting(end)
        return end

    def redial(self, address: SocketAddress, source: str) -> Coroutine[Any, Any, PlainSocket]:
        return self.dial(address, source=source)

    async def finished(self, end: PlainSocket, address: SocketAddress) -> PlainSocket:
        try:
            await sockets.finish_connect(end.sock, address, self._timeout_s)
        except BaseException:
            end.close()
            raise
        self.when_lasting(end)
        return end

    async def connect(
        self, address: SocketAddress, *, source: str | None = None, keepalive: bool = True
    ) -> socket.SocketType:
        """Connect by TCP from the pod. The caller closes the socket.

        Args:
            address: the address to connect to.
            source: the source address to connect from, if it is not the pod's own.
            keepalive: whether to set the node's keepalive.

        Raises:
            TproxyError: the address refused, is unreachable, or did not answer within the time limit.
        """
        if source == address.host:
            source = None  # a pod that dials itself cannot be given the source address of another client
        return await sockets.connect(
            (address.host, address.port),
            source=source,
            own_source=self._sidecar,
            mark=self._mark,
            timeout_s=self._timeout_s,
            netns=self._netns,
            keepalive=self._keepalive if keepalive else None,
            socket_options=self._options,
        )
