"""Finds the two ends of a connection through all its hops, for admin pages and the flight recorder. Pure."""

from collections.abc import Mapping, Sequence

from xds.model.address import SocketAddress
from ztunnel.proxy.envoy.stream.stream_info import LONG_NAMES, Flag, StreamInfo


def hops_of(info: StreamInfo) -> tuple[StreamInfo, ...]:
    """Return a connection's hops, the accepted one first."""
    if info.behind is None:
        return (info,)
    hops = [info]
    while (behind := hops[-1].behind) is not None:
        hops.append(behind)
    return tuple(hops)


def proven(hops: Sequence[StreamInfo]) -> tuple[str, str]:
    """Return the authenticated identities of client and server, or empty texts.

    For a failed tunnel only the client's is known.
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
    """Return name and namespace of the service that istiod's metadata of a cluster names, or None."""
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
