"""Explains whether one pod may connect to another, and which policy decides. Pure: it does not read the kernel's
nftables table, but decides like the rules that ``ztunnel netpol`` writes there.
"""

from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from xds.model import calico as c
from ztunnel.policy.calico.compile import Compiled, endpoint_id, with_own_addresses
from ztunnel.policy.calico.evaluator import Evaluator, profile_id
from ztunnel.policy.calico.explain import (
    EPHEMERAL_PORT,
    BadQuestion,
    Party,
    explain,
    icmp_of,
    port_of,
    protocol_of,
)
from ztunnel.policy.calico.resources import Pod, Resources
from ztunnel.policy.netpol.table_builder import TableBuilder, Unseen
from ztunnel.policy.policysync.explain import evaluator_of, party

#: A protocol name that matches no packet, because it does not exist.
_NO_PROTOCOL: Final = "none"


def explained(
    resources: Resources,
    compiled: Compiled,
    source: str,
    destination: str,
    port: str,
    protocol: str,
    *,
    source_port: str = "",
) -> tuple[bool, list[str]]:
    """Return whether a connection is allowed, and lines with the reasons.

    Args:
        source, destination: ``namespace/pod`` or an address.
        port: see :func:`~ztunnel.policy.calico.explain.flow_of`. ``0`` is a port that no rule names.
        protocol: ``tcp``, ``udp``, ``sctp``, ``icmp``, ``icmpv6`` or a number.
        source_port: the source's port; :data:`~ztunnel.policy.calico.explain.EPHEMERAL_PORT` if empty.

    Raises:
        BadQuestion: the pod, the protocol or the port does not exist, or the parties have no common IP version.
    """
    number = protocol_of(protocol)
    is_icmp = number in c.ICMP_PROTOCOLS.values()
    asked = c.Flow(
        source_port=0 if is_icmp else port_of("--source-port", source_port or str(EPHEMERAL_PORT)),
        destination_port=0 if is_icmp or port == "0" else port_of("PORT", port),
        protocol=number,
        icmp=icmp_of(port) if is_icmp else None,
    )
    try:
        ends = tuple(party(text, resources, "cluster.local") for text in (source, destination))
    except ValueError as error:
        raise BadQuestion(str(error)) from error
    pods = tuple(_pod(resources, end) for end in ends)
    addresses = _common(ends, pods)
    if pods[0] is not None and pods[0] == pods[1]:
        return True, ["a pod always reaches itself"]
    if _node_reaches(*pods):
        return True, ["a node always reaches its own pods"]
    made = evaluator_of(compiled)
    lines: list[str] = []
    allowed = True
    assumed = False
    for end, pod, direction in ((ends[0], pods[0], c.Direction.EGRESS), (ends[1], pods[1], c.Direction.INGRESS)):
        flow = replace(asked, source_ip=addresses[0], destination_ip=addresses[1])
        answer, why = _one(compiled, made, end, pod, direction, flow)
        allowed = allowed and answer
        lines += why
        assumed = assumed or (
            not is_icmp
            and not source_port
            and end.endpoint is not None
            and made.reads_source_port(end.endpoint, direction)
        )
    if assumed:
        lines.append(f"  note: judged with source port {EPHEMERAL_PORT}; --source-port asks about another")
    lines.append("allowed" if allowed else "denied")
    return allowed, lines


def _one(
    compiled: Compiled,
    made: Evaluator,
    end: Party,
    pod: Pod | None,
    direction: c.Direction,
    flow: c.Flow,
) -> tuple[bool, list[str]]:
    head = f"{direction} of {end.name}: "
    if end.endpoint is None:
        what = "it uses its node's network" if pod is not None and pod.host_network else "it is no pod"
        return True, [head + f"allowed, {what}, so no policy selects it"]
    built = TableBuilder().build(compiled, compiled.nodes[end.endpoint])
    if end.endpoint not in built.policed[direction]:
        return True, [head + "allowed, no policy isolates it in this direction"]
    unseen = [item for item in built.unseen if item.direction is direction]
    left_out = _leave_out(made, unseen)
    verdict, lines = explain(made, flow, end.endpoint, direction)
    decided = [item for item in unseen if verdict.rule and item.policy == verdict.rule.policy]
    for item in dict.fromkeys((*left_out, *decided)):
        lines.append(f"  note: {item}{', so that it allows nothing' if item in left_out else ''}")
    blind = any(item.index == verdict.rule.index for item in decided) if verdict.rule else False
    return verdict.allowed and not blind, lines


def _leave_out(made: Evaluator, unseen: Sequence[Unseen]) -> list[Unseen]:
    """Make the allowing rules that the kernel's table leaves out match no flow, and return them.

    They keep their places, so that the numbers of the policy's other rules do not change.
    """
    left_out = []
    for item in unseen:
        of_profile = item.policy == profile_id(item.policy.name)
        store = made.store
        policy = store.profiles.get(item.policy.name) if of_profile else store.policies.get(item.policy)
        if policy is None or item.index < 0:
            continue
        rules = policy.rules(item.direction)
        if rules[item.index].action is not c.Action.ALLOW:
            continue
        left_out.append(item)
        never = replace(rules[item.index], protocol=_NO_PROTOCOL)
        rules = (*rules[: item.index], never, *rules[item.index + 1 :])
        inbound = item.direction is c.Direction.INGRESS
        changed = replace(policy, inbound=rules) if inbound else replace(policy, outbound=rules)
        if of_profile:
            made.apply(c.ProfileUpdate(item.policy.name, changed))
        else:
            made.apply(c.PolicyUpdate(item.policy, changed))
    return left_out


def _pod(resources: Resources, end: Party) -> Pod | None:
    return next(
        (
            pod
            for pod in with_own_addresses(resources.pods).values()
            if f"{pod.namespace}/{pod.name}" == end.name or (end.endpoint and endpoint_id(pod) == end.endpoint)
        ),
        None,
    )


def _node_reaches(source: Pod | None, destination: Pod | None) -> bool:
    if source is None or destination is None or not source.node or source.node != destination.node:
        return False
    return source.host_network or destination.host_network


def _common(ends: tuple[Party, ...], pods: tuple[Pod | None, ...]) -> tuple[str, str]:
    """Return one address of each party, both of the same IP version."""
    known: list[tuple[IPv4Address | IPv6Address, ...]] = []
    for end, pod in zip(ends, pods, strict=True):
        if end.address is None:
            raise BadQuestion(f"{end.name} has no address")
        known.append(pod.addresses if pod is not None else (ip_address(end.address),))
    for source in known[0]:
        for destination in known[1]:
            if source.version == destination.version:
                return str(source), str(destination)
    raise BadQuestion(f"{ends[0].name} and {ends[1].name} have no IP version in common")
