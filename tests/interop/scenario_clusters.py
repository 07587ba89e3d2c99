"""The clusters of :mod:`tests.interop.scenarios`, and the applications behind them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.interop.beside import NO_PANIC
from tests.interop.loopback import application
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T, cluster, endpoint

#: Criteria of a TLS socket, towards an endpoint whose metadata has ``true``. The application speaks plain text.
CRITERIA = (True, 1, "true", [True], None)
LB = f"{T}envoy.extensions.load_balancing_policies"
#: The fields of a cluster besides its name and one host. Each is a scenario.
OF_CLUSTERS: dict[str, Json] = {
    "limits of priority HIGH": {"circuit_breakers": {"thresholds": [{"priority": "HIGH", "max_connections": 0}]}},
    **{f"lb_policy {name}": {"lb_policy": name} for name in ("LEAST_REQUEST", "RANDOM", "RING_HASH", "MAGLEV")},
    **{
        f"load_balancing_policy {kind}": {
            "load_balancing_policy": {
                "policies": [
                    {"typed_extension_config": {"name": kind, "typed_config": {"@type": f"{LB}.{kind}", **more}}}
                ]
            }
        }
        for kind, more in (
            ("round_robin.v3.RoundRobin", {"slow_start_config": {"slow_start_window": "1s"}}),
            ("least_request.v3.LeastRequest", {"choice_count": 3}),
            ("ring_hash.v3.RingHash", {"minimum_ring_size": 8, "maximum_ring_size": 16}),
            ("maglev.v3.Maglev", {"table_size": 101}),
        )
    },
    "upstream_bind_config": {
        "upstream_bind_config": {"source_address": {"address": "127.0.0.1", "port_value": 0}}
    },
    "tcp_keepalive": {
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_time": 9, "keepalive_interval": 3, "keepalive_probes": 2}
        }
    },
    "connect_timeout": {"connect_timeout": "1s", "cleanup_interval": "1s", "metadata": {"filter_metadata": {}}},
}
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
CHECK: Json = {"timeout": "1s", "interval": "5s", "unhealthy_threshold": 2, "healthy_threshold": 1}


def _http(**options: Any) -> Json:
    return {"typed_extension_protocol_options": {HTTP_OPTIONS: {"@type": f"{T}{HTTP_OPTIONS}", **options}}}


#: Like :data:`OF_CLUSTERS`, but the effect is not visible for these clients: the setting is accepted, and the
#: cluster serves.
SERVED: dict[str, Json] = {
    "limits of requests": {
        "circuit_breakers": {
            "thresholds": [
                {"max_pending_requests": 9, "max_requests": 8, "max_retries": 7, "track_remaining": True},
            ]
        }
    },
    "locality_weighted_lb_config": {"common_lb_config": {"locality_weighted_lb_config": {}}},
    "zone_aware_lb_config": {"common_lb_config": {"zone_aware_lb_config": {"min_cluster_size": {"value": 9}}}},
    "least_request_lb_config": {"lb_policy": "LEAST_REQUEST", "least_request_lb_config": {"choice_count": 3}},
    "round_robin_lb_config": {
        "round_robin_lb_config": {
            "slow_start_config": {
                "slow_start_window": "1s",
                "aggression": {"default_value": 2, "runtime_key": "k"},
                "min_weight_percent": {"value": 5},
            }
        }
    },
    "outlier_detection": {
        "outlier_detection": {
            "interval": "5s",
            "base_ejection_time": "9s",
            "max_ejection_time": "20s",
            "max_ejection_time_jitter": "1s",
            "split_external_local_origin_errors": True,
            "always_eject_one_host": True,
            "successful_active_health_check_uneject_host": False,
            **dict.fromkeys(
                (
                    *("consecutive_5xx", "consecutive_gateway_failure", "consecutive_local_origin_failure"),
                    *("enforcing_consecutive_5xx", "enforcing_consecutive_gateway_failure"),
                    *("enforcing_consecutive_local_origin_failure", "enforcing_failure_percentage"),
                    *("enforcing_local_origin_success_rate", "enforcing_failure_percentage_local_origin"),
                    *("enforcing_success_rate", "failure_percentage_minimum_hosts", "max_ejection_percent"),
                    *("failure_percentage_request_volume", "failure_percentage_threshold"),
                    *("success_rate_minimum_hosts", "success_rate_request_volume", "success_rate_stdev_factor"),
                ),
                11,
            ),
        }
    },
    "health check by TCP": {
        "health_checks": [
            {
                **CHECK,
                "healthy_edge_interval": "6s",
                "unhealthy_edge_interval": "6s",
                "unhealthy_interval": "7s",
                "no_traffic_interval": "8s",
                "no_traffic_healthy_interval": "9s",
                "initial_jitter": "0.01s",
                "interval_jitter": "0.1s",
                "interval_jitter_percent": 5,
                "tcp_health_check": {"send": {"text": "3f"}, "receive": [{"binary": "b25l"}]},
            }
        ],
        "ignore_health_on_host_removal": True,
    },
    "http2_protocol_options": {
        "http2_protocol_options": {
            "initial_connection_window_size": 70_000,
            "initial_stream_window_size": 66_000,
            "max_concurrent_streams": 9,
            "connection_keepalive": {"interval": "30s", "timeout": "5s"},
        }
    },
    "max_requests_per_connection": {"max_requests_per_connection": 3},
    "explicit HTTP/1": _http(
        explicit_http_config={"http_protocol_options": {}},
        common_http_protocol_options={"idle_timeout": "9s", "max_requests_per_connection": 3},
    ),
    "use_downstream_protocol_config": _http(use_downstream_protocol_config={"http2_protocol_options": {}}),
    "weights and localities": {},
    "times of name look-ups": {
        "dns_failure_refresh_rate": {"base_interval": "1s", "max_interval": "2s"},
        "respect_dns_ttl": True,
    },
}
#: Groups of hosts, (priority, application, health), and settings of the cluster.
OF_HOSTS: dict[str, tuple[list[tuple[int, str, str]], Json]] = {
    "lower priority": ([(0, "one", "UNHEALTHY"), (1, "two", "HEALTHY")], {}),
    "draining host": ([(0, "one", "DRAINING"), (0, "two", "UNKNOWN")], {}),
    "timed out host": ([(0, "one", "TIMEOUT"), (0, "two", "HEALTHY")], {"common_lb_config": NO_PANIC}),
    "panic": ([(0, "one", "UNHEALTHY")], {}),
    "no panic": ([(0, "one", "UNHEALTHY")], {"common_lb_config": NO_PANIC}),
    "failing in panic": (
        [(0, "one", "UNHEALTHY")],
        {"common_lb_config": {"zone_aware_lb_config": {"fail_traffic_on_panic": True}}},
    ),
}


def _grown(apps: dict[str, int]) -> list[Json]:
    """The clusters of the scenarios that vary their settings or their hosts."""
    found = [cluster(apps["one"], name=name, **more)[1] for name, more in (OF_CLUSTERS | SERVED).items()]
    weighed = next(each for each in found if each["name"] == "weights and localities")["load_assignment"]
    weighed["policy"] = {"overprovisioning_factor": 150, "weighted_priority_health": True}
    weighed["endpoints"][0] |= {
        "locality": {"region": "r", "zone": "z", "sub_zone": "s"},
        "load_balancing_weight": 3,
        "metadata": {"filter_metadata": {"a": {"b": "c"}}},
    }
    host = weighed["endpoints"][0]["lb_endpoints"][0]
    host["load_balancing_weight"] = 2
    host["endpoint"]["health_check_config"] = {
        "port_value": apps["two"],
        "hostname": "h.example",
        "disable_active_health_check": True,
    }
    for name, (hosts, more) in OF_HOSTS.items():
        _, made = cluster(name=name, **more)
        made["load_assignment"]["endpoints"] = [
            {"priority": priority, "lb_endpoints": [endpoint(apps[app], health_status=health)]}
            for priority, app, health in hosts
        ]
        found.append(made)
    override = {"upstream_port_override": apps["three"]}
    original = {
        "name": "upstream_port_override",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": override,
    }
    found.append(original)
    for policy in ("NO_FALLBACK", "DEFAULT_SUBSET"):
        subsets = {"subset_selectors": [{"keys": ["v"]}], "fallback_policy": policy, "default_subset": {"v": "x"}}
        _, falling = cluster(name=f"fallback {policy}", lb_subset_config=subsets)
        metadata = {"filter_metadata": {"envoy.lb": {"v": "x"}}}
        falling["load_assignment"]["endpoints"] = [{"lb_endpoints": [endpoint(apps["two"], metadata=metadata)]}]
        found.append(falling)
    return found


def _matched(value: Any, port: int) -> Json:
    kind = f"{T}envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    match = {
        "name": "secured",
        "match": {"tls": value},
        "transport_socket": {"name": "tls", "typed_config": {"@type": kind}},
    }
    _, found = cluster(name=f"match {value!r}", transport_socket_matches=[match])
    host = endpoint(port, metadata={"filter_metadata": {"envoy.transport_socket_match": {"tls": True}}})
    found["load_assignment"]["endpoints"] = [{"lb_endpoints": [host]}]
    return found


def clusters(ports: dict[str, int]) -> list[Json]:
    """The clusters of all scenarios."""
    found = [cluster(port, name=name)[1] for name, port in ports.items() if name != "dns"]
    _, dropping = cluster(ports["one"], name="dropping")
    share = {"category": "all", "drop_percentage": {"numerator": 100}}
    dropping["load_assignment"]["policy"] = {"drop_overloads": [share]}
    found += [
        dropping,
        cluster(ports["one"], name="alternative", alt_stat_name="other")[1],
        cluster(name="empty")[1],
    ]
    hosts = [
        endpoint(ports["one"], metadata={"filter_metadata": {"envoy.lb": {"v": True}}}),
        endpoint(ports["two"], metadata={"filter_metadata": {"envoy.lb": {"v": 1}}}),
        endpoint(ports["three"], metadata={"filter_metadata": {"envoy.lb": {"v": "1"}}}),
    ]
    _, subsets = cluster(name="subsets", lb_subset_config={"subset_selectors": [{"keys": ["v"]}]})
    subsets["load_assignment"]["endpoints"] = [{"lb_endpoints": hosts}]
    found += [_matched(value, ports["one"]) for value in CRITERIA]
    for version in ("V1", "V2"):
        kind = f"{T}envoy.extensions.transport_sockets"
        raw = {"name": "raw", "typed_config": {"@type": f"{kind}.raw_buffer.v3.RawBuffer"}}
        proxy = {
            "@type": f"{kind}.proxy_protocol.v3.ProxyProtocolUpstreamTransport",
            "config": {"version": version},
            "transport_socket": raw,
        }
        socket_ = {"transport_socket": {"name": "proxy", "typed_config": proxy}}
        found.append(cluster(ports["echo"], name=f"header {version}", **socket_)[1])
    return [*found, subsets, cluster(free_port(), name="refusing")[1]]


def resolving(name: str, port: int, host: str, **more: Any) -> Json:
    address = {"socket_address": {"address": host, "port_value": port}}
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
    more = {"dns_lookup_family": "V4_ONLY", "dns_refresh_rate": "60s", "dns_jitter": "1s"} | more
    return {"name": name, "type": "STRICT_DNS", "load_assignment": load, **more}


def cares(server: Json, **more: Any) -> Json:
    kind = f"{T}envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig"
    return {"name": "cares", "typed_config": {"@type": kind, "resolvers": [server], **more}}


def resolving_clusters(apps: dict[str, int]) -> list[Json]:
    """Clusters of names, of which ``udp.test`` exists over UDP only and ``tcp.test`` over TCP only."""
    server = {"socket_address": {"address": "127.0.0.1", "port_value": apps["dns"]}}
    one = apps["one"]
    by_tcp, query = {"use_tcp_for_dns_lookups": True}, {"query_tries": 2, "query_timeout_seconds": 1}
    system = f"{T}envoy.extensions.network.dns_resolver.getaddrinfo.v3.GetAddrInfoDnsResolverConfig"
    getaddrinfo = {"name": "getaddrinfo", "typed_config": {"@type": system}}
    options = {"dns_resolver_options": by_tcp}
    configured: Json = {"resolvers": [server]}
    return [
        resolving("dns typed", one, "udp.test", typed_dns_resolver_config=cares(server, **query)),
        resolving(
            "dns typed by TCP",
            one,
            "tcp.test",
            typed_dns_resolver_config=cares(server, **options),
            dns_resolvers=[server],
        ),
        resolving("dns config", one, "udp.test", dns_resolution_config=configured),
        resolving("dns config by TCP", one, "tcp.test", dns_resolution_config={**configured, **options}),
        resolving("dns resolvers", one, "udp.test", dns_resolvers=[server]),
        resolving("dns resolvers by TCP", one, "tcp.test", dns_resolvers=[server], **by_tcp),
        resolving("dns getaddrinfo", one, "localhost", typed_dns_resolver_config=getaddrinfo),
        # Without servers of the cluster's own this changes nothing.
        resolving("dns of the bootstrap", one, "udp.test", **by_tcp),
    ]


def bootstrap(apps: dict[str, int], _: Path) -> Json:
    """The bootstrap of all scenarios but for their listeners."""
    server = {"socket_address": {"address": "127.0.0.1", "port_value": apps["dns"]}}
    return {
        "node": {"id": "n", "cluster": "c", "user_agent_version": "1"},
        "static_resources": {"clusters": [*clusters(apps), *resolving_clusters(apps), *_grown(apps)]},
        "typed_dns_resolver_config": cares(server),
    }


def _named(name: str) -> Callable[[socket.socket], None]:
    def serve(sock: socket.socket) -> None:
        if sock.recv(4096):
            sock.sendall(name.encode())

    return serve


def _echo(sock: socket.socket) -> None:
    while data := sock.recv(4096):
        sock.sendall(data)


def _resolved(wire: bytes, protocol: str) -> bytes:
    query = dns.message.from_wire(wire)
    response = dns.message.make_response(query)
    question = query.question[0]
    if question.name.to_text() != f"{protocol}.test.":
        response.set_rcode(dns.rcode.NXDOMAIN)
    elif question.rdtype == dns.rdatatype.A:
        response.answer.append(dns.rrset.from_text(question.name, 60, "IN", "A", "127.0.0.1"))
    return response.to_wire()


def name_server(stack: contextlib.ExitStack) -> int:
    """Answer ``udp.test`` over UDP and ``tcp.test`` over TCP until ``stack`` ends; return the port of both."""

    def over_tcp(sock: socket.socket) -> None:
        size = int.from_bytes(sock.recv(2, socket.MSG_WAITALL), "big")
        answer = _resolved(sock.recv(size, socket.MSG_WAITALL), "tcp")
        sock.sendall(len(answer).to_bytes(2, "big") + answer)

    port = application(over_tcp, stack)
    datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    datagrams.bind(("127.0.0.1", port))

    def over_udp() -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, peer = datagrams.recvfrom(4096)
                if not wire:
                    return
                datagrams.sendto(_resolved(wire, "udp"), peer)

    threading.Thread(target=over_udp, daemon=True).start()
    stack.callback(_wake, port)
    return port


def _wake(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"", ("127.0.0.1", port))


def applications(stack: contextlib.ExitStack, _: Path) -> dict[str, int]:
    """Start the applications of the scenarios until ``stack`` ends. Return their ports."""
    apps = {name: application(_named(name), stack) for name in ("one", "two", "three")}
    return apps | {"echo": application(_echo, stack), "dns": name_server(stack)}
