"""Enrols the pods of a Kubernetes API server, and records there which pods are in the mesh.

``enrolment.py`` decides. This module calls it after every change, and takes the returned step, one at a time per
pod, until there is none left. A failed step is retried with back-off; the step is then chosen again by the pod's
current state.

There are two triggers: changes of pods and namespaces, and the container runtime, whose CNI plugin announces a
sandbox before a process starts in it (:meth:`Enroller.added`). A pod that is announced in this way has no address
in the API yet. The namespace of any other pod is found by its processes (``scan.py``), in one scan for all waiting
pods.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

from tproxy.aio.netns import Netns
from tproxy.errors import TproxyError, UnknownNamespace
from tproxy.inpod import Probed
from tproxy.resources import IpAddress
from ztunnel.kube.client import Client
from ztunnel.kube.errors import ApiRefused, KubeError
from ztunnel.kube.kinds import NAMESPACE, POD, Selection
from ztunnel.kube.objects import Changes, EventSink, Object, ObjectKey, ObjectSource
from ztunnel.node.agent import enrolment
from ztunnel.node.agent.description import PodDescription
from ztunnel.node.agent.enrolment import Decision, Misshapen, Pod, Reason, Settings, Situation, Step
from ztunnel.node.agent.errors import AgentError, CannotAdd, NotFound, TwoAgents
from ztunnel.node.agent.node import NodeAgent
from ztunnel.node.agent.phase import Phase
from ztunnel.node.agent.scan import PROC, Found, is_pods, pod_namespaces
from ztunnel.proxy.istio.zds.pods import PodUid
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_RETRY_S: Final = 0.05
_LONGEST_RETRY_S: Final = 5.0
#: The number of failed enrolments after which a pod counts as failing. One scan can miss an enrolled pod, for
#: example while its sandbox is recreated.
_FAILING: Final = 3
#: The time limit for enrolling a new sandbox. The plugin waits for 5 s, and kubelet makes a new sandbox after an
#: error.
_ADD_S: Final = 4.0
#: The time limit for the API server when the last agent of a node ends. The limit of a request is 30 s. Kubelet
#: kills the agent after the same time, and its pods would keep their rules.
_LAST_ANNOTATION_S: Final = 5.0


def selections(node: str) -> tuple[Selection, ...]:
    """Return the Kubernetes selections that an informer must watch to see the pods of a node."""
    return (
        Selection(NAMESPACE, keep=_kept_namespace),
        Selection(POD, fields=f"spec.nodeName={node}", keep=enrolment.kept),
    )


def _kept_namespace(value: Object) -> Object:
    metadata = value["metadata"]
    return {"kind": "Namespace", "metadata": {"name": metadata["name"], "labels": metadata.get("labels")}}


class Annotate(Protocol):
    """Writes the annotation that says whether a pod is in the mesh, None to remove it.

    Returns:
        The changed pod, or None if it no longer exists.

    Raises:
        KubeError: it was not written.
    """

    async def __call__(self, pod: Pod, value: str | None) -> Pod | None:
        """Write the annotation of one pod; see the class."""
        ...


def annotating(client: Client) -> Annotate:
    """Return an :class:`Annotate` that patches only pods' status. So the agent needs no right to patch pods."""

    async def annotate(pod: Pod, value: str | None) -> Pod | None:
        # The patch has the uid as a precondition: a new pod of a StatefulSet with the same name is another pod.
        patch = {"metadata": {"uid": pod.uid, "annotations": {enrolment.REDIRECTION: value}}}
        try:
            written = await client.merge_patch(POD, pod.info.namespace, pod.info.name, patch, subresource="status")
        except ApiRefused as error:
            if error.status in (404, 409):
                return None
            raise
        return enrolment.read_pod(written)

    return annotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A sandbox that the container runtime has made.

    Attributes:
        netns: path of its network namespace.
        uid: the pod's UID. Empty if the plugin does not send it.
    """

    namespace: str
    name: str
    netns: str
    uid: str = ""


class _Entry:
    """The known state of one pod: from the API (``pod``), from the container runtime (``hint``), and its last
    steps.
    """

    def __init__(self, uid: PodUid) -> None:
        self.uid = uid
        self.pod: Pod | None = None
        self.hint = ""  # path of the namespace according to the container runtime
        self.described: PodDescription | None = None
        self.looked_for: frozenset[IpAddress] = frozenset()
        self.suspect = False  # its process has ended, so the pod may have a new sandbox
        self.failures = 0
        self.fault = ""
        self.kept = False  # enrolment failed; the pod works by the rules of its earlier agent
        self.wake = asyncio.Event()
        self.running = False
        self.leaving: asyncio.Task[None] | None = None


class Enroller:
    """While entered, keeps a node's pods in the mesh as described by the API server.

    Args:
        socket: path of the socket for proxies.
        source: pods of the node and all namespaces, see :func:`selections`.
        annotate: writes annotations.
        events: reports facts about a pod to its owner.
        settings: select the pods and their options.
        proc: where the node's processes are shown.
        record, grace_s, probe_user: see :class:`~ztunnel.node.agent.node.NodeAgent`.

    Attributes:
        agent: enrols the pods.
        synced: whether every pod and namespace is known.
        steps: how often each step was taken, and how often it failed.

    Raises:
        OSError: on entering, the socket cannot be bound or the record not read.
    """

    def __init__(
        self,
        socket: Path,
        source: ObjectSource,
        annotate: Annotate,
        events: EventSink,
        settings: Settings,
        *,
        proc: Path = PROC,
        record: Path | None = None,
        grace_s: float = 10.0,
        probe_user: int | None = None,
    ) -> None:
        self._source = source
        self._annotate = annotate
        self._events = events
        self._settings = settings
        self._proc = proc
        self._entries: dict[PodUid, _Entry] = {}
        self._uids: dict[ObjectKey, PodUid] = {}
        self._namespaces: dict[str, Mapping[str, Any]] = {}
        self._misshapen: dict[ObjectKey, str] = {}
        self._news = asyncio.Condition()
        self._looking: dict[PodUid, asyncio.Future[Found | None]] = {}
        self._tasks = Tasks("enroller")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scan")
        self._ending = False
        self.synced = False
        self.steps: Counter[tuple[str, str]] = Counter()
        self.agent = NodeAgent(
            socket,
            record=record,
            grace_s=grace_s,
            probe_user=probe_user,
            on_change=self._touch,
            is_still=self._is_still,
            held=True,
        )

    async def __aenter__(self) -> Self:
        await self.agent.__aenter__()
        self._tasks.keep(self._follow, "follow")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._ending = True
        await self._tasks.close()
        await self.agent.__aexit__(*exception)
        self._thread.shutdown(wait=True, cancel_futures=True)

    def pods(self) -> dict[PodUid, tuple[Pod, Decision, str]]:
        """Return every pod of the node, with the decision about it and the fault of its last step."""
        return {
            uid: (entry.pod, self._decide(entry.pod), entry.fault)
            for uid, entry in self._entries.items()
            if entry.pod is not None
        }

    def next_step(self, uid: PodUid) -> Step:
        """Return the next step for a pod, ``NOTHING`` if the pod is unknown."""
        entry = self._entries.get(uid)
        return Step.NOTHING if entry is None else enrolment.step(self._situation(entry))

    @property
    def waiting(self) -> int:
        """The number of pods with pending steps."""
        return sum(entry.running for entry in self._entries.values())

    def recheck(self) -> None:
        """Compare every pod with the desired state once more. Repairs run in the background."""
        for uid in {*self._entries, *self.agent.left_over}:
            self._touch(uid)

    async def withdraw(self, grace_s: float) -> None:
        """Take every pod out of the mesh, because the agent has no successor. This first ends the background work.

        If a pod also has the rules of another agent, it stays in the mesh and is left to that agent.
        """
        self._ending = True
        await self._tasks.close()

        async def take_out(uid: PodUid) -> None:
            if await self.agent.hand_over(uid):
                return
            entry = self._entries.get(uid)
            if entry is not None and entry.pod is not None and entry.pod.annotation is not None:
                try:
                    async with asyncio.timeout(_LAST_ANNOTATION_S):
                        await self._annotate(entry.pod, None)
                except (KubeError, Misshapen, TimeoutError) as error:
                    reason = str(error) or "no answer in time"
                    log.error("pod's annotation not changed uid=%s error=%s", uid, reason)
            await self.agent.forget(uid)
            await self.agent.remove(uid, grace_s=grace_s)

        await asyncio.gather(*(take_out(uid) for uid in {*self._entries, *self.agent.left_over}))
        await self.agent.probes.end()

    # Events of the API server

    async def _follow(self) -> None:
        while True:
            changes = await self._source.next()
            touched = self._take(changes)
            if changes.synced and not self.synced:
                await self._begin()
                touched = set(self._entries)
            async with self._news:
                self._news.notify_all()
            if self.synced:
                for uid in touched:
                    self._touch(uid)

    def _take(self, changes: Changes) -> set[PodUid]:
        """Store the changes of objects, and return the pods that they can affect."""
        touched: set[PodUid] = set()
        spaces = set()
        for key, value in changes.objects.items():
            if key.kind == NAMESPACE.name:
                labels = None if value is None else value.get("metadata", {}).get("labels")
                before = self._namespaces.pop(key.name, None)
                if value is not None:
                    self._namespaces[key.name] = labels if isinstance(labels, Mapping) else {}
                if before != self._namespaces.get(key.name):
                    spaces.add(key.name)
            elif key.kind == POD.name:
                touched |= self._take_pod(key, value)
        for uid, entry in self._entries.items() if spaces else ():
            if entry.pod is not None and entry.pod.info.namespace in spaces:
                touched.add(uid)
        return touched

    def _take_pod(self, key: ObjectKey, value: Object | None) -> set[PodUid]:
        touched: set[PodUid] = set()
        pod = None
        if value is not None:
            try:
                pod = enrolment.read_pod(value)
            except Misshapen as error:
                if self._misshapen.get(key) != str(error):
                    log.error("ignoring an unusable pod object=%s: %s", key, error)
                self._misshapen[key] = str(error)
                return touched
        self._misshapen.pop(key, None)
        before = self._uids.get(key)
        if before is not None and (pod is None or pod.uid != before):
            self._entries[before].pod = None
            del self._uids[key]
            touched.add(before)
        if pod is not None:
            self._uids[key] = pod.uid
            self._entries.setdefault(pod.uid, _Entry(pod.uid)).pod = pod
            touched.add(pod.uid)
        return touched

    async def _begin(self) -> None:
        """Take over an earlier agent's pods: allow probes of existing pods, and remove the rules of deleted
        ones.
        """
        known = [entry.pod for entry in self._entries.values() if entry.pod is not None]
        enabled = [pod for pod in known if pod.annotation == "enabled" and self._can_enrol(pod)]
        if enabled:
            await self.agent.probes.expect(
                Probed(uid=pod.uid, addresses=tuple(sorted(pod.addresses, key=str))) for pod in enabled
            )
        # Called before the first enrolment, so that proxies keep the pods enrolled by istio-cni.
        self.agent.expect(pod.uid for pod in enabled)
        for uid in set(self.agent.left_over) - set(self._entries):
            log.info("pod left while no agent ran uid=%s", uid)
            await self.agent.forget(uid)
        self.synced = True
        enrol = sum(self._decide(pod).enrol for pod in known)
        log.info("pods known pods=%d enrol=%d left_over=%d", len(known), enrol, len(self.agent.left_over))

    # One pod

    def _decide(self, pod: Pod) -> Decision:
        return enrolment.decide(pod, self._namespaces.get(pod.info.namespace), self._settings)

    def _can_enrol(self, pod: Pod) -> bool:
        decision = self._decide(pod)
        return decision.enrol or decision.reason is Reason.NAMESPACE_UNKNOWN

    def _touch(self, uid: PodUid) -> None:
        entry = self._entries.get(uid)
        # At the end, a step must not even begin: a pod that is being released would be enrolled again.
        if entry is None or not self.synced or self._ending:
            return
        entry.wake.set()
        if not entry.running:
            entry.running = True
            self._tasks.start(self._settle(entry), f"settle {uid}")

    def _is_still(self, description: PodDescription, netns: Netns) -> bool:
        """Return true: only the API server reports deletions. If in doubt, also start another scan for the
        namespace.
        """
        entry = self._entries.get(description.uid)
        if entry is not None and not entry.suspect:
            try:
                with Netns.open(description.netns) as now:
                    entry.suspect = now.inode != netns.inode
            except UnknownNamespace:
                entry.suspect = True
            except TproxyError as error:
                log.warning("pod's namespace not checked uid=%s error=%s", entry.uid, error)
            if entry.suspect:
                if entry.hint == description.netns:  # otherwise the runtime has announced the next sandbox
                    entry.hint = ""
                self._touch(description.uid)
        return True

    def _situation(self, entry: _Entry) -> Situation:
        status = self.agent.pod(entry.uid)
        left_over = entry.uid in self.agent.left_over or entry.uid in self.agent.expected
        phase = None if status is None else status.phase
        pod = entry.pod
        if pod is None:
            return Situation(enrol=False, ended=True, phase=phase, left_over=left_over)
        decision = self._decide(pod)
        return Situation(
            enrol=decision.enrol,
            undecided=decision.reason is Reason.NAMESPACE_UNKNOWN,
            ended=pod.ended,
            reachable=bool(pod.addresses or entry.hint),
            annotation=pod.annotation,
            phase=phase,
            left_over=left_over,
            current=self._is_current(entry, pod),
            failing=entry.failures >= _FAILING and not entry.kept,
        )

    def _is_current(self, entry: _Entry, pod: Pod) -> bool:
        was = entry.described
        if was is None or entry.suspect or (entry.hint and entry.hint != was.netns):
            return False
        if entry.looked_for != pod.addresses and not entry.hint:
            return False
        return was == enrolment.describe(pod, was.netns, self._settings)[0]

    async def _settle(self, entry: _Entry) -> None:
        """Take steps for a pod until none are left."""
        waits = Backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        try:
            while True:
                entry.wake.clear()
                what = enrolment.step(self._situation(entry))
                if what is Step.NOTHING:
                    self._settled(entry)
                    return
                try:
                    await self._do(entry, what)
                except (AgentError, KubeError, Misshapen, TproxyError, OSError) as error:
                    self._failed(entry, what, error)
                    try:
                        async with asyncio.timeout(waits.next()):
                            await entry.wake.wait()
                    except TimeoutError:
                        pass
                else:
                    self.steps[what.value, "ok"] += 1
                    if what is Step.ENROL:
                        entry.failures = 0
                        entry.fault = ""
        finally:
            # The last check was in this iteration of the loop, so a later change starts a new task.
            entry.running = False

    def _failed(self, entry: _Entry, what: Step, error: Exception) -> None:
        if isinstance(error, NotFound) and entry.pod is not None and entry.pod.ending:
            log.debug("pod's sandbox is gone, waiting for its deletion uid=%s", entry.uid)
            return
        self.steps[what.value, "failed"] += 1
        if what is Step.ENROL:
            entry.failures += 1
        entry.kept = isinstance(error, TwoAgents)
        kind = "MeshTwoAgents" if entry.kept else "MeshEnrollFailed"
        self._say(entry, kind, f"{what.value}: {plain_reason(error)}")

    def _settled(self, entry: _Entry) -> None:
        gone = entry.pod is None and self.agent.pod(entry.uid) is None and entry.uid not in self.agent.left_over
        if gone:
            self._entries.pop(entry.uid, None)

    async def _do(self, entry: _Entry, what: Step) -> None:
        match what:
            case Step.ENROL:
                await self._enrol(entry)
            case Step.SAY_ENABLED | Step.SAY_PENDING | Step.SAY_OUT:
                value = {Step.SAY_ENABLED: "enabled", Step.SAY_PENDING: "pending"}.get(what)
                pod = entry.pod
                if pod is None:
                    return
                written = await self._annotate(pod, value)
                if entry.pod is pod:
                    # Use the new state without waiting for the watch to report it. A deleted pod needs no
                    # annotation.
                    annotations = {
                        key: text for key, text in pod.annotations.items() if key != enrolment.REDIRECTION
                    }
                    if value is not None:
                        annotations[enrolment.REDIRECTION] = value
                    entry.pod = written or replace(pod, annotations=annotations)
                    log.info("pod annotated uid=%s pod=%s annotation=%s", pod.uid, _named(pod), value or "none")
            case Step.RELEASE:
                await self._release(entry)
            case Step.DROP:
                await self.agent.remove(entry.uid, grace_s=0)
                await self.agent.forget(entry.uid)
                entry.described = None
            case _:
                raise AssertionError(what)

    async def _enrol(self, entry: _Entry) -> None:
        pod = entry.pod
        if pod is None:
            return
        where = self._announced(entry) or await self._find(entry, pod)
        description, ignored = enrolment.describe(pod, where, self._settings)
        if ignored:
            self._say(entry, "AnnotationIgnored", "; ".join(ignored))
        await self.agent.enrol(description)
        entry.described, entry.looked_for, entry.suspect = description, pod.addresses, False

    def _announced(self, entry: _Entry) -> str:
        """Return the path that the container runtime has named. Empty if it has named none, or if the path no
        longer exists.

        Raises:
            TproxyError: the path cannot be opened now.
        """
        if entry.hint:
            try:
                Netns.open(entry.hint).close()
            except UnknownNamespace:
                entry.hint = ""
        return entry.hint

    async def _release(self, entry: _Entry) -> None:
        """Start to release a pod, and return once it is draining. ``on_change`` is called at the end."""
        if entry.uid in self.agent.expected or entry.uid in self.agent.left_over:
            # The pod has another agent's rules. Enrolling it first makes them ours, so that they can be removed
            # and its connections get the grace period. Its recorded process can have ended, so its namespace is
            # searched.
            try:
                await self._enrol(entry)
            except AgentError:
                await self.agent.forget(entry.uid)
            return
        entry.described = None
        if entry.leaving is None or entry.leaving.done():
            entry.leaving = self._tasks.start(self.agent.remove(entry.uid), f"release {entry.uid}")
        waking = self._tasks.start(entry.wake.wait(), "wake")
        try:
            await asyncio.wait({entry.leaving, waking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()

    async def _find(self, entry: _Entry, pod: Pod) -> str | int:
        """Return the path of the pod's namespace as recorded by an earlier agent, otherwise found by the pod's
        processes.

        Raises:
            NotFound: no process of the pod has one of its addresses.
        """
        left = self.agent.left_over.get(pod.uid)
        if left is not None and await self._in_thread(partial(is_pods, left.netns, left.inode, pod.addresses)):
            return left.netns
        found = await self.find(pod.uid)
        if found is None:
            raise NotFound(_named(pod), ", ".join(sorted(map(str, pod.addresses))))
        return found

    async def find(self, uid: PodUid) -> str | None:
        """Find the path of a pod's namespace by the pod's processes. None if no process has a namespace with the
        pod's address.
        """
        asked = self._looking.get(uid)
        if asked is None:
            if not self._looking:
                self._tasks.start(self._look(), "look")
            asked = self._looking[uid] = asyncio.get_running_loop().create_future()
        found = await asyncio.shield(asked)
        return None if found is None else found.path

    async def _look(self) -> None:
        """Scan all processes for the requested pods, until there are no more requests."""
        while self._looking:
            asked = dict(self._looking)
            wanted: dict[str, frozenset[IpAddress]] = {}
            for uid in asked:
                pod = self._entries[uid].pod if uid in self._entries else None
                if pod is not None:
                    wanted |= dict.fromkeys(pod.ids, pod.addresses)
            try:
                found = await self._in_thread(partial(pod_namespaces, wanted, self._proc))
            except OSError as error:
                log.error("the node's processes cannot be read proc=%s error=%s", self._proc, plain_reason(error))
                found = {}
            for uid, future in asked.items():
                del self._looking[uid]
                pod = self._entries[uid].pod if uid in self._entries else None
                names = () if pod is None else pod.ids
                if not future.done():
                    future.set_result(next((found[name] for name in names if name in found), None))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _say(self, entry: _Entry, reason: str, message: str) -> None:
        """Log a fault of a pod, and report it in an Event. The same fault is reported only once."""
        if entry.fault == message or entry.pod is None:
            return
        entry.fault = message
        info = entry.pod.info
        log.warning("%s uid=%s pod=%s: %s", reason, entry.uid, _named(entry.pod), message)
        self._events.event(ObjectKey(POD.name, info.namespace, info.name), reason, message)

    # Announcements of the container runtime

    async def added(self, event: Added, within_s: float = _ADD_S) -> str:
        """Enrol a pod whose sandbox was just created, before a process starts in it.

        Returns:
            The action taken, for a log, also if the pod does not belong to the mesh.

        Raises:
            CannotAdd: the pod belongs to the mesh and could not be enrolled. The runtime then makes a new sandbox.
        """
        key = ObjectKey(POD.name, event.namespace, event.name)
        named = f"{event.namespace}/{event.name}"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        try:
            async with asyncio.timeout_at(deadline), self._news:
                await self._news.wait_for(lambda: not self._missing(key, event.uid))
        except TimeoutError:
            raise CannotAdd(f"pod {named}: {self._missing(key, event.uid)}") from None
        entry = self._shown(key, event.uid)
        assert entry is not None
        assert entry.pod is not None
        entry.hint = event.netns
        decision = self._decide(entry.pod)
        if not decision.enrol:
            return f"pod {named}: not in the mesh ({decision.reason})"
        self._touch(entry.uid)
        try:
            async with asyncio.timeout_at(deadline):
                while not self._is_in(entry, event.netns):
                    await self._changed(entry)
        except TimeoutError:
            status = self.agent.pod(entry.uid)
            why = status.error if status is not None and status.error else entry.fault or "not enrolled in time"
            # The runtime deletes this sandbox, and may already have created the next one.
            if entry.hint == event.netns:
                entry.hint = ""
                entry.described = None
                await self.agent.remove(entry.uid, grace_s=0)
            raise CannotAdd(f"pod {named}: {why}") from None
        return f"pod {named}: in the mesh"

    def _missing(self, key: ObjectKey, uid: str) -> str:
        """Return the object that is needed to decide about an announced pod, as a fault. Empty if none is
        missing.
        """
        if not self.synced:
            return "the API server has not answered yet"
        entry = self._shown(key, uid)
        if entry is None or entry.pod is None:
            return "the API server has not named this pod"
        # Pods and namespaces arrive by separate watches, and either watch can lag.
        if self._decide(entry.pod).reason is Reason.NAMESPACE_UNKNOWN:
            return f"the API server has not named namespace {key.namespace}"
        return ""

    def _shown(self, key: ObjectKey, uid: str) -> _Entry | None:
        found = self._uids.get(key)
        entry = self._entries[found] if found is not None else None
        if entry is None or entry.pod is None:
            return None
        # For a static pod, the runtime has the id of its manifest, and not the uid of its mirror in the API.
        return entry if not uid or uid in entry.pod.ids else None

    def _is_in(self, entry: _Entry, netns: str) -> bool:
        status = self.agent.pod(entry.uid)
        return status is not None and status.phase is Phase.ENABLED and status.description.netns == netns

    async def _changed(self, entry: _Entry) -> None:
        # This polls, because the pod's own task awaits the event that reports a change.
        await asyncio.sleep(0.01)


def _named(pod: Pod) -> str:
    return f"{pod.info.namespace}/{pod.info.name}"
