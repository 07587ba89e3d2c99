"""Converts a mesh's authorization policies to RBAC filters, with the structure of the control plane of 2022."""

from collections.abc import Callable, Iterable
from typing import Any

from xds.model.address import IpNetwork
from xds.model.identity import SpiffeId
from ztunnel.control_plane.mesh import Mesh, Pod, Policy, PolicyRule

_TYPE = "type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC"
_NEVER = {"not_id": {"any": True}}
_ACTIONS = (("AUDIT", "LOG"), ("DENY", "DENY"), ("ALLOW", "ALLOW"))

Json = dict[str, Any]


def rbac_filters(mesh: Mesh, pod: Pod, waypoint: SpiffeId | None) -> list[Json]:
    """Return the RBAC filters in front of a pod: for AUDIT, DENY and ALLOW, each only if there are such policies.

    Args:
        mesh: the mesh with the policies.
        pod: the destination.
        waypoint: identity of the pod's waypoint, which enforces the policies of its workloads. These admit only
            the waypoint, and no DENY applies to the waypoint.
    """
    selected = [policy for policy in mesh.policies if policy.selects(pod)]
    filters = []
    for action, name in _ACTIONS:
        enforced = [policy for policy in selected if policy.action == action and not policy.dry_run]
        shadow = [policy for policy in selected if policy.action == action and policy.dry_run]
        config: Json = {"@type": _TYPE, "stat_prefix": "tcp."}
        if waypoint is not None and action == "ALLOW":
            only = {"permissions": [{"any": True}], "principals": [_principal(_bare(waypoint))]}
            config["rules"] = {"action": name, "policies": {"istio-waypoint": only}}
        elif enforced:
            config["rules"] = {"action": name, "policies": _policies(enforced, waypoint)}
        if shadow:
            config["shadow_rules"] = {"action": name, "policies": _policies(shadow, waypoint)}
            config["shadow_rules_stat_prefix"] = f"istio_dry_run_{action.lower()}_"
        if "rules" in config or "shadow_rules" in config:
            filters.append({"name": "envoy.filters.network.rbac", "typed_config": config})
    return filters


def _bare(identity: SpiffeId) -> str:
    return str(identity).removeprefix("spiffe://")


def _policies(policies: Iterable[Policy], waypoint: SpiffeId | None) -> Json:
    entries: Json = {}
    for policy in policies:
        if not policy.rules:
            key = f"ns[{policy.namespace}]-policy[{policy.name}]-rule[0]"
            entries[key] = {"permissions": [{"any": True}], "principals": [_NEVER]}
        for index, rule in enumerate(policy.rules):
            key = f"ns[{policy.namespace}]-policy[{policy.name}]-rule[{index}]"
            entries[key] = _rule(rule, waypoint if policy.action == "DENY" else None)
    return entries


def _rule(rule: PolicyRule, waypoint: SpiffeId | None) -> Json:
    permissions: list[Json] = []
    _add(permissions, "rules", rule.ports, rule.not_ports, lambda port: {"destination_port": port})
    principals: list[Json] = []
    _add(principals, "ids", rule.principals, rule.not_principals, _principal)
    _add(principals, "ids", rule.namespaces, rule.not_namespaces, _namespace)
    _add(principals, "ids", rule.ip_blocks, rule.not_ip_blocks, _ip_block)
    if waypoint is not None:
        principals.append({"not_id": _principal(_bare(waypoint))})
    return {
        "permissions": [{"and_rules": {"rules": permissions or [{"any": True}]}}],
        "principals": [{"and_ids": {"ids": principals or [{"any": True}]}}],
    }


def _add(
    into: list[Json], plural: str, wanted: Iterable[Any], excluded: Iterable[Any], make: Callable[[Any], Json]
) -> None:
    either, negation = (f"or_{plural}", f"not_{plural.removesuffix('s')}")
    hits = [make(value) for value in wanted]
    misses = [make(value) for value in excluded]
    if hits:
        into.append({either: {plural: hits}})
    if misses:
        into.append({negation: {either: {plural: misses}}})


def _principal(value: str) -> Json:
    return {"authenticated": {"principal_name": _pattern(value)}}


def _pattern(value: str) -> Json:
    if value == "*":
        return {"safe_regex": {"regex": ".+"}}
    if value.startswith("*"):
        return {"suffix": value[1:]}
    if value.endswith("*"):
        return {"prefix": f"spiffe://{value[:-1]}"}
    return {"exact": f"spiffe://{value}"}


def _namespace(value: str) -> Json:
    middle = value.replace(".", "\\.").replace("*", ".*")
    return {"authenticated": {"principal_name": {"safe_regex": {"regex": f".*/ns/{middle}/.*"}}}}


def _ip_block(network: IpNetwork) -> Json:
    return {"direct_remote_ip": {"address_prefix": str(network.network_address), "prefix_len": network.prefixlen}}
