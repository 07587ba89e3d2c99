"""Reads the mesh from the ``config_dump`` of this proxy or of the Rust ztunnel, for queries without a running
proxy.

A dump has the form of a local file (:mod:`xds.dialects.istio.local_file`) with three exceptions. Unknown keys come
from newer versions and are ignored. A workload only names its services; the services' entries have the ports. An
unreadable entry is omitted and reported by name, because the other entries are still useful. A policy is never
omitted: its unreadable parts get the strictest meaning, like on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from xds.dialects.istio.local_file import read_policy, read_refused, read_service, read_workload
from xds.errors import ConfigError
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.mesh import Mesh
from xds.model.policy import Always, Never
from xds.model.service import Service
from xds.model.workload import Health, ServiceKey, Workload, WorkloadUid

Read = TypeVar("Read")

_OF_WORKLOAD: Final = (
    *("uid", "name", "namespace", "serviceAccount", "trustDomain", "workloadIps", "hostname", "protocol", "node"),
    *("networkMode", "network", "clusterId", "workloadName", "canonicalName", "canonicalRevision", "nativeTunnel"),
    *(
        "applicationTunnel",
        "locality",
        "status",
        "capacity",
        "authorizationPolicies",
        "waypoint",
        "networkGateway",
    ),
)
_OF_SERVICE: Final = (
    *("name", "namespace", "hostname", "vips", "cidrVips", "ports", "subjectAltNames", "waypoint"),
    *("weightedWaypoints", "loadBalancer", "ipFamilies", "canonical", "visibility", "endpoints"),
)
_OF_REFUSED: Final = ("name", "reason", "vips", "cidrVips")
_OF_POLICY: Final = ("name", "namespace", "scope", "action", "dryRun", "rules")


@dataclass(frozen=True, slots=True)
class DumpedMesh:
    """The mesh as read from a dump.

    Attributes:
        unread: the entries that could not be read, one line each.
    """

    mesh: Mesh
    unread: tuple[str, ...]


def read_dump(dump: Mapping[str, Any]) -> DumpedMesh:
    """Return the mesh of a dump.

    Args:
        dump: the parsed dump. Where newer dumps have lists, older ones have mappings, whose values are then used.

    Raises:
        ConfigError: a list of the dump has another type.
    """
    unread: list[str] = []
    workloads: dict[WorkloadUid, Workload] = {}
    named: dict[WorkloadUid, list[str]] = {}
    for entry in entries(dump, "workloads"):
        workload = _one("workload", entry, _OF_WORKLOAD, read_workload, unread)
        if workload is not None:
            workloads[workload.uid] = workload
            listed = entry.get("services") or []
            named[workload.uid] = [each for each in listed if isinstance(each, str)]
    services: dict[ServiceKey, Service] = {}
    for entry in entries(dump, "services"):
        read = _one("service", entry, _OF_SERVICE, read_service, unread)
        if read is None:
            continue
        service, endpoints = read
        services[service.key] = service
        for uid, (ports, _) in endpoints.items():
            workload = workloads.get(WorkloadUid(uid))
            if workload is None:
                unread.append(f"service {service.key}: endpoint {uid} is no workload of the dump")
            else:
                joined = {**workload.services, service.key: ports}
                workloads[workload.uid] = replace(workload, services=joined)
    for uid, keys in named.items():
        workload = workloads[uid]
        if workload.status is Health.UNHEALTHY:
            # A dump lists only the endpoints that serve. The ports of the other endpoints are missing, but not
            # needed.
            missing = {key: services[key].ports for key in map(ServiceKey, keys) if key in services}
            workloads[uid] = replace(workload, services={**missing, **workload.services})
    mesh = Mesh()
    policies = [_policy(entry, unread) for entry in entries(dump, "policies")]
    refused = [
        _one("refused resource", each, _OF_REFUSED, read_refused, unread)
        for each in entries(dump, "refusedResources")
    ]
    mesh.apply([*workloads.values(), *services.values(), *policies, *filter(None, refused)])
    return DumpedMesh(mesh, tuple(unread))


def _policy(entry: Mapping[str, Any], unread: list[str]) -> AuthorizationPolicy:
    faults = tuple(str(each) for each in entry.get("faults") or ())
    if not faults:
        found: list[str] = []
        policy = _one("policy", entry, _OF_POLICY, read_policy, found)
        if policy is not None:
            return policy
        faults = (found[0].partition(": ")[2],)
        unread.append(f"{found[0]}; taken at its strictest")
    try:
        action, scope = Action(str(entry.get("action"))), PolicyScope(str(entry.get("scope")))
    except ValueError:
        action, scope = Action.DENY, PolicyScope.GLOBAL  # as from the wire
    # Unreadable parts get the strictest meaning: the dump does not show which rules are missing, so a more lenient
    # reading would be unsafe.
    return AuthorizationPolicy(
        name=str(entry.get("name")),
        namespace=str(entry.get("namespace")),
        scope=scope,
        action=action,
        dry_run=entry.get("dryRun") is True,
        condition=Always() if action is Action.DENY else Never(),
        faults=faults,
    )


def entries(dump: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a list in a dump, or the values if there is a mapping instead.

    Raises:
        ConfigError: it is neither.
    """
    found = dump.get(key) or []
    listed = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ConfigError(f"{key}: must be a list of mappings")
    yield from listed


def _one(
    kind: str,
    entry: Mapping[str, Any],
    keys: tuple[str, ...],
    read: Callable[[object], Read],
    unread: list[str],
) -> Read | None:
    """Read the known keys of an entry. If the entry is unreadable, add a line to ``unread`` and return
    ``None``.
    """
    try:
        return read({key: entry[key] for key in keys if entry.get(key) is not None})
    except ConfigError as error:
        name = entry.get("uid") or f"{entry.get('namespace')}/{entry.get('hostname') or entry.get('name')}"
        unread.append(f"{kind} {name}: {error.reason}")
        return None
