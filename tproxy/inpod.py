"""The desired resources of a pod whose TCP and DNS traffic passes through a proxy with sockets in the pod's
namespace.

The proxy listens inside the pod. nftables in the pod redirects the application's outgoing connections to 15001
and incoming ones to 15006. Tunnels arrive at 15008 and are not redirected. Packets with the mark 0x539 were sent
by the proxy and are never redirected.

The proxy connects to the application with the client's source address. Its packets pass through ``lo`` and enter
PREROUTING with the proxy's mark, where a rule sets the connection mark to 0x111. The application's reply packets
get the mark 0x111 from the connection, and a policy rule routes packets with this mark to ``lo``, where the
proxy's socket is, and not to the client.

Forwarded DNS over UDP is tracked in a separate conntrack zone, because the application's redirected query and the
proxy's forwarded query can have equal tuples.

A pod is removed from the mesh in two steps, because deleting a table also removes its nat hooks, and every
redirected connection would stall. ``draining`` therefore first removes the redirects, but keeps the base chains,
which translate open connections, and the marks, on which open connections to the application depend.

The node itself has one table, for probes: connections from its kubelet to captured pods get a source address that
the pods' rules accept. nftables cannot match the sending process, only its user. So all connections of that user
to pods bypass the mesh.

The rules and numbers are the same as in istio-cni's nftables variant, but in one table for both IP versions, so
that a change of rules is one transaction. If any rule is removed, some flow of ``tests/netns`` fails, with three
exceptions: the two ``accept`` for replies (nat chains see only the first packet of a tracked connection) and the
zone of answers. These exceptions are kept to match istio-cni.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network

from tproxy.expressions import (
    TCP,
    UDP,
    Family,
    Phrase,
    accept,
    copy_ct_mark_to_mark,
    ct_mark_is,
    destination_in,
    destination_is,
    destination_port,
    family_is,
    family_of,
    input_interface_like,
    mark_is,
    opens_connection,
    output_interface,
    protocol_is,
    redirect_to,
    return_,
    set_ct_mark,
    set_ct_zone,
    source_is,
    source_port,
    translate_source,
    user_is,
)
from tproxy.resources import (
    DSTNAT,
    MANGLE,
    RAW,
    SRCNAT,
    Chain,
    ChainKind,
    Element,
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
    Table,
    Version,
)

POD = NamespaceName("pod")
HOST = NamespaceName("host")
TABLE = "ztunnel_pod"
OWNERSHIP = Ownership(tables=frozenset({TABLE}), memory_table="ztunnel_pod_sysctls")

PROBE_TABLE = "ztunnel_probes"
PROBE_OWNERSHIP = Ownership(tables=frozenset({PROBE_TABLE}), memory_table="ztunnel_probes_sysctls")

OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, TUNNEL_PORT, DNS_PORT = 15001, 15006, 15008, 15053
PROXY_MARK, RETURN_MARK, MASK = 0x539, 0x111, 0xFFF
RETURN_TABLE, RETURN_PRIORITY = 100, 32764
PROBE_SOURCES: tuple[IpAddress, ...] = (
    IPv4Address("169.254.7.127"),
    IPv6Address("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
)

_COMMENT_BYTES = 120
_DNS = 53
_DNS_ZONE = 1
_LOOPBACK: dict[Version, IpAddress] = {4: IPv4Address("127.0.0.1"), 6: IPv6Address("::1")}
_EVERYTHING = {4: ip_network("0.0.0.0/0"), 6: ip_network("::/0")}
_FAMILIES: dict[Version, Family] = {4: Family.IPV4, 6: Family.IPV6}
_NOT_THE_PROXY = mark_is(PROXY_MARK, MASK, negate=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The traffic to capture in one pod.

    Attributes:
        versions: the IP versions. Leave out 6 where ``net.ipv6.conf.lo.disable_ipv6`` is 1: REDIRECT cannot work
            there.
        dns: capture port 53, UDP and TCP.
        inbound: capture plaintext connections to the pod. If false, only tunnels reach the proxy ("ingress mode").
        virtual_interfaces: devices, for example of a virtual machine, whose incoming connections count as sent by
            the pod. A final ``+`` makes a prefix of a name, like in iptables.
        new_connections_only: connections that are open at enrolment bypass the proxy until they end. Otherwise
            they break: conntrack treats their next packet as the first of a connection and redirects it.
        probe_sources: the node's addresses for kubelet probes, one per version, which are not captured.
        draining: whether this is the first step of the pod's removal; see the module's docstring.
    """

    versions: tuple[Version, ...] = (4, 6)
    dns: bool = True
    inbound: bool = True
    virtual_interfaces: tuple[str, ...] = ()
    new_connections_only: bool = False
    probe_sources: tuple[IpAddress, ...] = PROBE_SOURCES
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A captured pod, as the node's rules for kubelet probes need it."""

    uid: str
    addresses: tuple[IpAddress, ...]


def probes(pods: Iterable[Probed], user: int, sources: tuple[IpAddress, ...] = PROBE_SOURCES) -> State:
    """Return the node's desired resources for kubelet probes, in the namespace ``HOST``.

    Args:
        pods: the captured pods of this node.
        user: the numeric user that kubelet runs as.
        sources: the source addresses that probes get, one per IP version.
    """
    members = tuple(pods)
    rules = []
    sets = []
    for source in sources:
        name = f"probed_pods{source.version}"
        # While a pod drains, its address can already belong to another pod, but a set has only one element per
        # key.
        owners = {address: member.uid for member in members for address in member.addresses}
        elements = frozenset(
            Element(address.packed, _comment(uid))
            for address, uid in owners.items()
            if address.version == source.version
        )
        sets.append(
            Set(name, SetKey.IPV4_ADDRESS if source.version == 4 else SetKey.IPV6_ADDRESS, elements),
        )
        phrase = (
            *protocol_is(TCP),
            *user_is(user),
            *destination_in(family_of(source), name),
            *translate_source(source),
        )
        rules.append(Rule(phrase, "probes"))
    # The chain's priority puts it before masquerading, like istio-cni's jump at the beginning of POSTROUTING.
    chain = _base("postrouting", rules, "nat", HookPoint.POSTROUTING, SRCNAT - 10)
    table = Table(PROBE_TABLE, Family.INET, chains=(chain,), sets=tuple(sets))
    return State({HOST: Namespace(tables=(table,))})


def _comment(uid: str) -> str:
    # The comment is cut, because the uid of a static pod is free text. Uids that Kubernetes generates are much
    # shorter.
    return f"uid {uid}".encode("ascii", "replace")[:_COMMENT_BYTES].decode()


def pod(wanted: Capture) -> State:
    """Return the desired resources of one pod, in the namespace ``POD``."""
    rules = {
        IpRule(version=version, priority=RETURN_PRIORITY, mark=RETURN_MARK, mask=MASK, table=RETURN_TABLE)
        for version in wanted.versions
    }
    routes = {
        Route(table=RETURN_TABLE, destination=_EVERYTHING[version], device="lo", local=True)
        for version in wanted.versions
    }
    return State(
        {POD: Namespace(tables=(_table(wanted),), rules=frozenset(rules), routes=frozenset(routes))},
    )


def _table(wanted: Capture) -> Table:
    from_proxy = Rule(
        (*mark_is(PROXY_MARK, MASK), *set_ct_mark(RETURN_MARK, MASK)), "from the proxy to the application"
    )
    reply = Rule((*ct_mark_is(RETURN_MARK, MASK), *copy_ct_mark_to_mark()), "its reply")
    chains = [
        _base("mangle_prerouting", [from_proxy], "filter", HookPoint.PREROUTING, MANGLE),
        # The type is route, because packets are routed again only after a route chain has set their mark.
        _base("mangle_output", [reply], "route", HookPoint.OUTPUT, MANGLE),
        _base("nat_prerouting", _received(wanted), "nat", HookPoint.PREROUTING, DSTNAT),
        _base("nat_output", _sent(wanted), "nat", HookPoint.OUTPUT, DSTNAT),
    ]
    if wanted.dns and not wanted.draining:
        zone = set_ct_zone(_DNS_ZONE)
        query = Rule(
            (*destination_port(UDP, _DNS), *mark_is(PROXY_MARK, MASK), *zone), "query that the proxy forwards"
        )
        answer = Rule((*source_port(UDP, _DNS), *_NOT_THE_PROXY, *zone), "its answer")
        chains += [
            _base("raw_prerouting", [answer], "filter", HookPoint.PREROUTING, RAW),
            _base("raw_output", [query], "filter", HookPoint.OUTPUT, RAW),
        ]
    return Table(TABLE, Family.INET, chains=tuple(chains))


def _base(name: str, rules: Iterable[Rule], kind: ChainKind, point: HookPoint, priority: int) -> Chain:
    return Chain(name, tuple(rules), Hook(kind=kind, point=point, priority=priority))


def _received(wanted: Capture) -> list[Rule]:
    if wanted.draining:
        return []
    first = _first(wanted)
    rules = []
    for device in wanted.virtual_interfaces:
        behind = input_interface_like(device)
        rules += [
            Rule((*behind, *protocol_is(TCP), *first, *redirect_to(OUTBOUND_PORT)), "sent from behind the pod"),
            Rule((*behind, *return_()), "nothing else from there"),
        ]
    if wanted.inbound:
        # Kubelet's probes are not redirected and stay plain text, because kubelet has no mesh certificate. The
        # rule matches the link-local source address that the node's table gives to probes. No other host can use
        # this address.
        rules += [Rule((*source_is(probe), *protocol_is(TCP), *accept()), "probe") for probe in _probes(wanted)]
        rules += [
            Rule(
                (
                    *destination_is(_LOOPBACK[version], negate=True),
                    *destination_port(TCP, TUNNEL_PORT, negate=True),
                    *_NOT_THE_PROXY,
                    *first,
                    *redirect_to(INBOUND_PLAINTEXT_PORT),
                ),
                "plaintext to the pod",
            )
            for version in wanted.versions
        ]
    return rules


def _sent(wanted: Capture) -> list[Rule]:
    if wanted.draining:
        return []
    first = _first(wanted)
    # Connections to the pod's own loopback are never redirected.
    elsewhere = {version: destination_is(_LOOPBACK[version], negate=True) for version in wanted.versions}
    rules = [
        Rule((*destination_is(probe), *protocol_is(TCP), *accept()), "reply to a probe")
        for probe in _probes(wanted)
    ]
    if wanted.dns:
        rules += [
            Rule(
                (
                    *family_is(_FAMILIES[version]),
                    *output_interface("lo", negate=True),
                    *_NOT_THE_PROXY,
                    *destination_port(UDP, _DNS),
                    *redirect_to(DNS_PORT),
                ),
                "DNS",
            )
            for version in wanted.versions
        ]
        rules += [
            Rule(
                (
                    *elsewhere[version],
                    *destination_port(TCP, _DNS),
                    *_NOT_THE_PROXY,
                    *first,
                    *redirect_to(DNS_PORT),
                ),
                "DNS over TCP",
            )
            for version in wanted.versions
        ]
    rules.append(
        Rule((*protocol_is(TCP), *mark_is(RETURN_MARK, MASK), *accept()), "reply to a spoofed connection")
    )
    rules += [
        Rule((*output_interface("lo"), *elsewhere[version], *accept()), "to the pod's own addresses")
        for version in wanted.versions
    ]
    rules += [
        Rule(
            (*elsewhere[version], *protocol_is(TCP), *_NOT_THE_PROXY, *first, *redirect_to(OUTBOUND_PORT)),
            "sent by the pod",
        )
        for version in wanted.versions
    ]
    return rules


def _first(wanted: Capture) -> Phrase:
    return opens_connection() if wanted.new_connections_only else ()


def _probes(wanted: Capture) -> list[IpAddress]:
    families = {_FAMILIES[version] for version in wanted.versions}
    return [probe for probe in wanted.probe_sources if family_of(probe) in families]
