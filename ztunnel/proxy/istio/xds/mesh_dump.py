"""Creates the mesh's part of ``/config_dump``: workloads, services, policies, staged endpoints, the local file.

Format and names match the input format of ``istioctl ztunnel-config``. Lists are generators, so that the dump of a
big mesh is written while it is created. The caller sorts the keys.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xds.dialects.istio.local_file import LocalMesh
from xds.model.authorization import AuthorizationPolicy
from xds.model.mesh import Changes, Mesh
from xds.model.mesh_index import Endpoint
from xds.model.refused import RefusedResource
from xds.model.service import CidrAddress, Service
from xds.model.workload import GatewayAddress, Locality, Workload, WorkloadUid
from ztunnel.policy.effect import without_effect

Json = Any

_NOWHERE = Locality()


def workloads(mesh: Mesh) -> Iterator[Json]:
    """Iterate over all workloads, by uid."""
    for workload in sorted(mesh.workloads(), key=lambda workload: workload.uid):
        yield shown_workload(workload, services=sorted(workload.services))


def services(mesh: Mesh) -> Iterator[Json]:
    """Iterate over all services, by host name, with their usable endpoints."""
    for service in sorted(mesh.services(), key=lambda service: (service.hostname, service.namespace)):
        yield shown_service(service, mesh.endpoints(service.key))


def policies(mesh: Mesh, decisions: Mapping[str, Json]) -> Iterator[Json]:
    """Iterate over all policies in the order of their keys, each with its counts from ``decisions``, if any."""
    for policy in sorted(mesh.policies(), key=lambda policy: policy.key):
        made = decisions.get(policy.key)
        yield shown_policy(policy) | ({"decisions": made} if made is not None else {})


def refused_resources(mesh: Mesh) -> list[Json]:
    """Return the refused resources without a readable version, by name. Connections to their addresses fail."""
    return [shown_refused(each) for each in sorted(mesh.refused_resources(), key=lambda each: each.name)]


class Ineffective:
    """The keys of policies that have no effect (:mod:`ztunnel.policy.effect`), updated when the mesh changes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._keys: set[str] = set()
        mesh.watch(self._changed)

    def __len__(self) -> int:
        return len(self._keys)

    def _changed(self, changes: Changes) -> None:
        for key in changes.policies:
            policy = self._mesh.policy(key)
            if policy is not None and without_effect(shown_policy(policy)):
                self._keys.add(key)
            else:
                self._keys.discard(key)


def staged_services(mesh: Mesh) -> Json:
    """Return, by service, the endpoints whose service has not been received yet."""
    return {key: _endpoints(endpoints) for key, endpoints in mesh.staged().items()}


def static_config(local: LocalMesh) -> Json:
    """Return the mesh that the local file describes."""
    endpoints: dict[str, dict[WorkloadUid, Endpoint]] = {}
    for workload in local.workloads:
        for key, ports in workload.services.items():
            endpoint = Endpoint(workload.uid, ports, workload.status)
            endpoints.setdefault(key, {})[workload.uid] = endpoint
    return {
        "workloads": [
            shown_workload(workload, services={key: _ports(ports) for key, ports in workload.services.items()})
            for workload in local.workloads
        ],
        "policies": [shown_policy(policy) for policy in local.policies],
        "services": [shown_service(service, endpoints.get(service.key, {})) for service in local.services],
    }


def shown_workload(workload: Workload, services: Json) -> Json:
    """Return one workload, without empty entries.

    Args:
        workload: the workload.
        services: the workload's services, in the format of the caller's page.
    """
    tunnel, locality = workload.application_tunnel, workload.locality
    sometimes = {
        "waypoint": _gateway(workload.waypoint),
        "networkGateway": _gateway(workload.network_gateway),
        "uid": workload.uid,
        "trustDomain": workload.trust_domain,
        "serviceAccount": workload.service_account,
        "network": workload.network,
        "workloadName": workload.workload_name,
        "workloadType": workload.workload_type,
        "canonicalName": workload.canonical_name,
        "canonicalRevision": workload.canonical_revision,
        "hostname": workload.hostname,
        "node": workload.node,
        "nativeTunnel": workload.native_tunnel,
        "applicationTunnel": tunnel
        and ({"protocol": tunnel.protocol.value} | ({"port": tunnel.port} if tunnel.port else {})),
        "authorizationPolicies": list(workload.authorization_policies),
        "locality": locality != _NOWHERE
        and {"region": locality.region, "zone": locality.zone, "subzone": locality.subzone},
        "services": services,
    }
    return {
        "workloadIps": list(workload.addresses),
        "protocol": workload.protocol.value,
        "networkMode": workload.network_mode.value,
        "name": workload.name,
        "namespace": workload.namespace,
        "status": workload.status.value,
        "clusterId": workload.cluster_id,
        "capacity": workload.capacity,
    } | {key: value for key, value in sometimes.items() if value}


def shown_service(service: Service, endpoints: Mapping[WorkloadUid, Endpoint]) -> Json:
    """Return one service and its endpoints."""
    balancing = service.load_balancing
    sometimes = {
        "cidrVips": _blocks(service.cidr_vips),
        "waypoint": _gateway(service.waypoint),
        "weightedWaypoints": [
            {"destination": _gateway(weighted.destination), "weight": weighted.weight}
            for weighted in service.weighted_waypoints
        ],
        "loadBalancer": balancing
        and {
            "routingPreferences": _values(balancing.preferences),
            "mode": balancing.mode.value,
            "healthPolicy": balancing.health.value,
        },
        "ipFamilies": service.ip_families and service.ip_families.value,
    }
    return {
        "name": service.name,
        "namespace": service.namespace,
        "hostname": service.hostname,
        "vips": [str(vip) for vip in service.vips],
        "ports": _ports(service.ports),
        "endpoints": _endpoints(endpoints),
        "subjectAltNames": list(service.subject_alt_names),
        "canonical": service.canonical,
        "visibility": service.visibility.value,
    } | {key: value for key, value in sometimes.items() if value}


def shown_policy(policy: AuthorizationPolicy) -> Json:
    """Return one policy. The entry ``faults`` lists its unreadable parts, if there are any."""
    shown = {
        "name": policy.name,
        "namespace": policy.namespace,
        "scope": policy.scope.value,
        "action": policy.action.value,
        "rules": list(policy.rules),
        "dryRun": policy.dry_run,
    }
    return shown | ({"faults": list(policy.faults)} if policy.faults else {})


def shown_refused(resource: RefusedResource) -> Json:
    """Return one refused resource."""
    return {
        "name": resource.name,
        "reason": resource.reason,
        "vips": [str(address) for address in resource.addresses],
        "cidrVips": _blocks(resource.blocks),
    }


def _blocks(blocks: Iterable[CidrAddress]) -> Json:
    return [{"network": cidr.network, "cidr": str(cidr.block)} for cidr in blocks]


def _values(words: Iterable[Any]) -> list[str]:
    return [word.value for word in words]


def _ports(ports: Mapping[int, int]) -> Json:
    return {str(port): target for port, target in ports.items()}


def _endpoints(endpoints: Mapping[WorkloadUid, Endpoint]) -> Json:
    return {
        uid: {"workloadUid": uid, "port": _ports(endpoint.ports), "status": endpoint.status.value}
        for uid, endpoint in endpoints.items()
    }


def _gateway(gateway: GatewayAddress | None) -> Json:
    if gateway is None:
        return None
    return {"destination": str(gateway.destination), "hboneMtlsPort": gateway.hbone_mtls_port}
