"""Answers readiness probes (whether the proxy can carry the node's traffic, as in the Rust ztunnel) and liveness
probes.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.runtime.http import liveness
from ztunnel.runtime.http.page import PLAIN, Page, PageRequest, not_found, printable, text

if TYPE_CHECKING:
    from ztunnel.proxy.envoy.upstream.cluster import LiveCluster

#: The largest number of names in the readiness answer. Kubelet copies the answer into an event, which should be
#: short.
_MOST_NAMES = 10


def page(proxy: InspectedProxy, request: PageRequest) -> Page | Awaitable[Page]:
    """Answer a request to the readiness server."""
    if request.path == liveness.PATH:
        return liveness.page(proxy.poller, request)
    if request.path != "/healthz/ready":
        return not_found(["/healthz/ready", liveness.PATH])
    if request.method not in ("GET", "HEAD"):
        return text("", 405, PLAIN)
    state = proxy.state
    if state == "LIVE":
        if proxy.descriptors.short:
            return text("not ready, pending: descriptors\n", 500, PLAIN)
        return text("ready\n", content_type=PLAIN)
    if state == "DRAINING":
        return text("not ready, draining\n", 500, PLAIN)
    return text(f"not ready, pending: {', '.join(pending(proxy))}\n", 500, PLAIN)


def pending(proxy: InspectedProxy) -> list[str]:
    """Return the sorted names of resources that the start waits for. Before the proxy is live, the list is not
    empty.
    """
    waiting = [f"cluster {printable(c.model.name)}" for c in unready_clusters(proxy)]
    waiting += [f"listener {printable(listener.name)}" for listener in proxy.listeners.warming]
    policies = ["policies"] if lacks_policies(proxy) else []
    if not waiting:
        if proxy.state == "PRE_INITIALIZING":
            waiting = ["clusters"]
        elif not (policies and proxy.listeners.active):
            waiting = ["listeners"]
        return waiting + policies
    waiting.sort()
    more = len(waiting) - _MOST_NAMES
    shown = [*waiting[:_MOST_NAMES], f"{more} more"] if more > 0 else waiting
    return shown + policies


def lacks_policies(proxy: InspectedProxy) -> bool:
    """Return whether Calico's policies are configured but have not arrived yet."""
    return proxy.policies is not None and not proxy.policies.are_complete


def unready_clusters(proxy: InspectedProxy) -> list[LiveCluster]:
    """Return the clusters that wait for endpoints or secrets. Static clusters are already in use meanwhile."""
    return [cluster for cluster in (*proxy.clusters.active, *proxy.clusters.warming) if not cluster.warm.is_set()]
