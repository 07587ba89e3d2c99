"""The agent's hands inside pods: rules in, rules out, and is anything still connected through the proxy.

Blocking: one thread of the agent does this for all pods, one after the other, as netlink and ``setns`` want it.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tproxy.aio import rtnetlink
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.netlink import NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.errors import TproxyError
from tproxy.inpod import (
    HOST,
    INBOUND_PLAINTEXT_PORT,
    OUTBOUND_PORT,
    OWNERSHIP,
    POD,
    PROBE_OWNERSHIP,
    TUNNEL_PORT,
    Capture,
    Probed,
    pod,
    probes,
)
from tproxy.resources import IpAddress, Namespace, State, Version
from ztunnel.agent.description import PodDescription

_PROXY_PORTS = {OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, TUNNEL_PORT}
# Of /proc/net/tcp: a listener is no connection, and what is in TIME_WAIT has been one.
_LISTEN, _TIME_WAIT = "0A", "06"


def open_namespace(description: PodDescription) -> Netns:
    """The pod's namespace.

    Raises:
        TproxyError: it is not there.
        ValueError: it is the node's own, where the rules would cut off the node.
    """
    netns = Netns.open(description.netns)
    try:
        for own in (None, 1):
            with contextlib.suppress(TproxyError), Netns.open(own) as nodes:
                if nodes.inode == netns.inode:
                    raise ValueError(f"{description.netns} is the node's own network namespace")
    except BaseException:
        netns.close()
        raise
    return netns


def put_rules(netns: Netns, description: PodDescription, *, draining: bool = False) -> int:
    """Make the rules what the description wants.

    Returns:
        How much had to be changed.

    Raises:
        TproxyError: not all of it could be done.
    """
    return _apply(netns, pod(description.capture(versions(netns), draining=draining)))


def take_rules(netns: Netns) -> int:
    """Take everything of ours away; what is not there is fine."""
    return _apply(netns, State({POD: Namespace()}))


def _apply(netns: Netns, wanted: State) -> int:
    with contextlib.closing(BlockingKernel({POD: netns}, OWNERSHIP)) as kernel:
        return len(kernel.apply(wanted))


def put_probes(pods: Iterable[Probed], user: int) -> None:
    """Let the node's kubelet, which runs as ``user``, probe these pods and no others.

    Raises:
        TproxyError: not all of it could be done.
    """
    _apply_to_node(probes(pods, user))


def take_probes() -> None:
    """Take the node's table away."""
    _apply_to_node(State({HOST: Namespace()}))


def _apply_to_node(wanted: State) -> None:
    with Netns.open(None) as node, contextlib.closing(BlockingKernel({HOST: node}, PROBE_OWNERSHIP)) as kernel:
        kernel.apply(wanted)


def addresses(netns: Netns) -> tuple[IpAddress, ...]:
    """Where others reach the pod: the addresses of all its devices but ``lo``.

    Raises:
        TproxyError: they could not be read.
    """
    with NetlinkSocket(NETLINK_ROUTE, netns) as route:
        links = map(rtnetlink.read_link, route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK)))
        names = {link.index: link.name for link in links if link.name != "lo"}
        bodies = route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETADDR))
    found = (rtnetlink.read_address(body, names) for body in bodies)
    return tuple(address.interface.ip for address in found if address is not None)


def versions(netns: Netns) -> tuple[Version, ...]:
    """The IP versions that can be redirected there: IPv6 where ``lo`` has it."""
    with netns.entered():
        try:
            disabled = Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").read_text().strip()
        except FileNotFoundError:
            disabled = "1"
    return (4,) if disabled == "1" else Capture().versions


def proxied_connections(netns: Netns) -> int:
    """Connections that end at the proxy's ports in this namespace."""
    with netns.entered():
        return sum(1 for port in _connected_ports() if port in _PROXY_PORTS)


def _connected_ports() -> Iterator[int]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state not in (_LISTEN, _TIME_WAIT):
                    yield int(local.rpartition(":")[2], 16)
