"""Checks nodes' kernels and processes, as each node's proxy and agent see them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, error, warning

#: The bits of CapEff (capabilities(7)) that each process needs. deploy/helm explains each bit.
NEEDED: Final = {
    "proxy": {"NET_ADMIN": 12, "NET_RAW": 13, "SYS_ADMIN": 21},
    "agent": {"NET_ADMIN": 12, "SYS_ADMIN": 21, "SYS_PTRACE": 19, "DAC_OVERRIDE": 1},
}
#: Ports of the proxy in pods and on the node.
PORTS: Final = range(15000, 15091)
_STRICT: Final = 1


def pod_rules(facts: Facts) -> Iterator[Finding]:
    """Check whether the kernel accepted a pod's rules in a temporary network namespace."""
    for node, agent in facts.agents():
        if agent.get("rulesRefused"):
            yield error(f"the kernel refuses the rules of a pod: {agent['rulesRefused']}", node=node)


def capabilities(facts: Facts) -> Iterator[Finding]:
    """Check the effective capabilities of proxies and agents."""
    for node, who, kernel in facts.kernels():
        shown = (kernel.get("process") or {}).get("capabilities")
        if shown is None:
            continue
        held = int(str(shown), 16)
        missing = [name for name, bit in NEEDED[who].items() if not held >> bit & 1]
        if missing:
            yield error(f"the {who} lacks {', '.join(missing)}", node=node)


def control_groups(facts: Facts) -> Iterator[Finding]:
    """Check whether the node has version 1 of control groups, which reports no memory pressure."""
    for node, who, kernel in facts.kernels():
        if who == "agent" and kernel.get("cgroupVersion") == 1:
            yield warning("control groups are of version 1: there is no memory pressure", node=node)


def reverse_path(facts: Facts) -> Iterator[Finding]:
    """Check the reverse path filter (rp_filter). Packets from the proxy to a pod return by ``lo``, so a strict one
    would drop them.
    """
    for node, who, kernel in facts.kernels():
        values: Mapping[str, int] = kernel.get("rpFilter") or {}
        if max(values.get("all", 0), values.get("lo", 0)) == _STRICT:
            yield warning(f"rp_filter is strict for lo in the {who}'s network", node=node)
        if who == "agent" and kernel.get("ipForward") == 0:
            yield warning("ip_forward is 0 on the host: pods of other nodes are not reached", node=node)


def ipv6(facts: Facts) -> Iterator[Finding]:
    """Check whether ``lo`` has IPv6 if other devices have it."""
    for node, check in facts.checks():
        values: Mapping[str, int] = (check.get("kernel") or {}).get("disableIpv6") or {}
        others = [value for device, value in values.items() if device not in ("lo", "all", "default")]
        if check.get("ipv6") and values.get("lo") == 1 and 0 in others:
            yield warning("devices have IPv6, and lo has not: connections to ::1 fail", node=node)


def connection_tracking(facts: Facts) -> Iterator[Finding]:
    """Check how full the conntrack table is."""
    for node, who, kernel in facts.kernels():
        table = kernel.get("conntrack") or {}
        used = _share(table.get("count"), table.get("maximum"))
        if used >= 0.7:
            make = error if used >= 0.9 else warning
            yield make(f"{used:.0%} of nf_conntrack_max are used in the {who}'s network", node=node)


def local_ports(facts: Facts) -> Iterator[Finding]:
    """Check the range of local ports, and how many local ports a pod uses for connections to one target."""
    found = False
    for node, check in facts.checks():
        found = True
        kernel = check.get("kernel") or {}
        least, most = kernel.get("localPortRange") or (32768, 60999)
        reserved = _ports(str(kernel.get("reservedPorts") or ""))
        taken = [port for port in PORTS if least <= port <= most and port not in reserved]
        if taken:
            yield warning(
                f"ip_local_port_range {least}-{most} has the proxy's ports {taken[0]}-{taken[-1]}", node=node
            )
        dump = facts.nodes[node].dump
        for (pod, target), number in _targets(dump).most_common(1) if dump is not None else ():
            used = number / max(1, most - least + 1)
            if used >= 0.6:
                make = error if used >= 0.9 else warning
                yield make(f"{number} local ports are in use toward {target}", f"pod {pod}", node)
    if not found:
        raise NotGathered("no proxy of this project has answered")


def _targets(dump: Mapping[str, Any]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for state in (dump.get("workloadState") or {}).values():
        info = state.get("info") or {}
        for each in (state.get("connections") or {}).get("outbound") or ():
            if each.get("protocol") == "TCP":  # tunnels share connections
                found[f"{info.get('namespace')}/{info.get('name')}", str(each.get("actualDst"))] += 1
    return found


def _ports(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found.update(range(int(first), int(last or first) + 1))
    return found


def limits(facts: Facts) -> Iterator[Finding]:
    """Compare each process's descriptors, memory and throttled CPU periods with their limits."""
    for node, who, kernel in facts.kernels():
        process = kernel.get("process") or {}
        for name, used, limit in (
            ("descriptors", "descriptors", "descriptorLimit"),
            ("memory", "memoryBytes", "memoryLimitBytes"),
        ):
            share = _share(process.get(used), process.get(limit))
            if share >= 0.8:
                yield warning(f"the {who} uses {share:.0%} of its limit of {name}", node=node)
        throttling = process.get("throttling") or {}
        throttled = _share(throttling.get("throttled"), throttling.get("periods"))
        if throttled > 0.05:
            yield warning(f"the CPU limit throttled the {who} in {throttled:.0%} of all periods", node=node)


def _share(used: object, limit: object) -> float:
    if not isinstance(used, int) or not isinstance(limit, int) or limit <= 0:
        return 0.0
    return used / limit


CHECKS: Final = (
    Check(
        id="KRN1", asks="the rules of a pod", judge=pod_rules,
        remedy="Load the kernel module of the refused rule (nf_tables, nft_redir), or use another kernel.",
    ),
    Check(
        id="KRN2", asks="capabilities of proxy and agent", judge=capabilities,
        remedy="Add the capability to the container; set seLinuxOptions or the profile.",
    ),
    Check(
        id="KRN3", asks="version of control groups", judge=control_groups,
        remedy="Boot the node with systemd.unified_cgroup_hierarchy=1; check kubelet's cgroup driver.",
    ),
    Check(
        id="KRN4", asks="rp_filter and ip_forward", judge=reverse_path,
        remedy="Set rp_filter to 2 or 0 for the devices named, ip_forward to 1.",
    ),
    Check(
        id="KRN5", asks="IPv6 of lo", judge=ipv6,
        remedy="Enable IPv6 on lo, or switch it off everywhere (IPV6_ENABLED=false).",
    ),
    Check(
        id="KRN6", asks="connection tracking", judge=connection_tracking,
        remedy="Raise nf_conntrack_max; find the pods that open many short connections.",
    ),
    Check(
        id="KRN7", asks="local ports", judge=local_ports,
        remedy="Widen ip_local_port_range, set ip_local_reserved_ports, or reuse connections.",
    ),
    Check(
        id="KRN8", asks="descriptors, memory and CPU", judge=limits,
        remedy="Raise the limit. A CPU limit here delays every pod of the node.", ),
)  # fmt: skip
