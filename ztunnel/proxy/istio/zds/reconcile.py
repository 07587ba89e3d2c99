"""Decides which pods have a proxy. The inputs are the agent's requests and the results of starts, the outputs are
actions.

A pod is named by its uid. Each new proxy of a pod gets a new number, its *generation*. The result of a start
contains the generation, so that an old proxy's late result is never mistaken for the new proxy's::

    Add ─> STARTING ──started──> UP
              │  ^
        failed│  │every RETRY_S, or the agent's next Add
              v  │
            PENDING                     any ──Del, not in the snapshot, another namespace──> End

Each connection of the agent begins with a snapshot, which names every pod of the node and ends with SnapshotSent.
Pods that the snapshot did not name have been removed. The agent gets the same answers at the same times as from
Rust ztunnel, but the proxy's behaviour differs in four points:

* A protocol fault only ends the connection. Rust ztunnel stops every pod's proxy and exits, so an invalid message
  of an agent causes an outage of the node's pods, and again after the restart. Here the caller answers with the
  error and connects again with back-off, and the agent sends a new snapshot.
* Failed starts are retried even while the agent is disconnected. The pod's redirection rules are already in place,
  so the pod has no network until its proxy listens.
* If an ``Add`` takes longer than the agent waits, it is answered in time as failed, and the start continues.
* A pod that cannot be started delays this proxy's readiness by :data:`SETTLE_S` only. The fault of one pod, such
  as a port that it uses itself, must not stop the roll-out of the proxy on all nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, NewType, TypeAlias, assert_never

from ztunnel.proxy.istio.zds.messages import AddPod, DeletePod, KeepPod, Request, SnapshotSent, Unexpected
from ztunnel.proxy.istio.zds.pods import PodInfo, PodState, PodUid

#: How often a failed start of a pod's proxy is retried, in seconds, as in the Rust ztunnel.
RETRY_S = 5.0
#: The time limit for answering the agent, in seconds. The agent waits 5 s. The difference leaves time for the
#: transport and a busy event loop.
ANSWER_S = 4.0
#: How long a faulty pod delays readiness, in seconds: a pod whose proxy does not start (counted from the
#: snapshot), or whose certificate the authority refuses. It permits six attempts to start. A guess.
SETTLE_S = 30.0

#: The number of a pod's proxy. A number is never reused, not even for a later proxy in the same pod.
Generation = NewType("Generation", int)


class NetnsId(NamedTuple):
    """Identifies a network namespace by its device and inode numbers."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a proxy in the network namespace received with the current request."""

    generation: Generation
    uid: PodUid
    info: PodInfo


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry the failed start of a proxy, in the network namespace that was received earlier."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class End:
    """End a proxy in any state, running, starting or waiting for a retry; then close its namespace."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the current request. An empty error means success."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class ReadyWithout:
    """The pods whose proxies have not started within :data:`SETTLE_S`. Readiness no longer waits for these
    pods.
    """

    pods: tuple[PodUid, ...]


Action: TypeAlias = Start | Retry | End | Answer | ReadyWithout


@dataclass(slots=True)
class _Pod:
    generation: Generation
    info: PodInfo
    netns: NetnsId
    up: bool = False
    retry_at: float | None = None  # None: starting, or up
    error: str = ""


class Reconciler:
    """The state machine for the pods' proxies. Its methods take the current time and return the actions to carry
    out, in order.

    Callers pass one request at a time, and wait for its :class:`Answer` before passing the next request.
    """

    def __init__(self) -> None:
        self._pods: dict[PodUid, _Pod] = {}
        self._uids: dict[Generation, PodUid] = {}
        self._generations = count(1)
        self._not_up: set[PodUid] = set()
        self._connected = False
        self._in_snapshot: set[PodUid] | None = set()  # None: the snapshot is complete
        self._awaited: Generation | None = None
        self._answer_by = 0.0
        self._settle_by = 0.0
        self._settled = False

    @property
    def ready(self) -> bool:
        """Whether the agent is connected, and its snapshot was complete and the pods in it had proxies (see
        :data:`SETTLE_S`).
        """
        return self._connected and self._settled

    @property
    def active(self) -> int:
        """The number of pods whose proxy is up."""
        return len(self._pods) - len(self._not_up)

    @property
    def pending(self) -> int:
        """The number of pods whose proxy is starting, or failed to start."""
        return len(self._not_up)

    @property
    def next_due(self) -> float | None:
        """The time for the next call of :meth:`advance`. None: no call is needed."""
        due = [pod.retry_at for uid in self._not_up if (pod := self._pods[uid]).retry_at is not None]
        if self._awaited is not None:
            due.append(self._answer_by)
        if self._in_snapshot is None and not self._settled:
            due.append(self._settle_by)
        return min(due, default=None)

    def pods(self) -> Iterator[tuple[PodUid, Generation, PodInfo, PodState]]:
        """Iterate over every pod."""
        for uid, pod in self._pods.items():
            yield uid, pod.generation, pod.info, PodState.UP if pod.up else PodState.PENDING

    def errors(self) -> dict[PodUid, str]:
        """Return the error of the last attempt for each pod whose start failed."""
        return {uid: pod.error for uid in self._not_up if (pod := self._pods[uid]).error}

    def connected(self) -> None:
        """Start a connection to the agent, which begins a new snapshot."""
        self.disconnected()
        self._connected = True

    def disconnected(self) -> None:
        """End the connection to the agent; proxies keep running. Idempotent."""
        self._connected = False
        self._in_snapshot = set()
        self._awaited = None
        self._settled = False

    def handle(self, request: Request, netns: NetnsId | None, now: float) -> list[Action]:
        """Handle one request.

        Args:
            request: the request.
            netns: the namespace received with an Add.
            now: the time.

        Raises:
            Unexpected: the request is not allowed now, and has no effect. The caller answers with the error and
                ends the connection.
        """
        match request:
            case AddPod(uid, info):
                if netns is None:
                    raise Unexpected(f"no namespace for {uid!r}")
                actions = self._add(uid, info, netns, now)
            case KeepPod(uid):
                if self._in_snapshot is None:
                    raise Unexpected("pods are kept in a snapshot only, and it is complete")
                self._in_snapshot.add(uid)
                actions = [Answer()]
            case DeletePod(uid):
                actions = self._delete(uid)
            case SnapshotSent():
                if self._in_snapshot is None:
                    raise Unexpected("the snapshot is complete already")
                gone = [uid for uid in self._pods if uid not in self._in_snapshot]
                actions = [self._forget(uid) for uid in gone]
                actions.append(Answer())
                self._in_snapshot = None
                self._settle_by = now + SETTLE_S
            case _:
                assert_never(request)
        return [*actions, *self._settle(now)]

    def _add(self, uid: PodUid, info: PodInfo, netns: NetnsId, now: float) -> list[Action]:
        if self._in_snapshot is not None:
            self._in_snapshot.add(uid)
        pod = self._pods.get(uid)
        actions: list[Action] = []
        # The identity of a pod never changes. If an agent still announces another identity, start a new proxy, so
        # that no proxy runs with an old identity and certificate.
        if pod is not None and (pod.netns, pod.info) != (netns, info):
            actions.append(self._forget(uid))
            pod = None
        if pod is None:
            pod = _Pod(Generation(next(self._generations)), info, netns)
            self._pods[uid] = pod
            self._uids[pod.generation] = uid
            self._not_up.add(uid)
            actions.append(Start(pod.generation, uid, info))
        elif pod.up:
            return [Answer()]
        elif pod.retry_at is not None:
            pod.retry_at = None
            actions.append(Retry(pod.generation))
        self._awaited = pod.generation
        self._answer_by = now + ANSWER_S
        return actions

    def _delete(self, uid: PodUid) -> list[Action]:
        pod = self._pods.get(uid)
        if self._in_snapshot is not None:
            self._in_snapshot.discard(uid)
            # As in the Rust ztunnel, a running proxy is not ended here, but when the snapshot is complete.
            if pod is not None and pod.up:
                pod = None
        return [Answer()] if pod is None else [self._forget(uid), Answer()]

    def _forget(self, uid: PodUid) -> Action:
        pod = self._pods.pop(uid)
        del self._uids[pod.generation]
        self._not_up.discard(uid)
        return End(pod.generation)

    def started(self, generation: Generation, now: float) -> list[Action]:
        """Record that a proxy listens. Ignored if this generation has ended meanwhile."""
        pod = self._find(generation)
        if pod is None:
            return []
        pod.up, pod.error = True, ""
        self._not_up.discard(self._uids[generation])
        return [*self._answered(generation, ""), *self._settle(now)]

    def failed(self, generation: Generation, error: str, now: float) -> list[Action]:
        """Record that a start failed, and schedule a retry. Ignored if this generation has ended meanwhile."""
        pod = self._find(generation)
        if pod is None:
            return []
        pod.retry_at, pod.error = now + RETRY_S, error
        return self._answered(generation, f"failure to start proxy : {error}")

    def advance(self, now: float) -> list[Action]:
        """Return the actions that are due at ``now``: answers and retries."""
        actions: list[Action] = []
        if self._awaited is not None and self._answer_by <= now:
            late = f"failure to start proxy : not done after {ANSWER_S:g} s, goes on"
            actions += self._answered(self._awaited, late)
        for uid in sorted(self._not_up):
            pod = self._pods[uid]
            if pod.retry_at is not None and pod.retry_at <= now:
                pod.retry_at = None
                actions.append(Retry(pod.generation))
        return [*actions, *self._settle(now)]

    def _find(self, generation: Generation) -> _Pod | None:
        uid = self._uids.get(generation)
        return None if uid is None else self._pods[uid]

    def _answered(self, generation: Generation, error: str) -> list[Action]:
        if self._awaited != generation:
            return []
        self._awaited = None
        return [Answer(error)]

    def _settle(self, now: float) -> list[Action]:
        """Become ready once the snapshot's pods are up or :data:`SETTLE_S` has passed.

        Readiness then lasts until the agent disconnects, even if a pod fails later.
        """
        if self._settled or self._in_snapshot is not None:
            return []
        if self._not_up and now < self._settle_by:
            return []
        self._settled = True
        return [ReadyWithout(tuple(sorted(self._not_up)))] if self._not_up else []
