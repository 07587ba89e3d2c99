"""The workloads at the two ends of a connection, by identity, baggage and an endpoint's metadata. Pure.

Envoy's dialect has no table of workloads, so the facts about them are parsed from texts.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from hbone.tunnel_headers import parse_baggage
from xds.model.metadata import Metadata
from ztunnel.addons import Workload
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo

_BAGGAGE: Final = "envoy.filters.listener.workload_metadata"
#: Istio's endpoint metadata. Its field ``workload`` is ``name;namespace;canonical name;canonical
#: revision;cluster``.
_ISTIO: Final = "istio"
_LB: Final = "envoy.lb"
NOBODY: Final = Workload()


def host_workload(metadata: Metadata) -> Workload:
    """Return the workload at an endpoint, from its metadata. Texts in ``envoy.lb`` also become labels."""
    labels = {key: value for key, value in metadata.get(_LB, {}).items() if isinstance(value, str)}
    return named(host_name(metadata), tuple(sorted(labels.items())))


def host_name(metadata: Metadata) -> str:
    """Return the text that describes the workload in an endpoint's metadata, or an empty text."""
    text = metadata.get(_ISTIO, {}).get("workload")
    return text if isinstance(text, str) else ""


@lru_cache(maxsize=4096)
def named(text: str, more: tuple[tuple[str, str], ...] = ()) -> Workload:
    """Return the workload described by a text from endpoint metadata, with additional labels."""
    name, namespace, app, version, cluster, *_ = [*text.split(";"), "", "", "", "", ""]
    labels: Mapping[str, str] = {**_filled(app=app, version=version), **dict(more)}
    return Workload(name=name, namespace=namespace, cluster=cluster, labels=MappingProxyType(labels))


def _filled(**labels: str) -> dict[str, str]:
    return {key: value for key, value in labels.items() if value}


def source_workload(info: StreamInfo) -> Workload:
    """Return the client's workload according to its baggage (sent or configured), or else to its identity."""
    baggage = source_baggage(info)
    return described(baggage, peer_identity(info)) if baggage else of_identity(peer_identity(info))


def source_baggage(info: StreamInfo) -> str:
    """Return the client's baggage, as sent by the client or as configured, or an empty text."""
    if _BAGGAGE in info.facts.metadata:
        baggage = info.facts.metadata[_BAGGAGE].get("baggage")
        if isinstance(baggage, str):
            return baggage
    for name, value in info.request_headers:
        if name == "baggage":
            return value
    return ""


@lru_cache(maxsize=4096)
def described(baggage: str, identity: str) -> Workload:
    """Return a workload from its baggage and identity."""
    found = parse_baggage(((b"baggage", baggage.encode("latin-1", "replace")),))
    return of_identity(identity)._replace(
        name=found.workload_name,
        namespace=found.namespace,
        cluster=found.cluster_id,
        labels=MappingProxyType(_filled(app=found.service_name, version=found.revision)),
    )


@lru_cache(maxsize=4096)
def of_identity(identity: str) -> Workload:
    """Return the workload facts contained in a SPIFFE id."""
    parts = identity.removeprefix("spiffe://").split("/")
    if len(parts) != 5:
        return NOBODY
    return Workload(namespace=parts[2], service_account=parts[4])


def peer_identity(info: StreamInfo) -> str:
    """Return the client's authenticated identity, or an empty text."""
    peer = info.facts.peer
    return str(peer.identity) if peer is not None and peer.identity is not None else ""
