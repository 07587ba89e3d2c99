"""What the pods of one node share: the mesh, certificates, metrics, and who is in trouble."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from hbone.aio.connection import ConnectionSettings
from hbone.aio.poller import Poller
from hbone.headers import Baggage, format_baggage
from hbone.settings import Http2Settings, client_settings, server_settings
from tproxy.aio import sockets
from xds.model.mesh import Mesh
from xds.model.workload import Workload, WorkloadUid
from ztunnel.dataplane.resolver import Resolver
from ztunnel.istio.certificates.manager import Certificates, Revocations
from ztunnel.istio.config import AmbientConfig
from ztunnel.istio.logs import LogStream
from ztunnel.istio.metrics import Metrics, Side
from ztunnel.istio.names import Names
from ztunnel.runtime.clock import Clock

if TYPE_CHECKING:
    from ztunnel.istio.pod import PodProxy

#: How long an endpoint that failed is passed over while there are others; a guess between Envoy's outlier
#: ejection (30 s) and what a restarting pod takes.
AVOID_S = 10.0
_MOST_SUSPECTS = 10_000

#: A pod by namespace, name and service account: how ZDS names it and the mesh knows it.
PodKey = tuple[str, str, str]


class Suspects:
    """Endpoints that failed lately."""

    def __init__(self) -> None:
        self._until_s: dict[WorkloadUid, float] = {}

    def add(self, uid: WorkloadUid, now_s: float) -> None:
        """An endpoint failed."""
        if len(self._until_s) >= _MOST_SUSPECTS:
            self._until_s.pop(next(iter(self._until_s)))
        self._until_s[uid] = now_s + AVOID_S

    def clear(self, uid: WorkloadUid) -> None:
        """An endpoint answered."""
        self._until_s.pop(uid, None)

    def current(self, now_s: float) -> frozenset[WorkloadUid]:
        """Those to pass over now."""
        if not self._until_s:
            return _NOBODY
        for uid in [uid for uid, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[uid]
        return frozenset(self._until_s)


_NOBODY: frozenset[WorkloadUid] = frozenset()


class Described(NamedTuple):
    """What is said of a workload again and again, made once per version of it."""

    workload: Workload
    side: Side
    secured_side: Side
    baggage: bytes


def describe(workload: Workload) -> Described:
    """See :class:`Described`."""
    side = Side.of(workload)
    place = workload.locality
    return Described(
        workload,
        side,
        side._replace(principal=str(workload.identity)),
        format_baggage(
            Baggage(
                cluster_id=workload.cluster_id,
                namespace=workload.namespace,
                workload_type=workload.workload_type,
                workload_name=workload.workload_name,
                service_name=workload.canonical_name,
                revision=workload.canonical_revision,
                region=place.region,
                zone=place.zone,
            )
        ),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """See the module.

    Attributes:
        revocations: where lists come from; ``None``: nobody is revoked.
        is_ours: see :class:`ztunnel.runtime.accepting.ListeningSocket`.
        tell_open: told how many sockets are open whenever that changes, for those who accept from the same ports.
        pods: proxies of pods that run here, for joining tunnels that never leave the node.
        ask: on demand: have the control plane tell about a key; ``None`` when the mesh holds everything.
        asked: keys that were asked for and answered, one way or the other.
        descriptions: see :meth:`described`.
    """

    config: AmbientConfig
    mesh: Mesh
    certificates: Certificates
    poller: Poller
    clock: Clock
    metrics: Metrics
    logs: LogStream
    revocations: Revocations | None = None
    is_ours: Callable[[], bool] | None = None
    tell_open: Callable[[int], None] | None = None
    rng: random.Random = field(default_factory=random.Random)
    suspects: Suspects = field(default_factory=Suspects)
    pods: dict[PodKey, PodProxy] = field(default_factory=dict)
    ask: Callable[[str], Awaitable[None]] | None = None
    asked: set[str] = field(default_factory=set)
    descriptions: dict[WorkloadUid, Described] = field(default_factory=dict)
    names: Names = field(init=False)
    client_settings: ConnectionSettings = field(init=False)
    server_settings: ConnectionSettings = field(init=False)
    keepalive: sockets.Keepalive | None = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.names = Names(Resolver(), self.clock)
        self.client_settings = self._settings(client_settings())
        self.server_settings = self._settings(server_settings())
        wanted = config.socket
        self.keepalive = (
            None
            if wanted.keepalive_time_s is None
            else sockets.Keepalive(
                idle_s=max(1, int(wanted.keepalive_time_s)),
                interval_s=max(1, int(wanted.keepalive_interval_s)),
                probes=wanted.keepalive_retries,
            )
        )

    def _settings(self, http2: Http2Settings) -> ConnectionSettings:
        config = self.config
        return ConnectionSettings(
            http2=replace(
                http2,
                stream_window_bytes=config.stream_window,
                connection_window_bytes=config.connection_window,
                max_frame_bytes=config.frame_size,
                early_data=config.early_data,
            ),
            handshake_timeout_s=config.handshake_timeout_s,
        )

    def described(self, workload: Workload) -> Described:
        """What is said of a workload; remembered while it is this version."""
        known = self.descriptions.get(workload.uid)
        if known is None or known.workload is not workload:
            known = self.descriptions[workload.uid] = describe(workload)
        return known

    def sockets(self, reporter: str, change: int) -> None:
        """So many sockets more, or less, are open for users."""
        number = self.metrics.sockets_open
        number[reporter] += change
        if self.tell_open is not None:
            self.tell_open(number["source"] + number["destination"])

    def forget(self, uids: Iterable[WorkloadUid]) -> None:
        """Workloads changed or are gone."""
        for uid in uids:
            self.descriptions.pop(uid, None)
            self.suspects.clear(uid)

    async def told(self, key: str) -> bool:
        """On demand: ask for a key unless that was done before; whether anything may have changed.

        Raises:
            TimeoutError: there was no answer. The key does not count as asked for: what nobody has told about
                must not be taken for something outside the mesh.
        """
        if self.ask is None or key in self.asked:
            return False
        await self.ask(key)
        self.asked.add(key)
        return True
