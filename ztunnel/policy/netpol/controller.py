"""Follows objects and keeps the node's table in the state that they describe.

Until every object has been read, the table of an earlier run stays unchanged. While the source is unreachable, the
last table stays. It also stays after the controller stops; only ``ztunnel netpol cleanup`` removes it.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tproxy.aio import rtnetlink
from tproxy.aio.conntrack import forget_flows
from tproxy.aio.netlink import NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.aio.table import KeptTable
from tproxy.conntrack import Flow
from tproxy.errors import MissingFeature, TproxyError
from tproxy.expressions import IpAddress
from tproxy.packets import Interpreter, Packet
from xds.model import calico as c
from xds.model.address import IpNetwork
from ztunnel.kube.objects import Changes, EventSink, ObjectKey, ObjectSource, not_read
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.table_builder import Built, TableBuilder, Unseen, local_endpoints
from ztunnel.policy.policysync.cluster import Publisher
from ztunnel.policy.policysync.problems import ProblemReports
from ztunnel.policy.policysync.view import excerpt

log = logging.getLogger(__name__)

_RETRY_S = 1.0
#: Seconds between two checks for changes by other programs, in case a notification was missed.
_RECHECK_S = 60.0
#: The least time between two checks of open connections. Dumping 100,000 entries of conntrack takes about a
#: second.
_JUDGE_S = 1.0


@dataclass(slots=True)
class Counts:
    """Counters of the controller since its start."""

    applied: int = 0
    failed: int = 0
    repaired: int = 0
    ended: int = 0
    last_apply_s: float = 0.0


@dataclass(slots=True)
class _Work:
    """The data that only the worker thread uses: objects, their compiled form, and the table."""

    node: str
    builder: TableBuilder
    objects: PolicyObjects
    compiler: Compiler = field(default_factory=Compiler)

    def take(self, changes: Changes) -> None:
        self.compiler.apply(self.objects.changes(changes.objects))

    def build(self) -> Built:
        problems = self.objects.problems
        notes = [f"{key}: {problem}" for key, problem in sorted(problems.items())]
        return self.builder.build(self.compiler.compiled, self.node, notes)

    def excerpt(self, ours: set[IpAddress]) -> Compiled:
        """Return a copy of all data that this node's proxies need to decide like the table.

        Args:
            ours: the node's own addresses.
        """
        found = excerpt(self.compiler.compiled, local_endpoints(self.compiler.compiled, self.node))
        found.ip_sets[c.NODE_ADDRESSES] = (c.IpSetType.IP, frozenset(map(str, ours)))
        return found


class Controller:
    """Keeps one node's nftables table up to date.

    Args:
        node: name of this node; its pods are policed.
        events: reports objects that cannot be applied as written.
        tunnels, pod_cidrs: see :class:`~ztunnel.policy.netpol.table_builder.TableBuilder`.
        netns: the network namespace of the table and of the connections that it filters.
        proxies: receives the policies of this node's pods once all objects have been read, and after each change,
            even while the kernel refuses the table, because a proxy can still enforce them.
        nodes: whether the source includes Node objects; see :class:`~ztunnel.policy.calico.objects.PolicyObjects`.

    Attributes:
        synced: whether every object has been received.
        in_force: whether the kernel has the latest table.
        built: the last desired table.
    """

    def __init__(
        self,
        source: ObjectSource,
        table: KeptTable,
        node: str,
        events: EventSink,
        *,
        tunnels: bool = False,
        netns: Netns | None = None,
        proxies: Publisher | None = None,
        pod_cidrs: tuple[IpNetwork, ...] = (),
        nodes: bool = True,
    ) -> None:
        self._proxies = proxies
        self._published = True
        self._source = source
        self._table = table
        self._events = events
        self._netns = netns
        builder = TableBuilder(tunnels=tunnels, pod_cidrs=pod_cidrs)
        self._work = _Work(node, builder, PolicyObjects(nodes=nodes))
        self._reports = ProblemReports(events)
        self._unseen: set[Unseen] = set()
        self._failure = ""
        # An earlier run can have been killed after it had changed the table and before it had ended connections.
        self._judge = True
        self._judged_at = 0.0
        self.counts = Counts()
        self.synced = False
        self.in_force = False
        self.built: Built | None = None

    @property
    def problems(self) -> int:
        """The number of objects that are not enforced as written."""
        return len(self._work.objects.problems)

    def unready(self, faults: Mapping[str, str]) -> str:
        """Return why the node's table is not what the objects want. Empty if it is.

        Args:
            faults: see :attr:`~ztunnel.kube.objects.WatchedSource.faults`.
        """
        if not self.synced:
            return not_read(faults)
        return "" if self.in_force else self._failure or "the table has not been applied yet"

    async def run(self, *, once: bool = False) -> None:
        """Follow the source until cancelled, or with ``once`` until the first table is applied."""
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._source.next(), name="netpol source")
            try:
                while not (once and self.in_force):
                    following = await self._turn(group, following)
            finally:
                following.cancel()

    async def _turn(self, group: asyncio.TaskGroup, following: "asyncio.Task[Changes]") -> "asyncio.Task[Changes]":
        """Wait for one event and handle it. Return the task that is waiting for the source."""
        disturbed = group.create_task(self._table.disturbed.wait(), name="netpol disturbed")
        try:
            done, _ = await asyncio.wait(
                {following, disturbed}, timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            disturbed.cancel()
        changed = following in done
        if changed:
            changes = following.result()
            following = group.create_task(self._source.next(), name="netpol source")
            await self._table.in_thread(lambda: self._work.take(changes))
            self.synced = self.synced or changes.synced
            self._reports.report(self._work.objects.problems)
        if self.synced and self._proxies is not None and (changed or not done):
            await self._publish(self._proxies)
        foreign = self._table.disturbed.is_set()
        self._table.disturbed.clear()
        if self.synced and (changed or foreign or not done):
            await self._apply(foreign=foreign)
        return following

    async def _publish(self, proxies: Publisher) -> None:
        """Send the current policies to the node's proxies, unless they are unchanged."""
        try:
            # The node's own addresses are read each time, because they change with interfaces, and include a pod's
            # gateway.
            found = await self._table.in_thread(lambda: self._work.excerpt(local_addresses(self._netns)))
        except TproxyError as error:
            self._published = False
            log.error("policies not sent to the proxies error=%s; tried again", error)
            return
        self._published = True
        proxies.publish(found)

    def _patience(self) -> float:
        if not self.synced:
            return _RECHECK_S
        if not self.in_force:
            return _RETRY_S
        if self._judge:
            return max(0.0, self._judged_at + _JUDGE_S - time.monotonic())
        return _RECHECK_S if self._published else _RETRY_S

    async def _apply(self, *, foreign: bool) -> None:
        began = time.monotonic()
        try:
            built = self.built = await self._table.in_thread(self._work.build)
            steps = await self._table.apply(built.table)
        except TproxyError as error:
            self.in_force = False
            self.counts.failed += 1
            if str(error) != self._failure:
                log.error("table not applied error=%s; the last one stays", error)
            self._failure = str(error)
            return
        self._failure = ""
        self.in_force = True
        self._report_unseen(built)
        if steps:
            self.counts.applied += 1
            self.counts.last_apply_s = time.monotonic() - began
            self._judge = True
            if foreign:
                self.counts.repaired += 1
                log.warning("another program changed table %s, repaired changes=%d", built.table.name, len(steps))
            pods = {direction.value: len(found) for direction, found in built.policed.items()}
            log.info(
                "table applied changes=%d ingress_pods=%d egress_pods=%d duration=%.0fms",
                len(steps), pods["ingress"], pods["egress"], self.counts.last_apply_s * 1000,
            )  # fmt: skip
        if self._judge and time.monotonic() >= self._judged_at + _JUDGE_S:
            await self._judge_again(built)

    async def _judge_again(self, built: Built) -> None:
        """End open connections that the new table would refuse if they began now. (NetworkPolicy permits either
        behaviour.)
        """
        self._judge = False
        self._judged_at = time.monotonic()
        try:
            ended = await self._table.in_thread(lambda: end_connections(built, self._netns))
        except MissingFeature as error:
            log.warning("forbidden open connections not ended error=%s", error)
            return
        except TproxyError as error:
            log.warning("open connections not checked error=%s", error)
            self._judge = True
            return
        self.counts.ended += len(ended)
        for flow in ended[:10]:
            log.info("connection ended, policy no longer allows it flow=%s", flow)
        if len(ended) > 10:
            log.info("connections ended more=%d", len(ended) - 10)

    def _report_unseen(self, built: Built) -> None:
        for unseen in built.unseen:
            if unseen not in self._unseen:
                self._events.event(_key_of(unseen.policy), "PolicyStricterInKernel", str(unseen))
        self._unseen = set(built.unseen)


def _key_of(policy: c.PolicyId) -> ObjectKey:
    """Return the key of the object that a policy was made from."""
    kind = policy.kind.removeprefix("Kubernetes")
    if policy.kind == "NetworkPolicy":  # Calico's
        kind = "NetworkPolicy.projectcalico.org"
    return ObjectKey(kind, policy.namespace, policy.name)


def end_connections(built: Built, netns: Netns | None = None) -> list[Flow]:
    """Delete the conntrack entries of policed pods' open connections that this table would refuse as new ones.

    The call blocks. The node's own connections are left out, because their packets pass no forward hook.

    Raises:
        TproxyError: see :func:`~tproxy.aio.conntrack.forget_flows`.
    """
    policed = {
        element.key for item in built.table.sets if item.name.startswith("policed") for element in item.elements
    }
    if not policed:
        return []
    made = Interpreter(built.table)
    ours = local_addresses(netns)
    # A busy node has a hundred thousand flows, mostly between the same clients and servers. Evaluating each flow
    # would delay further changes of policies by many seconds.
    with_source_ports = made.reads_source_ports
    judged: dict[Packet, bool] = {}

    def unwanted(flow: Flow) -> bool:
        if flow.source.packed not in policed and flow.destination.packed not in policed:
            return False
        if flow.source in ours or flow.destination in ours:
            return False
        packet = Packet(
            source=flow.source,
            destination=flow.destination,
            protocol=flow.protocol,
            source_port=flow.source_port if with_source_ports else 0,
            destination_port=flow.destination_port,
            icmp_type=flow.icmp[0],
            icmp_code=flow.icmp[1],
        )
        accepted = judged.get(packet)
        if accepted is None:
            accepted = judged[packet] = made.judge(packet).accepted
        return not accepted

    return forget_flows(unwanted, netns)


def local_addresses(netns: Netns | None = None) -> set[IpAddress]:
    """Return the node's own addresses; blocks."""
    with NetlinkSocket(NETLINK_ROUTE, netns) as link:
        links = [rtnetlink.read_link(body) for body in link.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))]
        names = {item.index: item.name for item in links}
        bodies = link.dump(rtnetlink.dump_request(rtnetlink.RTM_GETADDR))
    return {found.interface.ip for body in bodies if (found := rtnetlink.read_address(body, names)) is not None}
