"""Which pods have a proxy, decided: what the agent says and what became of starts go in, actions come out.

A pod is named by its uid. Each time one needs a new proxy it gets a new *generation*, and everything that happens
to that proxy is told by generation, so that news of an old one is never taken for the new one's::

    Add ─> STARTING ──started──> UP
              │  ^
        failed│  │every RETRY_S, or the agent's next Add
              v  │
            PENDING                     any ──Del, not in the snapshot, another namespace──> End

Each connection of the agent begins with a snapshot: it names every pod of the node, then says so. What was not
named is gone. What the agent gets, and when, is as with Rust ztunnel. Four things differ on this side of the wire:

* A fault in the protocol ends the connection and nothing else. Rust ztunnel stops every pod's proxy and exits,
  which turns one odd message of one agent into an outage of every pod of the node, and again after the restart.
  The agent is told (the caller answers with the error), the caller connects again with back-off, and a snapshot
  follows.
* Pods whose start failed are tried on while the agent is away. Their rules are in place and they have no network
  until their proxy is there, and the agent's being away does not make that better.
* An ``Add`` that takes longer than the agent would wait for is answered as failed in time and goes on behind it.
* A pod that cannot be started keeps this proxy from being ready for :data:`SETTLE_S` only. Another pod's fault,
  such as a port that it uses itself, must not stop the roll-out of the proxy on all nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, NewType, TypeAlias, assert_never

from ztunnel.istio.zds.messages import AddPod, DeletePod, KeepPod, Request, SnapshotSent, Unexpected
from ztunnel.istio.zds.pods import PodInfo, PodState, PodUid

#: Between two attempts to start a pod, as Rust ztunnel.
RETRY_S = 5.0
#: The agent waits 5 s for an answer; the rest is for the way and for a loop that is busy.
ANSWER_S = 4.0
#: After the snapshot, how long pods that do not start may keep us from being ready: six attempts; a guess.
SETTLE_S = 30.0

#: One proxy of one pod, never used again.
Generation = NewType("Generation", int)


class NetnsId(NamedTuple):
    """Device and inode: equal exactly for the same network namespace."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a proxy, in the namespace that came with the request at hand."""

    generation: Generation
    uid: PodUid
    info: PodInfo


@dataclass(frozen=True, slots=True)
class Retry:
    """Start a proxy whose start failed, in the namespace it has."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class End:
    """End a proxy, whether it runs, starts or waits for its next attempt; then close its namespace."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the request at hand; empty is success."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class ReadyWithout:
    """These pods have not started in all the time they had; from now on we are ready without them."""

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
    """The state machine. Every method takes the time, and returns what is to be done, in order.

    Requests come one at a time: the next one after the :class:`Answer` to the last.
    """

    def __init__(self) -> None:
        self._pods: dict[PodUid, _Pod] = {}
        self._uids: dict[Generation, PodUid] = {}
        self._generations = count(1)
        self._not_up: set[PodUid] = set()
        self._connected = False
        self._named: set[PodUid] | None = set()  # None: the snapshot is complete
        self._awaited: Generation | None = None
        self._answer_by = 0.0
        self._settle_by = 0.0
        self._settled = False

    @property
    def ready(self) -> bool:
        """Connected, the snapshot complete, its pods up (see :data:`SETTLE_S`)."""
        return self._connected and self._settled

    @property
    def active(self) -> int:
        """Pods whose proxy is up."""
        return len(self._pods) - len(self._not_up)

    @property
    def pending(self) -> int:
        """Pods whose proxy is not, or not yet."""
        return len(self._not_up)

    @property
    def next_due(self) -> float | None:
        """When :meth:`advance` has something to do."""
        due = [pod.retry_at for uid in self._not_up if (pod := self._pods[uid]).retry_at is not None]
        if self._awaited is not None:
            due.append(self._answer_by)
        if self._named is None and not self._settled:
            due.append(self._settle_by)
        return min(due, default=None)

    def pods(self) -> Iterator[tuple[PodUid, Generation, PodInfo, PodState]]:
        """Every pod."""
        for uid, pod in self._pods.items():
            yield uid, pod.generation, pod.info, PodState.UP if pod.up else PodState.PENDING

    def errors(self) -> dict[PodUid, str]:
        """Why pods that have failed to start did, at their last attempt."""
        return {uid: pod.error for uid in self._not_up if (pod := self._pods[uid]).error}

    def connected(self) -> None:
        """A connection to the agent begins, and with it a new snapshot."""
        self.disconnected()
        self._connected = True

    def disconnected(self) -> None:
        """The connection is over; whatever runs goes on."""
        self._connected = False
        self._named = set()
        self._awaited = None
        self._settled = False

    def handle(self, request: Request, netns: NetnsId | None, now: float) -> list[Action]:
        """Take one request.

        Args:
            request: see there.
            netns: of an Add, the namespace that came with it.
            now: the time.

        Raises:
            Unexpected: it has no meaning now. Nothing has changed; tell the agent, then end the connection.
        """
        match request:
            case AddPod(uid, info):
                if netns is None:
                    raise Unexpected(f"no namespace for {uid!r}")
                actions = self._add(uid, info, netns, now)
            case KeepPod(uid):
                if self._named is None:
                    raise Unexpected("pods are kept in a snapshot only, and it is complete")
                self._named.add(uid)
                actions = [Answer()]
            case DeletePod(uid):
                actions = self._delete(uid)
            case SnapshotSent():
                if self._named is None:
                    raise Unexpected("the snapshot is complete already")
                gone = [uid for uid in self._pods if uid not in self._named]
                actions = [self._forget(uid) for uid in gone]
                actions.append(Answer())
                self._named = None
                self._settle_by = now + SETTLE_S
            case _:
                assert_never(request)
        return [*actions, *self._settle(now)]

    def _add(self, uid: PodUid, info: PodInfo, netns: NetnsId, now: float) -> list[Action]:
        if self._named is not None:
            self._named.add(uid)
        pod = self._pods.get(uid)
        actions: list[Action] = []
        # A pod does not change who it is. Should one do so nevertheless, success for a proxy that goes on under
        # the old identity would be a lie.
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
        if self._named is not None:
            self._named.discard(uid)
            # As Rust ztunnel: the end of the snapshot ends what runs.
            if pod is not None and pod.up:
                pod = None
        return [Answer()] if pod is None else [self._forget(uid), Answer()]

    def _forget(self, uid: PodUid) -> Action:
        pod = self._pods.pop(uid)
        del self._uids[pod.generation]
        self._not_up.discard(uid)
        return End(pod.generation)

    def started(self, generation: Generation, now: float) -> list[Action]:
        """A proxy listens. One that was ended in the meantime is nobody's news."""
        pod = self._find(generation)
        if pod is None:
            return []
        pod.up, pod.error = True, ""
        self._not_up.discard(self._uids[generation])
        return [*self._answered(generation, ""), *self._settle(now)]

    def failed(self, generation: Generation, error: str, now: float) -> list[Action]:
        """A start came to nothing; it is tried again."""
        pod = self._find(generation)
        if pod is None:
            return []
        pod.retry_at, pod.error = now + RETRY_S, error
        return self._answered(generation, f"failure to start proxy : {error}")

    def advance(self, now: float) -> list[Action]:
        """Do what is due."""
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
        """Once ready, only losing the agent ends it: a pod that fails later is no news about the others."""
        if self._settled or self._named is not None:
            return []
        if self._not_up and now < self._settle_by:
            return []
        self._settled = True
        return [ReadyWithout(tuple(sorted(self._not_up)))] if self._not_up else []
