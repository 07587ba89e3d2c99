"""Reads our resources from the kernel, applies the desired state, and detects changes by others.

:class:`Kernel` owns one thread. Netlink requests, sysctl writes and namespace changes happen only in that thread,
one after the other, so the event loop never waits for the kernel's RTNL or nftables lock. :class:`BlockingKernel`
does the same work without a loop.

At its end, every apply reads the resources back and compares them with the desired state. So if the kernel
acknowledges a rule but stores a different one, the apply fails at once, and the fault does not surface later in
traffic.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, assert_never

from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, NetlinkSocket, drain, monitor_socket
from tproxy.aio.netns import Netns
from tproxy.aio.sysctl_memory import SysctlMemory, cookie_of
from tproxy.diff import diff
from tproxy.errors import KernelRefused, MissingFeature, NeedCapability, NotOurs, TproxyError, UnknownInterface
from tproxy.expressions import Fib, Nat, Redirect, SocketLookup, Tproxy
from tproxy.operations import (
    AddAddress,
    AddIpRule,
    AddRoute,
    AppendRule,
    CreatePair,
    DeleteAddress,
    DeleteIpRule,
    DeletePair,
    DeleteRoute,
    Forget,
    NftStep,
    NftTransaction,
    Operation,
    Remember,
    SetSysctl,
    SetUp,
)
from tproxy.render import nftables, nftables_dump
from tproxy.render.nf_tables import (
    NFTA_RULE_TABLE,
    NFTA_SET_ELEM_LIST_SET,
    NFTA_SET_ELEM_LIST_TABLE,
    NFTA_TABLE_NAME,
)
from tproxy.render.text import operation_text
from tproxy.resources import End, Namespace, NamespaceName, Ownership, State, SysctlKey, VethPair
from tproxy.wire import Message, text

log = logging.getLogger(__name__)
T = TypeVar("T")

_GONE = {errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.EADDRNOTAVAIL}
# The netlink multicast groups: RTNLGRP_ LINK, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE,
# IPV6_RULE, and NFNLGRP_NFTABLES
_ROUTE_GROUPS = (1, 5, 7, 8, 9, 11, 19)
_NFT_GROUPS = (7,)
# Notifications that arrive within this time of one another cause only one read. Bursts come from kube-proxy
# rewriting its tables, and from our own changes. A guess.
_SETTLE_S = 0.05
_MAX_ROUNDS = 4
# The longest wait for devices. The kernel's linkwatch handles non-urgent devices once a second
# (net/core/link_watch.c).
_RUNNING_S = 1.5
_RUNNING_POLL_S = 0.005


class _OpenNamespace:
    """One network namespace with its two netlink sockets and a cache of its links."""

    def __init__(self, name: NamespaceName, netns: Netns) -> None:
        self.name = name
        self.netns = netns
        self.route = NetlinkSocket(NETLINK_ROUTE, netns)
        try:
            self.nft = NetlinkSocket(NETLINK_NETFILTER, netns)
        except BaseException:
            self.route.close()
            raise
        self.links: list[rtnetlink.Link] = []
        self.memory = SysctlMemory(cookie_of(netns))
        #: The sysctls whose saved values were in the nftables table at the last read.
        self.in_table: frozenset[SysctlKey] = frozenset()

    def read_links(self) -> list[rtnetlink.Link]:
        bodies = self.route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))
        self.links = [rtnetlink.read_link(body) for body in bodies]
        return self.links

    def index(self, device: str) -> int:
        # If the cache lacks the device, read the links again, because the device can be newer than the cache.
        for attempt in range(2):
            for link in self.links:
                if link.name == device:
                    return link.index
            if attempt == 0:
                self.read_links()
        raise UnknownInterface(device, self.name)

    def close(self) -> None:
        self.route.close()
        self.nft.close()


class BlockingKernel:
    """Reads and changes the kernel's state of the named network namespaces. Use it from one thread only.

    Args:
        netns: the namespaces, by their names in states. The caller closes them after closing this object.
        ownership: the tables, devices and protocol number that mark a resource as ours.

    Raises:
        NeedCapability: CAP_SYS_ADMIN is missing (to enter a namespace).
    """

    def __init__(self, netns: Mapping[NamespaceName, Netns], ownership: Ownership) -> None:
        self.ownership = ownership
        self._places: dict[NamespaceName, _OpenNamespace] = {}
        try:
            for name, namespace in netns.items():
                self._places[name] = _OpenNamespace(name, namespace)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the netlink sockets; idempotent. The namespaces stay open."""
        for place in self._places.values():
            place.close()

    def read(self, wanted: State | None = None) -> State:
        """Return our resources that exist in the kernel.

        Sysctls have no owner in the kernel, so only names in the desired state or in the memory table are read.

        Raises:
            DumpInterrupted: other programs change the same tables faster than they can be read.
        """
        for place in self._places.values():
            place.read_links()
        pairs = self._pairs()
        namespaces = {}
        for name, place in self._places.items():
            wanted_here = wanted.namespaces.get(name) if wanted is not None else None
            namespaces[name] = self._read_namespace(place, wanted_here)
        return State(namespaces, pairs)

    def _pairs(self) -> frozenset[VethPair]:
        """Return our devices as pairs. Two devices form a pair if each one's IFLA_LINK is the index of the other.

        IFLA_LINK of a veth device is the index of its peer in the peer's own namespace, which is not unique: two
        pairs can have equal numbers. So both directions must agree, and each device is used once.
        """
        ours = [
            (place.name, link)
            for place in self._places.values()
            for link in place.links
            if link.name in self.ownership.devices
        ]
        pairs = set()
        used: set[tuple[NamespaceName, str]] = set()
        # The end of a pair in the later namespace is the "left" end, like in the desired states.
        for name, link in reversed(ours):
            if (name, link.name) in used:
                continue
            used.add((name, link.name))
            other = next(
                (
                    (peer_name, peer)
                    for peer_name, peer in reversed(ours)
                    if (peer_name, peer.name) not in used
                    and link.kind == peer.kind == "veth"
                    and (link.peer_index, link.index) == (peer.index, peer.peer_index)
                ),
                None,
            )
            left = End(name, link.name)
            if other is None:
                pairs.add(VethPair(left, None))
                continue
            used.add((other[0], other[1].name))
            pairs.add(VethPair(left, End(other[0], other[1].name)))
        return frozenset(pairs)

    def _read_namespace(self, place: _OpenNamespace, wanted: Namespace | None) -> Namespace:
        protocol = self.ownership.protocol
        names = {link.index: link.name for link in place.links}
        ours = {index: name for index, name in names.items() if name in self.ownership.devices}
        rules = place.route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETRULE))
        routes = place.route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETROUTE, protocol=protocol))
        addresses = place.route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETADDR))
        tables, in_table = nftables_dump.read_tables(self._dump_nft(place), self.ownership)
        place.in_table = frozenset(in_table)
        remembered = {**place.memory.load(), **in_table}
        keys = set(remembered) | (set(wanted.sysctls) if wanted is not None else set())
        with place.netns.entered():
            sysctls = {key: value for key in keys if (value := _read_sysctl(key)) is not None}
        return Namespace(
            tables=tables,
            rules=frozenset(rule for body in rules if (rule := rtnetlink.read_rule(body, protocol))),
            routes=frozenset(route for body in routes if (route := rtnetlink.read_route(body, protocol, names))),
            addresses=frozenset(item for body in addresses if (item := rtnetlink.read_address(body, ours))),
            up=frozenset(link.name for link in place.links if link.up and link.index in ours),
            sysctls=sysctls,
            remembered=remembered,
        )

    def _dump_nft(self, place: _OpenNamespace) -> nftables_dump.NftDump:
        ours = self.ownership.tables | {self.ownership.memory_table}

        def get(kind: int, *filters: bytes, family: int = 0) -> list[bytes]:
            message = nftables.nft_message(kind, family, nftables.DUMP, *filters, about="read nftables")
            return [body for body in place.nft.dump(message) if _table_name(body) in ours]

        # Tables are dumped first. If no table is ours, chains and sets are not dumped, because these dumps cover
        # every table, including kube-proxy's with thousands of chains.
        tables = get(nftables.NFT_GETTABLE)
        if not tables:
            return nftables_dump.NftDump((), (), (), (), {})
        sets = get(nftables.NFT_GETSET)
        elements = {}
        for key in map(nftables_dump.set_key, sets):
            family, table, name = key
            elements[key] = get(
                nftables.NFT_GETSETELEM,
                text(NFTA_SET_ELEM_LIST_TABLE, table),
                text(NFTA_SET_ELEM_LIST_SET, name),
                family=family,
            )
        rules = [
            body for table in sorted(ours) for body in get(nftables.NFT_GETRULE, text(NFTA_RULE_TABLE, table))
        ]
        return nftables_dump.NftDump(tables, get(nftables.NFT_GETCHAIN), rules, sets, elements)

    def apply(self, wanted: State) -> tuple[Operation, ...]:
        """Change the kernel's state to the desired one and return the operations. Idempotent.

        Raises:
            TproxyError: the first operation that failed. Earlier ones stay applied, and the next call
                continues from there.
        """
        done: list[Operation] = []
        # Each round reads, applies the difference and reads again. Only an empty difference is success, because it
        # proves that the kernel stored the sent values. Further rounds are needed if others change the same
        # resources meanwhile, or if one operation undoes the result of another: without its last IPv4 address a
        # device loses its routes (fib_inetaddr_event in net/ipv4/fib_frontend.c). If a difference remains after
        # four rounds, the kernel stores a resource in another form, and more rounds would not help.
        for _ in range(_MAX_ROUNDS):
            operations = diff(self.read(wanted), wanted)
            if not operations:
                if any(isinstance(operation, SetUp) for operation in done):
                    self._wait_until_running(wanted)
                return tuple(done)
            for operation in operations:
                self._carry_out(operation)
            done += operations
        raise KernelRefused(f"to keep {'; '.join(operation_text(operations[0]))}", errno.EAGAIN)

    def _wait_until_running(self, wanted: State) -> None:
        """Wait until the desired devices are operational, for at most ``_RUNNING_S``."""
        # IFF_UP shows only the administrative state. A veth device passes packets once the kernel's linkwatch has
        # activated its queue. Until then, its noop qdisc drops packets. linkwatch handles a device at once only if
        # its carrier is urgent (linkwatch_urgent_event in net/core/link_watch.c), and all others once a second.
        # Without this wait the first SYN after an apply is lost and costs the client its retransmission time of 1
        # s.
        deadline = time.monotonic() + _RUNNING_S
        for name, namespace in wanted.namespaces.items():
            place = self._places[name]
            while time.monotonic() < deadline:
                running = {link.name for link in place.read_links() if link.running}
                if namespace.up <= running:
                    break
                time.sleep(_RUNNING_POLL_S)

    def _carry_out(self, operation: Operation) -> None:
        log.debug("apply operation=%s", operation)
        protocol = self.ownership.protocol
        match operation:
            case NftTransaction(namespace, steps):
                self._transaction(namespace, steps)
            case Remember(namespace, values):
                self._places[namespace].memory.save(values)
                self._transaction(namespace, nftables.memory_steps(self.ownership.memory_table, values))
            case Forget(namespace, values, everything):
                self._forget(self._places[namespace], values, everything=everything)
            case CreatePair(pair):
                if pair.right is None:
                    raise ValueError(pair)
                peer = self._places[pair.right.namespace].netns.fileno()
                message = rtnetlink.create_pair(pair, peer)
                self._route(pair.left.namespace, operation, lambda place: message, MissingFeature("veth", "veth"))
            case DeletePair(pair):
                end = pair.left
                self._route(end.namespace, operation, lambda place: rtnetlink.delete_link(place.index(end.device)))
            case SetUp(namespace, device):
                self._route(namespace, operation, lambda place: rtnetlink.set_up(place.index(device)))
            case AddAddress(namespace, address) | DeleteAddress(namespace, address):
                kind = rtnetlink.RTM_NEWADDR if isinstance(operation, AddAddress) else rtnetlink.RTM_DELADDR
                self._route(
                    namespace,
                    operation,
                    lambda place: rtnetlink.address_message(kind, address, place.index(address.device)),
                )
            case AddRoute(namespace, route, replace):
                self._route(
                    namespace,
                    operation,
                    lambda place: rtnetlink.route_message(
                        rtnetlink.RTM_NEWROUTE, route, protocol, place.index, replace=replace
                    ),
                )
            case DeleteRoute(namespace, route):
                self._route(
                    namespace,
                    operation,
                    lambda place: rtnetlink.route_message(rtnetlink.RTM_DELROUTE, route, protocol, place.index),
                )
            case AddIpRule(namespace, rule) | DeleteIpRule(namespace, rule):
                kind = rtnetlink.RTM_NEWRULE if isinstance(operation, AddIpRule) else rtnetlink.RTM_DELRULE
                self._route(namespace, operation, lambda place: rtnetlink.rule_message(kind, rule, protocol))
            case SetSysctl(namespace, key, value, restore):
                place = self._places[namespace]
                with place.netns.entered():
                    _write_sysctl(key, value, namespace, restore=restore)
            case _:
                assert_never(operation)

    def _forget(self, place: _OpenNamespace, values: Mapping[SysctlKey, str], *, everything: bool) -> None:
        """Delete saved sysctl values from the file, and from the nftables table unless the table was already
        deleted.
        """
        in_table = {key: value for key, value in values.items() if key in place.in_table}
        if in_table:
            steps = nftables.forget_steps(self.ownership.memory_table, in_table, everything=everything)
            self._transaction(place.name, steps)
        place.memory.forget(values)

    def _route(
        self,
        namespace: NamespaceName,
        operation: Operation,
        message: Callable[[_OpenNamespace], Message],
        unsupported: MissingFeature | None = None,
    ) -> None:
        place = self._places[namespace]
        # Drop the link caches of all namespaces. A veth pair changes the links of two namespaces, and the kernel
        # can reuse the index of a deleted device.
        if isinstance(operation, CreatePair | DeletePair):
            for other in self._places.values():
                other.links = []
        doing = "; ".join(operation_text(operation))
        removes = isinstance(operation, DeletePair | DeleteAddress | DeleteRoute | DeleteIpRule)
        try:
            place.route.request(message(place))
        except UnknownInterface:
            # A removal can find its device missing. The kernel then has already removed the device's resources.
            if not removes:
                raise
        except KernelRefused as error:
            if removes and error.code in _GONE:
                return
            if error.code == errno.EEXIST:
                raise NotOurs(doing) from error
            if error.code == errno.EOPNOTSUPP and unsupported is not None:
                raise unsupported from error
            raise KernelRefused(doing, error.code) from error
        except NeedCapability as error:
            raise NeedCapability(error.capability, f"change routes and devices ({namespace})") from error

    def _transaction(self, namespace: NamespaceName, steps: tuple[NftStep, ...]) -> None:
        try:
            self._places[namespace].nft.batch(nftables.nft_batch(steps))
        except KernelRefused as error:
            if error.code in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOENT):
                raise MissingFeature(error.doing, _modules(steps)) from error
            raise
        except NeedCapability as error:
            raise NeedCapability(error.capability, f"change nftables ({namespace})") from error


def _table_name(body: bytes) -> str:
    _, parts = nftables_dump.nft_parts(body)
    return parts.get(NFTA_TABLE_NAME, b"").rstrip(b"\0").decode(errors="replace")


def _modules(steps: tuple[NftStep, ...]) -> str:
    needed = {"nf_tables"}
    by_type = {
        Tproxy: "nft_tproxy",
        SocketLookup: "nft_socket",
        Fib: "nft_fib_inet",
        Nat: "nft_nat",
        Redirect: "nft_redir",
    }
    for step in steps:
        if isinstance(step, AppendRule):
            needed |= {by_type[type(word)] for word in step.rule.phrase if type(word) in by_type}
    return ", ".join(sorted(needed))


def _read_sysctl(key: SysctlKey) -> str | None:
    try:
        return (Path("/proc/sys") / key.path).read_text().strip()
    except FileNotFoundError:
        return None


def _write_sysctl(key: SysctlKey, value: str, namespace: str, *, restore: bool) -> None:
    try:
        (Path("/proc/sys") / key.path).write_text(value)
    except FileNotFoundError as error:
        if not restore:
            raise UnknownInterface(key.device, namespace) from error
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            doing = f"write /proc/sys/{key.path}={value} (is /proc/sys mounted read-only?)"
            raise NeedCapability("CAP_NET_ADMIN", doing) from error
        raise KernelRefused(f"sysctl {key.path}={value}", error.errno or 0) from error


class Kernel:
    """Runs a :class:`BlockingKernel` in one thread, for use on an event loop.

    Use it as ``async with Kernel(netns, ownership) as kernel``. The caller closes the namespaces after that.
    """

    def __init__(self, netns: Mapping[NamespaceName, Netns], ownership: Ownership) -> None:
        self._netns = netns
        self._ownership = ownership
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="netlink")
        self._blocking: BlockingKernel | None = None

    async def __aenter__(self) -> Self:
        try:
            self._blocking = await self._in_thread(lambda: BlockingKernel(self._netns, self._ownership))
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Wait until the thread has finished its current transaction, which takes milliseconds.
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._blocking is not None:
            self._blocking.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _ready(self) -> BlockingKernel:
        if self._blocking is None:
            raise RuntimeError("use `async with Kernel(...)`")
        return self._blocking

    async def read(self, wanted: State | None = None) -> State:
        blocking = self._ready()
        return await self._in_thread(lambda: blocking.read(wanted))

    async def apply(self, wanted: State) -> tuple[Operation, ...]:
        """Run :meth:`BlockingKernel.apply` in the thread. Cancelling the call does not stop an apply that is
        already running in the thread.
        """
        blocking = self._ready()
        return await self._in_thread(lambda: blocking.apply(wanted))

    async def keep(
        self, wanted: Callable[[], State], *, recheck_s: float = 5.0, changed: asyncio.Event | None = None
    ) -> AsyncGenerator[tuple[Operation, ...] | TproxyError, None]:
        """Apply the desired state now, after every change reported by the kernel, and every ``recheck_s`` seconds.

        Yields the operations of each apply that changed the kernel's state, or the error of a failed apply. After
        an error, the next change or recheck tries again. The kernel does not report changes of sysctls, so these
        wait for the recheck.

        Args:
            wanted: returns the desired state. It is called before each apply.
            recheck_s: seconds between checks.
            changed: set by the caller when the desired state might have changed. This method clears it.
        """
        changed = changed or asyncio.Event()
        with contextlib.ExitStack() as stack:
            # Listening starts before the first read, so that no change between the two is missed. Our own apply
            # is reported, too, and costs one more read with an empty difference.
            self._listen(changed, stack)
            while True:
                changed.clear()
                result: tuple[Operation, ...] | TproxyError
                try:
                    result = await self.apply(wanted())
                except TproxyError as error:
                    result = error
                if result:
                    yield result
                try:
                    async with asyncio.timeout(recheck_s):
                        await changed.wait()
                    await asyncio.sleep(_SETTLE_S)
                except TimeoutError:
                    pass

    def _listen(self, changed: asyncio.Event, stack: contextlib.ExitStack) -> None:
        loop = asyncio.get_running_loop()
        for netns in self._netns.values():
            for protocol, groups in ((NETLINK_ROUTE, _ROUTE_GROUPS), (NETLINK_NETFILTER, _NFT_GROUPS)):
                sock = monitor_socket(protocol, groups, netns)
                stack.callback(sock.close)
                loop.add_reader(sock.fileno(), _noticed, sock, changed)
                stack.callback(loop.remove_reader, sock.fileno())


def _noticed(sock: socket.socket, changed: asyncio.Event) -> None:
    drain(sock)
    changed.set()
