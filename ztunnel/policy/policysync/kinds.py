"""The kinds of API objects that policies need, and the part of each object to keep. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from ztunnel.kube import kinds
from ztunnel.kube.kinds import Kind, Selection
from ztunnel.kube.objects import Object

_POD_METADATA: Final = ("name", "namespace", "uid", "labels", "creationTimestamp", "deletionTimestamp")
_ANNOTATION: Final = "ambient.istio.io/redirection"


def kept_pod(pod: Object) -> Object:
    """Return only the part of a pod that policies use. The rest would take most of the memory."""
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    annotations: Mapping[str, Any] = metadata.get("annotations") or {}
    kept = {key: metadata[key] for key in _POD_METADATA if key in metadata}
    if _ANNOTATION in annotations:
        kept["annotations"] = {_ANNOTATION: annotations[_ANNOTATION]}
    of_spec = {key: spec[key] for key in ("nodeName", "hostNetwork", "serviceAccountName") if key in spec}
    for key in ("containers", "initContainers"):
        ports = [{"ports": container["ports"]} for container in spec.get(key) or () if container.get("ports")]
        if ports:
            of_spec[key] = ports
    of_status = {key: status[key] for key in ("phase", "podIP", "podIPs") if key in status}
    return {
        "apiVersion": pod.get("apiVersion"),
        "kind": pod.get("kind"),
        "metadata": kept,
        "spec": of_spec,
        "status": of_status,
    }


def kept_node(node: Object) -> Object:
    """Return only the part of a node that rules about nodes need: its labels and addresses."""
    metadata, status = (node.get(part) or {} for part in ("metadata", "status"))
    return {
        "apiVersion": node.get("apiVersion"),
        "kind": node.get("kind"),
        "metadata": {key: metadata[key] for key in ("name", "labels") if key in metadata},
        "status": {"addresses": status.get("addresses")},
    }


def _kept_account(account: Object) -> Object:
    """Return a service account without its secrets' names."""
    return {"apiVersion": account.get("apiVersion"), "kind": account.get("kind"), "metadata": _named(account)}


def _kept_service(service: Object) -> Object:
    """Return only the part of a Service that rules use."""
    spec = service.get("spec") or {}
    return {
        "apiVersion": service.get("apiVersion"),
        "kind": service.get("kind"),
        "metadata": _named(service),
        "spec": {key: spec[key] for key in ("selector", "ports") if key in spec},
    }


def _named(item: Object) -> dict[str, Any]:
    metadata = item.get("metadata") or {}
    return {key: metadata[key] for key in ("name", "namespace", "labels") if key in metadata}


#: The kinds that ``ztunnel netpol run`` follows; deploy/kustomize/netpol has their role.
SELECTIONS: Final = (
    Selection(kinds.NAMESPACE),
    Selection(kinds.POD, keep=kept_pod),
    Selection(kinds.NETWORK_POLICY),
    Selection(kinds.ADMIN_NETWORK_POLICY, optional=True),
    Selection(kinds.BASELINE_ADMIN_NETWORK_POLICY, optional=True),
    Selection(kinds.CLUSTER_NETWORK_POLICY, optional=True),
)
#: Nodes are followed with ``--node-peers`` only. Each kubelet writes its whole Node every five minutes without a
#: change, and every follower receives each write: with 5,000 nodes, that is 17 a second.
NODES: Final = Selection(kinds.NODE, keep=kept_node)

_CALICO: Final = "projectcalico.org"


def _calico(
    name: str, plural: str, *, namespaced: bool = False, group: str = "", dispensable: bool = False
) -> Selection:
    kind = Kind(name, f"{_CALICO}/v3", plural, namespaced, group)
    return Selection(kind, optional=True, dispensable=dispensable)


#: The kinds that ``ztunnel policy serve --kube`` follows; deploy/kustomize/policy has their role. Calico's kinds
#: exist if Calico's API server is installed, or if its resources are stored as v3.
SERVED: Final = (
    *SELECTIONS,
    Selection(kinds.SERVICE_ACCOUNT, keep=_kept_account),
    Selection(kinds.SERVICE, keep=_kept_service),
    _calico("Tier", "tiers"),
    _calico("GlobalNetworkPolicy", "globalnetworkpolicies"),
    _calico("NetworkPolicy", "networkpolicies", namespaced=True, group=_CALICO),
    _calico("StagedGlobalNetworkPolicy", "stagedglobalnetworkpolicies"),
    _calico("StagedNetworkPolicy", "stagednetworkpolicies", namespaced=True),
    _calico("StagedKubernetesNetworkPolicy", "stagedkubernetesnetworkpolicies", namespaced=True),
    _calico("Profile", "profiles"),
    _calico("NetworkSet", "networksets", namespaced=True),
    _calico("GlobalNetworkSet", "globalnetworksets"),
    # The roles of earlier releases do not permit reading this kind.
    _calico("HostEndpoint", "hostendpoints", dispensable=True),
)
