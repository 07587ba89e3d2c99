"""The successor's side of a hand-over in an Istio mesh: rebuilds the offered connections and continues them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from functools import partial

from hbone.aio.end import End
from hbone.aio.handover import Resumed, resumed
from hbone.aio.relay import Relay
from hbone.aio.requests import Requests
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectionBroken
from ztunnel.proxy.dataplane.handover import messages as handover
from ztunnel.proxy.dataplane.handover.taker import Declining
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.identity.csr import IdentityError
from ztunnel.proxy.istio.accounting.access_record import Direction
from ztunnel.proxy.istio.accounting.outcome import EarlyDeny, Failed, of_reason, of_relay
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.handover.entries import prepared
from ztunnel.proxy.istio.handover.messages import CarrierValue, Offer, PodKey
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.path.request_plans import Peer

log = logging.getLogger(__name__)

Pods = Mapping[PodKey, PodProxy]


class Pending:
    """An offered hand-over unit, rebuilt but not started. The caller calls either :meth:`start` or
    :meth:`discard`, once.
    """

    def __init__(
        self,
        offer: Offer,
        pods: Pods,
        unit: Resumed,
        certificate: WorkloadCertificate | None,
        inbound: tuple[Peer, Requests] | None,
    ) -> None:
        self._offer = offer
        self._pods = pods
        self._unit = unit
        self._certificate = certificate
        self._inbound = inbound
        self._halves = [
            [(pods[value.pod], prepared(value, pods[value.pod], counts)) for value in values]
            for values, counts in zip(offer.entries, unit.counts, strict=True)
        ]

    @property
    def entries(self) -> int:
        """The number of pod connections in this unit."""
        return sum(map(len, self._halves))

    def discard(self) -> None:
        """Discard the rebuilt connections, because the previous process keeps the unit."""
        self._unit.discard()

    def start(self) -> None:
        """Start to carry the unit's connections, which belong to this process from now on."""
        unit = self._unit
        # Register the connections before checking policies, so that a policy review finds them and an early end is
        # counted.
        found = [[(pod, register(lambda _: None)) for pod, register in halves] for halves in self._halves]
        for halves, (a, b) in zip(found, unit.ends, strict=True):
            for pod, entry in halves:
                tunnel = next((end for end in (a, b) if isinstance(end, Tunnel)), None)
                entry.connection = tunnel.connection if tunnel is not None else None
                _count_socket(pod, entry)
        try:
            unit.start()
        except ConnectionBroken as error:
            log.error("a connection was lost while it was taken over error=%s", error)
            unit.discard()
        self._serve_connection()
        for number, halves in enumerate(found):
            relay = unit.relays[number] if number < len(unit.relays) else None
            self._serve_relay(halves, unit.ends[number], relay)
        for halves in found:
            for pod, entry in halves:
                if entry.state is not State.CLOSED:
                    group = (
                        pod.connections.outbound
                        if entry.record.direction is Direction.OUTBOUND
                        else pod.connections.inbound
                    )
                    group.judge(entry)

    def _serve_connection(self) -> None:
        connection, carrier = self._unit.connection, self._offer.carrier
        if connection is None or carrier is None:
            return
        pod = self._pods[carrier.pod]
        if carrier.dialled is None:
            assert self._inbound is not None
            peer, requests = self._inbound
            pod.context.tasks.run(
                pod.context.node.poller, pod.inbound.serve_moved(peer, requests, connection), "inbound"
            )
        else:
            assert self._certificate is not None
            target, identities = carrier.dialled
            tunnels = [end for pair in self._unit.ends for end in pair if isinstance(end, Tunnel)]
            pod.tunnels.adopt(connection, target, identities, self._certificate, tunnels, carrier.idle_s)

    def _serve_relay(
        self, halves: list[tuple[PodProxy, PodConnection]], ends: tuple[End, End], relay: Relay | None
    ) -> None:
        pod, entry = halves[0]
        if relay is not None:
            entry.carried_by(relay)
            for _, inner in halves[1:]:
                inner.carried_by(relay, state=State.JOINED)
        work = _carry(halves, ends, relay)
        tunnel = ends[0]
        if self._inbound is not None and isinstance(tunnel, Tunnel):
            self._inbound[1].adopt(tunnel, work)
        else:
            pod.context.tasks.run(pod.context.node.poller, work, str(entry.record.direction))


def _count_socket(pod: PodProxy, entry: PodConnection) -> None:
    """Count the application's socket as open until the entry ends. A tunnel request to a pod has no
    such socket.
    """
    record = entry.record
    if record.direction is Direction.OUTBOUND or not record.secured:
        count = pod.context.node.count_sockets
        count(record.direction.reporter, +1)
        entry.own(partial(count, record.direction.reporter, -1))


async def _carry(halves: list[tuple[PodProxy, PodConnection]], ends: tuple[End, End], relay: Relay | None) -> None:
    """Wait until a relay ends, then close both of its ends and complete the records, as in connections opened
    here.
    """
    (_, entry), near = halves[0], ends[0]
    failure: Failed | None = None
    try:
        if relay is None:
            failure = Failed("connection lost on its way from another process", Reason.BROKEN)
            return
        ended = await relay
        if entry.reason:
            failure = of_reason(entry.reason)
        elif ended.error is not None:
            failure = of_relay(ended.error, from_client=ended.first is near)
    except asyncio.CancelledError:
        failure = of_reason(entry.reason)
        raise
    finally:
        for end in ends:
            end.close()
        # If this proxy ended the inbound half, the outbound half has no failure: over the network it would see
        # CANCEL.
        for _, inner in halves[1:]:
            reason = inner.reason
            inner.close()
            inner.record.complete(of_reason(reason) if reason else failure)
            failure = None if reason else failure
        entry.close()
        entry.record.complete(failure)


async def make(pods: Pods, offer: handover.Offer, socks: list[socket.socket]) -> Pending:
    """Rebuild the connections that an offer describes, with the offer's sockets. Implements
    :data:`ztunnel.proxy.dataplane.handover.taker.Make`.
    """
    if not isinstance(offer, Offer):
        raise Declining("an offer of another dialect")
    if offer.unit.carrier is not None and offer.carrier is None:
        raise ValueError("a tunnel connection of no pod")
    keys = {value.pod for values in offer.entries for value in values}
    if offer.carrier is not None:
        keys.add(offer.carrier.pod)
    for key in keys:
        if key not in pods:
            raise Declining("pod not carried")
        try:
            await pods[key].context.local.get()
        except EarlyDeny:
            raise Declining("workload not known") from None
    _check_entries(offer)
    certificate, inbound, settings = None, None, None
    if offer.carrier is None:
        pod = pods[offer.entries[0][0].pod]
        settings = pod.context.client_settings
    else:
        pod = pods[offer.carrier.pod]
        settings = pod.context.client_settings if offer.carrier.dialled else pod.context.server_settings
        certificate, inbound = await _ends_of(offer.carrier, pod)
    poller = pod.context.node.poller
    requests = inbound[1] if inbound is not None else None
    unit = resumed(offer.unit, socks, settings, poller, requests)
    try:
        return Pending(offer, pods, unit, certificate, inbound)
    except BaseException:
        unit.discard()
        socks.clear()
        raise


def _check_entries(offer: Offer) -> None:
    """Check that an offer's entries match its relays and its tunnel connection.

    Raises:
        ValueError: parts of the offer contradict each other.
    """
    if len(offer.entries) != len(offer.unit.relays) or (offer.carrier is None and len(offer.entries) != 1):
        raise ValueError("the numbers of entries and relays differ")
    for values in offer.entries:
        directions = [value.record.direction for value in values]
        if directions not in (["outbound"], ["inbound"], ["outbound", "inbound"]):
            raise ValueError("a relay without a connection")
    if offer.carrier is not None:
        wanted = "outbound" if offer.carrier.dialled is not None else "inbound"
        if any(values[0].record.direction != wanted or len(values) > 1 for values in offer.entries):
            raise ValueError("a tunnel connection with connections of the other direction")


async def _ends_of(
    carrier: CarrierValue, pod: PodProxy
) -> tuple[WorkloadCertificate | None, tuple[Peer, Requests] | None]:
    """Return our certificate for a dialled tunnel connection, or the peer and request handler of an accepted one.

    Raises:
        Declining: the pod's certificate is not available.
    """
    if carrier.dialled is None:
        if carrier.source is None or carrier.local is None:
            raise ValueError("an accepted connection without addresses")
        peer = Peer(carrier.source, carrier.local)
        return None, (peer, pod.inbound.requests_of(peer))
    workload = (await pod.context.local.get()).workload
    try:
        return await pod.context.certificate(workload), None
    except IdentityError as error:
        raise Declining(f"no certificate: {error}") from error
