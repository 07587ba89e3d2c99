"""Scenarios with one field each, of a listener or of the cluster behind it.

``make envoy-diff`` counts which of the accepted fields are set in a scenario.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.interop.beside import (
    Scenario,
    Suite,
    go,
    header,
    inspector,
    listed,
    matches,
    matching,
    network_input,
    plain,
    rest,
    secured,
    tls,
    to,
)
from tests.interop.scenario_clusters import CRITERIA, OF_CLUSTERS, OF_HOSTS, SERVED, applications, bootstrap
from tests.ztunnel.proxy.envoy.harness import Json, T, chain, tcp


def _reads_header(**more: Any) -> Json:
    kind = f"{T}envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"
    return {"name": "proxy", "typed_config": {"@type": kind, **more}}


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
    """Return a proxy with weighted clusters, of which only the first has weight."""
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


def _if(value: Json, source: Json | None = None) -> Json:
    return {"single_predicate": {"input": source or network_input("SourceIPInput"), "value_match": value}}


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
SUITE = Suite(SCENARIOS, bootstrap, applications, DIFFERENT_LOGS)
