"""Enforces the demo's policies without Envoy: our proxy evaluates them at both ends of its tunnels.

One process has the listeners of two nodes. Each calling pod has a listener that opens tunnels with the pod's
certificate and from its address, and each called pod has a listener where tunnels end.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_TYPE: Final = "type.googleapis.com"
_EXTENSIONS: Final = f"{_TYPE}/envoy.extensions"
_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

#: A calling pod and a called pod.
Call = tuple[str, str]


def bootstrap(
    folder: Path,
    addresses: Mapping[str, str],
    ports: Mapping[str, int],
    calls: Mapping[Call, int],
    applications: Mapping[str, int],
) -> str:
    """Return the bootstrap of the proxy, as JSON.

    Args:
        folder: the folder of ``NAME.pem``, ``NAME.key`` and ``root.pem``, and of the access log.
        addresses: the pods' addresses.
        ports: the port of each pod for tunnels.
        calls: for each pair of pods, the port on which the caller's connections are captured.
        applications: the port of each pod's application.
    """
    listeners, clusters = [], []
    for (caller, called), port in calls.items():
        name = f"{caller}-{called}"
        target = f"{addresses[called]}:{applications[called]}"
        proxy = _filter(
            "network.tcp_proxy.v3.TcpProxy",
            stat_prefix=name,
            cluster=name,
            tunneling_config={"hostname": target},
            access_log=_access_log(folder, "egress"),
        )
        listeners.append(_listener(name, addresses[caller], port, proxy))
        clusters.append(
            _cluster(
                name,
                addresses[called],
                ports[called],
                upstream_bind_config={"source_address": {"address": addresses[caller], "port_value": 0}},
                transport_socket=_tls(folder, caller, "Upstream"),
                typed_extension_protocol_options={
                    _HTTP_OPTIONS: {
                        "@type": f"{_TYPE}/{_HTTP_OPTIONS}",
                        "explicit_http_config": {"http2_protocol_options": {"allow_connect": True}},
                    }
                },
            )
        )
    for called, port in ports.items():
        manager = _filter(
            "network.http_connection_manager.v3.HttpConnectionManager",
            stat_prefix=called,
            route_config=_routes(f"application-{called}"),
            http_filters=[
                {"name": "router", "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"}}
            ],
            http2_protocol_options={"allow_connect": True},
            upgrade_configs=[{"upgrade_type": "CONNECT"}],
            access_log=_access_log(folder, called),
        )
        tls = _tls(folder, called, "Downstream", require_client_certificate=True)
        listeners.append(_listener(called, addresses[called], port, manager, tls))
        clusters.append(_cluster(f"application-{called}", addresses[called], applications[called]))
    return json.dumps(
        {
            "node": {"id": "demo", "cluster": "demo"},
            "static_resources": {"listeners": listeners, "clusters": clusters},
        }
    )


def _filter(kind: str, **config: Any) -> dict[str, Any]:
    return {"name": kind, "typed_config": {"@type": f"{_EXTENSIONS}.filters.{kind}", **config}}


def _routes(cluster: str) -> dict[str, Any]:
    connect = {"cluster": cluster, "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}]}
    routes = [{"match": {"connect_matcher": {}}, "route": connect}]
    return {"name": "tunnels", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]}


def _access_log(folder: Path, judged: str) -> list[dict[str, Any]]:
    fields = {
        "judged": judged,
        "caller": "%DOWNSTREAM_PEER_URI_SAN%",
        "details": "%CONNECTION_TERMINATION_DETAILS%",
        "tier": "%DYNAMIC_METADATA(calico.policy:tier)%",
        "policy": "%DYNAMIC_METADATA(calico.policy:name)%",
        "rule": "%DYNAMIC_METADATA(calico.policy:rule)%",
        "staged": "%DYNAMIC_METADATA(calico.policy:dry_run)%",
    }
    return [
        {
            "name": "file",
            "typed_config": {
                "@type": f"{_EXTENSIONS}.access_loggers.file.v3.FileAccessLog",
                "path": str(folder / "tunnels.access"),
                "log_format": {"json_format": fields},
            },
        }
    ]


def _tls(folder: Path, name: str, side: str, **more: Any) -> dict[str, Any]:
    files = {"certificate_chain": f"{name}.pem", "private_key": f"{name}.key"}
    return {
        "name": "tls",
        "typed_config": {
            "@type": f"{_EXTENSIONS}.transport_sockets.tls.v3.{side}TlsContext",
            "common_tls_context": {
                "alpn_protocols": ["h2"],
                "tls_certificates": [{key: {"filename": str(folder / file)} for key, file in files.items()}],
                "validation_context": {"trusted_ca": {"filename": str(folder / "root.pem")}},
            },
            **more,
        },
    }


def _listener(
    name: str, host: str, port: int, filters: dict[str, Any], tls: dict[str, Any] | None = None
) -> dict[str, Any]:
    chain = {"filters": [filters]} | ({"transport_socket": tls} if tls is not None else {})
    address = {"socket_address": {"address": host, "port_value": port}}
    return {"name": name, "address": address, "filter_chains": [chain]}


def _cluster(name: str, host: str, port: int, **more: Any) -> dict[str, Any]:
    address = {"socket_address": {"address": host, "port_value": port}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": endpoints},
        **more,
    }
