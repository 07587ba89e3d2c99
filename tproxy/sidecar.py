"""The desired rules of a pod with a proxy beside the application. The proxy needs no capability, because the rules
match its user.

Connections from the application are redirected to 15001, and connections to the pod to 15006, unless excluded. The
proxy runs as a separate user, whose packets are not redirected. It connects to the application from 127.0.0.6 or
::6 (``PASSTHROUGH``), which the rules accept. From another source address, a connection of the proxy to the pod's
own address would look like the application's call to itself through a service, and return to 15006.

The rules, their order and their numbers are the same as in ``istio-iptables`` with REDIRECT. The flags and
annotations are the same, too, so that the exceptions of a pod for Istio's sidecar stay valid. With several users
or groups, one rule accepts the loopback traffic of all other users. istio-iptables has one such rule per user, and
the first also matches traffic meant for later rules. IPv6 is captured if the namespace has it, and not only if the
pod's first address is IPv6.

The steps are rendered in two ways: :func:`sidecar` makes an nftables table for both IP versions, and
``render/iptables.py`` makes iptables text for reviewers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, collapse_addresses, ip_network
from typing import Final, TypeAlias, assert_never

from tproxy.expressions import (
    CT_INVALID,
    TCP,
    UDP,
    Family,
    Phrase,
    address_in,
    connection_state,
    destination_port,
    drop,
    group_is,
    input_interface_like,
    output_interface_like,
    protocol_is,
    redirect_to,
    return_,
    set_ct_zone,
    source_port,
    user_is,
)
from tproxy.inpod import DNS_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, TUNNEL_PORT
from tproxy.resources import (
    DSTNAT,
    MANGLE,
    RAW,
    Chain,
    ChainKind,
    Element,
    Hook,
    HookPoint,
    IpAddress,
    IpNetwork,
    Rule,
    Set,
    SetKey,
    Table,
    Version,
)

TABLE: Final = "ztunnel_sidecar"
#: The source addresses of the proxy's connections to the application. The IPv6 address must be added to the device
#: ``lo``.
PASSTHROUGH: Final[dict[Version, IpAddress]] = {4: IPv4Address("127.0.0.6"), 6: IPv6Address("::6")}
USER: Final = 1337
LOOPBACK4: Final = IPv4Network("127.0.0.1/32")

_FAMILIES: Final[dict[Version, Family]] = {4: Family.IPV4, 6: Family.IPV6}
_DNS: Final = 53
_PROXY_ZONE, _APPLICATION_ZONE = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The traffic to capture in one pod.

    Attributes:
        versions: the IP versions. Leave out 6 where ``net.ipv6.conf.lo.disable_ipv6`` is 1.
        outbound_port, inbound_port, tunnel_port: the proxy's listening ports.
        users, groups: the users and groups of the proxy. Packets that they send are not captured.
        include_networks: destination networks that are captured. ``None`` means all.
        exclude_networks: destination networks that are not captured.
        include_inbound: ports of the pod whose connections are captured. ``None`` means all.
        exclude_inbound: ports that are not captured although ``include_inbound`` is ``None``.
        include_outbound: destination ports that are captured even outside ``include_networks``.
        exclude_outbound: ports that are never captured.
        virtual_interfaces: devices whose incoming connections, of a virtual machine, count as sent by the pod.
        exclude_interfaces: devices whose traffic is not captured.
        only_groups: unless empty, only packets that these groups send are captured.
        except_groups: packets that these groups send are not captured.
        loopback4: IPv4 destinations that are the pod's own loopback.
        dns: capture port 53, UDP and TCP.
        dns_servers: only queries to these servers are captured. ``None`` means any server.
        drop_invalid: drop packets that conntrack cannot assign to a connection. Otherwise the application's kernel
            answers them with a reset.
    """

    versions: tuple[Version, ...] = (4, 6)
    outbound_port: int = OUTBOUND_PORT
    inbound_port: int = INBOUND_PLAINTEXT_PORT
    tunnel_port: int = TUNNEL_PORT
    users: tuple[int, ...] = (USER,)
    groups: tuple[int, ...] = (USER,)
    include_networks: tuple[IpNetwork, ...] | None = None
    exclude_networks: tuple[IpNetwork, ...] = ()
    include_inbound: tuple[int, ...] | None = None
    exclude_inbound: tuple[int, ...] = ()
    include_outbound: tuple[int, ...] = ()
    exclude_outbound: tuple[int, ...] = ()
    virtual_interfaces: tuple[str, ...] = ()
    exclude_interfaces: tuple[str, ...] = ()
    only_groups: tuple[int, ...] = ()
    except_groups: tuple[int, ...] = ()
    loopback4: IPv4Network = LOOPBACK4
    dns: bool = False
    dns_servers: tuple[IpAddress, ...] | None = None
    drop_invalid: bool = False


# The tests of a step. A packet must match all tests.


@dataclass(frozen=True, slots=True)
class Device:
    """The packet enters (or leaves) by this device. A final ``+`` makes a prefix of the name, like in iptables."""

    name: str
    incoming: bool


@dataclass(frozen=True, slots=True)
class Transport:
    """The packet has this protocol, and its destination (or source) port is one of ``ports``, or none of ``ports``
    if negated.
    """

    protocol: int
    ports: tuple[int, ...] = ()
    negate: bool = False
    source: bool = False


@dataclass(frozen=True, slots=True)
class Networks:
    """The destination (or source) is in one of these networks, or if negated, in none of these networks.

    Attributes:
        name: the set's name, without the IP version.
        networks: networks of both IP versions. If an IP version has no networks, its packets never match, or if
            negated, always match.
    """

    name: str
    networks: tuple[IpNetwork, ...]
    source: bool = False
    negate: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """The packet was sent by a local process of this user (or group)."""

    number: int
    group: bool = False
    negate: bool = False


@dataclass(frozen=True, slots=True)
class Invalid:
    """conntrack cannot assign the packet to a connection (state INVALID)."""


Test: TypeAlias = Device | Transport | Networks | Owner | Invalid


# The possible actions of a step.


@dataclass(frozen=True, slots=True)
class Pass:
    """Leave the packet alone."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Redirect the connection to this port of the pod."""

    port: int


@dataclass(frozen=True, slots=True)
class Zone:
    """Track the connection in a separate conntrack zone, and continue with the next step."""

    number: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the packet."""


Deed: TypeAlias = Pass | Redirect | Zone | Drop


@dataclass(frozen=True, slots=True)
class Step:
    """One rule: if all tests match, the action is executed. ``why`` is the rule's comment."""

    tests: tuple[Test, ...]
    deed: Deed
    why: str


@dataclass(frozen=True, slots=True)
class StepChain:
    """The steps at one hook. The first matching step with a final action decides.

    Attributes:
        table: the table in iptables' terms: ``nat``, ``mangle`` or ``raw``.
        incoming: whether the hook is PREROUTING; otherwise it is OUTPUT.
    """

    table: str
    incoming: bool
    steps: tuple[Step, ...]


def steps(wanted: Sidecar) -> tuple[StepChain, ...]:
    """Return the rules of a pod, in order. Chains without rules are omitted."""
    chains = [
        StepChain("nat", True, tuple(_received(wanted))),
        StepChain("nat", False, tuple(_sent(wanted))),
    ]
    if wanted.drop_invalid:
        chains.append(StepChain("mangle", True, (Step((Transport(TCP), Invalid()), Drop(), "no connection's"),)))
    if wanted.dns:
        chains += [
            StepChain("raw", True, tuple(_answered_dns(wanted))),
            StepChain("raw", False, tuple(_asked_dns(wanted))),
        ]
    return tuple(chain for chain in chains if chain.steps)


def _received(wanted: Sidecar) -> Iterator[Step]:
    for device in wanted.virtual_interfaces:
        behind = Device(device, True)
        for where in _captured_networks(wanted):
            yield Step(
                (behind, *where, Transport(TCP)), Redirect(wanted.outbound_port), "sent from behind the pod"
            )
        yield Step((behind,), Pass(), "nothing else from there")
    for device in wanted.exclude_interfaces:
        yield Step((Device(device, True),), Pass(), "excluded device")
    if wanted.include_inbound == ():
        return
    yield Step((Transport(TCP, (wanted.tunnel_port,)),), Pass(), "tunnel")
    to_proxy = Redirect(wanted.inbound_port)
    if wanted.include_inbound is not None:
        for port in wanted.include_inbound:
            yield Step((Transport(TCP, (port,)),), to_proxy, "to the pod")
        return
    for port in wanted.exclude_inbound:
        yield Step((Transport(TCP, (port,)),), Pass(), "excluded port")
    yield Step((Transport(TCP),), to_proxy, "to the pod")


def _sent(wanted: Sidecar) -> Iterator[Step]:
    inside, outside = Device("lo", False), _loopback(wanted, negate=True)
    for device in wanted.exclude_interfaces:
        yield Step((Device(device, False),), Pass(), "excluded device")
    for port in wanted.exclude_outbound:
        for protocol in (TCP, UDP):
            yield Step((Transport(protocol, (port,)),), Pass(), "excluded port")
    passthrough = tuple(ip_network(PASSTHROUGH[version]) for version in wanted.versions)
    yield Step((inside, Networks("passthrough", passthrough, source=True)), Pass(), "proxy to application")
    owners = (
        *(Owner(user) for user in wanted.users),
        *(Owner(group, group=True) for group in wanted.groups),
    )
    # If the application calls a service whose endpoint is this pod, the proxy connects to the pod's address. This
    # connection is redirected like one from another host. Tunnels have their own port, and DNS has its own rule.
    itself = Transport(TCP, (wanted.tunnel_port, *((_DNS,) if wanted.dns else ())), negate=True)
    for owner in owners:
        yield Step((inside, outside, itself, owner), Redirect(wanted.inbound_port), "the pod calls itself")
    if not _captures_loopback(wanted):
        others = tuple(Owner(owner.number, group=owner.group, negate=True) for owner in owners if not owner.group)
        plain = (Transport(TCP, (_DNS,), negate=True),) if wanted.dns else ()
        yield Step((inside, *plain, *others), Pass(), "the application to itself")
    for owner in owners:
        yield Step((owner,), Pass(), "the proxy")
    if wanted.only_groups:
        only = tuple(Owner(group, group=True, negate=True) for group in wanted.only_groups)
        yield Step(only, Pass(), "groups that are not included")
    for group in wanted.except_groups:
        yield Step((Owner(group, group=True),), Pass(), "excluded group")
    if wanted.dns:
        # DNS is redirected before the rule that accepts loopback traffic, because a resolver can be a cache on
        # 127.0.0.53.
        for protocol in (UDP, TCP):
            where = _dns_servers(wanted)
            if where is not None:
                yield Step((*where, Transport(protocol, (_DNS,))), Redirect(DNS_PORT), "DNS")
    yield Step((_loopback(wanted),), Pass(), "loopback")
    if wanted.exclude_networks:
        yield Step((Networks("excluded", wanted.exclude_networks),), Pass(), "excluded destinations")
    for port in wanted.include_outbound:
        yield Step((Transport(TCP, (port,)),), Redirect(wanted.outbound_port), "included port")
    for where in _captured_networks(wanted):
        yield Step((*where, Transport(TCP)), Redirect(wanted.outbound_port), "sent by the pod")


def _captured_networks(wanted: Sidecar) -> Iterator[tuple[Networks, ...]]:
    if wanted.include_networks is None:
        yield ()
    elif wanted.include_networks:
        yield (Networks("included", wanted.include_networks),)


def _captures_loopback(wanted: Sidecar) -> bool:
    return any(network.is_loopback for network in wanted.include_networks or ())


def _loopback(wanted: Sidecar, *, negate: bool = False) -> Networks:
    return Networks("loopback", (wanted.loopback4, IPv6Network("::1/128")), negate=negate)


def _dns_servers(wanted: Sidecar) -> tuple[Networks, ...] | None:
    """Return the test that selects DNS servers. Only queries to these servers are captured. ``None``: no queries
    are captured.
    """
    if wanted.dns_servers is None:
        return ()
    if not wanted.dns_servers:
        return None
    return (Networks("dns_servers", tuple(ip_network(server) for server in wanted.dns_servers)),)


# The proxy forwards redirected DNS queries. The application's flow and the proxy's flow can have equal tuples, and
# conntrack would drop one of the two flows. So each flow has its own conntrack zone.


def _asked_dns(wanted: Sidecar) -> Iterator[Step]:
    query, where = Transport(UDP, (_DNS,)), _dns_servers(wanted)
    for user in wanted.users:
        yield Step((query, Owner(user)), Zone(_PROXY_ZONE), "query of the proxy")
    for group in wanted.groups:
        yield Step((query, Owner(group, group=True)), Zone(_PROXY_ZONE), "query of the proxy")
    yield Step((Transport(UDP, (DNS_PORT,), source=True),), Zone(_APPLICATION_ZONE), "answer to the application")
    if where is not None:
        yield Step((*where, query), Zone(_APPLICATION_ZONE), "query of the application")


def _answered_dns(wanted: Sidecar) -> Iterator[Step]:
    where = _dns_servers(wanted)
    if where is not None:
        servers = tuple(Networks(each.name, each.networks, source=True) for each in where)
        yield Step((*servers, Transport(UDP, (_DNS,), source=True)), Zone(_PROXY_ZONE), "answer to the proxy")


# As nftables


def sidecar(wanted: Sidecar) -> Table:
    """Return the desired nftables table of a pod. The pod also needs the address ``::6`` on the device ``lo``."""
    sets: dict[str, Set] = {}
    chains = []
    for chain in steps(wanted):
        rules = [
            Rule(phrase, step.why) for step in chain.steps for phrase in _phrases(step, wanted.versions, sets)
        ]
        chains.append(_base(chain, rules))
    return Table(TABLE, chains=tuple(chains), sets=tuple(sets[name] for name in sorted(sets)))


def _base(chain: StepChain, rules: Iterable[Rule]) -> Chain:
    kind: ChainKind = "nat" if chain.table == "nat" else "filter"
    priority = {"nat": DSTNAT, "mangle": MANGLE, "raw": RAW}[chain.table]
    point = HookPoint.PREROUTING if chain.incoming else HookPoint.OUTPUT
    name = f"{chain.table}_{'received' if chain.incoming else 'sent'}"
    return Chain(name, tuple(rules), Hook(kind=kind, point=point, priority=priority))


def _phrases(step: Step, versions: tuple[Version, ...], sets: dict[str, Set]) -> Iterator[Phrase]:
    """Yield the nftables rules of a step. A step that compares addresses needs a rule for each IP version."""
    compared = any(isinstance(test, Networks) for test in step.tests)
    deed = _deed(step.deed)
    for version in versions if compared else (None,):
        words = [_words(test, version, sets) for test in step.tests]
        if None not in words:
            yield (*(part for word in words if word is not None for part in word), *deed)


def _words(test: Test, version: Version | None, sets: dict[str, Set]) -> Phrase | None:
    """Return the expressions of a test, or ``None`` if the test never holds for this IP version."""
    match test:
        case Device(name, incoming):
            return input_interface_like(name) if incoming else output_interface_like(name)
        case Transport(protocol, ports, negate, source):
            if source:
                return source_port(protocol, ports[0])
            each = [destination_port(protocol, port, negate=negate) for port in ports]
            return tuple(word for words in each for word in words) or protocol_is(protocol)
        case Networks(name, networks, source, negate):
            assert version is not None
            mine = tuple(collapse_addresses(each for each in networks if each.version == version))  # type: ignore[type-var]
            family = _FAMILIES[version]
            if not mine:
                return () if negate else None
            made = _network_set(f"{name}{version}", version, mine)
            sets[made.name] = made
            return address_in(family, made.name, source=source, negate=negate)
        case Owner(number, group, negate):
            return group_is(number, negate=negate) if group else user_is(number, negate=negate)
        case Invalid():
            return connection_state(CT_INVALID)


def _network_set(name: str, version: Version, networks: Iterable[IpNetwork]) -> Set:
    elements = frozenset(Element(each[0].packed, last=each[-1].packed) for each in networks)
    key = SetKey.IPV4_ADDRESS if version == 4 else SetKey.IPV6_ADDRESS
    return Set(name, key, elements, interval=True)


def _deed(deed: Deed) -> Phrase:
    match deed:
        case Pass():
            return return_()
        case Redirect(port):
            return redirect_to(port)
        case Zone(number):
            return set_ct_zone(number)
        case Drop():
            return drop()
        case _:
            assert_never(deed)
