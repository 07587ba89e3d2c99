"""Resolvers of names: which of several fields wins, and what is refused."""

from typing import Any

import pytest

from tests.xds.dialects.walked import CARES, GETADDRINFO, SURROUNDINGS, T, socket
from xds.dialects.envoy import compile_cluster
from xds.dialects.envoy.dns import compile_bootstrap_resolver
from xds.errors import ConfigError
from xds.model.address import SocketAddress
from xds.model.dns import HOSTS_RESOLVER, DnsResolver
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.json import parse_value

RAW = "envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"
BY_TCP = {"use_tcp_for_dns_lookups": True}
CONFIG = {"dns_resolution_config": {"resolvers": [socket(0, "192.0.2.2")], "dns_resolver_options": BY_TCP}}
SECOND = DnsResolver(servers=(SocketAddress("192.0.2.2", 53),), tcp=True)
RESOLVERS = {"dns_resolvers": [socket(5, "192.0.2.3")], **BY_TCP}
FIRST = DnsResolver(servers=(SocketAddress("127.0.0.1", 53),), query_timeout_s=3.0, tries=2)


def resolver(**fields: Any) -> DnsResolver | None:
    return compile_cluster(parse_value({"name": "c", **fields}, Cluster).message, SURROUNDINGS).dns_resolver


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        (BY_TCP, None),
        (RESOLVERS, DnsResolver(servers=(SocketAddress("192.0.2.3", 5),), tcp=True)),
        ({**RESOLVERS, **CONFIG}, SECOND),
        ({**RESOLVERS, **CONFIG, "typed_dns_resolver_config": CARES}, FIRST),
        ({**CONFIG, "typed_dns_resolver_config": GETADDRINFO}, DnsResolver(has_ttls=False)),
    ],
)
def test_newest_field_is_a_clusters_resolver(fields: dict[str, Any], expected: DnsResolver | None) -> None:
    assert resolver(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, HOSTS_RESOLVER),
        (BY_TCP, DnsResolver(tcp=True)),
        ({**BY_TCP, **CONFIG}, SECOND),
        ({**CONFIG, "typed_dns_resolver_config": CARES}, FIRST),
    ],
)
def test_newest_field_is_the_bootstraps_resolver(fields: dict[str, Any], expected: DnsResolver) -> None:
    assert compile_bootstrap_resolver(parse_value(fields, Bootstrap).message) == expected


def cares(**fields: Any) -> dict[str, Any]:
    return {"name": "cares", "typed_config": {**CARES["typed_config"], **fields}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"typed_dns_resolver_config": cares(query_tries=0)}, "query_tries: Proto constraint"),
        ({"typed_dns_resolver_config": cares(resolvers=[socket(53, "a.test")])}, "malformed IP address"),
        ({"typed_dns_resolver_config": cares(resolvers=[{"pipe": {"path": "/x"}}])}, "has an IP address"),
        ({"dns_resolution_config": {}}, "resolvers: Proto constraint"),
        ({"typed_dns_resolver_config": CARES, "dns_resolution_config": {}}, "resolvers: Proto constraint"),
        ({"dns_resolvers": [socket(65536, "192.0.2.1")]}, "port_value: Proto constraint"),
        (
            {"typed_dns_resolver_config": {"typed_config": {"@type": f"{T}{RAW}"}}},
            "no such resolver",
        ),
    ],
)
def test_resolver_that_cannot_be_obeyed_is_refused_by_place(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolver(**fields)
