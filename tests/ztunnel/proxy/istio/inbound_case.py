"""What tests of connections to a pod share: the pod, requests, policies, and a tunnel connection."""

import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from hbone.aio.connection import Connection
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused
from tests.ztunnel.proxy.istio.pods import APP_PORT, CLIENT, SERVER, Cluster, End, workload
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.policy import Always, Condition, Never
from xds.model.workload import PolicyKey

POD, NEAR = workload("server", SERVER), workload("client", CLIENT)
APP = SocketAddress(SERVER, APP_PORT)
GATED = replace(POD, authorization_policies=(PolicyKey("default/gate"),))


_ALWAYS = Always()


def policy(
    name: str = "gate", action: Action = Action.DENY, condition: Condition = _ALWAYS
) -> AuthorizationPolicy:
    scope = PolicyScope.WORKLOAD_SELECTOR if name == "gate" else PolicyScope.GLOBAL
    return AuthorizationPolicy(name=name, namespace="default", scope=scope, action=action, condition=condition)


DENY, ALLOW, NEVER = policy(), policy(action=Action.ALLOW), policy(condition=Never())


def fields(
    authority: str = f"{SERVER}:{APP_PORT}", *more: tuple[bytes, bytes], method: bytes = b"CONNECT"
) -> tuple[tuple[bytes, bytes], ...]:
    return ((b":method", method), (b":authority", authority.encode()), *more)


class TunnelClient:
    """An application at the client's end of a tunnel."""

    def __init__(self, cluster: Cluster, tunnel: Tunnel) -> None:
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.setblocking(False)
        self.end = End(near)
        cluster.wire.ends.append(self.end)
        self.tunnel = tunnel
        self._far = far
        cluster.tasks.create_task(self._carry(cluster))

    async def _carry(self, cluster: Cluster) -> None:
        end = PlainSocket(self._far, cluster.node.poller)
        try:
            await relay(end, self.tunnel, ByteCounts())
        finally:
            end.close()
            self.tunnel.close()


async def refused(connection: Connection, *request: tuple[bytes, bytes]) -> int:
    """The status of a request that is refused."""
    with pytest.raises(ConnectRefused) as error:
        await connection.open(request or fields())
    return error.value.status


def closing(body: Callable[[Cluster, Connection], Awaitable[None]]) -> Callable[[Cluster], Awaitable[None]]:
    """A server pod, and a tunnel connection to it that is closed at the end."""

    async def with_connection(cluster: Cluster) -> None:
        await cluster.start(POD)
        connection = await cluster.tunnels_to("server")
        try:
            await body(cluster, connection)
        finally:
            connection.close()

    return with_connection
