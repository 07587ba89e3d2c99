"""Checks with real connections that a pod's traffic is captured, before its application starts.

A user other than the proxy's connects to an address outside of the pod. The connection must arrive at the proxy's
port for outgoing connections. The proxy's own user connects to the pod's address. That connection must arrive at
the port for incoming ones. If the rules are right, no packet leaves the pod. Otherwise one SYN does, to an address
of the documentation ranges (RFC 5737, RFC 3849, RFC 9637) or of the captured ranges. The check needs no
capability.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, TypeVar

from tproxy.aio import sockets
from tproxy.errors import TproxyError
from tproxy.resources import IpAddress, IpNetwork, Version
from tproxy.sidecar import Sidecar

_N = TypeVar("_N", IPv4Network, IPv6Network)
_ELSEWHERE: Final[dict[Version, tuple[IpAddress, ...]]] = {
    4: (IPv4Address("192.0.2.1"), IPv4Address("198.51.100.1"), IPv4Address("203.0.113.1")),
    6: (IPv6Address("2001:db8::1"), IPv6Address("3fff::1")),
}
_FAMILIES: Final[dict[Version, socket.AddressFamily]] = {4: socket.AF_INET, 6: socket.AF_INET6}
_WILDCARD: Final[dict[Version, str]] = {4: "0.0.0.0", 6: "::"}


def validate(
    wanted: Sidecar, port: int, timeout_s: float, say: Callable[[str], None], *, user: int, group: int
) -> bool:
    """Return whether connections are captured in each IP version that has a route. Blocks for at most
    ``timeout_s`` per version.

    Args:
        wanted: the expected rules.
        port: the connection's port.
        timeout_s: the time limit.
        say: called with a line for each version.
        user, group: the user and group of this process.
    """
    checked, fine = 0, True
    for version in wanted.versions:
        own = _own_address(version)
        if own is None:
            say(f"validation: IPv{version}: there is no route, and nothing to capture")
            continue
        itself = user in wanted.users or group in wanted.groups
        target = (own, port) if itself else _elsewhere(wanted, version, port, group)
        if target is None:
            say(f"validation: IPv{version}: nothing that this user sends is captured")
            continue
        checked += 1
        fault = _fault(version, target, wanted.inbound_port if itself else wanted.outbound_port, timeout_s)
        shown = f"[{target[0]}]:{target[1]}" if version == 6 else f"{target[0]}:{target[1]}"
        say(f"validation: IPv{version}: a connection to {shown} {fault or 'is captured'}")
        fine = fine and fault is None
    if not checked:
        say("validation: nothing could be checked")
    return fine and checked > 0


def _own_address(version: Version) -> IpAddress | None:
    """Return the pod's own address; ``None`` if this IP version has no route out of the pod."""
    with contextlib.suppress(OSError), socket.socket(_FAMILIES[version], socket.SOCK_DGRAM) as sock:
        sock.connect((str(_ELSEWHERE[version][0]), 53))
        return ip_address(sock.getsockname()[0])
    return None


def _elsewhere(wanted: Sidecar, version: Version, port: int, group: int) -> tuple[IpAddress, int] | None:
    """Return a destination whose connections the rules capture; ``None`` if they capture none."""
    if (wanted.only_groups and group not in wanted.only_groups) or group in wanted.except_groups:
        return None
    excluded_ports = wanted.exclude_outbound
    chosen = next((each for each in (port, *wanted.include_outbound) if each not in excluded_ports), None)
    if chosen is None:
        return None
    address = next(_captured(wanted, version, always=chosen in wanted.include_outbound), None)
    return None if address is None else (address, chosen)


def _captured(wanted: Sidecar, version: Version, *, always: bool) -> Iterator[IpAddress]:
    """Yield captured destinations outside of the excluded networks. Each range yields one for every part that the
    exclusions leave, the lowest first.
    """
    if wanted.include_networks is None or always:
        networks: tuple[IpNetwork, ...] = tuple(map(ip_network, _ELSEWHERE[version]))
    else:
        networks = wanted.include_networks
    for network in networks:
        if network.version == version and not network.is_loopback:
            parts = [network]
            for excluded in wanted.exclude_networks:
                parts = [left for part in parts for left in _without(part, excluded)]
            yield from sorted(part.network_address for part in parts)


def _without(network: IpNetwork, excluded: IpNetwork) -> Iterable[IpNetwork]:
    if isinstance(network, IPv4Network) and isinstance(excluded, IPv4Network):
        return _difference(network, excluded)
    if isinstance(network, IPv6Network) and isinstance(excluded, IPv6Network):
        return _difference(network, excluded)
    return (network,)


def _difference(network: _N, excluded: _N) -> Iterator[_N]:
    if not network.overlaps(excluded):
        yield network
    elif not network.subnet_of(excluded):
        yield from network.address_exclude(excluded)


def _fault(version: Version, target: tuple[IpAddress, int], port: int, timeout_s: float) -> str | None:
    """Return what happened to a connection that did not reach the listener. ``None`` if it did reach it."""
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(sockets.listen(_WILDCARD[version], port, backlog=1))
        except TproxyError as error:
            return f"cannot be checked: {error}"
        listener.settimeout(timeout_s)
        client = stack.enter_context(socket.socket(_FAMILIES[version], socket.SOCK_STREAM))
        client.settimeout(timeout_s)
        try:
            client.connect((str(target[0]), target[1]))
            arrived, _ = listener.accept()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else "no answer in time"
            return f"does not arrive at port {port} ({reason})"
        with arrived:
            found = sockets.original_destination(arrived)
        if (found.ip, found.port) != target:
            return f"arrives at port {port} as one to {found.ip} port {found.port}"
    return None
