"""Defines the values that the two halves of a node-local tunnel exchange.

The outbound half sends a :class:`NodeLocalRequest`, and the inbound half of the other pod answers with an open
connection to the application (:class:`InboundHalf`). Policies, baggage, log lines and metrics are the same as over
the network.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from hbone.aio.end import End
from xds.model.address import SocketAddress
from ztunnel.proxy.istio.accounting.outcome import Failed, of_reason
from ztunnel.proxy.istio.accounting.workload_labels import WorkloadLabels
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.path.pod_connection import PodConnection


class TunnelRequest(NamedTuple):
    """The request of a tunnel, as a CONNECT would carry it over the network.

    Attributes:
        authority: ``:authority``.
        service: the service that the client dialled, as in the ``forwarded`` header, if it dialled a service.
    """

    authority: str
    service: str | None


class NodeLocalRequest(NamedTuple):
    """The outbound half's request to open a node-local tunnel.

    Attributes:
        outer: the connection-table entry of the outbound half. The inbound half shares its byte counts, and stores
            its own certificate there.
        labels: the labels of the client's pod.
        certificate: the client pod's certificate.
        identities: the identities that the client accepts from the server, as over the network.
        target: the address in the far pod that a tunnel over the network would dial.
        tunnel: the values that a CONNECT would carry.
    """

    outer: PodConnection
    labels: WorkloadLabels
    certificate: WorkloadCertificate
    identities: tuple[str, ...]
    target: SocketAddress
    tunnel: TunnelRequest


class InboundHalf:
    """The inbound half of a node-local tunnel.

    Attributes:
        end: the connection to the application.
        entry: the inbound half's connection-table entry.
    """

    __slots__ = ("end", "entry")

    def __init__(self, end: End, entry: PodConnection) -> None:
        self.end = end
        self.entry = entry

    def finish(self, failure: Failed | None) -> Failed | None:
        """Close the inbound half and complete its record after the relay has ended. Called once, by the outbound
        half.

        Returns:
            The outbound half's failure. None if the inbound half was ended on purpose: over the network, the
            client's proxy would receive CANCEL, which is not a failure.
        """
        ended_here = self.entry.reason
        self.entry.close()
        self.entry.record.complete(of_reason(ended_here) if ended_here else failure)
        return None if ended_here else failure


class NodeLocalTarget(Protocol):
    """A pod of this node that accepts node-local tunnels: :class:`ztunnel.proxy.istio.path.inbound.Inbound`."""

    async def open_node_local(self, request: NodeLocalRequest) -> InboundHalf | None:
        """Open the inbound half of a node-local tunnel. Return ``None`` if the tunnel must go over the network.

        Raises:
            ConnectRefused: the request was refused, as it would be over the network.
            TunnelBroken: the far pod's proxy ended before answering.
        """
