"""Checks the network path between nodes, and their clocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ztunnel.ask.check.rules import objects as o
from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, error, warning

_SLOW_S: Final = 0.1
_SKEW_WARN_S: Final = 5.0
_SKEW_S: Final = 60.0
#: The proxy's ports in the network namespace of each captured pod.
_IN_PODS: Final = frozenset({15001, 15006, 15008, 15053})
#: Ports of the proxy itself: admin, metrics, readiness.
_ON_NODES: Final = frozenset({15000, 15020, 15021})
#: Names of the sidecar proxy containers that other meshes redirect a pod's traffic to.
_OTHER_MESHES: Final = {"linkerd-proxy": "Linkerd", "consul-dataplane": "Consul", "kuma-sidecar": "Kuma"}
_PLUGIN: Final = "ztunnel-cni"


def tunnels_between_nodes(facts: Facts) -> Iterator[Finding]:
    """Check whether each node could reach port 15008 of pods on other nodes, and of other networks' gateways."""
    tried = 0
    for node, found in facts.nodes.items():
        for each in found.reached:
            tried += 1
            target = f"{each.get('address')}:{each.get('port') or 15008}, {each.get('place')}"
            if each.get("error"):
                yield error(f"no TLS handshake with {target}: {each['error']}", node=node)
            elif float(each.get("seconds") or 0) > _SLOW_S:
                yield warning(f"the TLS handshake with {target} took {float(each['seconds']):.3f} s", node=node)
    if not tried:
        raise NotGathered(facts.no_nodes or "no two nodes with pods of the mesh and proxies of this project")


def large_packets(facts: Facts) -> Iterator[Finding]:
    """Check whether a first message of 12 KiB arrived at port 15008 wherever a small one did."""
    tried = 0
    for node, found in facts.nodes.items():
        for each in found.reached:
            if "largeArrives" in each:
                tried += 1
                if not each["largeArrives"]:
                    target = f"{each.get('address')}:{each.get('port') or 15008}, {each.get('place')}"
                    yield error(f"small packets reach {target}, packets of full size do not", node=node)
    if not tried:
        raise NotGathered(facts.no_nodes or "no tunnel between nodes was tried with success")


def taken_ports(facts: Facts) -> Iterator[Finding]:
    """Find containers that declare one of the proxy's ports."""
    for pod in o.captured(facts):
        taken = sorted(o.ports_of(pod) & _IN_PODS)
        if taken:
            yield error(f"it declares {_listed(taken)}, where the proxy listens in each pod", o.named(pod, "pod"))
    shared = [pod for pod in o.of_app(facts, o.PROXY) if o.spec(pod).get("hostNetwork")]
    nodes = {o.spec(pod).get("nodeName") for pod in shared}
    proxies = {o.key(pod) for pod in shared}
    for pod in facts.listed("Pod"):
        node = o.spec(pod).get("nodeName")
        if o.is_running(pod) and o.spec(pod).get("hostNetwork") and node in nodes and o.key(pod) not in proxies:
            taken = sorted(o.ports_of(pod) & _ON_NODES)
            if taken:
                yield error(
                    f"it declares {_listed(taken)} of the node, where the proxy listens",
                    o.named(pod, "pod"), str(node),
                )  # fmt: skip


def _listed(ports: list[int]) -> str:
    return f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}"


def others_rules(facts: Facts) -> Iterator[Finding]:
    """Check whether another mesh redirects the traffic of captured pods, and check the nodes' iptables."""
    for pod in o.captured(facts):
        for container in [*(o.spec(pod).get("containers") or ()), *(o.spec(pod).get("initContainers") or ())]:
            mesh = _OTHER_MESHES.get(str(container.get("name")))
            if mesh:
                yield error(f"it has a proxy of {mesh}, too", o.named(pod, "pod"))
    for node, found in facts.nodes.items():
        tables = (found.agent or {}).get("iptables") or {}
        if tables.get("legacy") and tables.get("nft"):
            both = f"{', '.join(tables['legacy'])} of iptables-legacy, {', '.join(tables['nft'])} of iptables-nft"
            yield warning(f"both backends of iptables have tables: {both}", node=node)


def plugins(facts: Facts) -> Iterator[Finding]:
    """Check the CNI configuration of nodes whose agent installs its plugin."""
    found = False
    for node, agent in facts.agents():
        cni = agent.get("cni")
        if cni is None:
            continue
        found = True
        if cni.get("error"):
            yield error(f"the CNI configuration cannot be read: {cni['error']}", node=node)
            continue
        listed = cni.get("plugins") or []
        if not listed:
            yield error("there is no CNI configuration that a container runtime can load", node=node)
        elif _PLUGIN not in listed:
            yield error(f"{cni.get('taken')} does not have the plugin {_PLUGIN}", node=node)
        elif listed[-1] != _PLUGIN:
            yield warning(f"the plugin {_PLUGIN} is not the last one in {cni.get('taken')}", node=node)
        if not cni.get("program"):
            yield error(f"the program of the plugin {_PLUGIN} is missing", node=node)
        if cni.get("setAside"):
            yield warning(f"Cilium has set aside {', '.join(cni['setAside'])} (cni.exclusive)", node=node)
    if not found:
        raise NotGathered("no agent installs a CNI plugin")


def probes(facts: Facts) -> Iterator[Finding]:
    """Check each node's nftables table for kubelet's probes, and find other data planes, which can drop probes."""
    for node, agent in facts.agents():
        state = agent.get("probes") or {}
        if state.get("fault"):
            yield error(f"the table for probes is not in place: {state['fault']}", node=node)
        if state.get("ebpf"):
            yield warning(str(state["ebpf"]), node=node)


def clocks(facts: Facts) -> Iterator[Finding]:
    """Compare the nodes' clocks with the API server's, or with this machine's if the API server's is unknown."""
    known = {node: found.clock_s for node, found in facts.nodes.items() if found.clock_s is not None}
    if not known:
        raise NotGathered(facts.no_nodes or "no proxy of this project has answered")
    reference = facts.clock_s or 0.0
    against = "the API server's" if facts.clock_s is not None else "this machine's"
    for node, clock_s in known.items():
        apart = clock_s - reference
        if abs(apart) >= _SKEW_WARN_S:
            make = error if abs(apart) >= _SKEW_S else warning
            yield make(
                f"its clock is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} {against}", node=node
            )


CHECKS: Final = (
    Check(
        id="NET1", asks="tunnels from each node to the others", judge=tunnels_between_nodes,
        remedy="Open 15008 in NetworkPolicies and security groups.",
    ),
    Check(
        id="NET2", asks="packets of full size between nodes", judge=large_packets,
        remedy="Lower the MTU of the pods; let ICMP \"too big\" pass.",
    ),
    Check(
        id="NET3", asks="clocks of the nodes", judge=clocks,
        remedy="Start NTP on the nodes named; certificates fail next.",
    ),
    Check(
        id="NET4", before=True, asks="ports of the proxy", judge=taken_ports,
        remedy="Move the application to another port, or leave the pod out of the mesh.",
    ),
    Check(
        id="NET5", before=True, asks="other meshes and iptables", judge=others_rules,
        remedy="Remove the other mesh from the pod; use one backend of iptables.",
    ),
    Check(
        id="NET6", asks="the CNI plugin", judge=plugins,
        remedy="Restart the agent; with Cilium set cni.exclusive=false.",
    ),
    Check(
        id="NET7", asks="kubelet's probes", judge=probes,
        remedy="See the agent's log; let the sources of probes pass (docs/agent.md).",
    ),
)  # fmt: skip
