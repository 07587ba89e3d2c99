"""Calls the hooks of addons for the connections of Envoy's dialect; see :mod:`ztunnel.proxy.addons.host`.

=================  ====================================================================================
hook               when
=================  ====================================================================================
``connecting``     a TCP proxy has chosen a host and not dialled yet. Not called for listeners with
                   ``traffic_direction`` INBOUND, nor for hops behind internal listeners
``accepting``      policies have allowed the connection, and an application is chosen: for a tunnel
                   that ends here, or by a TCP proxy of an INBOUND listener
``opened``         the relay has started
``closed``         the access lines are written, and ``opened`` was called
``refused``        the access lines are written, and ``opened`` was not called
=================  ====================================================================================

Addons get fewer facts here than in an Istio mesh. A side is described by its certificate's identity and its
proxy's baggage, and an endpoint by its metadata. The service is the cluster's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from xds.model.address import SocketAddress
from ztunnel.addons import Direction, Facts, Path, Record
from ztunnel.proxy.addons.decide import Labels
from ztunnel.proxy.addons.host import AddonHost, Asked
from ztunnel.proxy.addons.preview import would_say
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.stream.outcome import Denied
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.stream.workloads import NOBODY, host_workload, of_identity, peer_identity, source_workload
from ztunnel.proxy.envoy.telemetry.decisions import Decisions

if TYPE_CHECKING:
    from ztunnel.proxy.envoy.listeners.connections import LiveHop
    from ztunnel.proxy.envoy.upstream.host import Host

#: Dynamic metadata with the names of the addons that returned a verdict:
#: ``%DYNAMIC_METADATA(ztunnel.addon:name)%``.
METADATA: Final = "ztunnel.addon"


class StreamAddons:
    """Calls the hooks of this process's addons with the facts about connections.

    Args:
        host: calls the addons.
        decisions: records the addons' denials.
    """

    def __init__(self, host: AddonHost, decisions: Decisions) -> None:
        self.host = host
        self._decisions = decisions

    async def connecting(self, hop: LiveHop, host: Host, *, tunnelled: bool) -> tuple[Labels, ...] | None:
        """Ask the addons for a verdict on a connection whose upstream host is chosen.

        Returns:
            The endpoint labels to prefer when choosing a host again. ``None``: keep the host.

        Raises:
            Denied: an addon denies the connection.
        """
        if hop.owner.model.direction == "inbound":
            await self.accepting(hop, None)
            return None
        facts = self._outbound(self.host.next_number(), hop.info, host, tunnelled=tunnelled)
        asked = hop.asked = Asked(self.host, facts)
        await self.host.decide(self.host.connecting, hop, asked)
        self._note(hop.info, asked)
        return asked.prefer if asked.prefer or asked.waited else None

    async def accepting(self, hop: LiveHop, application: SocketAddress | None) -> None:
        """Ask the addons for a verdict on a connection to an application of this node.

        Raises:
            Denied: an addon denies the connection.
        """
        asked = hop.asked = Asked(self.host, self._inbound(hop.info, application))
        await self.host.decide(self.host.accepting, hop, asked)
        self._note(hop.info, asked)

    def rehosted(self, hop: LiveHop, host: Host, *, tunnelled: bool) -> None:
        """Store the facts about a newly chosen host. Later hooks get these facts."""
        asked = hop.asked
        if asked is not None and asked.facts.direction is Direction.OUTBOUND:
            asked.facts = self._outbound(asked.facts.connection, hop.info, host, tunnelled=tunnelled)

    def ended(self, hop: LiveHop) -> None:
        """Inform the addons that a hop has ended."""
        info, asked = hop.info, hop.asked
        if asked is None:  # refused before a hook was asked
            inbound = hop.owner.model.direction == "inbound" or bool(info.method)
            facts = (
                self._inbound(info, None)
                if inbound
                else self._outbound(self.host.next_number(), info, None, tunnelled=False)
            )
            asked = Asked(self.host, facts)
        asked.ended(
            Record(
                asked.facts,
                info.bytes_received,
                info.bytes_sent,
                info.duration_s or 0.0,
                _reason(info),
                asked.addon,
            )
        )

    def explained(self, info: StreamInfo, host: Host, inbound: bool) -> dict[str, Any]:
        """Return the addons' predicted verdicts on a hypothetical connection, for ``/explain``.

        Args:
            info: the known facts about the connection.
            host: the chosen host.
            inbound: whether the host is an application of this node.
        """
        address = host.endpoint.address
        if inbound:
            facts = self._inbound(info, address if isinstance(address, SocketAddress) else None)
        else:
            facts = self._outbound(0, info, host, tunnelled=False)
        addons = [(each.loaded, each.suspended) for each in self.host.addons]
        said = would_say(addons, "accepting" if inbound else "connecting", facts, self.host.current)
        if not said:
            return {}
        answer: dict[str, Any] = {"addons": [each.shown() for each in said]}
        if said[-1].denies:
            answer["verdict"] = f"closed: refused by addon {said[-1].addon}"
        return answer

    def _note(self, info: StreamInfo, asked: Asked) -> None:
        """Write the names of the addons that returned a verdict to the stream's dynamic metadata.

        Raises:
            Denied: an addon denies the connection.
        """
        if asked.addon:
            # Change a copy of the facts, because all tunnels of a connection share one facts object, and each
            # tunnel has its own log line.
            info.facts = replace(info.facts, metadata={**info.facts.metadata, METADATA: {"name": asked.addon}})
        denied = asked.outcome.denied
        if denied:
            self._decisions.denied(info, info.facts, denied)
            raise Denied(denied, failure=Reason.ADDON)

    # Facts

    def _outbound(self, number: int, info: StreamInfo, host: Host | None, *, tunnelled: bool) -> Facts:
        source, destination = info.source, info.destination
        there = host_workload(host.endpoint.metadata) if host is not None else NOBODY
        return Facts(
            connection=number,
            dialect="envoy",
            direction=Direction.OUTBOUND,
            path=Path.TUNNEL
            if tunnelled or (host is not None and _TUNNEL in host.endpoint.metadata)
            else Path.DIRECT,
            source=source_workload(info),
            source_address=source.host,
            source_port=source.port,
            source_identity=peer_identity(info),
            destination=there,
            destination_address=destination.host,
            destination_port=destination.port,
            endpoint=str(host.endpoint.address) if host is not None else "",
            service=info.upstream_cluster,
            server_name=info.facts.server_name,
        )

    def _inbound(self, info: StreamInfo, application: SocketAddress | None) -> Facts:
        source, destination = info.source, application or info.destination
        own = info.tls.local_uri_sans if info.tls is not None else ()
        return Facts(
            connection=self.host.next_number(),
            dialect="envoy",
            direction=Direction.INBOUND,
            path=Path.TUNNEL if info.method else Path.DIRECT,
            source=source_workload(info),
            source_address=source.host,
            source_port=source.port,
            source_identity=peer_identity(info),
            destination=of_identity(own[0]) if own else NOBODY,
            destination_address=destination.host,
            destination_port=destination.port,
            destination_identity=own[0] if own else "",
            service=info.upstream_cluster,
        )


#: Istio's endpoint metadata key for the address that a tunnel behind an internal listener leads to.
_TUNNEL: Final = "tunnel"


def without_labels(prefer: Iterable[Labels], hosts: Iterable[Host]) -> frozenset[Host]:
    """Return the hosts that preferences exclude, or an empty set if no preference fits any host. Pure.

    Each preference narrows the remaining hosts. A preference that fits no remaining host has no effect.
    """
    every = {host: host_workload(host.endpoint.metadata).labels for host in hosts}
    left: frozenset[Host] = frozenset()
    for labels in prefer:
        fitting = frozenset(host for host in left or every if labels <= every[host].items())
        left = fitting or left
    return frozenset(every) - left if left else frozenset()


def _reason(info: StreamInfo) -> str:
    if info.termination_details:
        return info.termination_details
    if info.upstream_failure:
        return info.upstream_failure
    return info.response_details if info.response_code not in (0, 200) else info.downstream_failure
