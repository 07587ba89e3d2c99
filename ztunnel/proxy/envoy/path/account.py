"""Counts ended connections in Envoy's dialect, and records them in the flight recorder.

A pod's connection is recorded once, with all its hops. At the destination's node, each tunnel request is recorded
once. The tunnel connection itself is recorded only if it ends without having carried a request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from hbone.aio.connection import Connection
from xds.model.address import SocketAddress
from ztunnel import __version__
from ztunnel.addons import Workload
from ztunnel.proxy.dataplane.reasons import Reason, Stage
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveConnection, LiveHop
from ztunnel.proxy.envoy.stream.ends import ends_of, hops_of, why
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.stream.workloads import described, named, of_identity
from ztunnel.proxy.flows.history import Totals
from ztunnel.proxy.flows.hubble import BY_ITSELF, Ended, Side, response
from ztunnel.proxy.flows.ring import Entry, FlowRing
from ztunnel.proxy.flows.times import ConnectionTimes
from ztunnel.runtime.clock import Clock

#: The number of text references in one flight recorder entry; :meth:`Account.ended` fills them in.
_WIDTH: Final = 10
#: The number of open connections handled per loop iteration: about a millisecond of work.
_SLICE: Final = 1000
#: Texts received from a peer are recorded up to this length.
_MOST_TEXT: Final = 512
#: Matches the names that istiod gives to the policies of its RBAC filters.
_ISTIO_POLICY: Final = re.compile(r"ns\[(.*)\]-policy\[(.*)\]-rule\[\d+\]")


class Account:
    """Counts the connections of one process when they end, and records them in the flight recorder.

    Args:
        capacity: the number of entries in the flight recorder. 0 disables it.
        clock: the clock for end times.
        node, cluster: the names of this node and its cluster, for flows.

    Attributes:
        ring: the flight recorder.
        times: the counts.
        node: the name of this node in flows.
        moved_bytes: bytes moved by the relays that have ended.
    """

    def __init__(self, capacity: int, clock: Clock, node: str, cluster: str) -> None:
        self.ring = FlowRing(capacity, _WIDTH)
        self.times = ConnectionTimes()
        self._clock = clock
        self.node = f"{cluster}/{node}"
        self._cluster = cluster
        self.moved_bytes = 0

    def ended(self, hop: LiveHop) -> None:
        """Count and record the end of ``hop``, the first hop of a connection or the request for a tunnel."""
        info = hop.info
        hops = (info,) if info.behind is None else hops_of(info)
        ends = ends_of(hops)
        request = bool(info.method) or hop.owner.ends_tunnels
        inbound = request or hop.owner.model.direction == "inbound"
        tunnelled = request or ends.tunnelled
        trace = ends.trace.encode() if ends.trace else b""
        reporter, path = "destination" if inbound else "source", "hbone" if tunnelled else "plain"
        duration_s, times, wall_s = info.duration_s or 0.0, self.times, self._clock.wall()
        times.lengths[reporter, path].observe(duration_s, trace, wall_s)
        if not inbound and info.ready_s is not None:
            times.connects[path, "ok" if info.connected else "failed"].observe(info.ready_s, trace, wall_s)
        if info.failure is not None:
            dialled = info.ready_s is not None
            stage = Stage.RELAY if info.connected else Stage.CONNECT if dialled else Stage.EARLY
            times.failed(reporter, stage, info.failure)
        ring = self.ring
        if not ring.capacity:
            return
        secured = bool(ends.client and ends.server and (inbound or info.connected))
        # For tunnels, record the application's port from the request's authority, not the tunnel's port.
        destination = info.facts.destination
        if not ends.tunnel:
            destination = (hop.application if inbound else None) or ends.host or destination
        # Connections between the same two workloads rarely differ in these texts, so they share one stored value.
        refs = ring.text(
            (
                ends.client,
                ends.server,
                ends.baggage[:_MOST_TEXT],
                ends.workload,
                ends.service,
                ends.authority,
                ends.tunnel,
                tunnelled,
                BY_ITSELF if info.failure is None else _ended(info, hops, info.failure),
                hop.asked.addon if hop.asked is not None and hop.asked.addon else "",
            )
        )
        ring.add(
            wall_s,
            duration_s,
            info.ready_s if info.connected and info.ready_s is not None else -1.0,
            (info.bytes_received, info.bytes_sent),
            (info.facts.source, destination),
            trace,
            (0 if inbound else 1) | (2 if secured else 0),
            refs,
        )

    def first_request(self, connection: Connection, trace: str) -> None:
        """Store the trace of a tunnel connection's first request as the exemplar of its handshake duration."""
        self.times.first_request(connection, trace.encode(), self._clock.wall())

    async def sample(self, connections: Connections) -> None:
        """Append the current totals of ended and open connections to the traffic history."""
        history, now_s = self.times.history, self._clock.monotonic()
        if not history.is_due(now_s):
            return
        failures, denials = self.times.failures()
        opened, moved = sum(each.count for each in self.times.lengths.values()), self.moved_bytes
        for number, hop in enumerate([*connections, *connections.hops], 1):
            tunnel = isinstance(hop, LiveConnection) and hop.owner.ends_tunnels  # count its requests instead
            opened += hop.account is not None and not tunnel
            if hop.relay is not None:
                counts = hop.relay.counts
                behind = hop.upstream.hops if hop.upstream is not None else ()
                ends = sum(each.account is not None for each in (hop, *behind))
                moved += ends * (counts.sent_here + counts.received_here)
            if not number % _SLICE:
                await asyncio.sleep(0)
        history.sample(now_s, Totals(opened, failures, denials, moved))

    def shape(self, entry: Entry) -> dict[str, Any]:
        """Return a flight recorder entry as a GetFlowsResponse of Hubble."""
        client, server, baggage, there, service, authority, tunnel, tunnelled, ended, addon = entry.refs
        with suppress(ValueError):  # raised for an empty text or a host name
            entry = entry._replace(destination=SocketAddress.parse(authority))
        source, destination = described(baggage, client) if baggage else of_identity(client), of_identity(server)
        if there:
            destination = named(there)._replace(service_account=destination.service_account)
        return response(
            entry,
            self.node,
            self._side(source, client),
            self._side(destination, server),
            ended,
            addon=addon,
            tunnelled=tunnelled,
            service=service,
            tunnel=tunnel,
            emitter=__version__,
        )

    def _side(self, workload: Workload, identity: str) -> Side:
        """Describe one side of a connection. If only the workload's identity is known, its service account serves
        as name.
        """
        name = workload.name or workload.service_account
        return Side(
            namespace=workload.namespace,
            workload=name,
            kind="Deployment" if workload.name else "ServiceAccount",
            cluster=(workload.cluster or self._cluster) if name else "",
            account=workload.service_account,
            app=workload.labels.get("app", ""),
            version=workload.labels.get("version", ""),
            spiffe=identity,
        )


def _ended(info: StreamInfo, hops: Sequence[StreamInfo], failure: Reason) -> Ended:
    found = _ISTIO_POLICY.fullmatch(info.policy)
    policy = f"{found[1]}/{found[2]}" if found is not None else info.policy
    return Ended(failure, why(hops)[:_MOST_TEXT], policy, info.flags_text())
