"""The desired resources of a node where the TCP traffic of member pods passes through one ztunnel in a separate
namespace.

This is the layout of the early ambient releases, with a veth pair in place of each Geneve tunnel. Packets from
members ("out") and packets to members ("in") are routed to the proxy's namespace. Replies to connections that the
proxy opened with a pod's address are routed back to the proxy by their connection mark.

The marks on the host share bits on purpose: 0x200 "route normally" is part of 0x210 "sent by the proxy with a
foreign source" and of 0x220 "skip both directions of this connection". One test for 0x200 ends the chain for
all three.

If any resource is removed, some flow of ``tests/netns`` fails, with three exceptions: accept_local, the connection
mark 0x220, and the ztunnel's rules 20001 and 20002. These exceptions are kept for hosts with more complicated
routes.

IPv6 has the same rules, with three differences:

- IPv6 has neither rp_filter nor accept_local, and needs neither, because its input path does not check the route
  to a source.
- A host answers neighbour solicitations only on the interface that has the address. So the route of the host's
  address directly on eth0 exists for IPv4 only; IPv6 replies return through the pair.
- The pairs skip duplicate address detection, during which the kernel solicits no neighbours for forwarded packets.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_interface, ip_network

from tproxy.expressions import (
    ALL_BITS,
    TCP,
    Family,
    accept,
    ct_mark_is,
    destination_is,
    destination_port,
    family_is,
    input_interface,
    jump,
    keep_destination,
    keep_source,
    mark_is,
    protocol_is,
    redirect_to,
    return_,
    set_ct_mark,
    set_mark,
    source_in,
    source_is,
    tproxy_to,
)
from tproxy.resources import (
    DSTNAT,
    MANGLE,
    SRCNAT,
    Address,
    Chain,
    Element,
    End,
    Hook,
    HookPoint,
    IpAddress,
    IpRule,
    Namespace,
    NamespaceName,
    Ownership,
    Route,
    Rule,
    Set,
    SetKey,
    State,
    SysctlKey,
    Table,
    Version,
    VethPair,
)

HOST = NamespaceName("host")
ZTUNNEL = NamespaceName("ztunnel")
TABLE = "ztunnel"

OUTBOUND_PORT, INBOUND_PORT, INBOUND_PLAINTEXT_PORT, NODE_LOCAL_PORT = 15001, 15008, 15006, 15088

OUTBOUND_MARK = 0x100
SKIP_MARK = 0x200
CONNECTION_SKIP_MARK = 0x220
PROXY_MARK = 0x210
PROXY_RETURN_MARK = 0x040
INBOUND_TABLE, OUTBOUND_TABLE, PROXY_TABLE = 100, 101, 102

PROXY_MASK = 0xFFF
TPROXY_MARK = 0x400
OUTBOUND_LISTENER_MARK = 0x401
INBOUND_LISTENER_MARK = 0x402
ORIGINAL_SOURCE_MARK = 0x4D2
ORIGINAL_SOURCE_RETURN_MARK = 0x4D3
LOCAL_TABLE, OUTBOUND_RETURN_TABLE, INBOUND_RETURN_TABLE = 100, 101, 102

_IN, _OUT = "istioin", "istioout"
_PEER_IN, _PEER_OUT = "pistioin", "pistioout"
OWNERSHIP = Ownership(
    tables=frozenset({TABLE}),
    memory_table="ztunnel_sysctls",
    devices=frozenset({_IN, _OUT, _PEER_IN, _PEER_OUT}),
)

_LINKS = {
    _IN: (ip_interface("192.168.126.1/30"), ip_interface("fd16:9254:7126:126::1/64")),
    _PEER_IN: (ip_interface("192.168.126.2/30"), ip_interface("fd16:9254:7126:126::2/64")),
    _OUT: (ip_interface("192.168.127.1/30"), ip_interface("fd16:9254:7126:127::1/64")),
    _PEER_OUT: (ip_interface("192.168.127.2/30"), ip_interface("fd16:9254:7126:127::2/64")),
}
_DEFAULT = {4: ip_network("0.0.0.0/0"), 6: ip_network("::/0")}
_MAIN_RULE_PRIORITY = 32766


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A pod whose traffic is captured; ``device`` is the node's end of its veth pair."""

    uid: str
    addresses: tuple[IpAddress, ...]
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node and its member pods. An IP version is captured if the node and its ztunnel both have an address of
    this version.
    """

    host_addresses: tuple[IpAddress, ...]
    ztunnel_addresses: tuple[IpAddress, ...]
    ztunnel_device: str
    uplink: str = "eth0"
    members: tuple[Member, ...] = ()

    @property
    def versions(self) -> tuple[Version, ...]:
        """The IP versions that the node and its ztunnel both have an address for."""
        both: tuple[Version, Version] = (4, 6)
        return tuple(
            version
            for version in both
            if any(item.version == version for item in self.host_addresses)
            and any(item.version == version for item in self.ztunnel_addresses)
        )


def node(wanted: Node) -> State:
    """Return the desired resources of one node, in the namespaces ``HOST`` and ``ZTUNNEL``."""
    pairs = frozenset(
        VethPair(End(HOST, near), End(ZTUNNEL, far)) for near, far in ((_IN, _PEER_IN), (_OUT, _PEER_OUT))
    )
    return State({ZTUNNEL: _ztunnel_side(wanted), HOST: _host_side(wanted)}, pairs)


def member_sets(members: Iterable[Member]) -> tuple[Set, Set]:
    """Return the sets ``mesh_pods4`` and ``mesh_pods6``; the comment of an element is the pod's uid.

    A set has one element per key. If two pods have the same address for a short time, the element has the uid of
    the later pod.
    """
    pods = {address: member.uid for member in members for address in member.addresses}
    return (
        Set("mesh_pods4", SetKey.IPV4_ADDRESS, _elements(pods, 4)),
        Set("mesh_pods6", SetKey.IPV6_ADDRESS, _elements(pods, 6)),
    )


def _elements(pods: Mapping[IpAddress, str], version: int) -> frozenset[Element]:
    return frozenset(Element(address.packed, uid) for address, uid in pods.items() if address.version == version)


def _host_table(wanted: Node) -> Table:
    veth = wanted.ztunnel_device
    versions = wanted.versions
    skip = (*mark_is(SKIP_MARK), *return_())
    prerouting = [
        *(
            Rule((*input_interface(device), *set_mark(SKIP_MARK), *return_()), "back from the ztunnel")
            for device in (_IN, _OUT)
        ),
        Rule((*ct_mark_is(CONNECTION_SKIP_MARK), *set_mark(SKIP_MARK)), "skipped connection, either way"),
        Rule(skip),
        Rule(
            (*input_interface(veth, negate=True), *ct_mark_is(PROXY_MARK), *set_mark(PROXY_RETURN_MARK)),
            "reply to a spoofed connection",
        ),
        Rule((*mark_is(PROXY_RETURN_MARK), *return_())),
        *(
            Rule(
                (*input_interface(veth), *source_is(own, negate=True), *set_mark(PROXY_MARK)),
                "sent by the ztunnel with a pod's address",
            )
            for own in _one_each(wanted.ztunnel_addresses, versions)
        ),
        Rule(skip),
        Rule((*input_interface(veth), *set_mark(CONNECTION_SKIP_MARK)), "the ztunnel's own"),
        # Istio's rule matches only UDP. This rule matches all protocols except TCP, so that ICMP echo requests
        # also reach member pods, because the ztunnel would drop them. ICMP errors for connections with a foreign
        # source have left the chain two rules above.
        Rule((*protocol_is(TCP, negate=True), *set_mark(CONNECTION_SKIP_MARK)), "only TCP is captured"),
        Rule(skip),
        *(
            Rule(
                (*source_in(_family(version), f"mesh_pods{version}"), *set_mark(OUTBOUND_MARK)),
                "sent by a member",
            )
            for version in versions
        ),
    ]
    save = [Rule((*mark_is(mark), *set_ct_mark(mark))) for mark in (CONNECTION_SKIP_MARK, PROXY_MARK)]
    output = [
        Rule((*source_is(address), *set_mark(CONNECTION_SKIP_MARK, ALL_BITS)), "kubelet and host processes")
        for address in wanted.host_addresses
        if address.version in versions
    ]
    # The destination is translated to itself, because netfilter translates a connection only once. kube-proxy's
    # chain at the same hook then no longer translates it. An accept verdict would end only this chain.
    keep_vip = [
        Rule((*mark_is(OUTBOUND_MARK), *keep_destination(_family(version))), "before kube-proxy")
        for version in versions
    ]
    keep_src = [
        Rule((*mark_is(OUTBOUND_MARK), *keep_source(_family(version))), "before masquerading")
        for version in versions
    ]
    return Table(
        TABLE,
        Family.INET,
        chains=(
            Chain("save", tuple(save)),
            _base("prerouting", prerouting, HookPoint.PREROUTING),
            _base("forward", [Rule(jump("save"))], HookPoint.FORWARD),
            _base("input", [Rule(jump("save"))], HookPoint.INPUT),
            # The type is route, because packets are routed again only after a route chain has set their mark.
            Chain("output", tuple(output), Hook(kind="route", point=HookPoint.OUTPUT, priority=MANGLE)),
            Chain(
                "keepvip",
                tuple(keep_vip),
                Hook(kind="nat", point=HookPoint.PREROUTING, priority=DSTNAT - 10),
            ),
            Chain(
                "keepsrc",
                tuple(keep_src),
                Hook(kind="nat", point=HookPoint.POSTROUTING, priority=SRCNAT - 10),
            ),
        ),
        sets=member_sets(wanted.members),
    )


def _base(name: str, rules: Iterable[Rule], point: HookPoint) -> Chain:
    return Chain(name, tuple(rules), Hook(kind="filter", point=point, priority=MANGLE))


def _host_side(wanted: Node) -> Namespace:
    rules: set[IpRule] = set()
    routes: set[Route] = set()
    for version in wanted.versions:
        rules |= {
            IpRule(version=version, priority=100, mark=SKIP_MARK, mask=SKIP_MARK, goto=_MAIN_RULE_PRIORITY),
            IpRule(version=version, priority=101, mark=OUTBOUND_MARK, mask=OUTBOUND_MARK, table=OUTBOUND_TABLE),
            IpRule(
                version=version,
                priority=102,
                mark=PROXY_RETURN_MARK,
                mask=PROXY_RETURN_MARK,
                table=PROXY_TABLE,
            ),
            IpRule(version=version, priority=103, table=INBOUND_TABLE),
        }
        routes |= set(_host_routes(wanted, version))
    off = ["all", "default", wanted.ztunnel_device, _IN, _OUT, *(pod.device for pod in wanted.members)]
    sysctls: dict[SysctlKey, str] = {}
    if 4 in wanted.versions:
        sysctls |= {SysctlKey("ipv4", device, "rp_filter"): "0" for device in off}
        sysctls |= {
            SysctlKey("ipv4", device, "accept_local"): "1" for device in (wanted.ztunnel_device, _IN, _OUT)
        }
    return Namespace(
        tables=(_host_table(wanted),),
        rules=frozenset(rules),
        routes=frozenset(routes),
        sysctls=sysctls | _without_duplicate_detection((_IN, _OUT), wanted),
        addresses=_pair_addresses((_IN, _OUT), wanted),
        up=frozenset({_IN, _OUT}),
    )


def _host_routes(wanted: Node, version: Version) -> Iterator[Route]:
    ztunnel = _first(wanted.ztunnel_addresses, version)
    veth = wanted.ztunnel_device
    for table in (INBOUND_TABLE, OUTBOUND_TABLE, PROXY_TABLE):
        yield Route(table=table, destination=ip_network(ztunnel), device=veth)
    yield Route(
        table=OUTBOUND_TABLE, destination=_DEFAULT[version], gateway=_link(_PEER_OUT, version), device=_OUT
    )
    yield Route(table=PROXY_TABLE, destination=_DEFAULT[version], gateway=ztunnel, device=veth, onlink=True)
    for pod in wanted.members:
        for address in pod.addresses:
            if address.version == version:
                yield Route(
                    table=INBOUND_TABLE,
                    destination=ip_network(address),
                    gateway=_link(_PEER_IN, version),
                    device=_IN,
                    source=_first(wanted.host_addresses, version),
                )


def _ztunnel_side(wanted: Node) -> Namespace:
    rules: set[IpRule] = set()
    routes: set[Route] = set()
    for version in wanted.versions:
        rules |= {
            IpRule(version=version, priority=priority, mark=mark, mask=PROXY_MASK, table=table)
            for priority, mark, table in (
                (20000, TPROXY_MARK, LOCAL_TABLE),
                (20001, OUTBOUND_LISTENER_MARK, OUTBOUND_RETURN_TABLE),
                (20002, INBOUND_LISTENER_MARK, INBOUND_RETURN_TABLE),
                (20003, ORIGINAL_SOURCE_RETURN_MARK, LOCAL_TABLE),
            )
        }
        routes.add(Route(table=LOCAL_TABLE, destination=_DEFAULT[version], device="lo", local=True))
        for table, near, far in (
            (OUTBOUND_RETURN_TABLE, _PEER_OUT, _OUT),
            (INBOUND_RETURN_TABLE, _PEER_IN, _IN),
        ):
            routes.add(Route(table=table, destination=_DEFAULT[version], gateway=_link(far, version), device=near))
            if version == 4:
                host = ip_network(_first(wanted.host_addresses, version))
                routes.add(Route(table=table, destination=host, device=wanted.uplink))
    sysctls: dict[SysctlKey, str] = {}
    if 4 in wanted.versions:
        devices = ("all", "default", wanted.uplink, _PEER_IN, _PEER_OUT)
        sysctls = {SysctlKey("ipv4", device, "rp_filter"): "0" for device in devices}
    return Namespace(
        tables=(_ztunnel_table(wanted),),
        rules=frozenset(rules),
        routes=frozenset(routes),
        sysctls=sysctls | _without_duplicate_detection((_PEER_IN, _PEER_OUT), wanted),
        addresses=_pair_addresses((_PEER_IN, _PEER_OUT), wanted),
        up=frozenset({_PEER_IN, _PEER_OUT}),
    )


def _ztunnel_table(wanted: Node) -> Table:
    captures = (
        (_PEER_IN, destination_port(TCP, INBOUND_PORT), INBOUND_PORT, "tunnels"),
        (_PEER_OUT, protocol_is(TCP), OUTBOUND_PORT, "sent by members"),
        (_PEER_IN, protocol_is(TCP), INBOUND_PLAINTEXT_PORT, "plaintext to members"),
    )
    loopback: dict[Version, IpAddress] = {4: IPv4Address("127.0.0.1"), 6: IPv6Address("::1")}
    # TPROXY assigns the packet to the listener's socket without changing its addresses. Routing would still
    # forward it, because the destination is not local. So the mark selects a table whose only route is "local
    # default", which delivers the packet here (Documentation/networking/tproxy.rst). The verdict must be accept:
    # otherwise the rule for plaintext, which matches any TCP, would also match the packets of tunnels.
    prerouting = [
        Rule(
            (
                *input_interface(device),
                *family_is(_family(version)),
                *match,
                *tproxy_to(_family(version), port, loopback[version]),
                *set_mark(TPROXY_MARK, PROXY_MASK),
                *accept(),
            ),
            comment,
        )
        for device, match, port, comment in captures
        for version in wanted.versions
    ]
    prerouting += [
        Rule(
            (
                *input_interface(wanted.uplink),
                *protocol_is(TCP),
                *destination_is(own, negate=True),
                *set_mark(ORIGINAL_SOURCE_RETURN_MARK, PROXY_MASK),
            ),
            "reply to a spoofed connection",
        )
        for own in _one_each(wanted.ztunnel_addresses, wanted.versions)
    ]
    node_local = Rule(
        (*destination_port(TCP, NODE_LOCAL_PORT), *redirect_to(INBOUND_PORT)), "tunnel to a pod of this node"
    )
    output = Hook(kind="nat", point=HookPoint.OUTPUT, priority=DSTNAT)
    return Table(
        TABLE,
        Family.INET,
        chains=(
            _base("prerouting", prerouting, HookPoint.PREROUTING),
            Chain("nat_output", (node_local,), output),
        ),
    )


def _without_duplicate_detection(devices: Iterable[str], wanted: Node) -> dict[SysctlKey, str]:
    if 6 not in wanted.versions:
        return {}
    return {SysctlKey("ipv6", device, "accept_dad"): "0" for device in devices}


def _pair_addresses(devices: tuple[str, ...], wanted: Node) -> frozenset[Address]:
    return frozenset(
        Address(device, interface)
        for device in devices
        for interface in _LINKS[device]
        if interface.version in wanted.versions
    )


def _link(device: str, version: Version) -> IpAddress:
    return _LINKS[device][0 if version == 4 else 1].ip


def _family(version: Version) -> Family:
    return Family.IPV4 if version == 4 else Family.IPV6


def _first(addresses: Iterable[IpAddress], version: Version) -> IpAddress:
    return next(address for address in addresses if address.version == version)


def _one_each(addresses: Iterable[IpAddress], versions: Iterable[Version]) -> list[IpAddress]:
    return [_first(addresses, version) for version in versions]
