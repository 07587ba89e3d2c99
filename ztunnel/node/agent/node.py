"""The node agent: enrols pods in the mesh and releases them.

A pod is enrolled in two steps: its rules, then its announcement to the proxy. From the first step on its traffic
passes only through a proxy. So a pod whose announcement fails has no network (it fails closed), and it is
announced again until a proxy takes it.

A pod is released in four steps. The redirects are removed, so that new connections are direct. Open connections
through the proxy get the grace period. The proxies are notified, and abort the remaining connections. The other
rules are removed. (If the proxies were notified first, they would abort the connections that the grace period
protects.)

When the agent ends, rules stay, because a successor usually starts soon. Meanwhile proxies keep their pods. The
successor's snapshot asks them to keep every recorded pod not yet examined, because a proxy ends the pods that a
snapshot lacks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from weakref import WeakValueDictionary

from tproxy.aio.netns import Netns
from tproxy.errors import TproxyError
from tproxy.inpod import Probed
from ztunnel.node.agent.description import PodDescription
from ztunnel.node.agent.errors import AgentError, EnrolFailed, TwoAgents
from ztunnel.node.agent.kernel_thread import KernelThread
from ztunnel.node.agent.namespaces import (
    addresses,
    apply_rules,
    foreign_rules,
    open_namespace,
    proxied_connections,
    remove_rules,
    take_over_rules,
)
from ztunnel.node.agent.phase import Phase
from ztunnel.node.agent.pods_file import PodsFile
from ztunnel.node.agent.probed_pods import ProbedPods
from ztunnel.node.agent.record import Enrolled, read_record, write_record
from ztunnel.node.agent.scan import is_namespace, reopened
from ztunnel.node.agent.server import Announced, ZdsServer
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: Seconds between two announcements of a pod that no proxy has accepted yet. A proxy also retries its starts at
#: this interval.
RETRY_S = 5.0
#: Seconds between two checks of each pod's rules. A guess.
RECHECK_S = 30.0
_POLL_FILE_S = 0.2
#: The time between two counts of a leaving pod's open connections. It doubles from the first value to the second.
_POLL_CONNECTIONS_S, _SLOW_POLL_CONNECTIONS_S = 0.1, 2.0
_FIRST_WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class PodStatus:
    """The status of a pod with our rules. ``error`` is the reason why no proxy listens in it."""

    description: PodDescription
    phase: Phase
    error: str = ""


class _Pod:
    __slots__ = ("announced", "description", "error", "leave_at", "netns", "news", "phase", "recalled")

    def __init__(self, description: PodDescription, netns: Netns) -> None:
        self.description = description
        self.netns = netns
        self.phase = Phase.PENDING
        self.error = ""
        self.announced = True  # false: not in snapshots, because proxies are being notified of its end
        # State of a leaving pod: its deadline, whether it has been enrolled again, and an event for changes of
        # both.
        self.leave_at = 0.0
        self.recalled = False
        self.news = asyncio.Event()

    @property
    def info(self) -> PodInfo:
        return self.description.info


class NodeAgent:
    """Serves proxies while entered. :meth:`enrol` and :meth:`remove`, or :meth:`want`, change its pods.

    Args:
        socket: path of the socket for proxies.
        record: file with the enrolled pods, see ``record.py``. None keeps no record.
        grace_s: time that open connections of a leaving pod have to end.
        remove_on_exit: release all pods when the agent ends.
        probe_user: numeric user of the node's kubelet, whose probes bypass the proxy. None if there is no kubelet.
        on_change: called with a pod whose phase or error has changed, or that is gone; must not block.
        is_still: returns whether a description still names the namespace that the pod was enrolled in. If not, the
            pod is released. It raises TproxyError if that cannot be known now. By default the name is looked up
            again.
        held: whether proxies get no snapshot before :meth:`expect`.

    Raises:
        OSError: on entering, the socket cannot be bound or the record not read.
    """

    def __init__(
        self,
        socket: Path,
        *,
        record: Path | None = None,
        grace_s: float = 10.0,
        remove_on_exit: bool = False,
        probe_user: int | None = None,
        on_change: Callable[[PodUid], object] = lambda uid: None,
        is_still: "Callable[[PodDescription, Netns], bool] | None" = None,
        held: bool = False,
    ) -> None:
        self._record = record
        self._grace_s = grace_s
        self._remove_on_exit = remove_on_exit
        self._pods: dict[PodUid, _Pod] = {}
        self._wanted: dict[PodUid, PodDescription] = {}
        self._edited = asyncio.Event()
        self._steering: set[PodUid] = set()
        self._locks: WeakValueDictionary[PodUid, asyncio.Lock] = WeakValueDictionary()
        self._recorded: dict[PodUid, Enrolled] = {}
        self._unseen: set[PodUid] = set()  # recorded pods that this agent has not examined, or not to the end
        self._unremoved: set[PodUid] = set()  # released pods whose rules the kernel has not removed yet
        self._expected: set[PodUid] = set()  # pods that another agent enrolled and this one has not yet
        self._on_change = on_change
        self._is_still = is_still or _is_still
        #: The number of times that rules of a pod were repaired after another program had changed them.
        self.repaired = 0
        self._watchers: set[asyncio.Event] = set()
        self._server = ZdsServer(socket, self._announced, on_answer=self._answered, held=held)
        self._tasks = Tasks("agent")
        self._thread = KernelThread()
        #: The pods that kubelet can probe.
        self.probes = ProbedPods(self._thread, probe_user)

    @property
    def proxies(self) -> int:
        """The number of connected proxies."""
        return self._server.proxies

    def pods(self) -> Mapping[PodUid, PodStatus]:
        """Return every pod with our rules."""
        return {uid: PodStatus(pod.description, pod.phase, pod.error) for uid, pod in self._pods.items()}

    def pod(self, uid: PodUid) -> PodStatus | None:
        """Return a pod with our rules by its uid."""
        pod = self._pods.get(uid)
        return None if pod is None else PodStatus(pod.description, pod.phase, pod.error)

    def netns(self, uid: PodUid) -> Netns | None:
        """Return the open namespace of a pod with our rules. The agent owns it, and can close it at any time."""
        pod = self._pods.get(uid)
        return None if pod is None else pod.netns

    @property
    def left_over(self) -> Mapping[PodUid, Enrolled]:
        """Pods of an earlier agent, which this agent has neither enrolled nor released yet."""
        return {uid: self._recorded[uid] for uid in self._unseen}

    async def __aenter__(self) -> Self:
        if self._record is not None:
            try:
                self._recorded = read_record(self._record)
                self._unseen = set(self._recorded)
            except ValueError as error:
                # Without the record, pods that left meanwhile keep their rules. If the agent refused to start, all
                # pods would suffer.
                log.error("record of enrolled pods not usable error=%s", error)
        await self._server.__aenter__()
        self._tasks.keep(self._keep, "keep")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.close()
        if self._remove_on_exit:
            await asyncio.gather(
                *(self.remove(uid) for uid in list(self._pods)), *(self.forget(uid) for uid in list(self._unseen))
            )
            await self.probes.end()
        await self._server.__aexit__(*exception)
        for pod in self._pods.values():
            pod.netns.close()
        self._thread.close()

    def _lock(self, uid: PodUid) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    # Pods

    async def enrol(self, description: PodDescription) -> Phase:
        """Enrol a pod, or apply a changed description to an enrolled one; idempotent.

        If the same pod is leaving, and is still in the same namespace, it stays in the mesh and keeps its
        connections.

        Returns:
            ``ENABLED`` if a proxy listens in it. ``PENDING`` if none does: the pod has no network, and its
            announcement is repeated.

        Raises:
            EnrolFailed: the namespace or the rules failed. A pod that was not enrolled before is unchanged.
        """
        leaving = self._pods.get(description.uid)
        if leaving is not None and leaving.phase is Phase.LEAVING:
            try:
                leaving.recalled = leaving.info == description.info and _is_still(description, leaving.netns)
            except TproxyError as error:
                raise EnrolFailed(_named(description), str(error)) from error
            if not leaving.recalled:
                leaving.leave_at = 0.0
            leaving.news.set()
        async with self._lock(description.uid):
            netns = self._open(description)
            pod = self._pods.get(description.uid)
            adopted = False
            try:
                while pod is not None and (pod.netns.inode, pod.info) != (netns.inode, description.info):
                    # A pod in another namespace has a new sandbox, and the processes of the old one have ended.
                    await self._leave(pod, self._grace_s if pod.netns.inode == netns.inode else 0)
                    pod = self._pods.get(description.uid)
                if pod is None:
                    pod = await self._enter(description, netns)
                    adopted = True
                else:
                    await self._change(pod, description)
            finally:
                if not adopted:
                    netns.close()
            if pod.phase is Phase.PENDING:
                await self._announce(pod)
            return pod.phase

    def _open(self, description: PodDescription) -> Netns:
        try:
            netns = open_namespace(description)
        except (TproxyError, ValueError) as error:
            raise EnrolFailed(_named(description), str(error)) from error
        for other in self._pods.values():
            if other.netns.inode == netns.inode and other.description.uid != description.uid:
                netns.close()
                taken = f"{description.netns} is the namespace of {_named(other.description)}"
                raise EnrolFailed(_named(description), taken)
        return netns

    async def _enter(self, description: PodDescription, netns: Netns) -> _Pod:
        # The pod is recorded before its rules are applied: after a crash, unrecorded rules would stay as long as
        # the namespace.
        self._recorded[description.uid] = Enrolled(description.netns, netns.inode)
        self._write_record()
        try:
            # Kubelet's probes are allowed before the pod's rules are applied. Otherwise kubelet would restart a
            # pod whose probes fail while it waits for a proxy.
            found = await self._thread.run(addresses, netns)
            await self.probes.add(Probed(uid=description.uid, addresses=found))
            removed = await self._thread.run(take_over_rules, netns, description)
        except (TproxyError, OSError) as error:
            if description.uid in self._expected:
                # Our rules do no harm beside the other agent's, because both have the same effect.
                raise TwoAgents(_named(description), plain_reason(error)) from error
            await self._forget(description.uid, netns)
            raise EnrolFailed(_named(description), plain_reason(error)) from error
        except asyncio.CancelledError:
            # The agent ends. The rules can be in the pod already, and a last agent must still remove them.
            if description.uid not in self._expected:
                self._unseen.add(description.uid)
            raise
        if removed:
            log.info("pod taken over uid=%s removed=%s", description.uid, ", ".join(sorted(removed)))
        pod = self._pods[description.uid] = _Pod(description, netns)
        self._unseen.discard(description.uid)
        self._unremoved.discard(description.uid)
        self._expected.discard(description.uid)
        log.info("pod captured uid=%s pod=%s netns=%s", description.uid, _named(description), description.netns)
        return pod

    async def _change(self, pod: _Pod, description: PodDescription) -> None:
        try:
            found = await self._thread.run(addresses, pod.netns)
            await self._thread.run(apply_rules, pod.netns, description)
        except (TproxyError, OSError) as error:
            raise EnrolFailed(_named(description), plain_reason(error)) from error
        if description.netns != pod.description.netns:
            self._recorded[description.uid] = Enrolled(description.netns, pod.netns.inode)
            self._write_record()
        pod.description = description
        await self.probes.add(Probed(uid=description.uid, addresses=found))

    async def _announce(self, pod: _Pod) -> None:
        uid = pod.description.uid
        try:
            await self._server.add(uid, pod.info, pod.netns)
        except AgentError as error:
            self._answered(uid, str(error))
        else:
            self._answered(uid, "")

    async def hand_over(self, uid: PodUid) -> bool:
        """Leave an enrolled pod to another agent, if that agent's rules are in the pod: remove our rules only.

        Proxies are not notified, so the pod's connections continue.

        Returns:
            Whether the pod was left.
        """
        async with self._lock(uid):
            pod = self._pods.get(uid)
            if pod is None or pod.phase is Phase.LEAVING:
                return False
            try:
                if not await self._thread.run(foreign_rules, pod.netns):
                    return False
                await self._thread.run(remove_rules, pod.netns)
            except (TproxyError, OSError) as error:
                log.error("pod not left to another agent uid=%s error=%s", uid, plain_reason(error))
                return False
            del self._pods[uid]
            pod.netns.close()
            self._recorded.pop(uid, None)
            self._write_record()
            log.info("pod left to another agent uid=%s pod=%s", uid, _named(pod.description))
            self._notify_watchers(uid)
            return True

    async def announce_anew(self, uid: PodUid) -> None:
        """Ask the proxies to end and restart the proxy of an enrolled pod, which has lost its listeners."""
        async with self._lock(uid):
            pod = self._pods.get(uid)
            if pod is None or pod.phase is Phase.LEAVING:
                return
            await self._server.delete(uid)
            pod.phase = Phase.PENDING
            await self._announce(pod)

    def _announced(self) -> Iterator[Announced]:
        for uid, pod in self._pods.items():
            if pod.announced:
                yield Announced(uid, pod.info, pod.netns)
        for uid in self._unseen | self._expected:
            yield Announced(uid)

    @property
    def expected(self) -> frozenset[PodUid]:
        """Pods of another agent, which this agent has neither enrolled nor released yet."""
        return frozenset(self._expected)

    def expect(self, uids: Iterable[PodUid]) -> None:
        """Ask proxies to keep the pods that another agent enrolled, until this agent enrols them, and start
        sending snapshots.

        These pods keep their proxy and their open connections, even if enrolling them fails.
        """
        self._expected |= {uid for uid in uids if uid not in self._pods and uid not in self._unseen}
        self._server.release()

    def _answered(self, uid: PodUid, error: str) -> None:
        pod = self._pods.get(uid)
        if pod is None or pod.phase is Phase.LEAVING:
            return
        if error and error != pod.error:
            log.warning("pod pending uid=%s pod=%s error=%s", uid, _named(pod.description), error)
        elif not error and pod.phase is Phase.PENDING:
            log.info("pod enabled uid=%s pod=%s", uid, _named(pod.description))
        pod.error = error
        pod.phase = Phase.PENDING if error else Phase.ENABLED
        self._notify_watchers(uid)

    async def remove(self, uid: PodUid, *, grace_s: float | None = None) -> None:
        """Release a pod from the mesh; idempotent.

        Args:
            uid: the pod.
            grace_s: the time for its open connections to end. None means the agent's own grace period. For a pod
                that is already leaving, this can shorten the time but not extend it.
        """
        wait_s = self._grace_s if grace_s is None else grace_s
        leaving = self._pods.get(uid)
        if leaving is not None and leaving.phase is Phase.LEAVING:
            leaving.leave_at = min(leaving.leave_at, asyncio.get_running_loop().time() + wait_s)
            leaving.recalled = False
            leaving.news.set()
        async with self._lock(uid):
            pod = self._pods.get(uid)
            if pod is not None:
                await self._leave(pod, wait_s)

    async def _leave(self, pod: _Pod, grace_s: float) -> None:
        """Drain a pod, then release it. If it is requested again while it drains, it becomes pending instead."""
        uid = pod.description.uid
        pod.phase = Phase.LEAVING
        pod.recalled = False
        pod.leave_at = asyncio.get_running_loop().time() + grace_s
        self._notify_watchers(uid)
        if grace_s > 0:
            try:
                await self._thread.run(apply_rules, pod.netns, pod.description, draining=True)
            except (TproxyError, OSError) as error:
                log.warning("pod's redirects not removed uid=%s error=%s", uid, plain_reason(error))
            else:
                await self._ended(pod)
        if pod.recalled:
            log.info("pod stays uid=%s pod=%s", uid, _named(pod.description))
            pod.phase = Phase.PENDING
            self._notify_watchers(uid)
            return
        pod.announced = False
        await self._forget(uid, pod.netns)
        # The pod leaves the list last, because until then no other pod can be enrolled in its namespace.
        del self._pods[uid]
        pod.netns.close()
        self._notify_watchers(uid)
        log.info("pod released uid=%s pod=%s", uid, _named(pod.description))

    async def _ended(self, pod: _Pod) -> None:
        """Wait until the pod has no connection through the proxy, its deadline has passed, or it is requested
        again.
        """
        loop = asyncio.get_running_loop()
        waits = Backoff(_POLL_CONNECTIONS_S, _SLOW_POLL_CONNECTIONS_S)
        fault = ""
        while not pod.recalled:
            rest_s = pod.leave_at - loop.time()
            if rest_s <= 0:
                log.info("pod leaves with open connections uid=%s", pod.description.uid)
                return
            try:
                if not await self._thread.run(proxied_connections, pod.netns):
                    return
            except (TproxyError, OSError) as error:
                if fault != plain_reason(error):
                    fault = plain_reason(error)
                    log.warning(
                        "leaving pod's connections not counted uid=%s error=%s", pod.description.uid, fault
                    )
            pod.news.clear()
            if pod.recalled or pod.leave_at <= loop.time():
                continue
            try:
                async with asyncio.timeout(min(waits.next(), rest_s)):
                    await pod.news.wait()
            except TimeoutError:
                pass

    async def forget(self, uid: PodUid) -> None:
        """Release a pod that is in :attr:`left_over`, without waiting; idempotent."""
        async with self._lock(uid):
            if uid in self._expected:
                # The pod's rules belong to another agent, except for the changes of a failed enrolment.
                self._expected.discard(uid)
                await self._server.delete(uid)
                self._recorded.pop(uid, None)
                self._write_record()
                return
            if uid in self._unseen:
                await self._forget(uid)

    async def _forget(self, uid: PodUid, netns: Netns | None = None) -> None:
        """Notify proxies that a pod is gone, remove our rules from its namespace, and delete its record.

        Rules that the kernel does not remove now are removed later, see :meth:`_keep`.

        Args:
            uid: the pod.
            netns: its namespace. By default the recorded one, if it still exists.
        """
        self._unseen.discard(uid)
        try:
            await self._server.delete(uid)
            await self._clean(uid, netns)
        except asyncio.CancelledError:
            # The agent ends. Its last step, or a successor, removes the rules.
            if uid not in self._pods and uid in self._recorded:
                self._unseen.add(uid)
            raise
        await self.probes.remove(uid)

    async def _clean(self, uid: PodUid, netns: Netns | None = None) -> None:
        """Remove our rules of a released pod, then its record. If rules remain, the record is kept for a
        successor.
        """
        try:
            if netns is not None:
                await self._thread.run(remove_rules, netns)
            elif (enrolled := self._recorded.get(uid)) is not None and not self._has_namespace(enrolled.inode):
                await self._thread.run(_remove_recorded, enrolled)
        except (TproxyError, OSError) as error:
            if uid not in self._unremoved:
                log.error("pod's rules not removed, trying again uid=%s error=%s", uid, plain_reason(error))
            self._unremoved.add(uid)
            return
        self._unremoved.discard(uid)
        self._recorded.pop(uid, None)
        self._write_record()

    def _has_namespace(self, inode: int) -> bool:
        """Return whether a pod with our rules is in the namespace with this inode number.

        Open namespaces keep their numbers. The kernel reuses the numbers of removed namespaces.
        """
        return any(pod.netns.inode == inode for pod in self._pods.values())

    def _write_record(self) -> None:
        if self._record is not None:
            try:
                write_record(self._record, self._recorded)
            except OSError as error:
                log.error("record of enrolled pods not written error=%s", plain_reason(error))

    def _notify_watchers(self, uid: PodUid) -> None:
        for event in self._watchers:
            event.set()
        self._on_change(uid)

    async def until_enabled(self, *uids: PodUid) -> None:
        """Wait until proxies listen in all of the given pods."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            while not all(uid in self._pods and self._pods[uid].phase is Phase.ENABLED for uid in uids):
                event.clear()
                await event.wait()
        finally:
            self._watchers.discard(event)

    # Wanted pods

    def want(self, pods: Iterable[PodDescription]) -> None:
        """From now on, enrol exactly these pods, and release all others.

        Returns at once. The changes happen in the background. A pod that fails is retried with back-off.
        """
        self._wanted = {pod.uid: pod for pod in pods}
        edited, self._edited = self._edited, asyncio.Event()
        edited.set()
        for uid in {*self._wanted, *self._pods}:
            self._steer(uid)

    async def follow(self, path: Path) -> None:
        """Follow a description file: keep exactly its pods enrolled, until cancelled.

        Raises:
            PodFaults, OSError: the file is not usable now. Faults of later edits are only logged, and the last
                good state stays current.
        """
        file = PodsFile(path)
        pods = file.read()
        await self._release_strangers({pod.uid: pod for pod in pods})
        self.want(pods)
        while True:
            await asyncio.sleep(_POLL_FILE_S)
            edited = file.edited()
            if edited is not None:
                log.info("%s changed: %d pods", path, len(edited))
                self.want(edited)

    async def _release_strangers(self, wanted: Mapping[PodUid, PodDescription]) -> None:
        """Remove the rules of recorded pods that left, or moved to another namespace, while no agent ran."""
        for uid in list(self._unseen):
            enrolled = self._recorded[uid]
            now = wanted.get(uid)
            try:
                if now is not None and is_namespace(now.netns, enrolled.inode):
                    continue
            except TproxyError as error:
                log.warning("pod's namespace not checked uid=%s error=%s", uid, error)
                continue
            log.info("pod left while no agent ran uid=%s netns=%s", uid, enrolled.netns)
            await self._forget(uid)

    def _steer(self, uid: PodUid) -> None:
        if uid not in self._steering:
            self._steering.add(uid)
            self._tasks.start(self._steered(uid), f"steer {uid}")

    async def _steered(self, uid: PodUid) -> None:
        """Bring one pod to its desired state, which can change in the meantime. Failures are retried with
        back-off.
        """
        waits = Backoff(_FIRST_WAIT_S)
        logged = ""
        try:
            while True:
                edited, wanted, pod = self._edited, self._wanted.get(uid), self._pods.get(uid)
                if wanted == (None if pod is None else pod.description):
                    return
                try:
                    if wanted is None:
                        await self.remove(uid)
                    else:
                        await self.enrol(wanted)
                except EnrolFailed as error:
                    if str(error) != logged:
                        log.error("%s; trying again", error)
                        logged = str(error)
                    try:
                        async with asyncio.timeout(waits.next()):
                            await edited.wait()
                    except TimeoutError:
                        pass
        finally:
            self._steering.discard(uid)

    async def repair(self, uid: PodUid) -> None:
        """Compare an enrolled pod's rules with the desired ones, and repair them; idempotent."""
        await self._maintain(uid, repair=True)

    async def _keep(self) -> None:
        """Periodically announce pending pods, release pods whose namespace is gone, and repair rules. Also retry
        to remove the rules of released pods, if the kernel refused this before.
        """
        loop = asyncio.get_running_loop()
        recheck_at = loop.time() + RECHECK_S
        while True:
            await asyncio.sleep(RETRY_S)
            repair = loop.time() >= recheck_at
            if repair:
                recheck_at = loop.time() + RECHECK_S
            for uid in list(self._pods):
                await self._maintain(uid, repair=repair)
            for uid in list(self._unremoved):
                if not (lock := self._lock(uid)).locked():
                    async with lock:
                        await self._clean(uid)
            if repair:
                await self.probes.repair()

    async def _maintain(self, uid: PodUid, *, repair: bool) -> None:
        lock = self._lock(uid)
        if lock.locked():
            return  # another task changes this pod
        async with lock:
            pod = self._pods.get(uid)
            if pod is None:
                return
            description = pod.description
            try:
                still = self._is_still(description, pod.netns)
            except TproxyError as error:
                log.warning("pod's namespace not checked uid=%s error=%s", uid, error)
                return
            if not still:
                # The name or process id in the description now leads to the namespace of another pod.
                log.info("pod's namespace is gone uid=%s netns=%s", uid, description.netns)
                await self._leave(pod, 0)
                if uid in self._wanted:
                    self._steer(uid)
                return
            if pod.phase is Phase.PENDING and self._server.proxies:
                await self._announce(pod)
            if repair:
                try:
                    if changes := await self._thread.run(apply_rules, pod.netns, description):
                        self.repaired += 1
                        log.warning("pod's rules had been changed, repaired uid=%s changes=%d", uid, changes)
                except (TproxyError, OSError) as error:
                    log.error("pod's rules not repaired uid=%s error=%s", uid, plain_reason(error))


def _remove_recorded(enrolled: Enrolled) -> None:
    netns = reopened(enrolled.netns, enrolled.inode)
    if netns is not None:  # otherwise the rules went with their namespace
        with netns:
            remove_rules(netns)


def _is_still(description: PodDescription, netns: Netns) -> bool:
    return is_namespace(description.netns, netns.inode)


def _named(description: PodDescription) -> str:
    return f"{description.info.namespace}/{description.info.name}"
