"""Compares which bootstraps Envoy and this proxy accept: ``--mode validate`` beside ``--validate``.

A row is a bootstrap, and whether each accepts it. Where the two differ the row says why.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commands import ztunnel
from tests.interop.proxies import ENVOY
from tests.xds.dialects.test_envoy import HEADER, PATH
from tests.ztunnel.proxy.envoy.config.test_bootstrap_fields import FILE_LOG
from tests.ztunnel.proxy.envoy.harness import Json, T, chain, cluster, listener, tcp
from tests.ztunnel.proxy.envoy.secrets.test_build import BAD, PINS, certificate, inline_ca, socket


@dataclass(frozen=True, slots=True)
class Row:
    """A bootstrap, and whether each proxy accepts it.

    Attributes:
        envoy, ours: whether it is accepted.
        why: the reason for a difference.
    """

    make: Callable[[], Json]
    envoy: bool
    ours: bool
    why: str = ""


def static(listeners: list[Json] = [], clusters: list[Json] = [], **more: Any) -> Json:  # noqa: B006  never changed
    return {"static_resources": {"listeners": listeners, "clusters": clusters}, **more}


def on_listener(*filters: Json, **more: Any) -> Json:
    return static([listener(chain(*filters, tcp()), **more)[1]], [cluster()[1]])


def over_tls(common: Json) -> Json:
    bad = chain(tcp(), transport_socket=socket("DownstreamTlsContext", common))
    return static([listener(bad)[1]], [cluster()[1]])


def rbac(permission: Json | None = None, principal: Json | None = None, **more: Any) -> Json:
    policy = {"permissions": [permission or {"any": True}], "principals": [principal or {"any": True}], **more}
    kind = T + "envoy.extensions.filters.network.rbac.v3.RBAC"
    config = {"@type": kind, "stat_prefix": "r", "rules": {"policies": {"p": policy}}}
    return on_listener({"name": "rbac", "typed_config": config})


def with_cluster(**more: Any) -> Json:
    return static(clusters=[cluster(**more)[1]])


def matched(predicate: Json, **more: Any) -> Json:
    """Return a listener whose only chain is chosen by a matcher. ``more`` are further fields."""
    name = {"name": "one", "typed_config": {"@type": T + "google.protobuf.StringValue", "value": "one"}}
    rows = [{"predicate": predicate, "on_match": {"action": name, **more}}]
    matcher = {"matcher_list": {"matchers": rows}}
    return static([listener(chain(tcp()), filter_chain_matcher=matcher)[1]], [cluster()[1]])


def routed(
    action: Json | None = None, host: Json | None = None, manager: Json | None = None, **match: Any
) -> Json:
    kind = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    upgrade = [{"upgrade_type": "CONNECT", "connect_config": {}}]
    taken = {"cluster": "app", "upgrade_configs": upgrade, **(action or {})}
    route = {"match": {"connect_matcher": {}, **match}, "route": taken}
    config = {
        "@type": T + kind,
        "stat_prefix": "h",
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route], **(host or {})}]},
        "http_filters": [
            {"name": "router", "typed_config": {"@type": T + "envoy.extensions.filters.http.router.v3.Router"}}
        ],
        "upgrade_configs": [{"upgrade_type": "CONNECT"}],
        **(manager or {}),
    }
    return static([listener({"filters": [{"name": "h", "typed_config": config}]})[1]], [cluster()[1]])


def endpoints(*priorities: int) -> Json:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 1}}
    groups = [{"priority": each, "lb_endpoints": [{"endpoint": {"address": address}}]} for each in priorities]
    return static(clusters=[{"name": "c", "load_assignment": {"cluster_name": "c", "endpoints": groups}}])


MONITORS = "envoy.extensions.resource_monitors"
NOT_HERE = "not supported here, and obeying the rest would mean something else"
SAN = {"match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"prefix": "spiffe://"}}]}


def balanced(kind: str, **config: object) -> Json:
    """A cluster with a load balancing policy extension."""
    url = f"{T}envoy.extensions.load_balancing_policies.{kind}"
    policy = {"typed_extension_config": {"name": kind, "typed_config": {"@type": url, **config}}}
    return with_cluster(load_balancing_policy={"policies": [policy]})


def logged_by(kind: str = "Tcp", **change: Any) -> Json:
    """A listener with a logger of an access log service."""
    common = {
        "log_name": "l",
        "transport_api_version": "V3",
        "grpc_service": {"envoy_grpc": {"cluster_name": "app"}},
        **{name: value for name, value in change.items() if not name.startswith("additional")},
    }
    more = {name: value for name, value in change.items() if name.startswith("additional")}
    config = {"@type": f"{T}envoy.extensions.access_loggers.grpc.v3.{kind}GrpcAccessLogConfig", **more}
    log = {"name": "service", "typed_config": {**config, "common_config": common}}
    return static([listener(chain(tcp(access_log=[log])))[1]], [cluster(9)[1]])


_INPUTS = f"{T}envoy.extensions.matching.common_inputs.network.v3"
ADDRESS: Json = {"name": "i", "typed_config": {"@type": f"{_INPUTS}.SourceIPInput"}}
METADATA: Json = {
    "name": "m",
    "typed_config": {"@type": f"{_INPUTS}.DynamicMetadataInput", "filter": "f", "path": [{"key": "k"}]},
}
ROWS: dict[str, Row] = {
    "log service": Row(logged_by, True, True),
    "log service of requests": Row(
        lambda: logged_by("Http", additional_request_headers_to_log=["x"], buffer_size_bytes=0), True, True
    ),
    "log service without a name": Row(lambda: logged_by(log_name=""), False, False),
    "log service, no time": Row(lambda: logged_by(buffer_flush_interval="0s"), False, False),
    "log service, no service": Row(lambda: logged_by(grpc_service={}), False, False),
    "log service, no such cluster": Row(
        lambda: logged_by(grpc_service={"envoy_grpc": {"cluster_name": "missing"}}),
        True,
        False,
        "no entry would ever be sent",
    ),
    "log service, retries": Row(
        lambda: logged_by(grpc_stream_retry_policy={"num_retries": 2}), True, False, NOT_HERE
    ),
    "log service, headers of answers": Row(
        lambda: logged_by("Http", additional_response_headers_to_log=["x"]), True, False, NOT_HERE
    ),
    "good": Row(lambda: over_tls({}), True, True),
    **{f"tls, {name}": Row(lambda make=case[0]: over_tls(make()), False, False) for name, case in BAD.items()},
    "tls, garbage revocation list": Row(
        lambda: over_tls(BAD["garbage revocation list"][0]()),
        True,
        False,
        "Envoy takes it for an empty list: a mistake in the file would revoke nothing",
    ),
    "tls, suites in groups": Row(
        lambda: over_tls(
            {
                "tls_params": {
                    "cipher_suites": ["[ECDHE-ECDSA-AES128-GCM-SHA256|ECDHE-ECDSA-CHACHA20-POLY1305]"],
                    "ecdh_curves": ["X25519", "P-256"],
                }
            }
        ),
        True,
        True,
    ),
    "tls, suite of TLS 1.3": Row(
        lambda: over_tls({"tls_params": {"cipher_suites": ["TLS_AES_128_GCM_SHA256"]}}),
        False,
        True,
        "BoringSSL has no choice of them, OpenSSL has",
    ),
    "tls, pinned certificate without root": Row(
        lambda: over_tls({"validation_context": {"verify_certificate_hash": list(PINS[0].certificate_hashes)}}),
        True,
        True,
    ),
    "tls, pinned key without root": Row(
        lambda: over_tls({"validation_context": {"verify_certificate_spki": list(PINS[1].spki_hashes)}}),
        True,
        True,
    ),
    "tls, names without root": Row(lambda: over_tls({"validation_context": SAN}), False, False),
    "tls, names with root": Row(lambda: over_tls({"validation_context": inline_ca(**SAN)}), True, True),
    "tls, revocation list without root": Row(
        lambda: over_tls({"validation_context": {"crl": {"inline_string": "x"}}}), False, False
    ),
    "tls, expired without root": Row(
        lambda: over_tls({"validation_context": {"allow_expired_certificate": True}}), False, False
    ),
    "tls, two certificates": Row(
        lambda: over_tls({"tls_certificates": [certificate(), certificate()]}), True, True
    ),
    "tls, a client's two certificates": Row(
        lambda: with_cluster(
            transport_socket=socket("UpstreamTlsContext", {"tls_certificates": [certificate(), certificate()]})
        ),
        False,
        False,
    ),
    "tls, keys logged where nothing can be": Row(
        lambda: over_tls({"key_log": {"path": "/dev/null/keys"}}), False, False
    ),
    "tls, range of logged keys": Row(
        lambda: over_tls(
            {
                "key_log": {
                    "path": "/dev/null",
                    "local_address_range": [{"address_prefix": "10.0.0.0", "prefix_len": 8}],
                }
            }
        ),
        True,
        False,
        NOT_HERE,
    ),
    "rbac, header": Row(lambda: rbac(HEADER), False, False),
    "rbac, no header": Row(lambda: rbac({"not_rule": HEADER}), False, False),
    "rbac, header of principal": Row(lambda: rbac(principal=HEADER), False, False),
    "rbac, no header of principal": Row(lambda: rbac(principal={"not_id": HEADER}), False, False),
    "rbac, path": Row(lambda: rbac(PATH), True, False, "it can never match"),
    "rbac, no path": Row(lambda: rbac({"not_rule": PATH}), True, False, "it would match every connection"),
    "rbac, any: false": Row(lambda: rbac({"any": False}), False, False),
    "eds, gap of priorities": Row(lambda: endpoints(0, 2), True, True),
    "eds, no first priority": Row(lambda: endpoints(1), True, True),
    "duplicate clusters": Row(lambda: static(clusters=[cluster()[1], cluster()[1]]), False, False),
    "no such field": Row(lambda: {"colour": 1}, False, False),
    "no such field of a cluster": Row(lambda: with_cluster(colour=1), False, False),
    "stats sinks": Row(
        lambda: {
            "stats_sinks": [
                {
                    "name": "envoy.stat_sinks.statsd",
                    "typed_config": {
                        "@type": T + "envoy.config.metrics.v3.StatsdSink",
                        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 8125}},
                    },
                }
            ]
        },
        True,
        False,
        NOT_HERE,
    ),
    "stats config": Row(lambda: {"stats_config": {"use_all_default_tags": False}}, True, False, NOT_HERE),
    "overload manager": Row(
        lambda: {
            "overload_manager": {
                "resource_monitors": [
                    {
                        "name": "envoy.resource_monitors.global_downstream_max_connections",
                        "typed_config": {
                            "@type": f"{T}{MONITORS}.downstream_connections.v3.DownstreamConnectionsConfig",
                            "max_active_downstream_connections": 5,
                        },
                    }
                ]
            }
        },
        True,
        False,
        NOT_HERE,
    ),
    "admin paths": Row(lambda: {"admin": {"allow_paths": [{"exact": "/ready"}]}}, True, True),
    "admin log": Row(
        lambda: {
            "admin": {"access_log": [{"name": "f", "typed_config": {"@type": FILE_LOG, "path": "/dev/null"}}]}
        },
        True,
        True,
    ),
    "runtime limit": Row(
        lambda: {
            "layered_runtime": {
                "layers": [{"name": "s", "static_layer": {"overload": {"global_downstream_max_connections": 5}}}]
            }
        },
        True,
        False,
        NOT_HERE,
    ),
    "ring hash sizes": Row(
        lambda: with_cluster(lb_policy="RING_HASH", ring_hash_lb_config={"minimum_ring_size": 5}),
        True,
        False,
        NOT_HERE,
    ),
    "ring sizes of a policy": Row(lambda: balanced("ring_hash.v3.RingHash", minimum_ring_size=5), True, True),
    "ring sizes that cross": Row(
        lambda: balanced("ring_hash.v3.RingHash", minimum_ring_size=9, maximum_ring_size=8), False, False
    ),
    "maglev table that is no prime": Row(lambda: balanced("maglev.v3.Maglev", table_size=100), False, False),
    "maglev table": Row(lambda: balanced("maglev.v3.Maglev", table_size=101), True, True),
    "least request of one": Row(lambda: balanced("least_request.v3.LeastRequest", choice_count=1), True, True),
    "no policy at all": Row(lambda: with_cluster(load_balancing_policy={"policies": []}), False, False),
    "limits of HTTP/2": Row(
        lambda: with_cluster(http2_protocol_options={"max_outbound_frames": 5}), True, False, NOT_HERE
    ),
    "route by runtime": Row(
        lambda: routed(runtime_fraction={"default_value": {"numerator": 0}}), True, False, NOT_HERE
    ),
    "route by query": Row(
        lambda: routed(query_parameters=[{"name": "q", "present_match": True}]), True, False, NOT_HERE
    ),
    "route by TLS": Row(lambda: routed(tls_context={"presented": True}), True, False, NOT_HERE),
    "virtual clusters": Row(
        lambda: routed(host={"virtual_clusters": [{"name": "a", "headers": [{"name": "x"}]}]}),
        True,
        False,
        NOT_HERE,
    ),
    "route tried again": Row(
        lambda: routed({"retry_policy": {"retry_on": "connect-failure"}}), True, False, NOT_HERE
    ),
    "route tried again in no case": Row(lambda: routed({"retry_policy": {"num_retries": 2}}), True, True),
    "route": Row(routed, True, True),
    "route by POST": Row(
        lambda: routed({"upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {"allow_post": True}}]}),
        True,
        False,
        NOT_HERE,
    ),
    "rbac, null as condition": Row(
        lambda: rbac(condition={"const_expr": {"null_value": "NULL_VALUE"}}), True, True
    ),
    "upgrade that is not enabled": Row(
        lambda: routed(manager={"upgrade_configs": [{"upgrade_type": "CONNECT", "enabled": False}]}), True, True
    ),
    "matching goes on": Row(
        lambda: matched(
            {"single_predicate": {"input": ADDRESS, "value_match": {"exact": "a"}}}, keep_matching=True
        ),
        True,
        True,
    ),
    "chain by metadata": Row(
        lambda: matched({"single_predicate": {"input": METADATA, "value_match": {"exact": "a"}}}),
        False,
        True,
        "Envoy has the input for other matchers only",
    ),
    "endpoints of the same resource": Row(
        lambda: static(
            clusters=[{"name": "c", "type": "EDS", "eds_cluster_config": {"eds_config": {"self": {}}}}]
        ),
        False,
        False,
    ),
}


def accepted(row: Row, kind: str, folder: Path) -> str:
    """Have a proxy validate a row's bootstrap; ``accepted`` or ``refused``."""
    path = folder / "bootstrap.json"
    path.write_text(json.dumps(row.make()))
    if kind != "envoy":
        finished = ztunnel("proxy", "--validate", "--bootstrap", str(path))
        assert finished.returncode in (0, 1), finished.stderr
        return word(finished.returncode == 0)
    command: list[str | Path] = [ENVOY, "--mode", "validate", "-l", "off", "-c", path]
    return word(subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0)


def word(good: bool) -> str:
    """Return a table's word for a verdict."""
    return "accepted" if good else "refused"
