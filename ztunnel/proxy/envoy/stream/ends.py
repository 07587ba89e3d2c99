"""Finds out which two workloads a connection with all its hops joins, for admin pages and the flight recorder.
Pure.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xds.model.address import SocketAddress
from ztunnel.proxy.envoy.stream.stream_info import LONG_NAMES, Flag, StreamInfo
from ztunnel.proxy.envoy.stream.workloads import host_name, source_baggage


class Ends(NamedTuple):
    """The two ends of a connection.

    Attributes:
        client, server: the authenticated identities, or empty texts.
        baggage: the client's baggage, or an empty text.
        workload: the server's workload according to the endpoint's metadata, or an empty text.
        service: name and namespace of the service, see :func:`service_of`.
        host: the last chosen host's address, see :func:`last_host`.
        tunnelled: whether a hop opens a tunnel.
        authority, tunnel: the authority of the last hop's CONNECT, and the host that gets this CONNECT, or empty
            texts.
        trace: the ``traceparent`` of the first request, or an empty text.
    """

    client: str
    server: str
    baggage: str
    workload: str
    service: tuple[str, str] | None
    host: SocketAddress | None
    tunnelled: bool
    authority: str
    tunnel: str
    trace: str


def ends_of(hops: Sequence[StreamInfo]) -> Ends:
    """Return the two ends of a connection. ``hops`` are its hops, beginning with the accepted one."""
    (client, server), service, host = proven(hops), service_of(hops), last_host(hops)
    tunnelled = False
    authority = tunnel = trace = workload = ""
    for hop in hops:
        tunnelled = tunnelled or hop.tunnelled
        trace = trace or hop.trace
        if hop.tunnel_authority:
            authority, tunnel = hop.tunnel_authority, hop.upstream_host
        if hop.upstream_metadata:
            workload = host_name(hop.upstream_metadata) or workload
    baggage = source_baggage(hops[0])
    return Ends(client, server, baggage, workload, service, host, tunnelled, authority, tunnel, trace)


def hops_of(info: StreamInfo) -> tuple[StreamInfo, ...]:
    """Return a connection's hops, the accepted hop first."""
    if info.behind is None:
        return (info,)
    hops = [info]
    while (behind := hops[-1].behind) is not None:
        hops.append(behind)
    return tuple(hops)


def proven(hops: Sequence[StreamInfo]) -> tuple[str, str]:
    """Return the authenticated identities of client and server, or empty texts.

    For a failed tunnel, only the client's identity is known.
    """
    for hop in hops:
        if hop.tls is not None and hop.tls.peer_uri_sans:
            return hop.tls.peer_uri_sans[0], hop.tls.local_uri_sans[0] if hop.tls.local_uri_sans else ""
    client = ""
    for hop in hops:
        own = hop.upstream_own_uri_sans[0] if hop.upstream_own_uri_sans else ""
        if hop.upstream_uri_sans:
            return own, hop.upstream_uri_sans[0]
        client = client or own
    return client, ""


def last_host(hops: Sequence[StreamInfo]) -> SocketAddress | None:
    """Return the last chosen host's address, or None if no host with an address was chosen."""
    for hop in reversed(hops):
        if hop.endpoint is not None and isinstance(hop.endpoint.address, SocketAddress):
            return hop.endpoint.address
    return None


def service_of(hops: Sequence[StreamInfo]) -> tuple[str, str] | None:
    """Return the service's name and namespace from the metadata that istiod puts into the cluster, or None."""
    for hop in hops:
        if not hop.cluster_metadata:
            continue
        services = hop.cluster_metadata.get("istio", {}).get("services")
        if isinstance(services, Sequence) and services and isinstance(services[0], Mapping):
            return str(services[0].get("name") or ""), str(services[0].get("namespace") or "")
    return None


def why(hops: Sequence[StreamInfo]) -> str:
    """Return why a connection ended, in the words of access logs. The last hop has the most precise reason."""
    first = hops[0]
    if first.termination_details:
        return first.termination_details
    for hop in reversed(hops):
        if hop.termination_details or hop.upstream_failure:
            return hop.termination_details or hop.upstream_failure
    if first.response_code not in (0, 200):
        return f"{first.response_code} {first.response_details}"
    return first.downstream_failure or ", ".join(LONG_NAMES[flag] for flag in Flag if flag in first.flags)
