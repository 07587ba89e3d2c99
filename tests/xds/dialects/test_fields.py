"""Every field of every message that we read is obeyed, refused by name, or known to change nothing.

``pytest -s`` prints the count by message. Fields that our messages lack: :mod:`tests.xds.proto.test_unknown`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest
from google.protobuf.descriptor import Descriptor

from tests.xds.dialects.field_walk import Outcome, kinds_in, walk
from tests.xds.dialects.walked import RESOURCES
from xds.proto import registry

HCM = "envoy.extensions.filters.network.http_connection_manager.v3"
DNS = "envoy.extensions.network.dns_resolver"
TLS = "envoy.extensions.transport_sockets.tls.v3"
_NO_HTTP1 = "of HTTP/1.1, which neither side of a tunnel speaks"
_NO_ZONES = "needs a local cluster, which is refused; Envoy ignores it without one"
_NO_NEXT_PROXY = "a tunnel's request goes no further than here: what is added to it has no reader"
_NO_TRACES = "names spans of traces, which are refused"
_ONLY_V3 = "v3 is the only version; v2 is refused"
_NO_RESUMPTION = "sessions are never resumed"
_LABEL = "a label; the type says what it is"
_NO_MANAGER = "of limits across listeners, which are refused where they would be set"
_NEWER_RESOLVER = "beside a newer field, or without name servers, as in Envoy"
_ANY_PROTOCOL = "name servers are asked by UDP or TCP as the options of the resolver say, as in Envoy"
_BY_PARTS = "says nothing without its parts, which are obeyed elsewhere"
_OF_HTTP = "of HTTP traffic under use_downstream_protocol_config; the values are judged all the same"
_SECOND_BEST = "protocol options in typed_extension_protocol_options win"

#: Fields that may be set although nothing here reads them, at one site at least, and why.
IGNORED = {
    "envoy.config.accesslog.v3.AccessLog.filter": "of the admin log, which can only be /dev/null",
    "envoy.config.accesslog.v3.AccessLog.name": _LABEL,
    "envoy.config.bootstrap.v3.Admin.ignore_global_conn_limit": _NO_MANAGER,
    "envoy.config.bootstrap.v3.Admin.profile_path": "of a page for Envoy's profiler, which there is not",
    "envoy.config.bootstrap.v3.Bootstrap.stats_flush_interval": "of sinks, which are refused",
    "envoy.config.bootstrap.v3.Bootstrap.StaticResources.listeners": "compiled at the start, as those of LDS",
    "envoy.config.bootstrap.v3.Bootstrap.StaticResources.secrets": "compiled at the start, as those of SDS",
    "envoy.config.bootstrap.v3.RuntimeLayer.admin_layer": "begins empty, and no page changes it",
    "envoy.config.bootstrap.v3.RuntimeLayer.name": _LABEL,
    "envoy.config.bootstrap.v3.Bootstrap.use_tcp_for_dns_lookups": _NEWER_RESOLVER,
    "envoy.config.cluster.v3.Cluster.use_tcp_for_dns_lookups": _NEWER_RESOLVER,
    f"{DNS}.cares.v3.CaresDnsResolverConfig.udp_max_queries": "of one socket; each query has its own",
    f"{DNS}.getaddrinfo.v3.GetAddrInfoDnsResolverConfig.num_resolver_threads": "look-ups take no threads",
    "envoy.config.cluster.v3.Cluster.http2_protocol_options": _SECOND_BEST,
    "envoy.config.cluster.v3.Cluster.lb_policy": "load_balancing_policy wins",
    "envoy.config.cluster.v3.Cluster.original_dst_lb_config": "of another type of cluster",
    "envoy.config.cluster.v3.Cluster.round_robin_lb_config": _BY_PARTS,
    "envoy.config.endpoint.v3.ClusterLoadAssignment.named_endpoints": _BY_PARTS,
    "envoy.config.cluster.v3.Cluster.per_connection_buffer_limit_bytes": "soft, and above what is ever held",
    "envoy.config.cluster.v3.Cluster.CommonLbConfig.update_merge_window": "changes are applied at once",
    "envoy.config.cluster.v3.Cluster.CommonLbConfig.ZoneAwareLbConfig.min_cluster_size": _NO_ZONES,
    "envoy.config.cluster.v3.Cluster.CommonLbConfig.ZoneAwareLbConfig.routing_enabled": _NO_ZONES,
    "envoy.config.core.v3.RuntimeDouble.runtime_key": "the runtime's keys are refused",
    "envoy.config.core.v3.ApiConfigSource.set_node_on_first_message_only": "of ADS; other streams send it once",
    "envoy.config.core.v3.ApiConfigSource.transport_api_version": _ONLY_V3,
    "envoy.config.core.v3.ConfigSource.resource_api_version": _ONLY_V3,
    "envoy.config.core.v3.ConfigSource.self": "the stream it came by is ADS, as beside it",
    "envoy.config.core.v3.HealthCheck.reuse_connection": "spares connections; each check opens its own",
    "envoy.config.core.v3.HttpProtocolOptions.idle_timeout": _SECOND_BEST,
    "envoy.config.core.v3.KeepaliveSettings.interval": _OF_HTTP,
    "envoy.config.core.v3.KeepaliveSettings.timeout": _OF_HTTP,
    "envoy.config.core.v3.Metadata.typed_filter_metadata": "nothing that is supported reads it",
    "envoy.config.core.v3.Pipe.mode": "of a socket that is made; endpoints are connected to",
    "envoy.config.core.v3.RuntimeUInt32.runtime_key": "the runtime's keys are refused",
    "envoy.config.core.v3.RuntimeFeatureFlag.runtime_key": "the runtime's keys are refused",
    "envoy.config.core.v3.SocketAddress.ipv4_compat": "an unspecified IPv6 address takes IPv4 in any case",
    "envoy.config.core.v3.SocketOption.description": _LABEL,
    "envoy.config.core.v3.SubstitutionFormatString.content_type": "of bodies; a log line has no type",
    "envoy.config.core.v3.TransportSocket.name": _LABEL,
    "envoy.config.core.v3.TypedExtensionConfig.name": _LABEL,
    "envoy.config.endpoint.v3.Endpoint.health_check_config": _BY_PARTS,
    "envoy.config.endpoint.v3.LocalityLbEndpoints.proximity": "of a load balancer that Envoy does not have either",
    "envoy.config.listener.v3.Filter.name": _LABEL,
    "envoy.config.listener.v3.Listener.bypass_overload_manager": _NO_MANAGER,
    "envoy.config.listener.v3.Listener.drain_type": "failed health checks drain nothing: both are alike",
    "envoy.config.listener.v3.Listener.ignore_global_conn_limit": _NO_MANAGER,
    "envoy.config.listener.v3.Listener.max_connections_to_accept_per_socket_event": "a turn's accepts are bounded",
    "envoy.config.listener.v3.Listener.per_connection_buffer_limit_bytes": "soft, and above what is ever held",
    "envoy.config.listener.v3.ListenerFilterChainMatchPredicate.any_match": "false matches any, too, as in Envoy",
    "envoy.config.route.v3.Decorator.operation": _NO_TRACES,
    "envoy.config.route.v3.Decorator.propagate": _NO_TRACES,
    "envoy.config.route.v3.RouteMatch.case_sensitive": "of other kinds of matches than a regular expression",
    "envoy.config.route.v3.VirtualHost.include_request_attempt_count": _NO_NEXT_PROXY,
    "google.api.expr.v1alpha1.Expr.id": "numbers the nodes of a tree for a compiler's positions",
    "envoy.extensions.access_loggers.file.v3.FileAccessLog.format": "of the admin log, which is only /dev/null",
    "envoy.extensions.access_loggers.file.v3.FileAccessLog.json_format": "likewise",
    "envoy.extensions.access_loggers.file.v3.FileAccessLog.log_format": "likewise",
    "envoy.extensions.access_loggers.file.v3.FileAccessLog.typed_json_format": "likewise",
    "envoy.extensions.access_loggers.grpc.v3.CommonGrpcAccessLogConfig.transport_api_version": _ONLY_V3,
    "envoy.extensions.filters.common.set_filter_state.v3.FilterStateValue.read_only": "nothing sets a value twice",
    "envoy.extensions.filters.http.router.v3.Router.dynamic_stats": "chooses statistics of HTTP",
    "envoy.extensions.filters.http.router.v3.Router.suppress_envoy_headers": "no such header is ever sent",
    "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol.stat_prefix": "names statistics",
    "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector.initial_read_buffer_size": "grows as needed",
    f"{HCM}.HttpConnectionManager.delayed_close_timeout": _NO_HTTP1,
    f"{HCM}.HttpConnectionManager.drain_timeout": "a PING says when the peer has seen the first GOAWAY",
    f"{HCM}.HttpConnectionManager.forward_client_cert_details": _NO_NEXT_PROXY,
    f"{HCM}.HttpConnectionManager.SetCurrentClientCertDetails.cert": _NO_NEXT_PROXY,
    f"{HCM}.HttpConnectionManager.SetCurrentClientCertDetails.chain": _NO_NEXT_PROXY,
    f"{HCM}.HttpConnectionManager.SetCurrentClientCertDetails.dns": _NO_NEXT_PROXY,
    f"{HCM}.HttpConnectionManager.SetCurrentClientCertDetails.subject": _NO_NEXT_PROXY,
    f"{HCM}.HttpConnectionManager.SetCurrentClientCertDetails.uri": _NO_NEXT_PROXY,
    f"{HCM}.HttpFilter.is_optional": "of a filter that is not known, which is refused in any case",
    f"{HCM}.HttpFilter.name": _LABEL,
    "envoy.extensions.filters.network.rbac.v3.RBAC.enforcement_type": "what is judged stays the same",
    f"{TLS}.DownstreamTlsContext.disable_stateless_session_resumption": _NO_RESUMPTION,
    f"{TLS}.DownstreamTlsContext.session_timeout": _NO_RESUMPTION,
    f"{TLS}.Secret.name": "names the resource, not what is in it",
    f"{TLS}.UpstreamTlsContext.max_session_keys": _NO_RESUMPTION,
    "envoy.type.matcher.v3.StringMatcher.ignore_case": "has no effect on a regular expression, as in Envoy",
    "xds.type.matcher.v3.StringMatcher.ignore_case": "has no effect on a regular expression, as in Envoy",
    "envoy.type.matcher.v3.RegexMatcher.GoogleRE2.max_program_size": "Envoy ignores it, too",
    "xds.core.v3.TypedExtensionConfig.name": _LABEL,
}
#: Messages that count for nothing wherever they stand.
IGNORED_MESSAGES = {
    "envoy.config.core.v3.Http1ProtocolOptions": _NO_HTTP1,
    "envoy.config.route.v3.RetryPolicy": "says how to try again; retry_on, which says when, is refused",
}
#: Messages in no resource above whose fields need no walk.
NOT_WALKED = {
    "envoy.config.core.v3.BuildVersion": "of the node, which control planes get as it is",
    "envoy.config.core.v3.ContextParams": "likewise",
    "envoy.config.core.v3.Extension": "likewise",
    "envoy.type.v3.SemanticVersion": "likewise",
    "envoy.config.core.v3.ControlPlane": "of responses, and for a log",
    "envoy.config.core.v3.RuntimeFractionalPercent": "only in fields that our messages lack, which are refused",
    "envoy.type.matcher.v3.RegexMatchAndSubstitute": "likewise",
    "envoy.type.matcher.v3.PathMatcher": "of rules that are refused, after a look at whether they are well-formed",
    "xds.type.v3.TypedStruct": "stands for the message that it holds",
}
#: Packages of what this proxy only sends or answers, and of other dialects.
_OTHERS = (
    *("envoy.admin.", "envoy.data.", "envoy.service.", "istio.", "google.", "udpa.", "felix.", "dikastes."),
    *("flow.", "observer.", "peer.", "relay.", "grpc.health."),  # Hubble's
)
#: Sites of messages that are read elsewhere.
IGNORED_SITES = {
    "resolvers/socket_address": _ANY_PROTOCOL,
    "dns_resolvers/socket_address": _ANY_PROTOCOL,
    "use_downstream_protocol_config/http2_protocol_options": _OF_HTTP,
    "session_ticket_keys/keys": _NO_RESUMPTION,
}


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [outcome for message, compile_it in RESOURCES.values() for outcome in walk(message, compile_it)]


def _fields(outcomes: list[Outcome], result: str) -> set[str]:
    return {f"{each.message}.{each.field}" for each in outcomes if each.result == result}


def test_no_value_of_a_field_is_a_bug(outcomes: list[Outcome]) -> None:
    assert [each for each in outcomes if each.result not in ("refused", "obeyed", "ignored")] == []


def test_a_field_that_is_ignored_is_known_to_change_nothing(outcomes: list[Outcome]) -> None:
    walked = {each.message for each in outcomes}
    silent = [
        each
        for each in outcomes
        if each.result == "ignored"
        and f"{each.message}.{each.field}" not in IGNORED
        and each.message not in IGNORED_MESSAGES
        and each.site not in IGNORED_SITES
        and each.inner not in walked  # an empty message, whose fields are each walked where it is set
    ]
    assert silent == []


def test_no_reason_is_for_a_field_that_is_always_read(outcomes: list[Outcome]) -> None:
    ignored = _fields(outcomes, "ignored")
    assert set(IGNORED) - ignored == set()
    assert set(IGNORED_MESSAGES) <= {each.message for each in outcomes if each.result == "ignored"}
    assert set(IGNORED_SITES) <= {each.site for each in outcomes if each.result == "ignored"}


def _reachable(names: Iterable[str], known: Mapping[str, Descriptor]) -> set[str]:
    found: set[str] = set()
    left = [name for name in names if name in known]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            kinds = (field.message_type for field in known[name].fields)
            left += [kind.full_name for kind in kinds if kind is not None and kind.full_name in known]
    return found


def test_a_message_that_is_not_walked_is_refused_whole(outcomes: list[Outcome]) -> None:
    """A message that this dialect begins to read is to be added to the resources."""
    walked = set().union(*(kinds_in(message) for message, _ in RESOURCES.values()))
    results: dict[str, set[str]] = defaultdict(set)
    for each in outcomes:
        results[each.inner].add(each.result)
    known = {each.full_name: each for each in registry.messages() if not each.full_name.startswith(_OTHERS)}
    refused = _reachable((name for name, seen in results.items() if seen <= {"refused", "ignored"}), known)
    left = {
        name
        for name, each in known.items()
        if name not in walked | refused and each.fields and not each.GetOptions().map_entry
    }
    assert left == set(NOT_WALKED)


def test_the_counts_by_message(outcomes: list[Outcome]) -> None:
    counts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in outcomes:
        counts[each.message][each.result].add(each.field)
    print(f"\n{'message':90}  obeyed  refused  ignored")
    for message, results in sorted(counts.items()):
        row = [len(results[result]) for result in ("obeyed", "refused", "ignored")]
        print(f"{message:90}  {row[0]:6}  {row[1]:7}  {row[2]:7}")
    total = [len(_fields(outcomes, result)) for result in ("obeyed", "refused", "ignored")]
    print(f"{'fields':90}  {total[0]:6}  {total[1]:7}  {total[2]:7}")
    assert len(counts) > 110
    assert total[0] > 300
    assert total[1] > 190
