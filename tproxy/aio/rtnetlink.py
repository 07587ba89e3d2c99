"""Links, addresses, routes and rules as rtnetlink messages, both ways, with pyroute2's message classes.

pyroute2 knows the layouts of ``linux/{rtnetlink,if_link,if_addr,fib_rules}.h``; the sockets are ours
(:class:`~tproxy.aio.netlink.NetlinkSocket`), for pyroute2's start an event loop of their own and refuse a thread
that already runs one. The import costs 10 MiB and 0.12 s, in the agent and in ``ztunnel intercept`` only: the
proxy has no need of it.

What is not ours is left out when reading. What only the running kernel knows, device indexes and namespace
descriptors, arrives as an argument.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any, Final

from pyroute2.netlink import NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST
from pyroute2.netlink.rtnl import (
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_DELROUTE,
    RTM_DELRULE,
    RTM_GETADDR,
    RTM_GETLINK,
    RTM_GETROUTE,
    RTM_GETRULE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWROUTE,
    RTM_NEWRULE,
    RTM_SETLINK,
    rt_scope,
    rt_type,
)
from pyroute2.netlink.rtnl.fibmsg import FR_ACT_GOTO, FR_ACT_TO_TBL, fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import IFA_F_NODAD, ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP, ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from tproxy.resources import Address, IpRule, Route, VethPair
from tproxy.wire import MalformedDump, Message

__all__ = [
    "RTM_DELADDR",
    "RTM_DELROUTE",
    "RTM_DELRULE",
    "RTM_GETADDR",
    "RTM_GETLINK",
    "RTM_GETROUTE",
    "RTM_GETRULE",
    "RTM_NEWADDR",
    "RTM_NEWROUTE",
    "RTM_NEWRULE",
    "Index",
    "Link",
    "address_message",
    "create_bridge",
    "create_pair",
    "delete_link",
    "dump_request",
    "join_bridge",
    "read_address",
    "read_link",
    "read_route",
    "read_rule",
    "route_message",
    "rule_message",
    "set_up",
]

AF_UNSPEC, AF_INET, AF_INET6 = 0, 2, 10
#: ``linux/rtnetlink.h``: set by the gateway's owner (next hop), set by the kernel on cached routes.
RTNH_F_ONLINK, RTM_F_CLONED = 4, 0x200
_HEADER: Final = struct.Struct("=IHHII")

#: Returns the index of a device by its name.
Index = Callable[[str], int]


def _message(kind: int, flags: int, body: Any) -> Message:
    body["header"]["type"] = kind
    body.encode()
    length = body["header"]["length"]
    return Message(kind, flags | NLM_F_REQUEST, bytes(body.data[_HEADER.size : length]))


def _decoded(kind: type, body: bytes) -> Any:
    header = _HEADER.pack(_HEADER.size + len(body), 0, 0, 0, 0)
    try:
        found = kind(header + body)
        found.decode()
    except Exception as error:  # pyroute2 raises whatever its unpacking runs into
        raise MalformedDump(body) from error
    return found


def _family(version: int) -> int:
    return AF_INET if version == 4 else AF_INET6


def dump_request(kind: int, *, protocol: int = 0) -> Message:
    """Ask for all links, addresses, routes or rules.

    Args:
        protocol: of routes: only those that carry this number, 0: any. A kernel before 4.20 ignores it.
    """
    bodies = {RTM_GETLINK: ifinfmsg, RTM_GETADDR: ifaddrmsg, RTM_GETROUTE: rtmsg, RTM_GETRULE: fibmsg}
    body = bodies[kind]()
    body["family"] = AF_UNSPEC
    if protocol:
        body["proto"] = protocol
    return _message(kind, NLM_F_DUMP, body)


# Links


@dataclass(frozen=True, slots=True)
class Link:
    """A device as RTM_GETLINK shows it.

    ``peer_index`` is the other end's number in its own namespace. ``running`` says that packets pass: the
    kernel gets there up to a second after ``up``, on a delayed work queue, and drops them until then.
    """

    index: int
    name: str
    up: bool
    running: bool
    kind: str
    peer_index: int | None


def read_link(body: bytes) -> Link:
    """Read one link."""
    found = _decoded(ifinfmsg, body)
    info = found.get_attr("IFLA_LINKINFO")
    return Link(
        index=found["index"],
        name=found.get_attr("IFLA_IFNAME") or "",
        up=bool(found["flags"] & IFF_UP),
        running=found.get_attr("IFLA_OPERSTATE") == "UP",
        kind=(info.get_attr("IFLA_INFO_KIND") or "") if info is not None else "",
        peer_index=found.get_attr("IFLA_LINK"),
    )


def _link(kind: int, flags: int, *attributes: tuple[str, Any], index: int = 0, up: bool = False) -> Message:
    body = ifinfmsg()
    body["index"] = index
    body["flags"] = body["change"] = IFF_UP if up else 0
    body["attrs"] = list(attributes)
    return _message(kind, flags, body)


def create_pair(pair: VethPair, peer_namespace_fd: int, *, peer_index: int = 0) -> Message:
    """Make a veth pair, the left end in the namespace of the socket, the right one where the fd says.

    ``peer_index`` is the right end's interface number, if it matters: ends with different numbers are
    running at once, ends that happen to have the same one may take a second (net/core/link_watch.c).
    """
    if pair.right is None:
        raise ValueError("a veth pair has two ends")
    peer = {
        "index": peer_index,
        "attrs": [("IFLA_IFNAME", pair.right.device), ("IFLA_NET_NS_FD", peer_namespace_fd)],
    }
    veth = {"attrs": [("VETH_INFO_PEER", peer)]}
    info = {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", veth)]}
    return _link(
        RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, ("IFLA_IFNAME", pair.left.device), ("IFLA_LINKINFO", info)
    )


def create_bridge(name: str) -> Message:
    """Make a bridge."""
    info = {"attrs": [("IFLA_INFO_KIND", "bridge")]}
    return _link(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, ("IFLA_IFNAME", name), ("IFLA_LINKINFO", info))


def join_bridge(index: int, bridge: int) -> Message:
    """Bring a device up as a port of a bridge; 0 takes it out of any."""
    return _link(RTM_SETLINK, 0, ("IFLA_MASTER", bridge), index=index, up=True)


def delete_link(index: int) -> Message:
    """Remove a device, a veth's other end with it."""
    return _link(RTM_DELLINK, 0, index=index)


def set_up(index: int) -> Message:
    """Bring a device up."""
    return _link(RTM_SETLINK, 0, index=index, up=True)


# Addresses


def address_message(kind: int, address: Address, index: int) -> Message:
    """Add or delete an address (RTM_NEWADDR, RTM_DELADDR)."""
    interface = address.interface
    body = ifaddrmsg()
    body["family"], body["prefixlen"] = _family(interface.version), interface.network.prefixlen
    body["index"] = index
    body["attrs"] = [("IFA_ADDRESS", str(interface.ip)), ("IFA_LOCAL", str(interface.ip))]
    if interface.version == 6:
        body["attrs"].append(("IFA_FLAGS", IFA_F_NODAD))
    return _message(kind, NLM_F_CREATE | NLM_F_EXCL if kind == RTM_NEWADDR else 0, body)


def read_address(body: bytes, names: Mapping[int, str]) -> Address | None:
    """Read one address of a device in ``names``; ``None`` for link-local IPv6 ones, which the kernel makes."""
    found = _decoded(ifaddrmsg, body)
    text = found.get_attr("IFA_LOCAL") or found.get_attr("IFA_ADDRESS")
    if text is None or found["index"] not in names:
        return None
    try:
        interface = ip_interface(f"{text}/{found['prefixlen']}")
    except ValueError as error:
        raise MalformedDump(body) from error
    return None if interface.ip.is_link_local else Address(names[found["index"]], interface)


# Routes


def route_message(kind: int, route: Route, protocol: int, index: Index, *, replace: bool = False) -> Message:
    """Add or delete a route (RTM_NEWROUTE, RTM_DELROUTE)."""
    body = rtmsg()
    body["family"], body["dst_len"] = _family(route.version), route.destination.prefixlen
    body["table"] = route.table if route.table < 256 else 0
    body["proto"] = protocol
    body["scope"] = rt_scope[_scope(kind, route)]
    body["type"] = rt_type["local" if route.local else "unicast"]
    body["flags"] = RTNH_F_ONLINK if route.onlink else 0
    attributes: list[tuple[str, Any]] = [("RTA_TABLE", route.table)]
    if route.destination.prefixlen:
        attributes.append(("RTA_DST", str(route.destination.network_address)))
    if route.gateway is not None:
        attributes.append(("RTA_GATEWAY", str(route.gateway)))
    if route.source is not None:
        attributes.append(("RTA_PREFSRC", str(route.source)))
    body["attrs"] = [*attributes, ("RTA_OIF", index(route.device))]
    flags = 0
    if kind == RTM_NEWROUTE:
        flags = NLM_F_CREATE | (NLM_F_REPLACE if replace else NLM_F_EXCL)
    return _message(kind, flags, body)


def _scope(kind: int, route: Route) -> str:
    if kind == RTM_DELROUTE and route.version == 4:
        return "nowhere"  # whatever scope it has
    if route.version == 6 or route.gateway is not None:
        return "universe"
    return "host" if route.local else "link"


def read_route(body: bytes, protocol: int, names: Mapping[int, str]) -> Route | None:
    """Read one route; ``None`` for those that carry another protocol number, and for cached ones."""
    found = _decoded(rtmsg, body)
    kinds = (rt_type["unicast"], rt_type["local"])
    if found["proto"] != protocol or found["flags"] & RTM_F_CLONED or found["type"] not in kinds:
        return None
    anywhere = "0.0.0.0" if found["family"] == AF_INET else "::"
    table, gateway, source = (found.get_attr(name) for name in ("RTA_TABLE", "RTA_GATEWAY", "RTA_PREFSRC"))
    try:
        return Route(
            table=found["table"] if table is None else table,
            destination=ip_network(f"{found.get_attr('RTA_DST') or anywhere}/{found['dst_len']}"),
            device=names.get(found.get_attr("RTA_OIF"), ""),
            gateway=None if gateway is None else ip_address(gateway),
            source=None if source is None else ip_address(source),
            local=found["type"] == rt_type["local"],
            onlink=bool(found["flags"] & RTNH_F_ONLINK),
        )
    except ValueError as error:
        raise MalformedDump(body) from error


# Rules


def rule_message(kind: int, rule: IpRule, protocol: int) -> Message:
    """Add or delete a rule (RTM_NEWRULE, RTM_DELRULE)."""
    table = rule.table or 0
    body = fibmsg()
    body["family"] = _family(rule.version)
    body["table"] = table if table < 256 else 0
    body["action"] = FR_ACT_TO_TBL if rule.goto is None else FR_ACT_GOTO
    wanted = (
        ("FRA_PRIORITY", rule.priority),
        ("FRA_PROTOCOL", protocol),
        ("FRA_TABLE", rule.table),
        ("FRA_GOTO", rule.goto),
        ("FRA_FWMARK", rule.mark),
        ("FRA_FWMASK", rule.mask),
    )
    body["attrs"] = [(name, value) for name, value in wanted if value is not None]
    return _message(kind, NLM_F_CREATE | NLM_F_EXCL if kind == RTM_NEWRULE else 0, body)


def read_rule(body: bytes, protocol: int) -> IpRule | None:
    """Read one rule; ``None`` for those that carry another protocol number."""
    found = _decoded(fibmsg, body)
    if found["family"] not in (AF_INET, AF_INET6) or found.get_attr("FRA_PROTOCOL") != protocol:
        return None
    table, mark = found.get_attr("FRA_TABLE"), found.get_attr("FRA_FWMARK")
    return IpRule(
        version=4 if found["family"] == AF_INET else 6,
        priority=found.get_attr("FRA_PRIORITY") or 0,
        table=(found["table"] if table is None else table) if found["action"] == FR_ACT_TO_TBL else None,
        goto=found.get_attr("FRA_GOTO"),
        mark=mark,
        mask=found.get_attr("FRA_FWMASK") if mark is not None else None,
    )
