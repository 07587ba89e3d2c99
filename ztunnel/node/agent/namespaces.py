"""Works inside pods' network namespaces: applies and removes rules, and counts connections through the proxy.

The functions block. One thread of the agent runs them for all pods, one after the other: setns(2) moves a whole
thread, and a netlink socket belongs to one.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tproxy.aio import istio_cni, rtnetlink
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.diff import diff
from tproxy.errors import NeedCapability, UnknownNamespace
from tproxy.expressions import Family
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
from tproxy.render import nftables
from tproxy.render.nf_tables import NFTA_TABLE_NAME
from tproxy.render.nftables_dump import nft_parts
from tproxy.resources import IpAddress, Namespace, State, Version
from tproxy.wire import read_text
from ztunnel.node.agent.description import PodDescription

_PROXY_PORTS = {OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, TUNNEL_PORT}
#: Tables with these names in nftables belong to ``iptables-nft``.
_IPTABLES = {"raw", "mangle", "nat", "filter", "security"}
# The states in /proc/net/tcp of sockets that are not open connections (include/net/tcp_states.h).
_LISTEN, _TIME_WAIT, _FIN_WAIT2 = "0A", "06", "05"


def open_namespace(description: PodDescription) -> Netns:
    """Open the pod's namespace; the caller closes it.

    Raises:
        TproxyError: the namespace does not exist, or access is denied.
        ValueError: it is the node's own namespace, where the rules would cut off the node.
    """
    netns = Netns.open(description.netns)
    try:
        for own in (None, 1):
            with contextlib.suppress(UnknownNamespace, NeedCapability), Netns.open(own) as nodes:
                if nodes.inode == netns.inode:
                    raise ValueError(f"{description.netns} is the node's own network namespace")
    except BaseException:
        netns.close()
        raise
    return netns


def apply_rules(netns: Netns, description: PodDescription, *, draining: bool = False) -> int:
    """Apply the rules of the pod's description. Idempotent.

    Returns:
        The number of changes, 0 if the rules were right.

    Raises:
        TproxyError: the first change that failed; earlier ones stay.
    """
    return _apply(netns, pod(description.capture(versions(netns), draining=draining)))


def take_over_rules(netns: Netns, description: PodDescription) -> set[str]:
    """Apply the rules of the pod's description in place of those written by istio-cni. Idempotent.

    Open connections that were captured by either agent's rules keep working, even if this fails half-way.

    Returns:
        istio-cni's chains that were removed.

    Raises:
        TproxyError: the first change that failed; earlier ones stay.
    """
    wanted = pod(description.capture(versions(netns)))
    istio_cni.take_over_routing(netns, wanted.namespaces[POD], OWNERSHIP.protocol)
    _apply(netns, wanted)
    return istio_cni.remove_chains(netns)


def wrong_rules(netns: Netns, description: PodDescription) -> int:
    """Return how many changes :func:`apply_rules` would make, without making them.

    Raises:
        TproxyError: the rules cannot be read.
    """
    wanted = pod(description.capture(versions(netns)))
    with contextlib.closing(BlockingKernel({POD: netns}, OWNERSHIP)) as kernel:
        return len(diff(kernel.read(wanted), wanted))


def remove_rules(netns: Netns) -> int:
    """Remove all our rules from the pod, and return the number of changes; idempotent.

    If istio-cni's chains are in the pod, the route and the policy rule stay, because these chains need them.

    Raises:
        TproxyError: the first change that failed.
    """
    left = Namespace()
    if istio_cni.foreign_chains(netns):
        with contextlib.closing(BlockingKernel({POD: netns}, OWNERSHIP)) as kernel:
            found = kernel.read().namespaces[POD]
        left = Namespace(rules=found.rules, routes=found.routes)
    return _apply(netns, State({POD: left}))


def _apply(netns: Netns, wanted: State) -> int:
    with contextlib.closing(BlockingKernel({POD: netns}, OWNERSHIP)) as kernel:
        return len(kernel.apply(wanted))


def try_rules() -> None:
    """Try a pod's rules in a network namespace that exists only for this trial.

    Raises:
        TproxyError: the kernel refused an operation.
    """
    with Netns.create() as trial:
        with NetlinkSocket(NETLINK_ROUTE, trial) as route:
            route.request(rtnetlink.set_up(1))  # lo, the first device of every namespace
        _apply(trial, pod(Capture(versions=versions(trial))))


def iptables_tables() -> dict[str, list[str]]:
    """Return which kinds of iptables have tables in this network namespace: ``legacy``, and ``nft`` for iptables
    on nftables.

    Raises:
        TproxyError: the kernel refused to list them.
    """
    legacy: set[str] = set()
    for name in ("ip_tables_names", "ip6_tables_names"):
        with contextlib.suppress(OSError):  # iptables-legacy was never used in this namespace
            legacy.update(Path("/proc/thread-self/net", name).read_text().split())
    with NetlinkSocket(NETLINK_NETFILTER) as link:
        bodies = link.dump(nftables.nft_message(nftables.NFT_GETTABLE, 0, nftables.DUMP, about="list tables"))
    found = ((family, read_text(parts.get(NFTA_TABLE_NAME, b""))) for family, parts in map(nft_parts, bodies))
    nft = {name for family, name in found if family in (Family.IPV4, Family.IPV6) and name in _IPTABLES}
    return {"legacy": sorted(legacy), "nft": sorted(nft)}


def apply_probes(pods: Iterable[Probed], user: int) -> None:
    """Let the node's kubelet, which runs as ``user``, probe exactly these pods; idempotent.

    Raises:
        TproxyError: the first change that failed.
    """
    _apply_to_node(probes(pods, user))


def remove_probes() -> None:
    """Remove the node's nftables table for kubelet's probes; idempotent."""
    _apply_to_node(State({HOST: Namespace()}))


def _apply_to_node(wanted: State) -> None:
    with Netns.open(None) as node, contextlib.closing(BlockingKernel({HOST: node}, PROBE_OWNERSHIP)) as kernel:
        kernel.apply(wanted)


def addresses(netns: Netns) -> tuple[IpAddress, ...]:
    """Return the pod's addresses as seen by others: the addresses of all its devices except ``lo``.

    Raises:
        TproxyError: the kernel refused to list them.
    """
    with NetlinkSocket(NETLINK_ROUTE, netns) as route:
        links = map(rtnetlink.read_link, route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK)))
        names = {link.index: link.name for link in links if link.name != "lo"}
        bodies = route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETADDR))
    found = (rtnetlink.read_address(body, names) for body in bodies)
    return tuple(address.interface.ip for address in found if address is not None)


def versions(netns: Netns) -> tuple[Version, ...]:
    """Return the IP versions that can be redirected in the namespace.

    REDIRECT sends an outgoing packet to an address of ``lo`` (nf_nat_redirect_ipv6), so IPv6 must be enabled
    there.
    """
    with netns.entered():
        try:
            disabled = Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").read_text().strip()
        except FileNotFoundError:
            disabled = "1"
    return (4,) if disabled != "0" else Capture().versions


def listening_ports(netns: Netns) -> set[int]:
    """Return the TCP ports with a listener in the namespace."""
    with netns.entered():
        return {port for port, state, _ in _tcp_sockets() if state == _LISTEN}


def foreign_rules(netns: Netns) -> set[str]:
    """Return istio-cni's chains in the namespace, each with its table.

    Raises:
        TproxyError: the kernel refused to list them.
    """
    return istio_cni.foreign_chains(netns)


def device_names() -> list[str]:
    """Return the names of the node's network devices.

    Raises:
        TproxyError: the kernel refused to list them.
    """
    with NetlinkSocket(NETLINK_ROUTE) as route:
        bodies = route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))
    return [rtnetlink.read_link(body).name for body in bodies]


def proxied_connections(netns: Netns) -> int:
    """Return the number of open connections to the proxy's ports in this namespace."""
    with netns.entered():
        return sum(
            port in _PROXY_PORTS
            # A connection in this state has no more data to send: its process has closed it, and the peer has
            # acknowledged all.
            and state not in (_LISTEN, _TIME_WAIT)
            and not (state == _FIN_WAIT2 and inode == "0")
            for port, state, inode in _tcp_sockets()
        )


def _tcp_sockets() -> Iterator[tuple[int, str, str]]:
    """Yield local port, state and inode of the TCP sockets in the thread's namespace. An orphan's inode is 0."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                yield int(local.rpartition(":")[2], 16), state, inode
