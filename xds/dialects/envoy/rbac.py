"""Compiles ``envoy.config.rbac.v3.RBAC`` to policy lists.

A permission or principal without a known field, or with an unknown field, is refused, because a partly enforced
policy would admit or reject peers against its author's intention.
"""

from collections.abc import Iterable

from xds.dialects.envoy.cel import compile_expression
from xds.dialects.envoy.reading import at, constraint, network, only, required, string_match
from xds.errors import ConfigError, Unsupported
from xds.model import policy as p
from xds.model.listener import Rbac
from xds.proto.envoy.config.rbac.v3 import rbac_pb2 as config
from xds.proto.envoy.extensions.filters.network.rbac.v3 import rbac_pb2 as network_rbac
from xds.proto.envoy.type.matcher.v3 import matcher_pb2
from xds.proto.envoy.type.v3 import type_pb2


def compile_rbac(message: network_rbac.RBAC) -> Rbac:
    """Compile the network filter.

    With ``CONTINUOUS`` enforcement, Envoy evaluates the rules at every read. This proxy treats both enforcement
    types alike: the facts that rules use do not change between two reads of a connection, and changed policies are
    applied to open connections anyway.
    """
    only(
        message,
        "rules",
        "shadow_rules",
        "stat_prefix",
        "enforcement_type",
        "shadow_rules_stat_prefix",
    )
    required(message, "stat_prefix")
    rules = shadow = None
    if message.HasField("rules"):
        with at("rules"):
            rules = compile_rules(message.rules)
    if message.HasField("shadow_rules"):
        with at("shadow_rules"):
            shadow = compile_rules(message.shadow_rules)
    return Rbac(
        stat_prefix=message.stat_prefix,
        rules=rules,
        shadow=shadow,
        shadow_prefix=message.shadow_rules_stat_prefix,
        log_only=message.HasField("rules") and message.rules.action == config.RBAC.LOG,
    )


def compile_rules(message: config.RBAC) -> p.PolicyList:
    """Compile the rules to a policy list with one tier. If no policy matches, ALLOW denies, and DENY and LOG
    allow.

    Policies are evaluated in the order of their keys, so that the policy named in a denial does not depend on the
    order of a map.
    """
    only(message, "action", "policies")
    verdicts = {
        config.RBAC.ALLOW: (p.Verdict.ALLOW, p.Verdict.DENY),
        config.RBAC.DENY: (p.Verdict.DENY, p.Verdict.ALLOW),
        config.RBAC.LOG: (p.Verdict.ALLOW, p.Verdict.ALLOW),
    }
    if message.action not in verdicts:
        raise ConfigError(f"unknown action {message.action}", "action")
    hit, end = verdicts[message.action]
    policies = []
    for name in sorted(message.policies):
        with at(f"policies[{name!r}]"):
            policies.append(p.Policy(name, hit, _policy(message.policies[name])))
    return p.PolicyList((p.Tier(tuple(policies)),), end)


def _policy(message: config.Policy) -> p.Condition:
    if message.HasField("checked_condition"):
        raise Unsupported("this is not evaluated, nor by Envoy; set condition", "checked_condition")
    if not message.permissions:
        raise constraint(message, "permissions", "value must contain at least 1 item(s)")
    if not message.principals:
        raise constraint(message, "principals", "value must contain at least 1 item(s)")
    with at("permissions"):
        permissions = p.AnyOf(tuple(_permissions(message.permissions)))
    with at("principals"):
        principals = p.AnyOf(tuple(_principals(message.principals)))
    if not message.HasField("condition"):
        return p.AllOf((permissions, principals))
    with at("condition"):
        return p.AllOf((permissions, principals, compile_expression(message.condition)))


def _permissions(messages: Iterable[config.Permission]) -> Iterable[p.Condition]:
    for index, message in enumerate(messages):
        with at(f"[{index}]"):
            yield _permission(message)


def _permission(message: config.Permission) -> p.Condition:
    kind = message.WhichOneof("rule")
    match kind:
        case "any":
            _any(message)
            return p.Always()
        case "and_rules" | "or_rules":
            rules = message.and_rules if kind == "and_rules" else message.or_rules
            if not rules.rules:
                raise constraint(rules, "rules", "value must contain at least 1 item(s)")
            with at(kind, "rules"):
                inner = tuple(_permissions(rules.rules))
            return p.AllOf(inner) if kind == "and_rules" else p.AnyOf(inner)
        case "not_rule":
            with at("not_rule"):
                return p.Not(_permission(message.not_rule))
        case "destination_ip":
            with at("destination_ip"):
                return p.DestinationIp(network(message.destination_ip))
        case "destination_port":
            if message.destination_port > 65535:
                raise constraint(message, "destination_port", "value must be less than or equal to 65535")
            return p.DestinationPort(message.destination_port, message.destination_port + 1)
        case "destination_port_range":
            with at("destination_port_range"):
                return _port_range(message.destination_port_range)
        case "requested_server_name":
            with at("requested_server_name"):
                return p.ServerName(string_match(message.requested_server_name))
        case "metadata":
            with at("metadata"):
                return _metadata(message.metadata)
        case "header" | "url_path":
            raise _needs_http(kind)
        case None:
            raise constraint(message, "rule", "value is required")
        case _:
            raise Unsupported("this kind of permission is not supported", kind)


def _port_range(message: type_pb2.Int32Range) -> p.Condition:
    """Compile a range of ports. An empty range is refused, because a rule about it never matches. A policy that
    denies would then deny no connection.
    """
    for field, value, most in (("start", message.start, 65535), ("end", message.end, 65536)):
        if not 0 <= value <= most:
            raise ConfigError(f"range {field} {value} is out of bounds")
    if message.start >= message.end:
        raise ConfigError(f"range start {message.start} cannot be greater or equal than range end {message.end}")
    return p.DestinationPort(message.start, message.end)


def _principals(messages: Iterable[config.Principal]) -> Iterable[p.Condition]:
    for index, message in enumerate(messages):
        with at(f"[{index}]"):
            yield _principal(message)


def _principal(message: config.Principal) -> p.Condition:
    kind = message.WhichOneof("identifier")
    match kind:
        case "any":
            _any(message)
            return p.Always()
        case "and_ids" | "or_ids":
            ids = message.and_ids if kind == "and_ids" else message.or_ids
            if not ids.ids:
                raise constraint(ids, "ids", "value must contain at least 1 item(s)")
            with at(kind, "ids"):
                inner = tuple(_principals(ids.ids))
            return p.AllOf(inner) if kind == "and_ids" else p.AnyOf(inner)
        case "not_id":
            with at("not_id"):
                return p.Not(_principal(message.not_id))
        case "authenticated":
            with at("authenticated"):
                if not message.authenticated.HasField("principal_name"):
                    return p.Authenticated()
                with at("principal_name"):
                    return p.Authenticated(string_match(message.authenticated.principal_name))
        case "source_ip" | "direct_remote_ip" | "remote_ip":
            with at(kind):
                return p.SourceIp(network(getattr(message, kind)), kind == "direct_remote_ip")
        case "metadata":
            with at("metadata"):
                return _metadata(message.metadata)
        case "header" | "url_path":
            raise _needs_http(kind)
        case None:
            raise constraint(message, "identifier", "value is required")
        case _:
            raise Unsupported("this kind of principal is not supported", kind)


def _any(message: config.Permission | config.Principal) -> None:
    if not message.any:
        raise constraint(message, "any", "value must equal true")


def _needs_http(kind: str) -> ConfigError:
    """Return the error for a rule about HTTP requests, which this layer does not see.

    Envoy refuses rules about headers, and treats a rule about a path as a condition that never matches. Inside a
    ``not``, that condition would match every connection, which cannot be intended. So both are refused here.
    """
    return ConfigError(f"Found {kind} rule, not supported by RBAC network filter", kind)


def _metadata(message: matcher_pb2.MetadataMatcher) -> p.Condition:
    required(message, "filter")
    if not message.path:
        raise constraint(message, "path", "value must contain at least 1 item(s)")
    if message.value.WhichOneof("match_pattern") != "string_match":
        raise Unsupported("metadata is matched by string only", "value")
    with at("value", "string_match"):
        match = string_match(message.value.string_match)
    found = p.DynamicMetadata(message.filter, tuple(segment.key for segment in message.path), match)
    return p.Not(found) if message.invert else found
