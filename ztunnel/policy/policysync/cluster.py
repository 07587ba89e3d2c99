"""Follows a cluster's objects, and publishes the policies for the pods of one node, or of all nodes."""

import asyncio
from typing import Protocol

from ztunnel.kube.objects import Changes, EventSink, WatchedSource, not_read
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.policysync.problems import ProblemReports
from ztunnel.policy.policysync.view import excerpt


class Publisher(Protocol):
    """A server of PolicySync."""

    def publish(self, compiled: Compiled) -> None:
        """Serve this state to clients from now on, without waiting for the clients."""
        ...


class ClusterPolicies:
    """Keeps a server's policies equal to the policies of a cluster.

    Policies are published only after every object has been read, because a missing object could be the policy that
    denies a pod's traffic. While the source is unreachable, the last state is served.

    Args:
        source: the source of objects, such as an informer of :data:`~ztunnel.policy.policysync.kinds.SERVED`.
        server: receives its own copy after each effective change.
        node: the node whose pods are served. None serves the policies of every node.
        events: reports objects that are not enforced as written.
        nodes: whether the source includes Node objects.

    Attributes:
        synced: whether every object has been received.
        compiled: the last published state.
    """

    def __init__(
        self,
        source: WatchedSource,
        server: Publisher,
        node: str | None,
        events: EventSink,
        *,
        nodes: bool = False,
    ) -> None:
        self._source = source
        self._server = server
        self._node = node
        self._objects = PolicyObjects(nodes=nodes)
        self._compiler = Compiler()
        self._reports = ProblemReports(events)
        self.synced = False
        self.compiled = Compiled()

    @property
    def problems(self) -> int:
        """The number of objects that are not enforced as written."""
        return len(self._objects.problems)

    @property
    def not_followed(self) -> tuple[str, ...]:
        """The plurals of the kinds that the source cannot follow now."""
        return tuple(self._source.faults)

    @property
    def unready(self) -> str:
        """Why no state can be served yet. Empty if one is served."""
        return "" if self.synced else not_read(self._source.faults)

    async def follow(self) -> None:
        """Process one batch of changes. The caller repeats this, and loses no change if it cancels between two
        batches.
        """
        changes = await self._source.next()
        # Changes are compiled in a thread, because 20,000 pods at once take seconds, during which the pods'
        # sockets must be served.
        changed = await asyncio.to_thread(self._take, changes)
        self._reports.report(self._objects.problems)
        first = changes.synced and not self.synced
        self.synced = self.synced or changes.synced
        if self.synced and (changed or first):
            self.compiled = await asyncio.to_thread(self._excerpt)
            self._server.publish(self.compiled)

    def _take(self, changes: Changes) -> bool:
        return bool(self._compiler.apply(self._objects.changes(changes.objects)))

    def _excerpt(self) -> Compiled:
        """Return a copy, because streams read it over many loop iterations, while the compiler changes its own."""
        found = self._compiler.compiled
        return excerpt(found, [key for key in found.endpoints if self._node in (None, found.nodes.get(key))])
