"""Compiles route configurations, as far as they concern the termination of CONNECT."""

import re

from xds.dialects.envoy.reading import (
    NEVER_IN_HEADERS,
    Surroundings,
    at,
    constraint,
    data,
    enum_name,
    metadata,
    nothing_unknown,
    only,
    regex_match,
    required,
    seconds,
    string_match,
    wrapped,
)
from xds.errors import ConfigError, Unsupported
from xds.model import http as model
from xds.model.string_match import StringMatch, ascii_lower
from xds.model.weighted_cluster import WeightedCluster
from xds.proto.envoy.config.route.v3 import route_pb2 as proto

_NOT_FOUND_STATUS = {0: 503, 1: 404, 2: 500}


def compile_route_table(message: proto.RouteConfiguration, surroundings: Surroundings) -> model.RouteTable:
    """Compile a route configuration.

    Raises:
        ConfigError: with the path of the first route that is not supported or not valid.
    """
    nothing_unknown(message)
    only(message, "name", "virtual_hosts", "validate_clusters", "max_direct_response_body_size_bytes")
    if wrapped(message, "validate_clusters", False):
        raise Unsupported("clusters may come after routes", "validate_clusters")
    limit = wrapped(message, "max_direct_response_body_size_bytes", 4096)
    hosts: list[model.VirtualHost] = []
    seen: set[str] = set()
    for index, host in enumerate(message.virtual_hosts):
        with at("virtual_hosts", index):
            hosts.append(_virtual_host(host, surroundings))
            for position, route in enumerate(hosts[-1].routes):
                if len(route.direct_body) > limit:
                    raise ConfigError(
                        f"response body size is {len(route.direct_body)} bytes; maximum is {limit}",
                        f"routes[{position}].direct_response.body",
                    )
            for domain in hosts[-1].domains:
                if domain in seen:
                    raise ConfigError(
                        f"Only unique values for domains are permitted. Duplicate entry of domain {domain}"
                    )
                seen.add(domain)
    return model.RouteTable(message.name, tuple(hosts))


def _virtual_host(message: proto.VirtualHost, surroundings: Surroundings) -> model.VirtualHost:
    # include_request_attempt_count has no effect: tunnel requests end at this proxy, so the header would not be
    # read.
    only(message, "name", "domains", "routes", "include_request_attempt_count", "metadata")
    required(message, "name")
    if not message.domains:
        raise constraint(message, "domains", "value must contain at least 1 item(s)")
    routes = []
    for index, route in enumerate(message.routes):
        with at("routes", index):
            routes.append(_route(route, surroundings))
    return model.VirtualHost(
        message.name,
        tuple(domain.lower() for domain in message.domains),
        tuple(routes),
        metadata(message.metadata),
    )


def _route(message: proto.Route, surroundings: Surroundings) -> model.Route:
    # decorator has no effect: it names trace spans, and this proxy creates none.
    only(message, "match", "route", "direct_response", "metadata", "decorator", "name")
    with at("match"):
        path = _path(message.match)
        headers = []
        for index, header in enumerate(message.match.headers):
            with at("headers", index):
                headers.append(_header(header))
    kind = message.WhichOneof("action")
    if kind == "direct_response":
        if not 200 <= message.direct_response.status < 600:
            with at(kind):
                raise constraint(message.direct_response, "status", "value must be inside range [200, 600)")
        body = b""
        if message.direct_response.HasField("body"):
            with at("direct_response", "body"):
                body = data(message.direct_response.body, surroundings)
        return model.Route(
            name=message.name,
            path=path,
            headers=tuple(headers),
            direct_status=message.direct_response.status,
            direct_body=body,
            metadata=metadata(message.metadata),
        )
    if kind != "route":
        raise constraint(message, "action", "value is required")
    with at("route"):
        return _action(message, path, tuple(headers))


def _action(message: proto.Route, path: StringMatch | None, headers: tuple[model.HeaderMatch, ...]) -> model.Route:
    action = message.route
    only(
        action,
        "cluster",
        "weighted_clusters",
        "timeout",
        "idle_timeout",
        "cluster_not_found_response_code",
        "upgrade_configs",
        "retry_policy",
    )
    if action.retry_policy.retry_on:
        # With retry_on, Envoy would retry a CONNECT at another host if the first could not be reached.
        raise Unsupported("this proxy does not retry requests", "retry_policy.retry_on")
    tunnel = False
    for index, upgrade in enumerate(action.upgrade_configs):
        with at("upgrade_configs", index):
            if upgrade.upgrade_type.upper() != "CONNECT":
                raise Unsupported(f"only CONNECT is supported, not '{upgrade.upgrade_type}'", "upgrade_type")
            with at("connect_config"):
                only(upgrade.connect_config, "allow_post")
                if upgrade.connect_config.allow_post:
                    raise Unsupported("a request becomes a tunnel only by CONNECT here", "allow_post")
            if not upgrade.HasField("enabled") or upgrade.enabled.value:
                tunnel = upgrade.HasField("connect_config")
    if message.match.HasField("connect_matcher") and not tunnel:
        # Without connect_config, Envoy forwards the CONNECT as a request, with its authority and headers.
        raise Unsupported(
            "this proxy terminates CONNECT, and does not forward it: set connect_config", "upgrade_configs"
        )
    enum_name(action, "cluster_not_found_response_code")
    return model.Route(
        name=message.name,
        metadata=metadata(message.metadata),
        path=path,
        headers=headers,
        clusters=_clusters(action),
        tunnel=tunnel,
        timeout_s=seconds(action, "timeout", 0.0) if action.HasField("timeout") else None,
        idle_timeout_s=seconds(action, "idle_timeout", 0.0) if action.HasField("idle_timeout") else None,
        cluster_not_found_status=_NOT_FOUND_STATUS[action.cluster_not_found_response_code],
    )


def _clusters(action: proto.RouteAction) -> tuple[WeightedCluster, ...]:
    kind = action.WhichOneof("cluster_specifier")
    if kind == "cluster":
        required(action, "cluster")
        return (WeightedCluster(action.cluster, 1),)
    if kind == "weighted_clusters":
        with at(kind):
            only(action.weighted_clusters, "clusters")
            for index, cluster in enumerate(action.weighted_clusters.clusters):
                with at("clusters", index):
                    only(cluster, "name", "weight")
                    required(cluster, "name")
            choices = tuple(WeightedCluster(c.name, c.weight.value) for c in action.weighted_clusters.clusters)
            if sum(choice.weight for choice in choices) == 0:
                raise ConfigError("Sum of weights in the weighted_cluster must be greater than 0.")
            return choices
    raise constraint(action, "cluster_specifier", "value is required")


def _path(message: proto.RouteMatch) -> StringMatch | None:
    only(
        message,
        "prefix",
        "path",
        "safe_regex",
        "connect_matcher",
        "path_separated_prefix",
        "headers",
        "case_sensitive",
    )
    ignore_case = message.HasField("case_sensitive") and not message.case_sensitive.value
    kind = message.WhichOneof("path_specifier")
    match kind:
        case "connect_matcher":
            return None
        case "prefix":
            return _text("prefix", message.prefix, ignore_case)
        case "path":
            return _text("exact", message.path, ignore_case)
        case "safe_regex":
            return regex_match(message.safe_regex.regex)
        case "path_separated_prefix":
            if not re.fullmatch("[^?#]+[^?#/]", message.path_separated_prefix):
                raise constraint(message, kind, 'value does not match regex pattern "^[^?#]+[^?#/]$"')
            flags = "(?i)" if ignore_case else ""
            return regex_match(f"{flags}{re.escape(message.path_separated_prefix)}(?:[/?].*)?")
        case _:
            raise constraint(message, "path_specifier", "value is required")


def _text(kind: str, value: str, ignore_case: bool) -> StringMatch:
    return StringMatch(kind, ascii_lower(value) if ignore_case else value, ignore_case)


def _header(message: proto.HeaderMatcher) -> model.HeaderMatch:
    if message.treat_missing_header_as_empty:
        raise Unsupported("this proxy does not support this field", "treat_missing_header_as_empty")
    required(message, "name")
    if set(message.name) & NEVER_IN_HEADERS:
        raise constraint(message, "name", "value must have no NUL, CR or LF")
    if message.name.startswith(":") and message.name not in (":authority", ":method", ":path"):
        raise Unsupported(f"routes do not match {message.name}", "name")
    kind = message.WhichOneof("header_match_specifier")
    match: StringMatch | None
    match kind:
        case None:
            match = None
        case "present_match":
            invert = message.invert_match != (not message.present_match)
            return model.HeaderMatch(message.name.lower(), None, invert)
        case "string_match":
            with at("string_match"):
                match = string_match(message.string_match)
        case "safe_regex_match":
            match = regex_match(message.safe_regex_match.regex)
        case "exact_match" | "prefix_match" | "suffix_match" | "contains_match":
            if kind != "exact_match":
                required(message, kind)
            # An empty exact_match means any value, as in Envoy.
            how = kind.removesuffix("_match") if getattr(message, kind) else "prefix"
            match = StringMatch(how, getattr(message, kind))
        case _:
            raise Unsupported("this kind of header match is not supported", kind)
    return model.HeaderMatch(message.name.lower(), match, message.invert_match)
