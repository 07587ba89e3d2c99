"""Converts links, addresses, routes and rules to rtnetlink messages and back, with pyroute2's message classes.

pyroute2 defines the layouts of ``linux/{rtnetlink,if_link,if_addr,fib_rules}.h``. Its sockets are not used,
because they start their own event loop and cannot be used in a thread that already runs one.
:class:`~tproxy.aio.netlink.NetlinkSocket` is used instead. The import costs 10 MiB and 0.12 s. Only the agent and
``ztunnel intercept`` import this module, and the proxy does not.

Readers return None for resources that are not ours. Device indexes and namespace descriptors are arguments,
because only the running kernel defines them.
"""

import struct
import sys
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
from tproxy.wire import MalformedDump, Message, attribute_map, attributes, read_text

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
#: Flags of ``linux/rtnetlink.h``: the next hop is on-link although no route reaches it; the route is a cached
#: copy.
RTNH_F_ONLINK, RTM_F_CLONED = 4, 0x200
#: The size of ``struct rtmsg``, and the offset of ``rtm_protocol`` in it.
_RTMSG_BYTES, _RTMSG_PROTOCOL = 12, 5
_RTA_ENCAP = 22
#: Attribute numbers of ``linux/if_link.h``, a state of ``linux/if.h``, and ``struct ifinfomsg``: family, type,
#: index, flags, mask of flags.
_IFLA_IFNAME, _IFLA_LINK, _IFLA_OPERSTATE, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 5, 16, 18, 1
_IF_OPER_UP: Final = b"\6"
_IFINFOMSG: Final = struct.Struct("=BxHiII")
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
    except Exception as error:  # pyroute2 raises any error of its unpacking code
        raise MalformedDump(body) from error
    return found


def _family(version: int) -> int:
    return AF_INET if version == 4 else AF_INET6


def dump_request(kind: int, *, protocol: int = 0) -> Message:
    """Return the request to dump all links, addresses, routes or rules.

    Args:
        kind: one of RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE, RTM_GETRULE.
        protocol: dump only routes with this protocol number. 0 means any. Kernels before 4.20 ignore it.
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
    """A network device in an answer to RTM_GETLINK.

    Attributes:
        up: the administrative state, IFF_UP.
        running: the operational state, IF_OPER_UP. It follows ``up`` with a delay of up to a second
            (net/core/link_watch.c). Until then, the device drops packets.
        peer_index: the index of a veth's other end, in that end's own namespace.
    """

    index: int
    name: str
    up: bool
    running: bool
    kind: str
    peer_index: int | None


def read_link(body: bytes) -> Link:
    """Parse the body of an RTM_NEWLINK message.

    pyroute2 is not used here. A link has about forty attributes, and a node has a link for each pod. Decoding all
    attributes would take ten times as long as decoding these four.

    Raises:
        MalformedDump: the message is cut short.
    """
    if len(body) < _IFINFOMSG.size:
        raise MalformedDump(body)
    _, _, index, flags, _ = _IFINFOMSG.unpack_from(body)
    found = attribute_map(body[_IFINFOMSG.size :])
    info = attribute_map(found.get(_IFLA_LINKINFO, b""))
    peer = found.get(_IFLA_LINK)
    return Link(
        index=index,
        name=read_text(found.get(_IFLA_IFNAME, b"")),
        up=bool(flags & IFF_UP),
        running=found.get(_IFLA_OPERSTATE) == _IF_OPER_UP,
        kind=read_text(info.get(_IFLA_INFO_KIND, b"")),
        peer_index=None if peer is None else int.from_bytes(peer, sys.byteorder),
    )


def _link(kind: int, flags: int, *attributes: tuple[str, Any], index: int = 0, up: bool = False) -> Message:
    body = ifinfmsg()
    body["index"] = index
    body["flags"] = body["change"] = IFF_UP if up else 0
    body["attrs"] = list(attributes)
    return _message(kind, flags, body)


def create_pair(pair: VethPair, peer_namespace_fd: int, *, index: int = 0, peer_index: int = 0) -> Message:
    """Return the request to create a veth pair.

    Args:
        pair: the left end is created in the namespace of the socket that sends the request.
        peer_namespace_fd: the namespace of the right end.
        index, peer_index: the interface indexes of both ends. If both are 0, the kernel chooses them. The kernel
            ignores one index without the other. Ends with different indexes are operational at once. If the
            IFLA_LINK of a device equals its own index, linkwatch does not treat the device as urgent and can defer
            it for a second (linkwatch_urgent_event in net/core/link_watch.c).

    Raises:
        ValueError: the pair has no right end.
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
        RTM_NEWLINK,
        NLM_F_CREATE | NLM_F_EXCL,
        ("IFLA_IFNAME", pair.left.device),
        ("IFLA_LINKINFO", info),
        index=index,
    )


def create_bridge(name: str) -> Message:
    """Return the request to create a bridge."""
    info = {"attrs": [("IFLA_INFO_KIND", "bridge")]}
    return _link(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, ("IFLA_IFNAME", name), ("IFLA_LINKINFO", info))


def join_bridge(index: int, bridge: int) -> Message:
    """Return the request to bring a device up as a port of a bridge. ``bridge`` 0 removes the device from its
    bridge.
    """
    return _link(RTM_SETLINK, 0, ("IFLA_MASTER", bridge), index=index, up=True)


def delete_link(index: int) -> Message:
    """Return the request to delete a device. The kernel also deletes the other end of a veth."""
    return _link(RTM_DELLINK, 0, index=index)


def set_up(index: int) -> Message:
    """Return the request to bring a device up."""
    return _link(RTM_SETLINK, 0, index=index, up=True)


# Addresses


def address_message(kind: int, address: Address, index: int) -> Message:
    """Return the request to add or delete an address; ``kind`` is RTM_NEWADDR or RTM_DELADDR."""
    interface = address.interface
    body = ifaddrmsg()
    body["family"], body["prefixlen"] = _family(interface.version), interface.network.prefixlen
    body["index"] = index
    body["attrs"] = [("IFA_ADDRESS", str(interface.ip)), ("IFA_LOCAL", str(interface.ip))]
    if interface.version == 6:
        body["attrs"].append(("IFA_FLAGS", IFA_F_NODAD))
    return _message(kind, NLM_F_CREATE | NLM_F_EXCL if kind == RTM_NEWADDR else 0, body)


def read_address(body: bytes, names: Mapping[int, str]) -> Address | None:
    """Parse one address of a device in ``names``.

    Returns:
        None for other devices, and for link-local IPv6 addresses, which the kernel adds by itself.

    Raises:
        MalformedDump: the body does not have the layout of ``struct ifaddrmsg`` and its attributes.
    """
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
    """Return the request to add or delete a route; ``kind`` is RTM_NEWROUTE or RTM_DELROUTE.

    Args:
        protocol: the value of rtm_protocol, which marks the route as ours.
        index: called with the name of the route's device.
        replace: replace the route in the same slot instead of failing with EEXIST.
    """
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
        return "nowhere"  # matches a route of any scope (fib_table_delete in net/ipv4/fib_trie.c)
    if route.version == 6 or route.gateway is not None:
        return "universe"
    return "host" if route.local else "link"


def route_protocol(body: bytes) -> int:
    """Return the protocol number of a dumped route.

    Raises:
        MalformedDump: the body is shorter than ``struct rtmsg``.
    """
    if len(body) < _RTMSG_BYTES:
        raise MalformedDump(body)
    return body[_RTMSG_PROTOCOL]


def read_route(body: bytes, protocol: int, names: Mapping[int, str]) -> Route | None:
    """Parse one route.

    Returns:
        None for routes with another protocol number, for cached routes, and for route types that we never add.

    Raises:
        MalformedDump: not the layout of ``struct rtmsg`` and its attributes.
    """
    if len(body) < _RTMSG_BYTES:
        raise MalformedDump(body)
    # Do not decode foreign routes: there can be many. Do not decode routes with an encapsulation either, which
    # ours never have. pyroute2 loops forever over an encapsulation's attributes if a length is 0.
    if body[_RTMSG_PROTOCOL] != protocol or any(kind == _RTA_ENCAP for kind, _ in attributes(body[_RTMSG_BYTES:])):
        return None
    found = _decoded(rtmsg, body)
    kinds = (rt_type["unicast"], rt_type["local"])
    if found["flags"] & RTM_F_CLONED or found["type"] not in kinds:
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
    """Return the request to add or delete a policy routing rule; ``kind`` is RTM_NEWRULE or RTM_DELRULE."""
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


def rule_protocol(body: bytes) -> int:
    """Return the protocol number of a dumped policy routing rule.

    Raises:
        MalformedDump: not the layout of ``struct fib_rule_hdr`` and its attributes.
    """
    return int(_decoded(fibmsg, body).get_attr("FRA_PROTOCOL") or 0)


def read_rule(body: bytes, protocol: int) -> IpRule | None:
    """Parse one policy routing rule; returns None for rules with another protocol number.

    Raises:
        MalformedDump: not the layout of ``struct fib_rule_hdr`` and its attributes.
    """
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
