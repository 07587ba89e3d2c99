"""What tests of connections from a pod share: addresses, and the workloads behind them."""

from hbone.aio.requests import Request
from tests.ztunnel.proxy.istio.pods import CLIENT, ELSEWHERE, SERVER, Cluster, Peer, pass_on, workload
from xds.model.address import SocketAddress
from xds.model.workload import GatewayAddress, NetworkAddress, ServiceKey, Workload

POD = workload("client", CLIENT)
REMOTE = workload("server", SERVER, node=ELSEWHERE)
REMOTE_ADDRESS = SocketAddress(SERVER, 15008)
WAYPOINT_HOST, GATEWAY_HOST = "127.0.1.8", "127.0.1.9"
WAYPOINT_KEY = ServiceKey("default/waypoint.example")
GATEWAY = GatewayAddress(NetworkAddress("", GATEWAY_HOST), 15008)
FAR, FAR_SIDE = "far", SocketAddress("127.0.2.1", 15008)


def waypoint(**more: object) -> Workload:
    """A waypoint at an address of its own."""
    return workload("waypoint", WAYPOINT_HOST, node=ELSEWHERE, **more)


BY_ADDRESS = GatewayAddress(NetworkAddress("", WAYPOINT_HOST), 15008)


async def through_gateway(cluster: Cluster, *, far: str) -> tuple[Peer, Peer]:
    """A gateway that passes inner tunnels on to the far side, and the far side."""
    inner = cluster.peer(far, "127.0.2.1")
    gateway = cluster.peer("gateway", GATEWAY_HOST)

    async def answer(request: Request) -> None:
        await pass_on(cluster, request.accept(), FAR_SIDE)

    gateway.answer = answer
    return gateway, inner
