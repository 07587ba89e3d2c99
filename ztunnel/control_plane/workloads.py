"""Generates the resources of Istio's node proxies from a mesh: workloads, services, policies. Pure.

Every node gets the same resources. A waypoint of the mesh file becomes a service without addresses, which each
workload behind the waypoint names, as with current istiod. The waypoint enforces the policies of these workloads,
like an Envoy as waypoint. At the workload itself, ALLOW policies allow only the waypoint, and DENY policies do not
apply to connections from the waypoint.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from xds.model.address import IpNetwork
from xds.model.identity import SpiffeId
from xds.proto.istio.security import authorization_pb2 as security
from xds.proto.istio.workload import workload_pb2 as wds
from xds.protocol.snapshot import Named
from ztunnel.control_plane.mesh import Mesh, Pod, Policy, PolicyRule, Service, Waypoint

_HBONE_PORT: Final = 15008
_ACTIONS: Final = {"ALLOW": security.ALLOW, "DENY": security.DENY}


@dataclass(frozen=True)
class WorkloadConfig:
    """Generates the resources of a mesh in Istio's dialect."""

    mesh: Mesh

    def resources(self) -> Iterator[Named]:
        """Return every resource, with istiod's names and aliases, and with the companions that are sent together
        with the resource.
        """
        for pod in self.mesh.pods.values():
            aliases = tuple(f"/{address}" for address in pod.addresses)
            yield Named(name=self.uid(pod), message=wds.Address(workload=self._workload(pod)), aliases=aliases)
        for service in self.mesh.services:
            yield Named(
                name=f"{service.namespace}/{service.hostname}",
                message=wds.Address(service=self._service(service)),
                aliases=tuple(f"/{address}" for address in service.addresses),
                companions=tuple(self.uid(self.mesh.pods[key]) for key in service.pods),
            )
        for waypoint in self.mesh.waypoints:
            yield Named(
                name=f"{waypoint.identity.namespace}/{_waypoint_hostname(waypoint)}",
                message=wds.Address(service=_waypoint_service(waypoint)),
                companions=tuple(self.uid(self.mesh.pods[key]) for key in waypoint.pods),
            )
        for authorization in self._authorizations():
            name = f"{authorization.namespace}/{authorization.name}"
            yield Named(name=name, message=authorization)

    def uid(self, pod: Pod) -> str:
        """Return the uid of a pod's workload."""
        return f"{self.mesh.cluster}//Pod/{pod.namespace}/{pod.name}"

    def uids_on(self, node: str) -> frozenset[str]:
        """Return the workloads of a node, which its proxy gets without requesting them."""
        return frozenset(self.uid(pod) for pod in self.mesh.pods.values() if pod.node == node)

    # Waypoints

    @cached_property
    def _waypoints(self) -> Mapping[SpiffeId, Waypoint]:
        return {waypoint.identity: waypoint for waypoint in self.mesh.waypoints}

    def _waypoint_of(self, pod: Pod) -> Waypoint | None:
        """Return the waypoint of a pod's account. A waypoint's own pods run as that account, too, but have no
        waypoint.
        """
        waypoint = self._waypoints.get(pod.identity)
        return waypoint if waypoint is not None and pod.mesh and pod.key not in waypoint.pods else None

    # Addresses

    @cached_property
    def _ports(self) -> Mapping[str, list[tuple[str, list[tuple[int, int]]]]]:
        """The services that select each pod: a service's name, and its pairs of service port and target port."""
        found: dict[str, list[tuple[str, list[tuple[int, int]]]]] = {}
        for service in self.mesh.services:
            ports = [(port.port, port.target) for port in service.ports]
            for key in service.pods:
                found.setdefault(key, []).append((f"{service.namespace}/{service.hostname}", ports))
        for waypoint in self.mesh.waypoints:
            name = f"{waypoint.identity.namespace}/{_waypoint_hostname(waypoint)}"
            for key in waypoint.pods:
                found.setdefault(key, []).append((name, [(_HBONE_PORT, _HBONE_PORT)]))
        return found

    def _workload(self, pod: Pod) -> wds.Workload:
        workload = wds.Workload(
            uid=self.uid(pod),
            name=pod.name,
            namespace=pod.namespace,
            addresses=[_packed(address) for address in pod.addresses],
            tunnel_protocol=wds.HBONE if pod.mesh else wds.NONE,
            native_tunnel=pod.hbone,
            trust_domain=pod.identity.trust_domain,
            service_account=pod.identity.service_account,
            node=pod.node,
            canonical_name=pod.workload,
            canonical_revision=pod.version,
            workload_type=wds.DEPLOYMENT,
            workload_name=pod.workload,
            cluster_id=self.mesh.cluster,
            status=wds.HEALTHY,
            authorization_policies=self._references[pod.key],
        )
        for name, ports in self._ports.get(pod.key, ()):
            listed = workload.services[name].ports
            for port, target in ports:
                listed.add(service_port=port, target_port=target)
        waypoint = self._waypoint_of(pod)
        if waypoint is not None:
            workload.waypoint.CopyFrom(_reference(waypoint))
        return workload

    def _service(self, service: Service) -> wds.Service:
        message = wds.Service(
            name=service.name,
            namespace=service.namespace,
            hostname=service.hostname,
            addresses=[wds.NetworkAddress(address=_packed(address)) for address in service.addresses],
            ports=[wds.Port(service_port=port.port, target_port=port.target) for port in service.ports],
        )
        behind = (self._waypoint_of(self.mesh.pods[key]) for key in service.pods)
        waypoint = next((found for found in behind if found is not None), None)
        if waypoint is not None:
            message.waypoint.CopyFrom(_reference(waypoint))
        return message

    # Authorization

    @cached_property
    def _references(self) -> Mapping[str, list[str]]:
        """Return the policies that each pod must name, because they do not apply to its whole namespace."""
        references: dict[str, list[str]] = {key: [] for key in self.mesh.pods}
        for policy in self.mesh.policies:
            if policy.action not in _ACTIONS or self._for_namespace(policy):
                continue
            for pod in self.mesh.pods.values():
                if not policy.selects(pod):
                    continue
                waypoint = self._waypoint_of(pod)
                if waypoint is None:
                    references[pod.key].append(f"{policy.namespace}/{policy.name}")
                elif policy.action == "DENY":
                    references[pod.key].append(f"{policy.namespace}/{_behind(policy, waypoint)}")
        for pod in self.mesh.pods.values():
            waypoint = self._waypoint_of(pod)
            if waypoint is not None:
                references[pod.key].append(f"{pod.namespace}/{_only(waypoint)}")
        return references

    def _for_namespace(self, policy: Policy) -> bool:
        """Return whether a policy applies to a whole namespace, and no pod there has a waypoint."""
        if policy.pods or policy.service_account:
            return False
        inside = (pod for pod in self.mesh.pods.values() if pod.namespace == policy.namespace)
        return all(self._waypoint_of(pod) is None for pod in inside)

    def _authorizations(self) -> Iterator[security.Authorization]:
        for policy in self.mesh.policies:
            if policy.action not in _ACTIONS:
                continue  # AUDIT: nothing to decide, and no such action in Istio's resource
            scope = security.NAMESPACE if self._for_namespace(policy) else security.WORKLOAD_SELECTOR
            yield _authorization(policy, policy.name, scope)
            if policy.action == "DENY":
                for waypoint in self._in_front_of(policy):
                    name = _behind(policy, waypoint)
                    yield _authorization(policy, name, security.WORKLOAD_SELECTOR, but_for=waypoint)
        for waypoint in self.mesh.waypoints:
            only = security.Authorization(
                name=_only(waypoint),
                namespace=waypoint.identity.namespace,
                scope=security.WORKLOAD_SELECTOR,
                action=security.ALLOW,
            )
            match = only.rules.add().clauses.add().matches.add()
            match.principals.add(exact=_bare(waypoint.identity))
            yield only

    def _in_front_of(self, policy: Policy) -> Iterable[Waypoint]:
        found = {}
        for pod in self.mesh.pods.values():
            waypoint = self._waypoint_of(pod) if policy.selects(pod) else None
            if waypoint is not None:
                found[waypoint.identity] = waypoint
        return found.values()


def _packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed


def _waypoint_hostname(waypoint: Waypoint) -> str:
    return f"waypoint.{waypoint.identity.service_account}.{waypoint.identity.namespace}.mesh.internal"


def _waypoint_service(waypoint: Waypoint) -> wds.Service:
    return wds.Service(
        name=f"waypoint.{waypoint.identity.service_account}",
        namespace=waypoint.identity.namespace,
        hostname=_waypoint_hostname(waypoint),
        ports=[wds.Port(service_port=_HBONE_PORT, target_port=_HBONE_PORT)],
    )


def _reference(waypoint: Waypoint) -> wds.GatewayAddress:
    hostname = wds.NamespacedHostname(namespace=waypoint.identity.namespace, hostname=_waypoint_hostname(waypoint))
    return wds.GatewayAddress(hostname=hostname, hbone_mtls_port=_HBONE_PORT)


# The mesh file forbids two dots in a row, so these names never collide with policies in the file.


def _behind(policy: Policy, waypoint: Waypoint) -> str:
    return f"{policy.name}..behind-waypoint..{waypoint.identity.service_account}"


def _only(waypoint: Waypoint) -> str:
    return f"istio-waypoint..{waypoint.identity.service_account}"


def _bare(identity: SpiffeId) -> str:
    return str(identity).removeprefix("spiffe://")


def _authorization(
    policy: Policy, name: str, scope: "security.Scope.ValueType", but_for: Waypoint | None = None
) -> security.Authorization:
    message = security.Authorization(
        name=name, namespace=policy.namespace, scope=scope, action=_ACTIONS[policy.action], dry_run=policy.dry_run
    )
    for rule in policy.rules:
        match = _match(rule)
        if but_for is not None:
            match.not_principals.add(exact=_bare(but_for.identity))
        group = message.rules.add()
        if match.ListFields():  # an empty match never matches; a rule without conditions always does
            group.clauses.add().matches.append(match)
    return message


def _match(rule: PolicyRule) -> security.Match:
    return security.Match(
        principals=[_string(value) for value in rule.principals],
        not_principals=[_string(value) for value in rule.not_principals],
        namespaces=[_string(value) for value in rule.namespaces],
        not_namespaces=[_string(value) for value in rule.not_namespaces],
        source_ips=[_block(block) for block in rule.ip_blocks],
        not_source_ips=[_block(block) for block in rule.not_ip_blocks],
        destination_ports=rule.ports,
        not_destination_ports=rule.not_ports,
    )


def _string(value: str) -> security.StringMatch:
    """Like in Istio's policies, ``*`` alone matches any value; at one end it matches any prefix or suffix."""
    if value == "*":
        match = security.StringMatch()
        match.presence.SetInParent()
        return match
    if value.startswith("*"):
        return security.StringMatch(suffix=value[1:])
    if value.endswith("*"):
        return security.StringMatch(prefix=value[:-1])
    return security.StringMatch(exact=value)


def _block(block: IpNetwork) -> security.Address:
    return security.Address(address=block.network_address.packed, length=block.prefixlen)
