"""Serializes a connection's hop for another process, and restores a received hop with this process's
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from hbone.tls_state import facts_of, facts_state
from xds.model.address import EndpointAddress, InternalAddress, NamedAddress, PipeAddress, SocketAddress
from xds.model.cluster import Endpoint
from xds.model.metadata import Metadata
from xds.model.secret import Certificate
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.handover.messages import AddressValue, HopValue, InfoValue, Kind, Plain, TlsValue
from ztunnel.proxy.envoy.listeners.connections import LiveConnection, LiveHop, LiveRequest
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo, TlsFacts

_COPIED: Final = (
    "started_at",
    "options",
    "restored",
    "attempts",
    "connected",
    "response_code",
    "ready_s",
    "request_headers",
    "response_headers",
    "upstream_uri_sans",
    "upstream_own_uri_sans",
    "tunnelled",
)
_METADATA: Final = ("upstream_metadata", "route_metadata", "virtual_host_metadata")
_TEXTS: Final = (
    "listener",
    "remote_text",
    "chain",
    "route",
    "protocol",
    "method",
    "authority",
    "path",
    "response_details",
    "termination_details",
    "upstream_failure",
    "downstream_failure",
    "cluster",
    "upstream_cluster",
    "upstream_host",
    "upstream_local",
    "stream_id",
    "upstream_sni",
    "tunnel_authority",
    "policy",
    "trace",
)


def hop_value(hop: LiveHop, now_s: float) -> HopValue:
    """Return a hop as a serializable value. ``now_s`` is the current time in monotonic seconds."""
    kind = Kind.INNER
    if isinstance(hop, LiveConnection):
        kind = Kind.CONNECTION
    elif isinstance(hop, LiveRequest):
        kind = Kind.REQUEST
    elif hop.info.manager is not None:
        kind = Kind.JOINED
    pod = hop.pod if isinstance(hop, LiveConnection) else ""
    return HopValue(kind=kind, info=_info_value(hop.info, now_s), pod=pod, application=hop.application)


def _info_value(info: StreamInfo, now_s: float) -> InfoValue:
    metadata: dict[str, Mapping[str, Any]] = dict(_plain(info.facts.metadata))
    copied: dict[str, Any] = {name: getattr(info, name) for name in _COPIED}
    copied |= {name: _plain(getattr(info, name)) for name in _METADATA}
    certificate = info.upstream_certificate
    return InfoValue(
        age_s=now_s - info.started,
        facts=replace(info.facts, metadata=metadata),
        texts={name: text for name in _TEXTS if (text := getattr(info, name))},
        flags=tuple(map(str, info.flags)),
        failure=str(info.failure) if info.failure is not None else "",
        direct_local=address_value(info.direct_local) if info.direct_local is not None else None,
        endpoint=address_value(info.endpoint.address) if info.endpoint is not None else None,
        failed=tuple(address_value(each.address) for each in info.failed),
        tls=_tls_value(info.tls) if info.tls is not None else None,
        upstream_tls=facts_state(info.upstream_tls) if info.upstream_tls is not None else None,
        upstream_pem=certificate.chain_pem if certificate is not None else None,
        **copied,
    )


def _tls_value(tls: TlsFacts) -> TlsValue:
    return TlsValue(
        version=tls.version,
        cipher=tls.cipher,
        peer_subject=tls.peer_subject,
        peer_chain=tuple(each.public_bytes(Encoding.DER) for each in tls.peer_chain),
        local_pem=tls.local.chain_pem if tls.local is not None else None,
        peer_uri_sans=tls.peer_uri_sans,
        peer_dns_sans=tls.peer_dns_sans,
        local_uri_sans=tls.local_uri_sans,
    )


def _plain(value: Metadata) -> Plain:
    return {name: _plain_value(struct) for name, struct in value.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(inner) for inner in value]
    return value


def info_of(value: InfoValue, connection_id: int, now_s: float) -> StreamInfo:
    """Restore the facts about a hop from a received value. The hop's configuration is not restored here.

    Args:
        value: the hop's value.
        connection_id: the connection's id in this process.
        now_s: monotonic seconds.

    Raises:
        ValueError: a certificate, an address or a flag cannot be read.
    """
    known: dict[str, Any] = {name: getattr(value, name) for name in (*_COPIED, *_METADATA)}
    known |= {name: text for name, text in value.texts.items() if name in _TEXTS}
    return StreamInfo(
        connection_id=connection_id,
        facts=value.facts,
        started=now_s - value.age_s,
        flags={Flag(each) for each in value.flags},
        failure=Reason(value.failure) if value.failure else None,
        direct_local=_local_of(value.direct_local),
        endpoint=Endpoint(address=address_of(value.endpoint)) if value.endpoint is not None else None,
        failed=tuple(Endpoint(address=address_of(each)) for each in value.failed),
        tls=_tls_of(value.tls) if value.tls is not None else None,
        upstream_tls=facts_of(value.upstream_tls) if value.upstream_tls is not None else None,
        upstream_certificate=_certificate_of(value.upstream_pem),
        **known,
    )


def _local_of(value: AddressValue | None) -> SocketAddress | InternalAddress | None:
    address = address_of(value) if value is not None else None
    return address if isinstance(address, SocketAddress | InternalAddress) else None


def _tls_of(value: TlsValue) -> TlsFacts:
    return TlsFacts(
        version=value.version,
        cipher=value.cipher,
        peer_subject=value.peer_subject,
        peer_chain=tuple(map(x509.load_der_x509_certificate, value.peer_chain)),
        local=_certificate_of(value.local_pem),
        peer_uri_sans=value.peer_uri_sans,
        peer_dns_sans=value.peer_dns_sans,
        local_uri_sans=value.local_uri_sans,
    )


def _certificate_of(chain_pem: bytes | None) -> Certificate | None:
    """Restore our own certificate without its key, which is enough for access log lines."""
    return None if chain_pem is None else Certificate(chain_pem=chain_pem, key_pem=b"")


def address_value(address: EndpointAddress) -> AddressValue:
    """Return an endpoint address as a tuple of texts."""
    match address:
        case SocketAddress():
            return ("ip", str(address))
        case InternalAddress():
            return ("internal", address.listener, address.endpoint_id)
        case PipeAddress():
            return ("pipe", address.path)
        case NamedAddress():
            return ("name", address.name, str(address.port))


def address_of(value: AddressValue) -> EndpointAddress:
    """Restore an endpoint address from a received value.

    Raises:
        ValueError: the value is not an address.
    """
    match value:
        case ("ip", text):
            return SocketAddress.parse(text)
        case ("internal", listener, endpoint_id):
            return InternalAddress(listener, endpoint_id)
        case ("pipe", path):
            return PipeAddress(path)
        case ("name", name, port):
            return NamedAddress(name, int(port))
        case _:
            raise ValueError(f"no address: {value}")
