"""Envoys at the other end of a node proxy: configured as Istio's waypoints and gateways are, one per pod.

Written as values, because every address is known only once the network exists. What an Envoy must have in common
with the Rust node proxy is here once: mutual TLS 1.3 by SPIFFE names, HTTP/2, CONNECT.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from deploy.lab import Lab, Place
from tests.interop.proxies import Fields, Kind, Proxy
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.authority import CertificateAuthority, now

HBONE_PORT = 15008
TRUST_DOMAIN = "cluster.local"
Config = dict[str, Any]
_FILTERS = "envoy.extensions.filters"
#: The address that a connection inside Envoy is for, as its listener filter reads it.
_ORIGINAL = "envoy.filters.listener.original_dst"


def typed(name: str, kind: str, **fields: Any) -> Config:
    """An extension with its configuration."""
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/{kind}", **fields}}


def address(host: str, port: int) -> Config:
    """Return the address to listen on or to dial; ``::`` accepts IPv4 too."""
    both = {"ipv4_compat": True} if host == "::" else {}
    return {"socket_address": {"address": host, "port_value": port, **both}}


# TLS


class Credentials:
    """Certificates in files, which Envoys watch.

    Args:
        folder: of the mesh, with its authority in ``ca``.
    """

    def __init__(self, folder: Path) -> None:
        self.authority = CertificateAuthority.open(folder / "ca", TRUST_DOMAIN, now())
        self._folder = folder
        self._root = folder / "root.pem"
        self._root.write_bytes(self.authority.root_pem)

    def issue(self, account: str, trust_domain: str = TRUST_DOMAIN) -> Path:
        """Issue a new certificate of a service account. It takes effect with the rename of its file."""
        identity = SpiffeId(trust_domain, "default", account)
        signed = self.authority.issue(identity, now(), timedelta(hours=1))
        secret = {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
            "name": "own",
            "tls_certificate": {
                "certificate_chain": {"inline_string": signed.chain_pem.decode()},
                "private_key": {"inline_string": signed.key_pem.decode()},
            },
        }
        path = self._folder / f"{account}@{trust_domain}.json"
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps({"version_info": "1", "resources": [secret]}))
        draft.rename(path)
        return path

    def tls(self, account: str | None, peers: Config, trust_domain: str = TRUST_DOMAIN) -> Config:
        """Return the TLS settings of either role: a certificate, if any, and a matcher of the peer's names."""
        own: Config = {}
        if account is not None:
            source = {"path_config_source": {"path": str(self.issue(account, trust_domain))}}
            own = {"tls_certificate_sds_secret_configs": [{"name": "own", "sds_config": source}]}
        return {
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
            "alpn_protocols": ["h2"],
            "validation_context": {
                "trusted_ca": {"filename": str(self._root)},
                "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": peers}],
            },
            **own,
        }

    def server(self, account: str, peers: Config | None = None) -> Config:
        """A server's transport socket; by default accepts every identity of the trust domain."""
        kind = "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
        peers = peers or {"prefix": f"spiffe://{TRUST_DOMAIN}/"}
        common = self.tls(account, peers)
        return typed(
            "envoy.transport_sockets.tls", kind, common_tls_context=common, require_client_certificate=True
        )

    def client(self, account: str | None, server: str, trust_domain: str = TRUST_DOMAIN) -> Config:
        """Return a client's transport socket, for a server that must have one service account."""
        kind = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        common = self.tls(account, {"exact": str(SpiffeId(TRUST_DOMAIN, "default", server))}, trust_domain)
        return typed("envoy.transport_sockets.tls", kind, common_tls_context=common)


# Clusters


def static(name: str, endpoint: Config, **more: Any) -> Config:
    """One endpoint."""
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": load, **more}


def original_dst(name: str, **config: Any) -> Config:
    """A cluster of the connection's original destination, or of the one that a header names."""
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "connect_timeout": "2s",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": config,
    }


def http2(requests: int = 0) -> Config:
    """A cluster that uses HTTP/2; ``requests`` limits the requests per connection, 0 does not."""
    kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options: Config = {
        "@type": f"type.googleapis.com/{kind}",
        "explicit_http_config": {"http2_protocol_options": {"allow_connect": True}},
    }
    if requests:
        options["common_http_protocol_options"] = {"max_requests_per_connection": requests}
    return {"typed_extension_protocol_options": {kind: options}}


def internal(name: str, listener: str, *, original: str = "") -> Config:
    """A listener of the same process; it believes that the connection is for ``original``."""
    kind = "envoy.extensions.transport_sockets.internal_upstream.v3.InternalUpstreamTransport"
    raw = typed("envoy.transport_sockets.raw_buffer", "envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer")
    passed = [{"kind": {"host": {}}, "name": _ORIGINAL}] if original else []
    cluster = static(
        name,
        {"address": {"envoy_internal_address": {"server_listener_name": listener}}},
        transport_socket=typed(
            "envoy.transport_sockets.internal_upstream", kind, passthrough_metadata=passed, transport_socket=raw
        ),
    )
    if original:
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["metadata"] = {"filter_metadata": {_ORIGINAL: {"local": original}}}
    return cluster


# Filters


def _log(listener: str) -> list[Config]:
    fields = {
        "listener": listener,
        "flags": "%RESPONSE_FLAGS%",
        "failure": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
        "code": "%RESPONSE_CODE%",
        "details": "%RESPONSE_CODE_DETAILS%",
        "authority": "%REQ(:AUTHORITY)%",
        "peer": "%DOWNSTREAM_PEER_URI_SAN%",
        "source": "%DOWNSTREAM_REMOTE_ADDRESS%",
        "destination": "%DOWNSTREAM_LOCAL_ADDRESS%",
        "sender": "%DYNAMIC_METADATA(envoy.filters.listener.proxy_protocol:peer)%",
    }
    kind = "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    return [typed("envoy.access_loggers.stdout", kind, log_format={"json_format": fields})]


def tcp(listener: str, cluster: str, **more: Any) -> Config:
    """A TCP proxy."""
    kind = f"{_FILTERS}.network.tcp_proxy.v3.TcpProxy"
    return typed("tcp", kind, stat_prefix=listener, cluster=cluster, access_log=_log(listener), **more)


def http(listener: str, routes: Sequence[Config], filters: Sequence[Config] = (), **more: Any) -> Config:
    """HTTP connections, without the time limits that cut tunnels."""
    router = typed("router", f"{_FILTERS}.http.router.v3.Router")
    return typed(
        "http",
        f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=listener,
        access_log=_log(listener),
        stream_idle_timeout="0s",
        drain_timeout="0.5s",
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": list(routes)}]},
        http_filters=[*filters, router],
        **more,
    )


def tunnels(cluster: str, *filters: Config, streams: int = 1024) -> Config:
    """What ends tunnels: CONNECT by HTTP/2, the bytes to a cluster."""
    upgrade = {"upgrade_type": "CONNECT"}
    route = {"cluster": cluster, "timeout": "0s", "upgrade_configs": [{**upgrade, "connect_config": {}}]}
    options = {"allow_connect": True, "max_concurrent_streams": streams}
    return http(
        "hbone",
        [{"match": {"connect_matcher": {}}, "route": route}],
        filters,
        upgrade_configs=[upgrade],
        http2_protocol_options=options,
    )


def denied(authority_suffix: str) -> Config:
    """Return a filter that answers 403 to requests whose authority ends with this suffix."""
    header = {"name": ":authority", "string_match": {"suffix": authority_suffix}}
    policy = {"permissions": [{"header": header}], "principals": [{"any": True}]}
    rules = {"action": "DENY", "policies": {"denied": policy}}
    return typed("rbac", f"{_FILTERS}.http.rbac.v3.RBAC", rules=rules)


def destination_is_authority() -> Config:
    """The next hop inside this process believes that the tunnel's authority was dialled (as Istio's waypoints)."""
    state = {
        "object_key": f"{_ORIGINAL}.local_ip",
        "format_string": {"text_format_source": {"inline_string": "%REQ(:AUTHORITY)%"}},
        "shared_with_upstream": "ONCE",
    }
    return typed("state", f"{_FILTERS}.http.set_filter_state.v3.Config", on_request_headers=[state])


# Listeners


def listener(name: str, port: int, *chains: Config, filters: Sequence[Config] = ()) -> Config:
    """On every address."""
    return {
        "name": name,
        "address": address("::", port),
        "filter_chains": list(chains),
        "listener_filters": list(filters),
    }


def inner_listener(name: str, *chains: Config) -> Config:
    """For connections of this very process, with the destination they believe in."""
    kind = f"{_FILTERS}.listener.original_dst.v3.OriginalDst"
    return {
        "name": name,
        "internal_listener": {},
        "filter_chains": list(chains),
        "listener_filters": [typed(_ORIGINAL, kind)],
    }


def chain(*filters: Config, socket: Config | None = None, **match: Any) -> Config:
    """Filters, for the connections that match."""
    found: Config = {"filters": list(filters)}
    if match:
        found["filter_chain_match"] = match
    if socket is not None:
        found["transport_socket"] = socket
    return found


# Processes


class IstioEnvoy(Proxy):
    """An Envoy in a pod of a node proxy's mesh, whose log lines are objects."""

    def __init__(self, lab: Lab, place: Place, folder: Path) -> None:
        super().__init__(lab, Kind.ENVOY, place, f"envoy-{place.name}", folder)
        self._bootstrap = folder / f"envoy-{place.name}.yaml"

    def run(self, listeners: Sequence[Config], clusters: Sequence[Config]) -> None:
        """Start the process; return at once."""
        inner = typed("inner", "envoy.extensions.bootstrap.internal_listener.v3.InternalListener")
        bootstrap = {
            "node": {"id": self.place.name, "cluster": "interop"},
            "admin": {"address": address("127.0.0.1", 15000)},
            "bootstrap_extensions": [inner],
            "static_resources": {"listeners": list(listeners), "clusters": list(clusters)},
        }
        self._bootstrap.write_text(yaml.safe_dump(bootstrap))
        self.start(self._bootstrap)

    def log(self, since: int = 0, **wanted: str) -> list[Fields]:
        """Return the access log lines after an offset whose fields contain the wanted ones."""
        lines: list[Fields] = []
        for text in self._out.read_bytes()[since:].decode().splitlines():
            found: Mapping[str, Any] = json.loads(text)
            fields = {name: "" if value is None else str(value) for name, value in found.items()}
            if all(value in fields.get(name, "") for name, value in wanted.items()):
                lines.append(fields)
        return lines
