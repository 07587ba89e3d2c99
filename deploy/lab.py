"""Builds a network of nodes and pods from namespaces and veth pairs on one machine, for tests, demo and benches.

Every node is a namespace that routes. Every pod and every ztunnel is a namespace whose ``eth0`` is one end of a
veth pair to its node, as with a simple CNI: the node's end has the pod's name, the node's gateway address and a
route to the pod. A bridge in another namespace connects the nodes. All namespaces have IPv4 and IPv6.

::

    node i       172.18.0.<i>     fd00:172:18::<i>
    gateway      10.244.<i>.1     fd00:10:244:<i>::1
    ztunnel      10.244.<i>.5     fd00:10:244:<i>::5
    pods         10.244.<i>.10..  fd00:10:244:<i>::10..

``ip netns`` shows the namespaces as ``pt-<pid>-<n>-<name>``. Leaving the ``with`` removes them, also after an
exception, SIGINT or SIGTERM. The next lab removes the namespaces of a killed process.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface, ip_network
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER, RUN, Netns, mount, names, unpublish, unshare
from tproxy.aio.sysctl_memory import SysctlMemory, cookie_of
from tproxy.errors import KernelRefused, NeedCapability, TproxyError
from tproxy.node import Member, Node
from tproxy.resources import Address, End, IpAddress, IpNetwork, NamespaceName, Route, VethPair

# The interface index of every eth0, and the first index of the veth pairs' other ends. Equal indexes would delay
# linkwatch; see create_pair.
_ETH0, _FIRST_INDEX = 50, 100
_STATIC = 4  # RTPROT_STATIC
_MAIN = 254
_STOP_S = 3.0
_RUNNING_S = 3.0
_ALL_LINKS = rtnetlink.dump_request(rtnetlink.RTM_GETLINK)
_PREFIX = "pt-"
_instances = itertools.count(1)


class NoUserNamespaces(TproxyError):
    """An unprivileged user cannot create namespaces here. The exception's text explains what to do."""

    def __str__(self) -> str:
        return (
            f"this system lets no user but root make namespaces ({self.args[0]}): run it as root, or allow them: "
            "`sysctl user.max_user_namespaces=10000`, on Ubuntu `kernel.apparmor_restrict_unprivileged_userns=0`"
        )


class Place:
    """One namespace of the lab: a node, a pod or a ztunnel.

    ``device`` is the node's end of its veth pair, None for a node.
    """

    def __init__(
        self, lab: "Lab", name: str, netns: Netns, ipv4: IPv4Address, ipv6: IPv6Address, device: str | None
    ) -> None:
        self._lab = lab
        self.name = name
        self.netns = netns
        self.ipv4 = ipv4
        self.ipv6 = ipv6
        self.device = device

    @property
    def addresses(self) -> tuple[IpAddress, IpAddress]:
        """The node's, pod's or ztunnel's IPv4 and IPv6 addresses."""
        return (self.ipv4, self.ipv6)

    def address(self, version: int) -> IpAddress:
        """Return the address of this place in IP version 4 or 6."""
        return self.ipv4 if version == 4 else self.ipv6

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a synchronous function in this thread, but in this network namespace. Sockets that it creates stay
        there.
        """
        with self.netns.entered():
            return function(*args)

    def socket(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0
    ) -> socket.socket:
        """Return a blocking socket in this network namespace; the caller closes it."""
        with self.netns.entered():
            return socket.socket(family, kind, protocol)

    def popen(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        start: "Callable[..., subprocess.Popen[Any]]" = subprocess.Popen,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a program in this network namespace, by default as a child of this process. Leaving the lab ends
        it.
        """
        with self.netns.entered():
            process = start(args, **options)
        self._lab.own(process)
        return process

    def process(self, function: Callable[..., object], *args: Any) -> BaseProcess:
        """Start a function of an importable module in a child process, in this network namespace. Leaving the lab
        ends it.
        """
        process = multiprocessing.get_context("spawn").Process(target=function, args=args)
        with self.netns.entered():
            process.start()
        self._lab.own(process)
        return process


class Worker:
    """One node of the lab, with its ztunnel and its pods."""

    def __init__(self, number: int, place: Place, ztunnel: Place) -> None:
        self.number = number
        self.place = place
        self.ztunnel = ztunnel
        self.pods: dict[str, Place] = {}

    def gateway(self, version: int) -> IpAddress:
        """Return the gateway address that the node has on the veth pairs of its pods."""
        if version == 4:
            return _ipv4(f"10.244.{self.number}.1")
        return _ipv6(f"fd00:10:244:{self.number}::1")

    def wanted(self, members: Sequence[str] | None = None) -> Node:
        """Return the desired kernel resources of this node, for all of its pods or for ``members``."""
        chosen = self.pods if members is None else {name: self.pods[name] for name in members}
        return Node(
            host_addresses=(*self.place.addresses, self.gateway(4), self.gateway(6)),
            ztunnel_addresses=self.ztunnel.addresses,
            ztunnel_device=self.ztunnel.device or "",
            members=tuple(
                Member(uid=f"uid-{name}", addresses=pod.addresses, device=pod.device or "")
                for name, pod in chosen.items()
            ),
        )


class Lab:
    """``with Lab({"worker1": ["productpage"], "worker2": ["reviews"]}) as lab: ...``.

    Args:
        nodes: pod names by node name. A pod name is used once.
        rp_filter: the initial value of this sysctl in nodes and pods.

    Raises:
        NeedCapability: the process is not root and did not call :func:`become_root_of_own_namespaces`.
    """

    def __init__(self, nodes: Mapping[str, Sequence[str]], *, rp_filter: int = 0) -> None:
        self._plan = nodes
        self._rp_filter = rp_filter
        self.prefix = f"{_PREFIX}{os.getpid()}-{next(_instances)}-"
        self.workers: dict[str, Worker] = {}
        self._open: list[Netns] = []
        self._children: list[subprocess.Popen[Any] | BaseProcess] = []
        self._old_handler: Any = None

    def worker(self, name: str) -> Worker:
        """Return a node by name."""
        return self.workers[name]

    def pod(self, name: str) -> Place:
        """Return a pod of any node by name."""
        for worker in self.workers.values():
            if name in worker.pods:
                return worker.pods[name]
        raise KeyError(name)

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[tuple[Netns, list[str]]]:
        """Disconnect the nodes' bridge while entered.

        Yields:
            The namespace with the far ends of the nodes' veth pairs, and the ends' names by number of the node.
            The caller forwards frames between them.
        """
        fabric, ports = self._open[0], [f"port{worker.number}" for worker in self.workers.values()]
        with NetlinkSocket(NETLINK_ROUTE, fabric) as link:

            def plug(bridge: int) -> None:
                for port in ports:
                    link.request(rtnetlink.join_bridge(_index(link, port), bridge))

            plug(0)
            try:
                yield fabric, ports
            finally:
                plug(_index(link, "br0"))

    def own(self, child: "subprocess.Popen[Any] | BaseProcess") -> None:
        """End this child process when the lab ends."""
        self._children.append(child)

    def __enter__(self) -> Self:
        sweep()
        self._catch_sigterm()
        try:
            self._build()
            self._wait_until_running()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait_until_running(self) -> None:
        deadline = time.monotonic() + _RUNNING_S
        for netns in self._open:
            with NetlinkSocket(NETLINK_ROUTE, netns) as link:
                while time.monotonic() < deadline:
                    links = [rtnetlink.read_link(body) for body in link.dump(_ALL_LINKS)]
                    if all(item.running for item in links if item.kind == "veth"):
                        break
                    time.sleep(0.005)

    def close(self) -> None:
        """End all processes, and remove the names of all namespaces; idempotent."""
        for child in self._children:
            child.terminate()
        for child in self._children:
            _reap(child)
        self._children.clear()
        for netns in self._open:
            SysctlMemory(cookie_of(netns)).forget_all()
            netns.remove_name()
            netns.close()
        self._open.clear()
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None

    def _catch_sigterm(self) -> None:
        # Replace only the default handler, which would end the process at once. A handler of the application
        # stays.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.signal(signal.SIGTERM, _exit)

    def _namespace(self, name: str, *, forwards: bool) -> Netns:
        netns = Netns.create(self.prefix + name)
        self._open.append(netns)
        with netns.entered():
            conf = Path("/proc/sys/net")
            # Without duplicate address detection an address is usable at once, not after a second.
            (conf / "ipv6/conf/default/accept_dad").write_text("0")
            (conf / "ipv6/conf/default/accept_ra").write_text("0")
            for scope in ("all", "default"):
                (conf / f"ipv4/conf/{scope}/rp_filter").write_text(str(self._rp_filter))
            if forwards:
                (conf / "ipv4/ip_forward").write_text("1")
                (conf / "ipv6/conf/all/forwarding").write_text("1")
        with NetlinkSocket(NETLINK_ROUTE, netns) as link:
            link.request(rtnetlink.set_up(_index(link, "lo")))
        return netns

    def _build(self) -> None:
        fabric = self._namespace("net", forwards=False)
        with NetlinkSocket(NETLINK_ROUTE, fabric) as link:
            link.request(rtnetlink.create_bridge("br0"))
            bridge = _index(link, "br0")
            link.request(rtnetlink.set_up(bridge))
            for number, (name, pods) in enumerate(self._plan.items(), start=1):
                self._build_node(number, name, pods, fabric, link, bridge)

    def _build_node(
        self, number: int, name: str, pods: Sequence[str], fabric: Netns, fabric_link: NetlinkSocket, bridge: int
    ) -> None:
        netns = self._namespace(name, forwards=True)
        place = Place(self, name, netns, _ipv4(f"172.18.0.{number}"), _ipv6(f"fd00:172:18::{number}"), None)
        with NetlinkSocket(NETLINK_ROUTE, netns) as link:
            cable = VethPair(End(NamespaceName(name), "eth0"), End(NamespaceName("net"), f"port{number}"))
            port = _FIRST_INDEX + number
            link.request(rtnetlink.create_pair(cable, fabric.fileno(), index=_ETH0, peer_index=port))
            fabric_link.request(rtnetlink.join_bridge(port, bridge))
            eth0 = _Device(link, "eth0", _ETH0)
            eth0.set_up((f"{place.ipv4}/16", f"{place.ipv6}/64"))
            for other in range(1, len(self._plan) + 1):
                if other != number:
                    eth0.add_route(f"10.244.{other}.0/24", f"172.18.0.{other}")
                    eth0.add_route(f"fd00:10:244:{other}::/64", f"fd00:172:18::{other}")
            worker = Worker(number, place, self._attach(f"{name}-ztunnel", "v-ztunnel", number, 5, netns, link))
            self.workers[name] = worker
            for position, pod in enumerate(pods, start=10):
                device = f"v-{pod}" if len(pod) <= 13 else f"v{position}-{pod}"[:15]
                worker.pods[pod] = self._attach(pod, device, number, position, netns, link)

    def _attach(
        self, name: str, device: str, number: int, position: int, node: Netns, node_link: NetlinkSocket
    ) -> Place:
        netns = self._namespace(name, forwards=False)
        ipv4 = _ipv4(f"10.244.{number}.{position}")
        ipv6 = _ipv6(f"fd00:10:244:{number}::{position}")
        gateways = (f"10.244.{number}.1", f"fd00:10:244:{number}::1")
        with NetlinkSocket(NETLINK_ROUTE, netns) as link:
            cable = VethPair(End(NamespaceName(name), "eth0"), End(NamespaceName("node"), device))
            far = _Device(node_link, device, _FIRST_INDEX + position)
            link.request(rtnetlink.create_pair(cable, node.fileno(), index=_ETH0, peer_index=far.index))
            eth0 = _Device(link, "eth0", _ETH0)
            far.set_up((f"{gateways[0]}/32", f"{gateways[1]}/128"))
            eth0.set_up((f"{ipv4}/32", f"{ipv6}/128"))
            for gateway, everything in zip(gateways, ("0.0.0.0/0", "::/0"), strict=True):
                eth0.add_route(everything, gateway, onlink=True)
        far.add_route(f"{ipv4}/32")
        far.add_route(f"{ipv6}/128")
        return Place(self, name, netns, ipv4, ipv6, device)


def sweep() -> None:
    """Remove the names of namespaces that killed processes left; idempotent."""
    for name in names():
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            unpublish(name)


def become_root_of_own_namespaces() -> None:
    """Start this program again as root of a new user, network and mount namespace.

    Return at once if the process can already create network namespaces. Call this first in ``main``, before any
    thread exists: only a single-threaded process can create a user namespace.

    Raises:
        NoUserNamespaces: the system forbids unprivileged user namespaces.
    """
    if may_make_namespaces():
        return
    uid, gid = os.getuid(), os.getgid()
    try:
        # unshare(2) failed with EPERM, or with ENOSPC if user.max_user_namespaces is 0 (user_namespaces(7)).
        # Ubuntu's AppArmor permits the namespace, but without its capabilities.
        unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        mount("tmpfs", str(RUN.parent), "tmpfs", 0)
    except (NeedCapability, KernelRefused, OSError) as error:
        raise NoUserNamespaces(str(error)) from error
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def may_make_namespaces() -> bool:
    """Return whether this process has CAP_SYS_ADMIN and CAP_NET_ADMIN in its user namespace."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return bool(effective >> 21 & 1 and effective >> 12 & 1)
    return False


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _reap(child: "subprocess.Popen[Any] | BaseProcess") -> None:
    if isinstance(child, BaseProcess):
        child.join(_STOP_S)
        if child.is_alive():
            child.kill()
            child.join()
        child.close()
        return
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _ipv4(value: str) -> IPv4Address:
    return IPv4Address(value)


def _ipv6(value: str) -> IPv6Address:
    return IPv6Address(value)


def _index(link: NetlinkSocket, device: str) -> int:
    for body in link.dump(_ALL_LINKS):
        found = rtnetlink.read_link(body)
        if found.name == device:
            return found.index
    raise KeyError(device)


@dataclass(frozen=True, slots=True)
class _Device:
    """A network device in the namespace of ``link``."""

    link: NetlinkSocket
    name: str
    index: int

    def set_up(self, addresses: Sequence[str]) -> None:
        """Add addresses with prefix lengths to the device, and bring it up."""
        self.link.request(rtnetlink.set_up(self.index))
        for address in addresses:
            wanted = Address(self.name, ip_interface(address))
            self.link.request(rtnetlink.address_message(rtnetlink.RTM_NEWADDR, wanted, self.index))

    def add_route(self, destination: str, gateway: str | None = None, *, onlink: bool = False) -> None:
        """Add a route to the main table."""
        network: IpNetwork = ip_network(destination)
        route = Route(
            table=_MAIN,
            destination=network,
            device=self.name,
            gateway=ip_address(gateway) if gateway is not None else None,
            onlink=onlink,
        )
        kind = rtnetlink.RTM_NEWROUTE
        self.link.request(rtnetlink.route_message(kind, route, _STATIC, lambda _: self.index, replace=False))
