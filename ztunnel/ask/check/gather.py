"""Gathers the facts that checks evaluate: objects from the API server, and pages from proxies and agents."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import ipaddress
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from ztunnel.ask.check.rules.model import Facts, NodeFacts, Object
from ztunnel.ask.inspect.archive import Archive
from ztunnel.ask.inspect.fleet import archive_of, gather
from ztunnel.ask.inspect.source import AskFailed, Pages, parsed
from ztunnel.ask.inspect.tables import is_envoy_dump
from ztunnel.kube.errors import ApiRefused, KubeError
from ztunnel.kube.kinds import (
    DAEMON_SET,
    MUTATING_WEBHOOK,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    SERVICE,
    Kind,
    Selection,
)

#: The kinds of Kubernetes objects that checks read.
KINDS: Final = (
    *(POD, NAMESPACE, NODE, SERVICE, DAEMON_SET, NETWORK_POLICY, MUTATING_WEBHOOK),
    Kind("AuthorizationPolicy", "security.istio.io/v1", "authorizationpolicies"),
    Kind("PeerAuthentication", "security.istio.io/v1", "peerauthentications"),
    Kind("ServiceEntry", "networking.istio.io/v1", "serviceentries"),
    Kind("Sidecar", "networking.istio.io/v1", "sidecars"),
    Kind("EnvoyFilter", "networking.istio.io/v1alpha3", "envoyfilters"),
    Kind("Telemetry", "telemetry.istio.io/v1", "telemetries"),
    Kind("Gateway", "gateway.networking.k8s.io/v1", "gateways"),
    Kind("PodMonitor", "monitoring.coreos.com/v1", "podmonitors"),
    Kind("PrometheusRule", "monitoring.coreos.com/v1", "prometheusrules"),
    Kind("CustomResourceDefinition", "apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False),
)
_ACCESS: Final = Kind(
    "SelfSubjectAccessReview", "authorization.k8s.io/v1", "selfsubjectaccessreviews", namespaced=False
)
#: The permissions that checks need in addition to listing objects.
_VERBS: Final = (("create", "", "pods", "portforward"), ("get", "", "pods", "log"))
#: The longest wait for the API server.
_API_S: Final = 5.0
#: The most other nodes that one node's proxy tries to reach.
_MOST_REACHED: Final = 20
_NOT_FOUND: Final = 404
_NO_CLUSTER: Final = "--no-cluster"


def gather_facts(args: argparse.Namespace, *, before: bool) -> Facts:
    """Return the facts of a cluster, or of an archive.

    Args:
        args: the command line; see :mod:`ztunnel.ask.check.command`.
        before: whether to skip proxies, because none is installed yet.
    """
    if args.file is not None:
        return archived_facts(args)
    with ThreadPoolExecutor(1, thread_name_prefix="cluster") as pool:
        cluster = pool.submit(cluster_facts, args) if not args.no_cluster else None
        facts = Facts(now_s=time.time())
        nodes = facts if before else _with_nodes(args, facts)
        if cluster is None:
            return replace(nodes, cluster_error=_NO_CLUSTER, cluster_asked=False)
        found = cluster.result()
    return replace(
        found, nodes=nodes.nodes, silent=nodes.silent, no_nodes="before installation" if before else nodes.no_nodes
    )


# The cluster


def cluster_facts(args: argparse.Namespace) -> Facts:
    """Return the facts from the API server."""
    try:
        return asyncio.run(_cluster(args))
    except KubeError as error:
        return Facts(now_s=time.time(), cluster_error=str(error))


async def _cluster(args: argparse.Namespace) -> Facts:
    from ztunnel.kube.client import Client, connect

    async def listed(client: Client, kind: Kind) -> Sequence[Object] | str:
        try:
            return await client.list_all(Selection(kind))
        except ApiRefused as error:
            if error.status == _NOT_FOUND:
                return []  # the custom resource is not installed, so no objects exist
            return str(error)
        except KubeError as error:
            return str(error)

    async def allowed(client: Client, verb: str, group: str, resource: str, sub: str = "") -> tuple[str, bool]:
        attributes = {"verb": verb, "group": group, "resource": resource, "subresource": sub}
        spec = {"resourceAttributes": attributes}
        body = {"apiVersion": _ACCESS.api_version, "kind": _ACCESS.name, "metadata": {}, "spec": spec}
        name = f"{verb} {resource}{f'/{sub}' if sub else ''}"
        try:
            answer = await client.create(_ACCESS, "", body)
        except KubeError:
            return name, True  # unknown: the requests for lists will show it
        return name, bool((answer.get("status") or {}).get("allowed", True))

    kubeconfig = Path(args.kubeconfig) if args.kubeconfig else None
    limit_s = args.request_timeout or _API_S
    connecting = connect(kubeconfig, context=args.context or None, as_user=args.as_user, limit_s=limit_s)
    async with connecting as client:
        began_s = time.time()
        version, date = await client.version()
        clock_s = clock(date, began_s, time.time())
        verbs = [*_VERBS, *(("list", _group(kind), kind.plural, "") for kind in KINDS)]
        access = await asyncio.gather(*(allowed(client, *verb) for verb in verbs))
        found = await asyncio.gather(*(listed(client, kind) for kind in KINDS))
    objects = {kind.name: items for kind, items in zip(KINDS, found, strict=True)}
    # Certificates, restarts and denials have times of the cluster. The clock of this machine can differ.
    now_s = time.time() + (clock_s or 0.0)
    return Facts(now_s=now_s, version=version, clock_s=clock_s, objects=objects, access=dict(access))


def _group(kind: Kind) -> str:
    return kind.api_version.rpartition("/")[0]


def clock(date: str, began_s: float, ended_s: float) -> float | None:
    """Return how far a server's clock is ahead of this machine's, by its ``Date`` header; ``None`` without one.

    The header has whole seconds, so half a second is added.
    """
    try:
        return parsedate_to_datetime(date).timestamp() + 0.5 - (began_s + ended_s) / 2
    except ValueError:
        return None


# Nodes


def _with_nodes(args: argparse.Namespace, facts: Facts) -> Facts:
    shared = Shared()
    try:
        found = gather(args, lambda pages: shared.of(look(pages)))
    except AskFailed as error:
        silent = {} if args.all_nodes else {args.node or args.pod or args.address: str(error)}
        return replace(facts, no_nodes=str(error), silent=silent)
    nodes = {node or str((each.check or {}).get("node") or "node"): each for node, each in found.by_node.items()}
    if found.across:
        nodes = {node: replace(each, **_agent(args, node)) for node, each in nodes.items()}
    return replace(facts, nodes=nodes, silent={each.node: each.reason for each in found.silent})


def _agent(args: argparse.Namespace, node: str) -> dict[str, Any]:
    return dict(args.agents.get(node) or {})


def ask_agents(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return ``/check`` and ``/audit`` of every node agent, by node. Empty without agents."""

    def pages(agent: Pages) -> dict[str, Any]:
        return {"agent": _page(agent, "/check"), "audit": _page(agent, "/audit")}

    try:
        found = gather(args, pages, agent=True)
    except AskFailed:
        return {}
    return {node: page for node, page in found.by_node.items() if node}


def _page(pages: Pages, path: str) -> Any:
    try:
        found = pages.json(path)
    except AskFailed:
        return None
    return found if isinstance(found, Mapping) else None


class Shared:
    """Keeps one copy of lists that are equal on several nodes, because all proxies of a mesh describe the same
    workloads.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, Any] = {}
        self._lock = threading.Lock()

    def of(self, facts: NodeFacts) -> NodeFacts:
        """Return a node's facts. If a list equals another node's list, both nodes share one object."""
        if facts.dump is None:
            return facts
        dump = dict(facts.dump)
        for kind in ("workloads", "services", "policies"):
            if kind in dump:
                digest = hashlib.sha256(msgspec.json.encode(dump[kind])).digest()
                with self._lock:
                    dump[kind] = self._kept.setdefault(digest, dump[kind])
        return replace(facts, dump=dump)


def look(pages: Pages) -> NodeFacts:
    """Ask one proxy to connect to port 15008 on other nodes, and return its facts with the results.

    Raises:
        AskFailed: it does not answer.
    """
    dump = pages.json("/config_dump")
    if is_envoy_dump(dump) or not isinstance(dump, Mapping):
        return NodeFacts()
    began_s = time.time()
    try:
        check = pages.json("/check")
    except AskFailed as error:
        if error.status != _NOT_FOUND:
            raise
        return NodeFacts(dump=dump)
    ended_s = time.time()
    clock_s = None
    said_s = None if pages.saved else _seconds(check.get("time"))
    if said_s is not None:
        clock_s = said_s - (began_s + ended_s) / 2
    reached = [] if pages.saved else [_reach(pages, place, address) for place, address in targets(dump)]
    return NodeFacts(dump=dump, check=check, clock_s=clock_s, reached=reached)


def _seconds(time_: object) -> float | None:
    from ztunnel.ask.check.rules.objects import seconds_of

    return seconds_of(time_)


def targets(dump: Mapping[str, Any], most: int = _MOST_REACHED) -> list[tuple[str, str]]:
    """Return the targets to try: one pod that accepts tunnels on each other node, and other networks' gateways. A
    target is a description (``node N``, ``the gateway of network N``) and an address.
    """
    config = dump.get("config") or {}
    own, network = config.get("localNode"), config.get("network") or ""
    gateways: dict[str, str] = {}
    found: dict[str, str] = {}
    for each in dump.get("workloads") or ():
        node, addresses = each.get("node"), each.get("workloadIps") or ()
        takes = each.get("protocol") == "HBONE" and each.get("status", "Healthy") == "Healthy"
        reachable = each.get("networkMode", "Standard") == "Standard" and (each.get("network") or "") == network
        if node and node != own and takes and addresses and reachable:
            found.setdefault(f"node {node}", str(addresses[0]))
        place, _, host = str((each.get("networkGateway") or {}).get("destination") or "").rpartition("/")
        if (each.get("network") or "") != network and _is_address(host):
            gateways.setdefault(f"the gateway of network {each.get('network') or place}", host)
    return [*sorted(gateways.items()), *sorted(found.items())][:most]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _reach(pages: Pages, place: str, address: str) -> dict[str, Any]:
    try:
        answer = dict(pages.json("/check", {"reach": address}))
    except AskFailed as error:
        return {"place": place, "address": address, "error": str(error)}
    return {"place": place, **answer}


# Archives


def archived_facts(args: argparse.Namespace) -> Facts:
    """Return the facts in an archive of ``ztunnel bug-report``, or in a single saved dump.

    Raises:
        AskFailed: the file cannot be read.
    """
    found, archive = gather(args, look), archive_of(args)
    if archive is None:
        return Facts(
            now_s=time.time(),
            cluster_error=f"{args.file} has no objects of a cluster",
            cluster_asked=False,
            nodes={node or "node": each for node, each in found.by_node.items()},
        )
    index = parsed(archive.files["index.json"].decode(errors="replace"), f"{args.file}: index.json")
    if not isinstance(index, Mapping):
        raise AskFailed(f"{args.file}: index.json: not an object")
    listed, version = index.get("silent"), index.get("kubernetes")
    silent = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    objects: dict[str, Sequence[Object] | str] = {kind.name: "not in the archive" for kind in KINDS}
    for name, data in archive.files.items():
        if name.startswith("objects/"):
            items = (_archived(data) or {}).get("items")
            kind = name.removeprefix("objects/").removesuffix(".json")
            objects[kind] = items if isinstance(items, list) else "its file in the archive has an unexpected form"
    nodes = {
        node: replace(each, agent=_agent_page(archive, node, "check"), audit=_agent_page(archive, node, "audit"))
        for node, each in found.by_node.items()
    }
    return Facts(
        now_s=_seconds(index.get("time")) or time.time(),
        cluster_error=str(index.get("clusterError") or ""),
        cluster_asked=index.get("clusterError") != _NO_CLUSTER,
        version=version if isinstance(version, Mapping) else {},
        objects=objects,
        nodes=nodes,
        silent={
            str(each.get("node")): str(each.get("reason"))
            for each in silent
            if args.node in (None, each.get("node"))
        },
    )


def _agent_page(archive: Archive, node: str, page: str) -> Any:
    return _archived(archive.files.get(f"nodes/{node}/agent/{page}", b""))


def _archived(data: bytes) -> Mapping[str, Any] | None:
    """Return the JSON object in a file; ``None`` for a file of another form, such as an error page of an agent."""
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, Mapping) else None
