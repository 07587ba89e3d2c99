"""Opens the tunnels of one pod. Several tunnels can share a connection."""

from __future__ import annotations

from collections.abc import Awaitable, Hashable, Iterable
from functools import partial

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.pool import Pool
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import TlsError, TlsReason
from hbone.events import Header
from hbone.pool import PoolSettings
from xds.model.address import SocketAddress
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.pool_key import PoolKey, dial_connection
from ztunnel.proxy.istio.accounting.outcome import REVOKED
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.path.connections import PodConnections
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod_connection import Carrier, is_listed
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_sockets import PodSockets

#: The connection pool's key for a tunnel: the target, the pod's certificate, and the identities accepted from the
#: peer.
TunnelKey = PoolKey[WorkloadCertificate, tuple[str, ...]]


def tunnel_key(target: SocketAddress, identities: tuple[str, ...], certificate: WorkloadCertificate) -> TunnelKey:
    """Return the pool key of a tunnel. Tunnels with equal keys can share a connection."""
    return PoolKey(target, certificate, certificate.generation, identities)


class PodTunnels:
    """Opens the tunnels of one pod. The tunnel connections use the pod's certificate and are not shared with other
    pods.

    Attributes:
        pool: the connection pool, keyed by :func:`tunnel_key`.
    """

    def __init__(self, pod: PodContext) -> None:
        config = pod.node.config
        self._node = pod.node
        self._connections = pod.connections
        # This is a partial function: a bound method would create a reference cycle between the pool and this
        # object.
        self.pool = Pool(
            partial(_dial, pod.node, pod.connections, pod.sockets, pod.client_settings),
            pod.node.poller,
            PoolSettings(
                max_streams_per_connection=config.pool_max_streams,
                idle_timeout_s=config.pool_unused_release_s,
            ),
        )

    def open(
        self,
        target: SocketAddress,
        identities: tuple[str, ...],
        certificate: WorkloadCertificate,
        request: Iterable[Header],
        client: PlainSocket | None,
    ) -> Awaitable[Tunnel]:
        """Open a tunnel, on an existing tunnel connection if one has room. The caller awaits the result once, and
        closes the tunnel.

        Args:
            target: the address of the tunnel's far end.
            identities: the far end's acceptable identities.
            certificate: the pod's certificate.
            request: the CONNECT.
            client: the end whose first bytes can be sent along with the CONNECT. ``None`` sends none.

        Raises:
            HboneError: see :meth:`hbone.aio.pool.Pool.open`.
            TproxyError: no connection could be opened.
        """
        return self.pool.open(tunnel_key(target, identities, certificate), request, client)

    def adopt(
        self,
        connection: Connection,
        target: SocketAddress,
        identities: tuple[str, ...],
        certificate: WorkloadCertificate,
        tunnels: Iterable[Tunnel],
        idle_s: float,
    ) -> None:
        """Add a connection dialled by another process to the pool; see :meth:`hbone.aio.pool.Pool.adopt` and
        :meth:`open`.
        """
        life = _carrier(self._node, self._connections)
        life.dialled = target, identities
        key = PoolKey(target, certificate, certificate.generation, identities)
        self.pool.adopt(key, connection, tunnels, idle_s=idle_s)
        _opened(life, connection, self._connections)
        self._connections.dialled.judge(life)

    async def close(self) -> None:
        """Close every connection at once; waiting callers get ``PoolClosed``."""
        await self.pool.close()


async def _dial(
    node: Node, connections: PodConnections, sockets: PodSockets, settings: ConnectionSettings, key: Hashable
) -> Connection:
    assert isinstance(key, PoolKey)
    return await _dial_key(node, connections, sockets, settings, key)


async def _dial_key(
    node: Node, connections: PodConnections, sockets: PodSockets, settings: ConnectionSettings, key: TunnelKey
) -> Connection:
    """Open one tunnel connection, and keep it in the pod's connection table until it ends.

    Raises:
        TlsError: the handshake failed, or the peer's certificate was revoked meanwhile.
    """
    life = _carrier(node, connections)
    life.dialled = key.address, key.options
    life.state = State.HANDSHAKE
    try:
        connection = await dial_connection(
            lambda: key.credentials.client_context(key.options),
            lambda: sockets.connect(key.address),
            settings,
            node.poller,
            partial(node.metrics.shook_hands, "client"),
        )
        lists = node.revocation_lists()
        if lists is not None and is_listed(lists, connection):
            connection.abort(REVOKED)
            raise TlsError(TlsReason.REVOKED, "certificate revoked during the handshake")
    except BaseException:
        life.close()
        raise
    _opened(life, connection, connections)
    return connection


def _carrier(node: Node, connections: PodConnections) -> Carrier:
    def rejected() -> None:
        node.metrics.crl_rejections["source"] += 1

    return Carrier(connections.dialled, node.revocation_lists, rejected)


def _opened(life: Carrier, connection: Connection, connections: PodConnections) -> None:
    life.connection = connection
    connection.wait_closed().add_done_callback(lambda _: life.close())

    def ended(reason: str) -> None:
        connections.end_carried(connection, reason)
        connection.abort(reason)

    life.opened(ended)
