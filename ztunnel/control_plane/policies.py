"""Converts the policies and pods of a mesh file to the resources that PolicySync's objects are compiled from.
Pure."""

from dataclasses import replace
from ipaddress import ip_address

from ztunnel.control_plane.mesh import Mesh
from ztunnel.policy.calico.resources import Pod, Resources


def policy_resources(mesh: Mesh) -> Resources:
    """Return the resources of all nodes, as input for the compilation of policies."""
    pods = {
        (pod.namespace, pod.name): Pod(
            namespace=pod.namespace,
            name=pod.name,
            labels=pod.labels,
            account=pod.identity.service_account,
            node=pod.node,
            addresses=tuple(map(ip_address, pod.addresses)),
            captured=pod.mesh,
        )
        for pod in mesh.pods.values()
    }
    return replace(mesh.calico, pods=pods)
