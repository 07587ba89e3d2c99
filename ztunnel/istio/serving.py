"""A pod's proxy put together: both directions, and the listeners that bring them connections."""

from collections.abc import Sequence
from functools import partial

from tproxy.aio.netns import Netns
from ztunnel.istio.config import HBONE_PORT, OUTBOUND_PORT, PLAINTEXT_PORT, SOCKS_PORT, PodName
from ztunnel.istio.inbound import Inbound
from ztunnel.istio.node import Node, PodKey
from ztunnel.istio.outbound import Outbound
from ztunnel.istio.pod import Bound, PodProxy


def serve(pod: PodProxy, bound: Sequence[Bound] | None = None) -> None:
    """Begin to take a pod's connections.

    Args:
        bound: sockets that somebody else has bound, ours from now on; ``None``: they are bound here.

    Raises:
        TproxyError: a port is taken, or a capability is missing.
    """
    inbound, outbound = Inbound(pod), Outbound(pod)
    pod.bind(
        {
            HBONE_PORT: inbound.accepted,
            PLAINTEXT_PORT: inbound.accepted_plain,
            OUTBOUND_PORT: outbound.accepted,
            SOCKS_PORT: outbound.accepted_socks,
        },
        bound,
    )


def enter(node: Node, pod: PodProxy) -> None:
    """Let other pods of this node find it, for tunnels that never leave the node."""
    key = _key(pod.name)
    node.pods[key] = pod
    pod.closing.append(partial(_leave, node, key, pod))


async def start(node: Node, name: PodName, netns: Netns | None, bound: Sequence[Bound] | None = None) -> PodProxy:
    """The proxy of a pod, serving.

    Raises:
        TproxyError: as :func:`serve`.
    """
    pod = PodProxy(node, name, netns)
    try:
        serve(pod, bound)
    except BaseException:
        await pod.stop()
        raise
    enter(node, pod)
    return pod


def _key(name: PodName) -> PodKey:
    return name.namespace, name.name, name.service_account


async def _leave(node: Node, key: PodKey, pod: PodProxy) -> None:
    if node.pods.get(key) is pod:
        del node.pods[key]
