"""What of an API server's objects network policy needs: the kinds, and of each pod a part. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from ztunnel.kube import kinds
from ztunnel.kube.kinds import Selection
from ztunnel.kube.objects import Object

_ANNOTATION: Final = "ambient.istio.io/redirection"


def kept_pod(pod: Object) -> Object:
    """Return the part of a pod that policies are about; the rest would take most of the memory."""
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    annotations: Mapping[str, Any] = metadata.get("annotations") or {}
    kept = {key: metadata[key] for key in ("name", "namespace", "uid", "labels") if key in metadata}
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
    """Return the part of a node that rules about nodes need: its labels and addresses."""
    metadata, status = (node.get(part) or {} for part in ("metadata", "status"))
    return {
        "apiVersion": node.get("apiVersion"),
        "kind": node.get("kind"),
        "metadata": {key: metadata[key] for key in ("name", "labels") if key in metadata},
        "status": {"addresses": status.get("addresses")},
    }


#: The kinds that ``ztunnel netpol run`` follows; deploy/kustomize/netpol has their role.
SELECTIONS: Final = (
    Selection(kinds.NAMESPACE),
    Selection(kinds.POD, keep=kept_pod),
    Selection(kinds.NETWORK_POLICY),
    Selection(kinds.ADMIN_NETWORK_POLICY, optional=True),
    Selection(kinds.BASELINE_ADMIN_NETWORK_POLICY, optional=True),
    Selection(kinds.CLUSTER_NETWORK_POLICY, optional=True),
)
#: Followed with ``--node-peers`` only. Each kubelet writes its whole Node every five minutes if nothing has
#: happened, and every node that follows them is sent each: of 5,000 nodes that is 17 a second.
NODES: Final = Selection(kinds.NODE, keep=kept_node)
