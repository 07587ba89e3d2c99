"""Manages the clusters from the bootstrap and from CDS: creates, updates, replaces and removes them.

While a changed cluster warms, the old version serves. Once warm, the new version replaces it, and the old
version's connections continue. Clusters become active independently: a cluster whose endpoints or secrets never
arrive delays no other cluster, no removal and no later update. If a cluster is refused, its old version stays
active, the refusal is reported, and the other clusters of the update are applied.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from xds.dialects.envoy import Surroundings, compile_cluster
from xds.dialects.envoy.cluster import renamed_cluster
from xds.errors import ConfigError
from xds.model.cluster import Cluster
from xds.model.weighted_cluster import WeightedCluster
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3 import cluster_pb2
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.resource import Resource, Update, UpdateRejected
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, Surround
from ztunnel.runtime.latch import Latch, all_of

log = logging.getLogger(__name__)

#: The number of clusters created per loop iteration, which takes about 5 ms.
_AT_ONCE = 50
TYPE_URL = registry.type_url(cluster_pb2.Cluster)


@dataclass(frozen=True, slots=True)
class Failure:
    """A refused version of a resource, for ``error_state`` in dumps."""

    name: str
    body: AnyMessage
    details: str
    at: float
    version: str


class ClusterManager:
    """Creates, replaces and retires clusters by name.

    Args:
        surround: the process's services for clusters.
        surroundings: the names that configuration may refer to.
        retired: called with each replaced or removed cluster. The called function drains and closes the cluster.
    """

    def __init__(
        self, surround: Surround, surroundings: Surroundings, retired: Callable[[LiveCluster], None]
    ) -> None:
        self._surround = surround
        self._surroundings = surroundings
        self._retired = retired
        self._active: dict[str, LiveCluster] = {}
        self._warming: dict[str, LiveCluster] = {}
        self._static: set[str] = set()
        self.failures: dict[str, Failure] = {}
        self.version = ""
        scope = surround.stats.scope("cluster_manager")
        scope.gauge("active_clusters", lambda: float(len(self._active)))
        scope.gauge("warming_clusters", lambda: float(len(self._warming)))
        self._added = scope.counter("cluster_added")
        self._modified = scope.counter("cluster_modified")
        self._removed = scope.counter("cluster_removed")

    def pick(
        self, choices: tuple[WeightedCluster, ...], rng: random.Random
    ) -> tuple[WeightedCluster, LiveCluster | None]:
        """Pick one of several weighted clusters at random. Return the choice, and the cluster if it is active."""
        one = choices[0] if len(choices) == 1 else rng.choices(choices, [each.weight for each in choices])[0]
        return one, self._active.get(one.name)

    def get(self, name: str) -> LiveCluster | None:
        """Return the active cluster with this name, or None."""
        return self._active.get(name)

    @property
    def active(self) -> list[LiveCluster]:
        """The active clusters, by name."""
        return [self._active[name] for name in sorted(self._active)]

    @property
    def warming(self) -> list[LiveCluster]:
        """The clusters that wait for secrets or endpoints, by name."""
        return [self._warming[name] for name in sorted(self._warming)]

    def add_static(self, body: AnyMessage) -> None:
        """Add a cluster of ``static_resources``.

        Raises:
            ConfigError: the cluster is invalid or unsupported.
        """
        model = self._compile(body)
        self._check_sources(model)
        cluster = LiveCluster(model, body, self._surround, added_via_api=False)
        self._static.add(model.name)
        self._active[model.name] = cluster
        cluster.show_state()
        self._added.value += 1
        cluster.start()

    async def initialised(self) -> None:
        """Wait until no cluster is warming: each has become active, or was replaced or removed."""
        for cluster in list(self._active.values()):
            await cluster.warm.wait()
        while self._warming:
            await next(iter(self._warming.values())).warm.wait()

    async def receive(self, update: Update) -> Latch:
        """Apply a CDS update. The returned latch is set when no cluster of the update is warming.

        Raises:
            UpdateRejected: names each refused cluster. All other clusters are applied.
        """
        self.version = update.version
        errors: dict[str, str] = {}
        changed: list[LiveCluster] = []
        seen: set[str] = set()
        for resource in update.resources:
            seen.add(resource.name)
            try:
                cluster = self._apply(resource)
            except ConfigError as error:
                reason = str(error)
                log.warning("cluster %s refused, its last good version stays in use: %s", resource.name, reason)
                errors[resource.name] = f"{resource.name}: {reason}"
                self.failures[resource.name] = Failure(
                    resource.name, resource.body, reason, self._surround.clock.wall(), resource.version
                )
                continue
            self.failures.pop(resource.name, None)
            if cluster is not None:
                changed.append(cluster)
                if len(changed) % _AT_ONCE == 0:
                    await asyncio.sleep(0)  # let connections proceed while a large mesh is applied
        gone = set(update.removed)
        if update.complete:
            gone |= {name for name in (*self._active, *self._warming, *self.failures) if name not in seen}
        for name in gone - self._static:
            self._remove(name)
        if changed or gone:
            log.info(
                "clusters: %d active, %d changed, version %s", len(self._active), len(changed), update.version
            )
        if errors:
            reasons = "Error adding/updating cluster(s) " + ", ".join(errors.values())
            raise UpdateRejected(reasons, errors.keys())
        return all_of([cluster.warm for cluster in changed])

    def _compile(self, body: AnyMessage, name: str = "") -> Cluster:
        found = renamed_cluster(body.value, name) if body.type_url == TYPE_URL else None
        if found is not None:
            return found
        try:
            message = registry.unpack(body)
        except (registry.UnknownType, registry.MalformedMessage) as error:
            raise ConfigError(str(error)) from None
        if not isinstance(message, cluster_pb2.Cluster):
            raise ConfigError(f"not a Cluster: {body.type_url}")
        return compile_cluster(message, self._surroundings, body)

    def _check_sources(self, model: Cluster) -> None:
        if model.eds_source is not None:
            self._surround.sources.check(model.eds_source)
        self._surround.secrets.check(model.secret_refs)

    def _apply(self, resource: Resource) -> LiveCluster | None:
        body, version = resource.body, resource.version
        current = self._warming.get(resource.name) or self._active.get(resource.name)
        if current is not None and current.added_via_api and current.body == body:
            # A state-of-the-world response repeats every cluster when one changes. Of two equal bodies, the new
            # one is stored, because a stored body keeps its whole response in memory.
            current.body, current.version = body, version
            return None
        model = self._compile(body, resource.name)
        if model.name in self._static:
            return None
        current = self._warming.get(model.name) or self._active.get(model.name)
        if current is not None and current.model.content == model.content:
            current.body, current.version = body, version
            return None
        self._check_sources(model)
        try:
            cluster = LiveCluster(model, body, self._surround, version=version)
            try:
                cluster.start()
            except ValueError:
                cluster.stats.scope.close()
                raise
        except ValueError as error:
            raise ConfigError(str(error)) from None
        superseded = self._warming.pop(model.name, None)
        if superseded is not None:
            self._discard(superseded)
        self._warming[model.name] = cluster
        if model.name not in self._active:
            cluster.show_state()
        (self._modified if model.name in self._active else self._added).value += 1
        cluster.warm.then(partial(self._promote, cluster))
        return cluster

    def _promote(self, cluster: LiveCluster) -> None:
        name = cluster.model.name
        if self._warming.get(name) is not cluster:
            return
        del self._warming[name]
        old = self._active.get(name)
        self._active[name] = cluster
        if old is not None:
            cluster.show_state()
            self._retire(old)

    def _discard(self, cluster: LiveCluster) -> None:
        """Retire a cluster version that never became active, and set its latch, because the version no longer
        warms.
        """
        cluster.warm.set()
        self._retire(cluster)

    def _retire(self, cluster: LiveCluster) -> None:
        cluster.stats.scope.close()
        self._retired(cluster)

    def _remove(self, name: str) -> None:
        active, warming = self._active.pop(name, None), self._warming.pop(name, None)
        for cluster in (active, warming):
            if cluster is not None:
                self._removed.value += 1
        if active is not None:
            self._retire(active)
        if warming is not None:
            self._discard(warming)
        self.failures.pop(name, None)

    async def close(self) -> None:
        """Close every cluster; idempotent."""
        everything = [*self._active.values(), *self._warming.values()]
        await asyncio.gather(*(cluster.close() for cluster in everything))
