"""Finds out for a stopping agent whether a successor follows (an upgrade) or the mesh on this node ends.

A kubelet sends the same SIGTERM for both. The agent's own DaemonSet distinguishes them: if it exists, is not being
deleted and still selects this node, a successor starts. Then pods stay as they are, and new pods wait for the
successor. Otherwise pods must leave the mesh now, or they would stay redirected to a proxy that never starts.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from ztunnel.kube.client import Client
from ztunnel.kube.errors import ApiRefused, KubeError
from ztunnel.kube.kinds import DAEMON_SET, NODE
from ztunnel.kube.objects import Object

log = logging.getLogger(__name__)

#: The agent's account, or its DaemonSet, was deleted: an uninstallation deletes both, in any order.
_GONE: Final = (401, 404)


async def is_last(client: Client, namespace: str, name: str, node: str) -> bool:
    """Return whether this is the last agent of the node, without a successor. False if that cannot be known. Never
    raises.

    Args:
        client: its role needs ``get`` of the DaemonSet, and of nodes if the DaemonSet selects some.
        namespace: the namespace of the agent's own DaemonSet.
        name: the DaemonSet's name.
        node: the name of this node.
    """
    try:
        daemon_set = await client.get(DAEMON_SET, namespace, name)
        if leaves := _leaves(daemon_set):
            log.info("last agent of this node: %s", leaves)
            return True
        wanted = _node_selector(daemon_set)
        if wanted:
            labels = _mapping(_mapping(await client.get(NODE, "", node), "metadata"), "labels")
            missing = [f"{key}={value}" for key, value in wanted.items() if labels.get(key) != value]
            if missing:
                log.info("last agent of this node: it lacks the label %s", ", ".join(missing))
                return True
    except ApiRefused as error:
        if error.status in _GONE:
            log.info("last agent of this node: %s", error)
            return True
        log.warning("pods stay in the mesh, because a successor could start: %s", error)
    except KubeError as error:
        log.warning("pods stay in the mesh, because a successor could start: %s", error)
    return False


def _leaves(daemon_set: Object) -> str:
    if _mapping(daemon_set, "metadata").get("deletionTimestamp"):
        return "the DaemonSet is being deleted"
    return ""


def _node_selector(daemon_set: Object) -> Mapping[str, Any]:
    template = _mapping(_mapping(daemon_set, "spec"), "template")
    return _mapping(_mapping(template, "spec"), "nodeSelector")


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = value.get(name)
    return inner if isinstance(inner, Mapping) else {}
