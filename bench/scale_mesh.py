"""Makes a mesh of any size in the Envoy dialect for one node, and changes it one resource at a time.

Every message is a copy of a message of :mod:`ztunnel.control_plane.generate` for a mesh of one service, with names
and addresses replaced: the generator goes through JSON, which takes minutes for 200,000 endpoints.

One pod lives on the node, every other pod elsewhere; all have one service account. The dialect has a cluster per
service and source identity, and per source address a tree of every service's and every pod's address.
"""

import ipaddress
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment, LbEndpoint
from xds.proto.envoy.config.listener.v3.listener_pb2 import FilterChain, Listener
from xds.proto.envoy.extensions.filters.network.tcp_proxy.v3.tcp_proxy_pb2 import TcpProxy
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.well_known import StringValue
from xds.proto.xds.type.matcher.v3.matcher_pb2 import Matcher
from xds.protocol.resource import Resource
from xds.protocol.snapshot import Snapshot
from xds.protocol.types import CDS, EDS, LDS
from ztunnel.control_plane.generate import NodeConfig
from ztunnel.control_plane.mesh import parse_mesh
from ztunnel.proxy.identity import authority as ca

NODE = "here"
CLIENT = "10.255.0.2"
PORT = 9080
_VIPS, _PODS = int(ipaddress.IPv4Address("11.0.0.0")), int(ipaddress.IPv4Address("12.0.0.0"))
_FIRST = "service-0"


def service_address(index: int) -> str:
    """Return the address of a service."""
    return str(ipaddress.IPv4Address(_VIPS + index))


class ScaleMesh:
    """The resources that one node receives.

    Args:
        services: number of services.
        endpoints: number of endpoints per service.
        folder: for the certificate authority.
    """

    def __init__(self, services: int, endpoints: int, folder: Path) -> None:
        self._endpoints = endpoints
        mesh = parse_mesh(
            json.dumps(
                {
                    "nodes": {NODE: {}, "there": {}},
                    "pods": {
                        "client": {"node": NODE, "addresses": [CLIENT]},
                        "server": {"node": "there", "addresses": [str(ipaddress.IPv4Address(_PODS))]},
                    },
                    "services": {
                        _FIRST: {"addresses": [service_address(0)], "ports": {"http": PORT}, "pods": ["server"]}
                    },
                }
            )
        )
        config = NodeConfig(mesh, NODE, access_log="/dev/null")
        others: list[Message] = list(_secrets(config, folder))
        for message in config.messages():
            match message:
                case Cluster() if _FIRST in message.name:
                    self._cluster = message
                case ClusterLoadAssignment():
                    self._assignment = message
                case Listener() if message.name == "ztunnel_outbound":
                    self._outbound = message
                case _:
                    others.append(message)
        chains = {chain.name: chain for chain in self._outbound.filter_chains}
        self._chain = FilterChain()
        self._chain.CopyFrom(chains[self._cluster.name])
        self._proxy = TcpProxy()
        self._chain.filters[0].typed_config.Unpack(self._proxy)
        entries = self._entries(self._outbound)
        self._entry = Matcher.OnMatch()
        self._entry.CopyFrom(entries[service_address(0)])
        self._pod_entry = Matcher.OnMatch()
        self._pod_entry.CopyFrom(entries[str(ipaddress.IPv4Address(_PODS))])
        for index in range(services):
            self._add_to(self._outbound, index)
        numbers = range(services)
        self.resources = _by_type(
            [
                *others,
                *(self.cluster(index) for index in numbers),
                *(self.assignment(index) for index in numbers),
                self._outbound,
            ]
        )
        self.services = services

    def snapshot(self) -> Snapshot:
        """Return the node's current resources."""
        return Snapshot(dict(self.resources))

    # Methods that change one resource each

    def change_endpoint(self, step: int) -> str:
        """Change the address of the last endpoint of a service; return the type that changed."""
        assignment = self.assignment(step % self.services)
        self._set_endpoint(assignment.endpoints[0].lb_endpoints[-1], 0xF00000 + step)
        return self._put(assignment)

    def add_cluster(self, step: int) -> str:
        """Add a cluster with its endpoints; return the type that changed."""
        index = self.services + step
        self._put(self.assignment(index))
        return self._put(self.cluster(index))

    def add_to_listener(self, step: int) -> str:
        """Add a service and its pods to the outbound listener; return the type that changed."""
        self._add_to(self._outbound, self.services + step)
        return self._put(self._outbound)

    def _put(self, message: Message) -> str:
        (type_url, of_type) = next(iter(_by_type([message]).items()))
        self.resources[type_url] = {**self.resources[type_url], **of_type}
        return type_url

    # Resources

    def cluster_name(self, index: int) -> str:
        """Return the name of a service's cluster and of its chain."""
        return self._cluster.name.replace(_FIRST, f"service-{index}")

    def cluster(self, index: int) -> Cluster:
        """Return the cluster of a service."""
        message = Cluster()
        message.CopyFrom(self._cluster)
        message.name = self.cluster_name(index)
        return message

    def assignment(self, index: int) -> ClusterLoadAssignment:
        """Return the endpoints of a service."""
        message = ClusterLoadAssignment(cluster_name=self.cluster_name(index))
        group = message.endpoints.add()
        template = self._assignment.endpoints[0].lb_endpoints[0]
        for number in range(self._endpoints):
            endpoint = group.lb_endpoints.add()
            endpoint.CopyFrom(template)
            self._set_endpoint(endpoint, index * self._endpoints + number)
        return message

    @staticmethod
    def _set_endpoint(endpoint: LbEndpoint, pod: int) -> None:
        address = ipaddress.IPv4Address(_PODS + pod)
        endpoint.endpoint.address.envoy_internal_address.endpoint_id = f"{address}:{PORT}"
        tunnel = endpoint.metadata.filter_metadata["tunnel"].fields
        tunnel["destination"].string_value = f"{address}:{PORT}"
        tunnel["address"].string_value = f"{address}:15008"

    def _add_to(self, listener: Listener, index: int) -> None:
        entries = self._entries(listener)
        name = self.cluster_name(index)
        if index:
            self._proxy.stat_prefix = self._proxy.cluster = name
            chain = listener.filter_chains.add()
            chain.CopyFrom(self._chain)
            chain.name = name
            chain.filters[0].typed_config.Pack(self._proxy, deterministic=True)
            entry = entries[service_address(index)]
            entry.CopyFrom(self._entry)
            action = entry.matcher.matcher_tree.exact_match_map.map[str(PORT)].action
            action.name = name
            action.typed_config.Pack(StringValue(value=name))
        for number in range(self._endpoints):
            address = ipaddress.IPv4Address(_PODS + index * self._endpoints + number)
            entries[str(address)].CopyFrom(self._pod_entry)

    @staticmethod
    def _entries(listener: Listener) -> Any:
        """Return the destination level of the tree for the one source."""
        by_source = listener.filter_chain_matcher.on_no_match.matcher.matcher_tree.exact_match_map.map
        return by_source[CLIENT].matcher.matcher_tree.exact_match_map.map


def _by_type(messages: list[Message]) -> dict[str, Mapping[str, Resource]]:
    return dict(Snapshot.of(messages).resources)


def _secrets(config: NodeConfig, folder: Path) -> list[Message]:
    authority = ca.CertificateAuthority.open(folder / "ca", config.mesh.trust_domain, ca.now())
    secrets: list[Message] = []
    for identity in config.identities:
        certificate = authority.issue(identity, ca.now(), timedelta(days=1))
        leaf = Secret(name=str(identity))
        leaf.tls_certificate.certificate_chain.inline_bytes = certificate.chain_pem
        leaf.tls_certificate.private_key.inline_bytes = certificate.key_pem
        secrets.append(leaf)
    root = Secret(name="ROOTCA")
    root.validation_context.trusted_ca.inline_bytes = authority.root_pem
    return [*secrets, root]


def packed_bytes(mesh: ScaleMesh) -> dict[str, int]:
    """Return the bytes per type of one complete response."""
    kinds = {CDS: "clusters", EDS: "endpoints", LDS: "listeners"}
    return {
        name: sum(len(resource.body.value) for resource in mesh.resources[url].values())
        for url, name in kinds.items()
    }
