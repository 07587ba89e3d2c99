"""One field each, run by Envoy and by this proxy from the same bootstrap: who is reached, with which bytes, and
what a log says.

A scenario is a listener with a log of its own, and what a client of it sees. All are in one bootstrap. `make
envoy-diff` counts which of the accepted fields stand in a scenario.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.interop.authorization import Certificates
from tests.interop.loopback import Running, application, until
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.rig import (
    Json,
    T,
    chain,
    cluster,
    endpoint,
    tcp,
)

WAIT_S = 5.0
LOG = "%RESPONSE_FLAGS% %RESPONSE_FLAGS_LONG% %UPSTREAM_CLUSTER% %UPSTREAM_CLUSTER_RAW% %FILTER_CHAIN_NAME% "
LOG += "%RESPONSE_CODE_DETAILS% %UPSTREAM_REQUEST_ATTEMPT_COUNT% "
LOG += "%CONNECTION_TERMINATION_DETAILS% %REQUESTED_SERVER_NAME%"
Client = Callable[[int, Path], str]


def said(sock: socket.socket, data: bytes = b"?" * 64) -> str:
    """Send, and return who answers."""
    sock.sendall(data)
    return sock.recv(64).decode() or "closed"


def plain(data: bytes = b"?" * 64, host: str = "127.0.0.1") -> Client:
    """A client that sends some bytes."""

    def ask(port: int, _: Path) -> str:
        try:
            with socket.create_connection((host, port), WAIT_S) as sock:
                return said(sock, data)
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "closed"  # by FIN or by RST, as our bytes were read before or not

    return ask


def header(host: str = "127.0.0.1") -> Client:
    """A client of an application that echoes: the PROXY header in front of its bytes, with names for the ports."""

    def ask(port: int, _: Path) -> str:
        try:
            with socket.create_connection((host, port), WAIT_S) as sock:
                own = sock.getsockname()[1]
                sock.sendall(b"?")
                seen = b""
                while not seen.endswith(b"?") and (more := sock.recv(512)):
                    seen += more
        except OSError:
            return "closed"
        for number, name in ((own, b"<client>"), (port, b"<listener>")):
            seen = seen.replace(str(number).encode(), name).replace(number.to_bytes(2, "big"), name)
        return repr(seen)

    return ask


def secured(*protocols: str, name: str | None = None) -> Client:
    """A client over TLS, which sends its protocols in this order."""

    def ask(port: int, _: Path) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if protocols:
            context.set_alpn_protocols(list(protocols))
        try:
            with (
                socket.create_connection(("127.0.0.1", port), WAIT_S) as raw,
                context.wrap_socket(raw, server_hostname=name) as sock,
            ):
                return f"{said(sock)} {sock.selected_alpn_protocol()}"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "closed"  # by FIN or by RST, as our bytes were read before or not

    return ask


def inspector(kind: str) -> Json:
    """A listener filter."""
    full = {"tls": "tls_inspector.v3.TlsInspector", "http": "http_inspector.v3.HttpInspector"}[kind]
    return {"name": kind, "typed_config": {"@type": f"{T}envoy.extensions.filters.listener.{full}"}}


def tls(folder: Path, *protocols: str) -> Json:
    """A server's transport socket."""
    server = {"filename": str(folder / "server.pem")}
    common = {"tls_certificates": [{"certificate_chain": server, "private_key": server}]}
    if protocols:
        common["alpn_protocols"] = list(protocols)  # type: ignore[assignment]  # of strings
    kind = f"{T}envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    return {"name": "tls", "typed_config": {"@type": kind, "common_tls_context": common}}


@dataclass(frozen=True)
class Scenario:
    """A listener, and clients whose observations are compared.

    Attributes:
        listener: fields beside its name, address and log.
        clients: in order.
        address: the host to listen on.
        form: the log's format, as the file logger's fields.
        bound: whether anything listens there.
    """

    listener: Callable[[Path], Json]
    clients: tuple[Client, ...] = (plain(),)
    address: Json = field(default_factory=lambda: {"address": "127.0.0.1"})
    form: Json = field(
        default_factory=lambda: {"log_format": {"text_format_source": {"inline_string": LOG + "\n"}}}
    )
    bound: bool = True


def _reads_header(**more: Any) -> Json:
    kind = f"{T}envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"
    return {"name": "proxy", "typed_config": {"@type": kind, **more}}


NO_PANIC: Json = {"healthy_panic_threshold": {"value": 0}}


def to(*chains: Json, **more: Any) -> Callable[[Path], Json]:
    """A listener without files."""
    return lambda _: {"filter_chains": list(chains), **more}


def matching(match: Json, target: str = "one", **more: Any) -> Json:
    """A chain with a match, named like its cluster."""
    return {**chain(tcp(target)), "name": target, "filter_chain_match": match, **more}


def rest(target: str = "two", **more: Any) -> Json:
    """A chain for everything else."""
    return {**chain(tcp(target)), "name": target, **more}


def by_alpn(folder: Path) -> Json:
    """Chains of two protocols."""
    chains = [
        matching({"application_protocols": ["http/1.1"]}, transport_socket=tls(folder, "h2", "http/1.1")),
        matching({"application_protocols": ["h2"]}, "two", transport_socket=tls(folder, "h2", "http/1.1")),
        rest("three", transport_socket=tls(folder)),
    ]
    return {"filter_chains": chains, "listener_filters": [inspector("tls")]}


def by_name(folder: Path) -> Json:
    """Chains of server names."""
    chains = [
        matching({"server_names": ["a.example"]}, transport_socket=tls(folder)),
        matching({"server_names": ["*.example"]}, "two", transport_socket=tls(folder)),
        rest("three", transport_socket=tls(folder)),
    ]
    return {"filter_chains": chains, "listener_filters": [inspector("tls")]}


def weighted(*names: str) -> Json:
    """A proxy with weighted clusters, of which the first alone has weight."""
    proxy = tcp()
    del proxy["typed_config"]["cluster"]
    clusters = [{"name": name, "weight": 1} for name in names]
    proxy["typed_config"]["weighted_clusters"] = {"clusters": clusters}
    return proxy


METHODS = (b"PROPFIND", b"get", b"M-SEARCH", b"GET", b"G(T")
SCENARIOS = {
    "alpn": Scenario(
        by_alpn, (secured("h2", "http/1.1"), secured("http/1.1", "h2"), secured("x", "h2"), secured())
    ),
    "server name": Scenario(
        by_name, (secured(name="a.example"), secured(name="b.example"), secured(name="A.example"), secured())
    ),
    "http_inspector": Scenario(
        to(
            matching({"application_protocols": ["http/1.1"]}),
            matching({"application_protocols": ["http/1.0"]}, "two"),
            rest("three"),
            listener_filters=[inspector("http")],
        ),
        (
            *(plain(method + b" / HTTP/1.1\r\n\r\n") for method in METHODS),
            plain(b"GET / HTTP/1.0\r\n\r\n"),
            plain(b"SSH-2.0-x\r\n"),
        ),
    ),
    "no chain": Scenario(to(matching({"destination_port": 9}))),
    "source prefix": Scenario(
        to(
            matching({"source_prefix_ranges": [{"address_prefix": "127.0.0.0", "prefix_len": 8}]}),
            rest(),
        )
    ),
    "mapped prefix": Scenario(
        to(
            matching({"source_prefix_ranges": [{"address_prefix": "::ffff:127.0.0.0", "prefix_len": 104}]}),
            rest(),
        )
    ),
    "source type": Scenario(to(matching({"source_type": "EXTERNAL"}), rest())),
    "source ports": Scenario(to(matching({"source_ports": [1, 2]}), rest())),
    "default chain": Scenario(
        lambda _: {"filter_chains": [matching({"destination_port": 9})], "default_filter_chain": rest()}
    ),
    "drop_overloads": Scenario(to(chain(tcp("dropping")))),
    "alt_stat_name": Scenario(to(chain(tcp("alternative")))),
    "no such cluster": Scenario(to(chain(tcp("nowhere")))),
    "no hosts": Scenario(to(chain(tcp("empty")))),
    "ipv6 only": Scenario(to(chain(tcp("one"))), (plain(), plain(host="::1")), {"address": "::"}),
    "ipv4_compat": Scenario(
        to(chain(tcp("one"))), (plain(), plain(host="::1")), {"address": "::", "ipv4_compat": True}
    ),
    "weighted clusters": Scenario(to(chain(weighted("one")))),
}


def _subset(value: Any) -> Scenario:
    match = {"filter_metadata": {"envoy.lb": {"v": value}}}
    return Scenario(to(chain(tcp("subsets", metadata_match=match))))


SCENARIOS |= {f"subset {value!r}": _subset(value) for value in (True, 1, "1", "true", [1], [True], None, 2)}


#: Criteria of a TLS socket, towards an endpoint whose metadata has ``true``. The application speaks plain text.
CRITERIA = (True, 1, "true", [True], None)
SCENARIOS |= {f"socket match {value!r}": Scenario(to(chain(tcp(f"match {value!r}")))) for value in CRITERIA}
SCENARIOS |= {
    "connect attempts": Scenario(to(chain(tcp("refusing", max_connect_attempts=2)))),
    "hash policy": Scenario(to(chain(tcp("one", hash_policy=[{"source_ip": {}}])))),
    "cluster by weight": Scenario(to(chain(weighted("alternative")))),
    "filter state": Scenario(
        to(
            chain(tcp("one"), filter_chain_match={"transport_protocol": "raw_buffer"}),
            listener_filters=[inspector("tls")],
        )
    ),
    "direct source": Scenario(
        to(matching({"direct_source_prefix_ranges": [{"address_prefix": "127.0.0.0", "prefix_len": 31}]}), rest())
    ),
    "PROXY header v1": Scenario(to(chain(tcp("header V1"))), (header(),)),
    "PROXY header v2": Scenario(to(chain(tcp("header V2"))), (header(),)),
    "PROXY header v1 by IPv6": Scenario(to(chain(tcp("header V1"))), (header("::1"),), {"address": "::1"}),
    "PROXY header v2 by IPv6": Scenario(to(chain(tcp("header V2"))), (header("::1"),), {"address": "::1"}),
    "dns typed": Scenario(to(chain(tcp("dns typed")))),
    "dns typed by TCP": Scenario(to(chain(tcp("dns typed by TCP")))),
    "dns config": Scenario(to(chain(tcp("dns config")))),
    "dns config by TCP": Scenario(to(chain(tcp("dns config by TCP")))),
    "dns resolvers": Scenario(to(chain(tcp("dns resolvers")))),
    "dns resolvers by TCP": Scenario(to(chain(tcp("dns resolvers by TCP")))),
    "dns getaddrinfo": Scenario(to(chain(tcp("dns getaddrinfo")))),
    "dns of the bootstrap": Scenario(to(chain(tcp("dns of the bootstrap")))),
    "destination prefix": Scenario(
        to(matching({"prefix_ranges": [{"address_prefix": "127.0.0.1", "prefix_len": 32}]}), rest())
    ),
}


LB = f"{T}envoy.extensions.load_balancing_policies"
#: What a cluster has beside its name and one host; each is a scenario.
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


#: As :data:`OF_CLUSTERS`, but what the setting changes is not seen by these clients: it is accepted, and served.
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
}
SCENARIOS |= {name: Scenario(to(chain(tcp(name)))) for name in (*OF_CLUSTERS, *OF_HOSTS, *SERVED)}
SCENARIOS |= {
    name: Scenario(to(chain(tcp("one")), **more))
    for name, more in (
        ("stat_prefix", {"stat_prefix": "p", "traffic_direction": "OUTBOUND"}),
        ("tcp_backlog_size", {"tcp_backlog_size": 7, "enable_reuse_port": False, "freebind": True}),
        (
            "socket_options",
            {"socket_options": [{"level": 1, "name": 9, "int_value": 1, "state": "STATE_LISTENING"}]},
        ),
        ("tcp_fast_open_queue_length", {"tcp_fast_open_queue_length": 5}),
    )
}

NETWORK = f"{T}envoy.extensions.matching.common_inputs.network.v3."


def network_input(name: str, **more: Any) -> Json:
    return {"name": name, "typed_config": {"@type": NETWORK + name, **more}}


def go(name: str) -> Json:
    kind = {"@type": f"{T}google.protobuf.StringValue", "value": name}
    return {"action": {"name": name, "typed_config": kind}}


def _if(value: Json, source: Json | None = None) -> Json:
    return {"single_predicate": {"input": source or network_input("SourceIPInput"), "value_match": value}}


def matches(matcher: Json, *filters: Json) -> Callable[[Path], Json]:
    """A listener whose chains ``one``, ``two`` and ``three`` are chosen by a matcher."""
    chains = [{**chain(tcp(name)), "name": name} for name in ("one", "two", "three")]
    return to(*chains, filter_chain_matcher=matcher, listener_filters=list(filters))


def listed(*rows: tuple[Json, str]) -> Callable[[Path], Json]:
    matchers = [{"predicate": predicate, "on_match": go(name)} for predicate, name in rows]
    return matches({"matcher_list": {"matchers": matchers}, "on_no_match": go("three")})


IS, IS_NOT = _if({"exact": "127.0.0.1"}), _if({"exact": "127.0.0.2"})
LISTED = {
    "exact": IS,
    "exact, other": IS_NOT,
    "prefix": _if({"prefix": "127."}),
    "suffix": _if({"suffix": ".0.1"}),
    "contains": _if({"contains": ".0."}),
    "regex": _if({"safe_regex": {"google_re2": {}, "regex": "127[.].*"}}),
    "part of a regex": _if({"safe_regex": {"google_re2": {}, "regex": "127"}}),
    "and": {"and_matcher": {"predicate": [IS, IS]}},
    "and, not all": {"and_matcher": {"predicate": [IS, IS_NOT]}},
    "or": {"or_matcher": {"predicate": [IS_NOT, IS]}},
    "or, none": {"or_matcher": {"predicate": [IS_NOT, IS_NOT]}},
    "not": {"not_matcher": IS_NOT},
    "filter state": _if({"exact": "x"}, network_input("FilterStateInput", key="k")),
}
TREES: dict[str, Json] = {
    "exact": {"exact_match_map": {"map": {"127.0.0.1": go("one"), "127.0.0.0": go("two")}}},
    "prefix": {"prefix_match_map": {"map": {"127.": go("one"), "127.0.": go("two")}}},
    "inner": {
        "exact_match_map": {
            "map": {
                "127.0.0.1": {
                    "matcher": {"matcher_list": {"matchers": [{"predicate": IS, "on_match": go("two")}]}}
                }
            }
        }
    },
    **{
        f"ranges, exclusive {exclusive}": {
            "custom_match": {
                "name": "ip",
                "typed_config": {
                    "@type": f"{T}xds.type.matcher.v3.IPMatcher",
                    "range_matchers": [
                        {"ranges": [{"address_prefix": "127.0.0.0", "prefix_len": 8}], "on_match": go("one")},
                        {
                            "ranges": [{"address_prefix": "127.0.0.1", "prefix_len": 32}],
                            "on_match": {
                                "matcher": {
                                    "matcher_list": {"matchers": [{"predicate": IS_NOT, "on_match": go("two")}]}
                                }
                            },
                            "exclusive": exclusive,
                        },
                    ],
                },
            }
        }
        for exclusive in (False, True)
    },
}
SCENARIOS |= {
    f"matcher_list, {name}": Scenario(listed((each, "one"), (IS, "two"))) for name, each in LISTED.items()
}
SCENARIOS |= {
    f"matcher_tree, {name}": Scenario(
        matches({"matcher_tree": {"input": network_input("SourceIPInput"), **tree}, "on_no_match": go("three")})
    )
    for name, tree in TREES.items()
}
_FILTER = f"{T}envoy.extensions.filters.network"
_LIMIT = {"@type": f"{_FILTER}.connection_limit.v3.ConnectionLimit", "stat_prefix": "l", "max_connections": 1}
_RATE = {
    "@type": f"{_FILTER}.local_ratelimit.v3.LocalRateLimit",
    "stat_prefix": "r",
    "token_bucket": {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "60s"},
}
_ANY = {"policies": {"p": {"permissions": [{"any": True}], "principals": [{"any": True}]}}}
_SHADOW = {
    "@type": f"{_FILTER}.rbac.v3.RBAC",
    "stat_prefix": "s",
    "shadow_rules": {"action": "DENY", **_ANY},
    "shadow_rules_stat_prefix": "x",
}
SCENARIOS |= {
    "connections at once": Scenario(
        to(chain({"name": "l", "typed_config": {**_LIMIT, "delay": "0.1s"}}, tcp("one")))
    ),
    "connections in a time": Scenario(
        to(chain({"name": "r", "typed_config": _RATE}, tcp("one"))), (plain(), plain())
    ),
    "rules in the shadow": Scenario(to(chain({"name": "s", "typed_config": _SHADOW}, tcp("one")))),
    "no PROXY header of version 1": Scenario(
        to(chain(tcp("one")), listener_filters=[_reads_header(disallowed_versions=["V1"])]),
        (plain(b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n" + b"?" * 64),),
    ),
    "filter_disabled by any of two": Scenario(
        to(
            matching({"transport_protocol": "tls"}),
            rest(),
            listener_filters=[
                {
                    **inspector("tls"),
                    "filter_disabled": {
                        "or_match": {"rules": [{"not_match": {"any_match": True}}, {"any_match": True}]}
                    },
                }
            ],
        ),
        (secured(), plain()),
    ),
    "bytes may come late": Scenario(
        to(
            chain(tcp("one")),
            listener_filters=[inspector("tls")],
            listener_filters_timeout="0.5s",
            continue_on_listener_filters_timeout=True,
        )
    ),
}
SCENARIOS |= {
    "upstream_port_override": Scenario(to(chain(tcp("upstream_port_override")))),
    **{
        f"fallback {policy}": Scenario(
            to(chain(tcp(f"fallback {policy}", metadata_match={"filter_metadata": {"envoy.lb": {"v": "other"}}})))
        )
        for policy in ("NO_FALLBACK", "DEFAULT_SUBSET")
    },
    "filter_disabled": Scenario(
        to(
            matching({"transport_protocol": "tls"}),
            rest(),
            listener_filters=[
                {
                    **inspector("tls"),
                    "filter_disabled": {
                        "and_match": {
                            "rules": [
                                {"any_match": True},
                                {"not_match": {"destination_port_range": {"start": 1, "end": 2}}},
                            ]
                        }
                    },
                }
            ],
        ),
        (secured(), plain()),
    ),
    "without an allowed PROXY header": Scenario(
        to(
            chain(tcp("one")),
            listener_filters=[_reads_header(allow_requests_without_proxy_protocol=True)],
        ),
        (plain(b"GET / HTTP/1.1\r\n\r\n"), plain(b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n" + b"?" * 64)),
    ),
}


#: Scenarios in which clients see the same and the logs differ on purpose, and why.
DIFFERENT_LOGS = {"no PROXY header of version 1": "the reason is named"}


def differences(
    envoy: dict[str, str],
    ours: dict[str, str],
    logs: Mapping[str, str] = DIFFERENT_LOGS,
    clients: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, tuple[str, str]]:
    """Return what each of the two saw in the scenarios that end differently.

    A difference that is expected and has gone is one, too.

    Args:
        logs: the scenarios in which the logs alone differ on purpose.
        clients: those in which clients see something else on purpose.
    """
    found = {}
    for name, theirs in envoy.items():
        same = theirs == ours[name]
        if name in logs or name in clients:
            alike = json.loads(theirs)["clients"] == json.loads(ours[name])["clients"]
            same = not same and alike is (name in logs)
        if not same:
            found[name] = (theirs, ours[name])
    return found


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


def listeners(scenarios: Mapping[str, Scenario], ports: dict[str, int], folder: Path) -> list[Json]:
    """The listeners of scenarios, each with a log of its own."""
    kind = f"{T}envoy.extensions.access_loggers.file.v3.FileAccessLog"
    found = []
    for number, (name, scenario) in enumerate(scenarios.items()):
        sink = {"@type": kind, "path": str(folder / f"{number}.log"), **scenario.form}
        address = {"socket_address": {"port_value": ports[name], **scenario.address}}
        log = [{"name": "f", "typed_config": sink}]
        found.append({"name": f"l{number}", "address": address, "access_log": log, **scenario.listener(folder)})
    return found


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
    """Answer for ``udp.test`` over UDP, and for ``tcp.test`` over TCP, until ``stack`` ends; the port of both."""

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
    """Start what the scenarios reach until ``stack`` ends; the ports."""
    apps = {name: application(_named(name), stack) for name in ("one", "two", "three")}
    return apps | {"echo": application(_echo, stack), "dns": name_server(stack)}


@dataclass(frozen=True)
class Suite:
    """Scenarios in one bootstrap.

    Attributes:
        bootstrap: what there is beside the scenarios' listeners.
        applications: what is started first; their ports.
        different_logs: scenarios in which clients see the same and the logs differ on purpose, and why.
        different: scenarios in which clients see something else on purpose, and why.
    """

    scenarios: Mapping[str, Scenario]
    bootstrap: Callable[[dict[str, int], Path], Json]
    applications: Callable[[contextlib.ExitStack, Path], dict[str, int]]
    different_logs: Mapping[str, str] = field(default_factory=dict)
    different: Mapping[str, str] = field(default_factory=dict)


SUITE = Suite(SCENARIOS, bootstrap, applications, DIFFERENT_LOGS)


def compared(suite: Suite) -> dict[str, tuple[str, str]]:
    """Run a suite by both proxies at once; what each saw in the scenarios that end differently."""
    with ThreadPoolExecutor(2) as pool:
        envoy, ours = pool.map(lambda kind: observed(kind, suite), ("envoy", "ours"))
    return differences(envoy, ours, suite.different_logs, suite.different)


def observed(kind: str, suite: Suite = SUITE) -> dict[str, str]:
    """Run all scenarios by one kind of proxy; what happened in each."""
    with contextlib.ExitStack() as stack, Running(kind) as running:
        Certificates(running.folder)
        apps = suite.applications(stack, running.folder)
        ports = {name: free_port() for name in suite.scenarios}
        document = suite.bootstrap(apps, running.folder)
        others = document["static_resources"].get("listeners", [])
        document["static_resources"]["listeners"] = listeners(suite.scenarios, ports, running.folder) + others
        v4 = [
            ports[name]
            for name, scenario in suite.scenarios.items()
            if scenario.address["address"] == "127.0.0.1" and scenario.bound
        ]
        running.start(document, v4)
        found = {}
        for number, (name, scenario) in enumerate(suite.scenarios.items()):
            seen = [client(ports[name], running.folder) for client in scenario.clients]
            reached = sum(each != "refused" for each in seen)
            path = running.folder / f"{number}.log"
            until(lambda path=path, reached=reached: _lines(path) >= reached)  # type: ignore[misc]
            # Connections that end at nearly the same time are logged in either order.
            log = sorted(path.read_text().splitlines()) if path.exists() else []
            found[name] = json.dumps({"clients": seen, "log": log})
        return found


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
