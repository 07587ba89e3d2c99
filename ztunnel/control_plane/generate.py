"""Generates one node's configuration from a mesh: listeners, clusters, endpoints. Pure.

The output equals the ambient control plane's of late 2022 (its names, order and structure), with three additions:
servers are verified, clients must present a certificate, and TLS sessions are not resumed, so that both ends are
verified for each connection. A real Envoy has no ``set_dst_address`` listener filter and no workload metadata. It
gets equivalent stock filters instead (``Flavour.STOCK_ENVOY``).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from google.protobuf.message import Message

from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import TypedExtensionConfig
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.json import parse_value
from ztunnel.control_plane.mesh import Mesh, Pod, Service, ServicePort
from ztunnel.control_plane.rbac import rbac_filters

_T = "type.googleapis.com/"
_OUTBOUND, _INBOUND_PLAIN, _INBOUND, _NODE_LOCAL = 15001, 15006, 15008, 15088
_ORIGINAL_SRC_MARK = 1234
_OUTBOUND_MARK, _INBOUND_MARK = 1025, 1026
_WAYPOINT_SERVER, _WAYPOINT_CLIENT = 15006, 15001
_METADATA_FILTER = "envoy.filters.listener.workload_metadata"
_METADATA_TYPE = "istio.telemetry.workloadmetadata.v1.WorkloadMetadataResources"
_ODH = "x-envoy-original-dst-host"

Json = dict[str, Any]


class Flavour(StrEnum):
    """The kind of proxy that the configuration is for."""

    ZTUNNEL = "ztunnel"
    STOCK_ENVOY = "envoy"


@dataclass(frozen=True)
class NodeConfig:
    """Generates the configuration of one node.

    Args:
        mesh: the mesh.
        node: the node's name.
        flavour: the kind of proxy that receives the configuration.
        access_log: path of the access logs.
        log_json: lines as JSON objects, with identities, instead of the text format of 2022.
    """

    mesh: Mesh
    node: str
    flavour: Flavour = Flavour.ZTUNNEL
    access_log: str = "/dev/stdout"
    log_json: bool = False

    # The parts of the mesh that concern the node

    @cached_property
    def local(self) -> list[Pod]:
        """The pods of the node that are in the mesh. The node's proxy terminates their tunnels."""
        return self.mesh.on(self.node)

    @cached_property
    def identities(self) -> list[SpiffeId]:
        """The identities of the node's pods, whose certificates its proxy holds."""
        return sorted({pod.identity for pod in self.local}, key=str)

    @cached_property
    def waypoints(self) -> dict[SpiffeId, tuple[Pod, ...]]:
        """The waypoint pods, by the identity whose traffic they handle."""
        return {w.identity: tuple(self.mesh.pods[key] for key in w.pods) for w in self.mesh.waypoints}

    def messages(self) -> Iterator[Message]:
        """Return every resource of the node, except secrets."""
        yield from self._clusters()
        yield from self._assignments()
        yield from self._listeners()
        if self.flavour is Flavour.ZTUNNEL:
            yield self._workload_metadata()

    # Names

    @staticmethod
    def service_cluster(source: SpiffeId, service: Service, port: ServicePort) -> str:
        """Return a cluster's name: ``<source>_to_<port name>_<hostname>_outbound_internal``."""
        return f"{source}_to_{port.name}_{service.hostname}_outbound_internal"

    def _server_waypoint(self, service: Service) -> SpiffeId | None:
        pods = (self.mesh.pods[key] for key in service.pods)
        return next((pod.identity for pod in pods if pod.identity in self.waypoints), None)

    # Listeners

    def _listeners(self) -> Iterator[Message]:
        yield _listener(self._outbound())
        for identity in sorted({pod.identity for pod in self.mesh.pods.values() if pod.mesh}, key=str):
            yield _listener(self._internal(identity))
        yield _listener(self._inbound())
        yield _listener(self._inbound_plaintext())

    def _socket_listener(self, name: str, port: int, mark: int, direction: str, label: str) -> Json:
        # This dual-stack socket also accepts IPv4 clients.
        host = "::" if any(":" in a for pod in self.mesh.pods.values() for a in pod.addresses) else "0.0.0.0"
        address: Json = {"address": host, "port_value": port}
        if host == "::":
            address["ipv4_compat"] = True
        return {
            "name": name,
            "address": {"socket_address": address},
            "use_original_dst": True,
            "transparent": True,
            "socket_options": [
                {
                    "description": "mark of packets this listener sends",
                    "level": 1,
                    "name": 36,
                    "int_value": mark,
                    "state": "STATE_PREBIND",
                }
            ],
            "listener_filters": [
                _filter("envoy.filters.listener.original_dst", "listener.original_dst.v3.OriginalDst"),
                _filter(
                    "envoy.filters.listener.original_src",
                    "listener.original_src.v3.OriginalSrc",
                    mark=_ORIGINAL_SRC_MARK,
                ),
            ],
            "traffic_direction": direction,
            "access_log": self._log(label),
        }

    def _outbound(self) -> Json:
        listener = self._socket_listener(
            "ztunnel_outbound", _OUTBOUND, _OUTBOUND_MARK, "OUTBOUND", "outbound capture listener"
        )
        if self.flavour is Flavour.ZTUNNEL:
            listener["listener_filters"].append(
                {
                    "name": _METADATA_FILTER,
                    "config_discovery": {
                        "config_source": {
                            "ads": {},
                            "initial_fetch_timeout": "30s",
                            "resource_api_version": "V3",
                        },
                        "type_urls": [_T + _METADATA_TYPE],
                    },
                }
            )
        chains: dict[str, Json] = {}
        by_source: Json = {}
        for pod in self.local:
            by_destination = self._destinations(pod, chains)
            if by_destination:
                for address in pod.addresses:
                    by_source[address] = {"matcher": _tree("ip", "DestinationIPInput", by_destination)}
        passthrough = self._tcp_chain("PassthroughFilterChain", "PassthroughCluster", "passthrough")
        chains["PassthroughFilterChain"] = passthrough
        chains["blackhole outbound"] = self._tcp_chain(
            "blackhole outbound", "blackhole outbound", "blackhole outbound", "BlackHoleCluster"
        )
        fallback = _action("PassthroughFilterChain")
        port_tree = _tree("port", "DestinationPortInput", {str(_OUTBOUND): _action("BlackHoleCluster")})
        # Envoy would refuse a matcher with an empty map. Without sources, that matcher's on_no_match takes its
        # place.
        port_tree["on_no_match"] = (
            {"matcher": {**_tree("source-ip", "SourceIPInput", by_source), "on_no_match": fallback}}
            if by_source
            else fallback
        )
        listener["filter_chain_matcher"] = port_tree
        listener["filter_chains"] = list(chains.values())
        if not self.mesh.registry_only:
            listener["default_filter_chain"] = passthrough
        return listener

    def _destinations(self, source: Pod, chains: dict[str, Json]) -> Json:
        """Return the part of the matcher tree below one source, and add the filter chains that it names to
        ``chains``.
        """
        entries: Json = {}
        for service in self.mesh.services:
            ports = {}
            for port in service.ports:
                chain = self._service_chain(source.identity, service, port)
                chains[chain["name"]] = chain
                ports[str(port.port)] = _action(chain["name"])
            for address in service.addresses:
                entries[address] = {"matcher": _tree("port", "DestinationPortInput", ports)}
        for pod in self.mesh.pods.values():
            chain = self._pod_chain(source.identity, pod)
            chains[chain["name"]] = chain
            for address in pod.addresses:
                entries[address] = _action(chain["name"])
        return entries

    def _service_chain(self, source: SpiffeId, service: Service, port: ServicePort) -> Json:
        server = self._server_waypoint(service)
        if server is not None and server != source:
            return self._waypoint_chain(f"{source}_to_server_waypoint_proxy_{server}", "server")
        if source in self.waypoints:
            return self._waypoint_chain(f"_to_client_waypoint_proxy_{source}", "client")
        name = self.service_cluster(source, service, port)
        return self._tcp_chain(name, name, "capture outbound (no waypoint proxy)")

    def _pod_chain(self, source: SpiffeId, pod: Pod) -> Json:
        if pod.mesh and pod.identity in self.waypoints and pod.identity != source:
            return self._waypoint_chain(f"{source}_to_server_waypoint_proxy_{pod.identity}", "server")
        if source in self.waypoints:
            return self._waypoint_chain(f"_to_client_waypoint_proxy_{source}", "client")
        if not pod.mesh:
            cluster = "PassthroughCluster-tcp"
            return self._tcp_chain(f"fc-{cluster}", cluster, "capture outbound pod (no waypoint proxy)")
        local = pod.node == self.node and not pod.hbone
        cluster = f"outbound_pod_{'local_' if local else ''}tunnel_clus_{source}"
        return self._tcp_chain(
            f"fc-{cluster}",
            cluster,
            "capture outbound pod (no waypoint proxy)",
            tunneling=_tunneling_to_original(),
        )

    def _waypoint_chain(self, name: str, kind: str) -> Json:
        tunneling = _tunneling_to_original()
        if self.flavour is Flavour.ZTUNNEL:
            value = f'%DYNAMIC_METADATA(["{_METADATA_FILTER}", "baggage"])%'
            tunneling["headers_to_add"].append({"header": {"key": "baggage", "value": value}})
        label = f"capture outbound (to {kind} waypoint proxy)"
        return self._tcp_chain(name, name, label, tunneling=tunneling)

    def _internal(self, identity: SpiffeId) -> Json:
        name = f"outbound_tunnel_lis_{identity}"
        filters: list[Json] = []
        if self.flavour is Flavour.ZTUNNEL:
            listener_filters = [
                {
                    "name": "set_dst_address",
                    "typed_config": {
                        "@type": _T + "xds.type.v3.TypedStruct",
                        "type_url": _T + "istio.set_internal_dst_address.v1.Config",
                        "value": {},
                    },
                }
            ]
        else:
            listener_filters = [
                _filter("envoy.filters.listener.original_dst", "listener.original_dst.v3.OriginalDst")
            ]
            filters.append(
                _filter(
                    "envoy.filters.network.set_filter_state",
                    "network.set_filter_state.v3.Config",
                    on_new_connection=[
                        {
                            "object_key": "envoy.network.transport_socket.original_dst_address",
                            "format_string": {
                                "text_format_source": {"inline_string": "%DYNAMIC_METADATA(tunnel:address)%"}
                            },
                        }
                    ],
                )
            )
        destination = '%DYNAMIC_METADATA(["tunnel", "destination"])%'
        tunneling = {
            "hostname": "%DYNAMIC_METADATA(tunnel:destination)%",
            "headers_to_add": [{"header": {"key": _ODH, "value": destination}}],
        }
        cluster = f"outbound_tunnel_clus_{identity}"
        filters.append(self._tcp_proxy(name, cluster, "outbound tunnel", tunneling))
        return {
            "name": name,
            "internal_listener": {},
            "use_original_dst": False,
            "listener_filters": listener_filters,
            "access_log": self._log("outbound tunnel"),
            "filter_chains": [{"filters": filters}],
        }

    def _inbound(self) -> Json:
        listener = self._socket_listener(
            "ztunnel_inbound", _INBOUND, _INBOUND_MARK, "INBOUND", "capture inbound listener"
        )
        listener["filter_chains"] = [
            *(self._inbound_chain(pod) for pod in self.local),
            self._tcp_chain("blackhole inbound", "blackhole inbound", "blackhole inbound", "BlackHoleCluster"),
        ]
        return listener

    def _inbound_chain(self, pod: Pod) -> Json:
        chain: Json = {
            "name": f"inbound_{pod.addresses[0]}",
            "filter_chain_match": {"prefix_ranges": _hosts(pod)},
        }
        if pod.hbone:
            chain["filters"] = [
                self._tcp_proxy("virtual_inbound_hbone", "virtual_inbound_hbone", "inbound hcm", None)
            ]
            return chain
        chain["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": _T + "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "require_client_certificate": True,
                "disable_stateless_session_resumption": True,
                "common_tls_context": self._tls(pod.identity),
            },
        }
        waypoint = pod.identity if pod.identity in self.waypoints else None
        chain["filters"] = [
            *rbac_filters(self.mesh, pod, waypoint),
            _filter(
                "envoy.filters.network.http_connection_manager",
                "network.http_connection_manager.v3.HttpConnectionManager",
                stat_prefix="inbound_hcm",
                route_config={
                    "name": "local_route",
                    "virtual_hosts": [
                        {
                            "name": "local_service",
                            "domains": ["*"],
                            "routes": [
                                {
                                    "match": {"connect_matcher": {}},
                                    "route": {
                                        "cluster": "virtual_inbound",
                                        "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}],
                                    },
                                }
                            ],
                        }
                    ],
                },
                http_filters=[_filter("envoy.filters.http.router", "http.router.v3.Router")],
                http2_protocol_options={"allow_connect": True},
                upgrade_configs=[{"upgrade_type": "CONNECT"}],
                access_log=self._log("inbound hcm"),
            ),
        ]
        return chain

    def _inbound_plaintext(self) -> Json:
        listener = self._socket_listener(
            "ztunnel_inbound_plaintext",
            _INBOUND_PLAIN,
            _INBOUND_MARK,
            "INBOUND",
            "capture inbound listener plaintext",
        )
        chains = []
        for pod in self.local:
            proxy = self._tcp_proxy("virtual_inbound_plaintext", "virtual_inbound", "inbound passthrough", None)
            chains.append(
                {
                    "name": f"inbound_{pod.addresses[0]}",
                    "filter_chain_match": {"prefix_ranges": _hosts(pod)},
                    "filters": [*rbac_filters(self.mesh, pod, None), proxy],
                }
            )
        name = "blackhole inbound plaintext"
        chains.append(self._tcp_chain(name, name, name, "BlackHoleCluster"))
        listener["filter_chains"] = chains
        return listener

    def _tcp_chain(
        self, name: str, cluster: str, label: str, stat_prefix: str = "", tunneling: Json | None = None
    ) -> Json:
        prefix = stat_prefix or (cluster if name == "PassthroughFilterChain" else name)
        return {"name": name, "filters": [self._tcp_proxy(prefix, cluster, label, tunneling)]}

    def _tcp_proxy(self, stat_prefix: str, cluster: str, label: str, tunneling: Json | None) -> Json:
        config: Json = {"stat_prefix": stat_prefix, "cluster": cluster, "access_log": self._log(label)}
        if tunneling is not None:
            config["tunneling_config"] = tunneling
        return _filter("envoy.filters.network.tcp_proxy", "network.tcp_proxy.v3.TcpProxy", **config)

    def _log(self, label: str) -> list[Json]:
        log_format: Json = {"text_format_source": {"inline_string": f"{_LOG_FORMAT} {label}\n"}}
        if self.log_json:
            log_format = {"json_format": {"hop": label, **_LOG_FIELDS}}
        return [
            {
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": _T + "envoy.extensions.access_loggers.file.v3.FileAccessLog",
                    "path": self.access_log,
                    "log_format": log_format,
                },
            }
        ]

    # Clusters

    def _clusters(self) -> Iterator[Message]:
        tunnel_sources = sorted({pod.identity for pod in self.mesh.pods.values() if pod.mesh}, key=str)
        for source in tunnel_sources:
            for service in self.mesh.services:
                for port in service.ports:
                    yield _cluster(self._service_cluster(source, service, port))
        for source in self.identities:
            base = {
                "connect_timeout": "2s",
                "cleanup_interval": "60s",
                "transport_socket": self._upstream_tls(source),
            }
            base |= {"typed_extension_protocol_options": _http2()}
            yield _cluster(_original(f"outbound_tunnel_clus_{source}", {}, **base))
            remote = {"upstream_port_override": _INBOUND}
            yield _cluster(_original(f"outbound_pod_tunnel_clus_{source}", remote, **base))
            local = {"use_http_header": True, "upstream_port_override": _NODE_LOCAL}
            yield _cluster(_original(f"outbound_pod_local_tunnel_clus_{source}", local, **base))
        for _, document, _ in self._waypoint_clusters():
            yield _cluster(document)
        yield _cluster(_original("virtual_inbound", {"use_http_header": True}))
        header = {"use_http_header": True, "upstream_port_override": _INBOUND}
        yield _cluster(_original("virtual_inbound_hbone", header))
        yield _cluster(_original("PassthroughCluster", None, connect_timeout="10s"))
        yield _cluster(_original("PassthroughCluster-tcp", None, connect_timeout="10s"))
        yield _cluster({"name": "BlackHoleCluster", "type": "STATIC", "connect_timeout": "10s"})

    def _service_cluster(self, source: SpiffeId, service: Service, port: ServicePort) -> Json:
        passed = ["tunnel", "istio"]
        if self.flavour is Flavour.STOCK_ENVOY:
            passed.append("envoy.filters.listener.original_dst")
        raw = {
            "name": "envoy.transport_sockets.raw_buffer",
            "typed_config": {"@type": _T + "envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"},
        }
        return {
            "name": self.service_cluster(source, service, port),
            "type": "EDS",
            "eds_cluster_config": {
                "eds_config": {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
            },
            "transport_socket_matches": [
                {
                    "name": "internal_upstream",
                    "match": {"tunnel": "h2"},
                    "transport_socket": {
                        "name": "envoy.transport_sockets.internal_upstream",
                        "typed_config": {
                            "@type": _T
                            + "envoy.extensions.transport_sockets.internal_upstream.v3.InternalUpstreamTransport",
                            "passthrough_metadata": [{"kind": {"host": {}}, "name": name} for name in passed],
                            "transport_socket": raw,
                        },
                    },
                },
                {"name": "tlsMode-disabled", "match": {}, "transport_socket": raw},
            ],
        }

    def _waypoint_clusters(self) -> Iterator[tuple[SpiffeId, Json, int]]:
        """Yield every waypoint cluster that the node needs, with the waypoint's identity and port."""
        for identity in self.identities:
            if identity in self.waypoints:
                name = f"_to_client_waypoint_proxy_{identity}"
                yield identity, self._waypoint_cluster(name, identity), _WAYPOINT_CLIENT
        for target in self.waypoints:
            for source in self.identities:
                if source != target:
                    name = f"{source}_to_server_waypoint_proxy_{target}"
                    yield target, self._waypoint_cluster(name, source), _WAYPOINT_SERVER

    def _waypoint_cluster(self, name: str, source: SpiffeId) -> Json:
        return {
            "name": name,
            "type": "EDS",
            "lb_policy": "ROUND_ROBIN",
            "connect_timeout": "2s",
            "eds_cluster_config": {
                "eds_config": {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
            },
            "typed_extension_protocol_options": _http2(),
            "transport_socket": self._upstream_tls(source),
        }

    # Endpoints

    def _assignments(self) -> Iterator[Message]:
        sources = sorted({pod.identity for pod in self.mesh.pods.values() if pod.mesh}, key=str)
        for source in sources:
            for service in self.mesh.services:
                for port in service.ports:
                    name = self.service_cluster(source, service, port)
                    pods = [self.mesh.pods[key] for key in service.pods]
                    yield _assignment(name, [self._endpoint(source, pod, port) for pod in pods])
        for identity, cluster, port_number in self._waypoint_clusters():
            waypoint_pods = self.waypoints[identity]
            endpoints = [
                {
                    "endpoint": {
                        "address": {"socket_address": {"address": pod.addresses[0], "port_value": port_number}}
                    },
                    "load_balancing_weight": 1,
                }
                for pod in waypoint_pods
            ]
            yield _assignment(cluster["name"], endpoints)

    def _endpoint(self, source: SpiffeId, pod: Pod, port: ServicePort) -> Json:
        address = SocketAddress(pod.addresses[0], port.target)
        plain = {"socket_address": {"address": address.host, "port_value": address.port}}
        if not pod.mesh or (pod.hbone and port.target == _INBOUND):
            return {"endpoint": {"address": plain}, "load_balancing_weight": 1}
        local = pod.node == self.node and not pod.hbone
        capture = SocketAddress(address.host, _NODE_LOCAL if local else _INBOUND)
        metadata: Json = {
            "tunnel": {"destination": str(address), "address": str(capture)},
            "envoy.transport_socket_match": {"tunnel": "h2"},
        }
        if self.flavour is Flavour.STOCK_ENVOY:
            metadata["envoy.filters.listener.original_dst"] = {"local": str(address)}
        internal = {"server_listener_name": f"outbound_tunnel_lis_{source}", "endpoint_id": str(address)}
        return {
            "endpoint": {"address": {"envoy_internal_address": internal}},
            "load_balancing_weight": 1,
            "metadata": {"filter_metadata": metadata},
        }

    # Certificates and metadata

    def _tls(self, identity: SpiffeId) -> Json:
        ads = {"ads": {}, "resource_api_version": "V3"}
        return {
            "alpn_protocols": ["h2"],
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
            "tls_certificate_sds_secret_configs": [{"name": str(identity), "sds_config": ads}],
            "combined_validation_context": {
                "default_validation_context": {
                    "match_typed_subject_alt_names": [
                        {"san_type": "URI", "matcher": {"prefix": f"spiffe://{self.mesh.trust_domain}/"}}
                    ]
                },
                "validation_context_sds_secret_config": {
                    "name": "ROOTCA",
                    "sds_config": {**ads, "initial_fetch_timeout": "0s"},
                },
            },
        }

    def _upstream_tls(self, source: SpiffeId) -> Json:
        return {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": _T + "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": self._tls(source),
                "max_session_keys": 0,
            },
        }

    def _workload_metadata(self) -> Message:
        workloads = [
            {
                "ip_addresses": list(pod.addresses),
                "instance_name": pod.name,
                "namespace_name": pod.namespace,
                "workload_name": pod.workload,
                "canonical_name": pod.workload,
                "canonical_revision": pod.version,
            }
            for pod in self.local
        ]
        document = {
            "name": _METADATA_FILTER,
            "typed_config": {
                "@type": _T + _METADATA_TYPE,
                "proxy_id": self.node,
                "workload_metadata_resources": workloads,
            },
        }
        return parse_value(document, TypedExtensionConfig).message


_LOG_FORMAT = (
    '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%" %RESPONSE_CODE% '
    "%RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% "
    '"%UPSTREAM_TRANSPORT_FAILURE_REASON%" %BYTES_RECEIVED% %BYTES_SENT% %DURATION% '
    '%RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% "%REQ(X-FORWARDED-FOR)%" "%REQ(USER-AGENT)%" "%REQ(X-REQUEST-ID)%" '
    '"%REQ(:AUTHORITY)%" "%UPSTREAM_HOST%" %UPSTREAM_CLUSTER% %UPSTREAM_LOCAL_ADDRESS% '
    "%DOWNSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_REMOTE_ADDRESS% %REQUESTED_SERVER_NAME% %ROUTE_NAME%"
)


_LOG_FIELDS = {
    "start": "%START_TIME%",
    "source": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "destination": "%DOWNSTREAM_LOCAL_ADDRESS%",
    "chain": "%FILTER_CHAIN_NAME%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "upstream": "%UPSTREAM_HOST%",
    "upstream_local": "%UPSTREAM_LOCAL_ADDRESS%",
    "authority": "%REQ(:AUTHORITY)%",
    "client_identity": "%DOWNSTREAM_PEER_URI_SAN%",
    "server_identity": "%DOWNSTREAM_LOCAL_URI_SAN%",
    "code": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "termination": "%CONNECTION_TERMINATION_DETAILS%",
    "failure": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
}


def _filter(name: str, kind: str, **config: Any) -> Json:
    return {"name": name, "typed_config": {"@type": f"{_T}envoy.extensions.filters.{kind}", **config}}


def _tree(name: str, kind: str, entries: Json) -> Json:
    package = "envoy.extensions.matching.common_inputs.network.v3"
    return {
        "matcher_tree": {
            "input": {"name": name, "typed_config": {"@type": f"{_T}{package}.{kind}"}},
            "exact_match_map": {"map": entries},
        }
    }


def _action(chain: str) -> Json:
    return {
        "action": {"name": chain, "typed_config": {"@type": _T + "google.protobuf.StringValue", "value": chain}}
    }


def _tunneling_to_original() -> Json:
    local = "%DOWNSTREAM_LOCAL_ADDRESS%"
    return {"hostname": local, "headers_to_add": [{"header": {"key": _ODH, "value": local}}]}


def _http2() -> Json:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"explicit_http_config": {"http2_protocol_options": {"allow_connect": True}}}
    return {name: {"@type": _T + name, **options}}


def _original(name: str, config: Json | None, **extra: Any) -> Json:
    cluster: Json = {"name": name, "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", **extra}
    if config is not None:
        cluster["original_dst_lb_config"] = config
    return cluster


def _hosts(pod: Pod) -> list[Json]:
    return [{"address_prefix": a, "prefix_len": 128 if ":" in a else 32} for a in pod.addresses]


def _listener(document: Json) -> Message:
    return parse_value(document, Listener).message


#: Like Istio. Envoy's default limit would let a node open only 1,024 connections to a service.
_UNLIMITED = 4_294_967_295
_LIMITS = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), _UNLIMITED)


def _cluster(document: Json) -> Message:
    return parse_value({**document, "circuit_breakers": {"thresholds": [_LIMITS]}}, Cluster).message


def _assignment(name: str, endpoints: Iterable[Json]) -> Message:
    document = {"cluster_name": name, "endpoints": [{"lb_endpoints": list(endpoints)}]}
    return parse_value(document, ClusterLoadAssignment).message
