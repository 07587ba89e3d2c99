"""Finds policies, in the cluster or in proxies, that do not have the effect expected by their authors. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ztunnel.ask.check.rules import objects as o
from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, Object, error, warning
from ztunnel.policy.effect import without_effect

HBONE_PORT: Final = 15008
#: The source addresses of kubelet's probes as captured pods see them, by IP version (tproxy/inpod.py).
PROBES: Final = {
    4: ipaddress.ip_address("169.254.7.127"),
    6: ipaddress.ip_address("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
}
_HOUR_S: Final = 3600.0
_HTTP_OPERATION: Final = ("hosts", "notHosts", "methods", "notMethods", "paths", "notPaths")
_HTTP_SOURCE: Final = ("requestPrincipals", "notRequestPrincipals", "remoteIpBlocks", "notRemoteIpBlocks")
#: The AuthorizationPolicy condition keys that a node proxy supports.
_KEYS: Final = (
    "source.ip",
    "source.namespace",
    "source.principal",
    "source.serviceAccount",
    "destination.ip",
    "destination.port",
)


def at_node(facts: Facts) -> Iterator[Object]:
    """Yield the AuthorizationPolicies that node proxies enforce, which are those without ``targetRefs``."""
    for item in facts.listed("AuthorizationPolicy"):
        if not o.spec(item).get("targetRefs") and not o.spec(item).get("targetRef"):
            yield item


def action(item: Object) -> str:
    """Return the action of a policy in capitals."""
    return str(o.spec(item).get("action") or "ALLOW")


def rules(item: Object) -> Sequence[Mapping[str, Any]]:
    """Return the rules of a policy. An absent list has no rules."""
    return o.spec(item).get("rules") or ()


def layer_7(facts: Facts) -> Iterator[Finding]:
    """Find policies with HTTP or JWT attributes that apply to no waypoint."""
    for item in at_node(facts):
        parts = [_layers(rule) for rule in rules(item)]
        about = o.named(item, "authorizationpolicy")
        only = [number for number, (low, high) in enumerate(parts) if high and not low]
        both = [number for number, (low, high) in enumerate(parts) if high and low]
        if action(item) == "DENY" and only:
            where = "" if len(only) == len(parts) else f" in rules {', '.join(map(str, only))}"
            yield error(f"a DENY of HTTP or JWT attributes only{where}: it is not enforced at the node", about)
        elif only or both:
            effect = "denies more than it says" if action(item) == "DENY" else "allows less than it says"
            yield warning(f"it has attributes of HTTP or JWT, and no waypoint gets it: it {effect}", about)


def _layers(rule: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a rule uses attributes that node proxies know, and whether it uses others."""
    low = high = False
    for entry in rule.get("from") or ():
        source = entry.get("source") or {}
        for name, values in source.items():
            low, high = (low, high or bool(values)) if name in _HTTP_SOURCE else (low or bool(values), high)
    for entry in rule.get("to") or ():
        operation = entry.get("operation") or {}
        for name, values in operation.items():
            low, high = (low, high or bool(values)) if name in _HTTP_OPERATION else (low or bool(values), high)
    for entry in rule.get("when") or ():
        low, high = (True, high) if entry.get("key") in _KEYS else (low, True)
    return low, high


def delivered(facts: Facts) -> Iterator[Finding]:
    """Check policies as the proxies received them."""
    seen: dict[tuple[str, str], list[str]] = {}
    for node, dump in facts.dumps():
        for policy in dump.get("policies") or ():
            reason = without_effect(policy)
            if reason:
                seen.setdefault((f"policy {policy.get('namespace')}/{policy.get('name')}", reason), []).append(
                    node
                )
    for (about, reason), nodes in seen.items():
        yield error(f"it denies nothing: {reason}", about, nodes[0] if len(nodes) == 1 else "")


def selectors(facts: Facts) -> Iterator[Finding]:
    """Find selectors that select no workload."""
    pods, roots = facts.listed("Pod"), o.root_namespaces(facts)
    for kind in ("AuthorizationPolicy", "PeerAuthentication"):
        for item in facts.listed(kind):
            selector = o.spec(item).get("selector")
            if not selector or not selector.get("matchLabels"):
                continue
            namespace = o.key(item)[0]
            others = {o.key(pod)[0] for pod in pods if o.selects(selector, o.labels(pod))}
            if namespace not in others and not (others and namespace in roots):
                hint = f"; pods of namespace {', '.join(sorted(others)[:3])} have these labels" if others else ""
                yield warning(f"its selector matches no pod{hint}", o.named(item, kind.lower()))


def mistakes(facts: Facts) -> Iterator[Finding]:
    """Find actions, principals and ports that never match."""
    domain = _trust_domain(facts)
    for item in at_node(facts):
        about = o.named(item, "authorizationpolicy")
        if action(item) in ("CUSTOM", "AUDIT"):
            yield error(f"action {action(item)} is ignored by node proxies", about)
        for principal in _principals(item):
            if principal.startswith("spiffe://"):
                yield error(f"principal {principal!r} begins with spiffe://, and never matches", about)
            elif domain and "/" in principal and not principal.startswith(("*", f"{domain}/")):
                yield warning(f"principal {principal!r} is not of the mesh's trust domain {domain}", about)
        ports = _ports(item)
        if str(HBONE_PORT) in ports:
            yield error("port 15008 is the tunnel's, and policies see the application's: it never matches", about)
        yield from _undeclared(facts, item, ports - {str(HBONE_PORT)})


def _trust_domain(facts: Facts) -> str:
    for node in facts.nodes.values():
        for each in (node.dump or {}).get("certificates") or ():
            identity = str(each.get("identity") or "")
            if identity.startswith("spiffe://"):
                return identity.removeprefix("spiffe://").partition("/")[0]
    return ""


def _principals(item: Object) -> Iterator[str]:
    for rule in rules(item):
        for entry in rule.get("from") or ():
            source = entry.get("source") or {}
            for name in ("principals", "notPrincipals"):
                yield from map(str, source.get(name) or ())
        for entry in rule.get("when") or ():
            if entry.get("key") == "source.principal":
                yield from map(str, entry.get("values") or ())


def _ports(item: Object) -> set[str]:
    found: set[str] = set()
    for rule in rules(item):
        for entry in rule.get("to") or ():
            found.update(map(str, (entry.get("operation") or {}).get("ports") or ()))
        for entry in rule.get("when") or ():
            if entry.get("key") == "destination.port":
                found.update(map(str, entry.get("values") or ()))
    return found


def _undeclared(facts: Facts, item: Object, ports: set[str]) -> Iterator[Finding]:
    """Yield a finding for each of a policy's ports that no selected pod declares, if every selected pod declares
    ports.
    """
    if not ports or isinstance(facts.objects.get("Pod", ""), str):
        return
    selector, namespace = o.spec(item).get("selector"), o.key(item)[0]
    everywhere = namespace in o.root_namespaces(facts)
    chosen = [
        pod
        for pod in facts.listed("Pod")
        if (everywhere or o.key(pod)[0] == namespace) and o.selects(selector, o.labels(pod))
    ]
    declared = [o.ports_of(pod) for pod in chosen]
    if not declared or not all(declared):
        return
    known = {str(port) for each in declared for port in each}
    for port in sorted(ports - known):
        yield warning(f"no selected pod declares port {port}", o.named(item, "authorizationpolicy"))


def waypoints(facts: Facts) -> Iterator[Finding]:
    """Check policies of pods behind a waypoint. They see the waypoint's account and address instead of the
    client's.
    """
    in_front = {
        o.key(item)[1]: (o.labels(item).get(o.USE_WAYPOINT_NAMESPACE) or o.key(item)[1], name)
        for item in facts.listed("Namespace")
        if (name := o.labels(item).get(o.USE_WAYPOINT, "")) and name != "none"
    }
    for item in at_node(facts):
        waypoint = in_front.get(o.key(item)[0])
        if waypoint is None or action(item) != "ALLOW" or not rules(item):
            continue
        about = o.named(item, "authorizationpolicy")
        if not any(_lets_in(rule, *waypoint, of=o.key(item)[0]) for rule in rules(item)):
            yield error(f"the waypoint {'/'.join(waypoint)} is in front, and no rule allows its account", about)
    for item in at_node(facts):
        if o.key(item)[0] in in_front and _judges_addresses(item):
            yield warning("it judges source addresses, and behind a waypoint these are the waypoint's",
                          o.named(item, "authorizationpolicy"))  # fmt: skip


def _lets_in(rule: Mapping[str, Any], namespace: str, account: str, *, of: str) -> bool:
    """Return whether a rule of a policy in namespace ``of`` allows the account of a waypoint."""
    sources = [entry.get("source") or {} for entry in rule.get("from") or ()]
    if not sources:
        return True
    own = f"/ns/{namespace}/sa/{account}"
    for source in sources:
        principals = [str(each) for each in source.get("principals") or ()]
        accounts = [str(each) for each in source.get("serviceAccounts") or ()]
        if any(_matches(each, f"{each.partition('/')[0]}{own}") for each in principals):
            return True
        if any((each if "/" in each else f"{of}/{each}") == f"{namespace}/{account}" for each in accounts):
            return True
        wanted = [str(each) for each in source.get("namespaces") or [namespace]]
        if not principals and not accounts and any(_matches(each, namespace) for each in wanted):
            return True
    return False


def _matches(pattern: str, text: str) -> bool:
    """Match like Istio: a star can be at the start or at the end of the pattern."""
    if pattern.startswith("*"):
        return text.endswith(pattern[1:])
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def _judges_addresses(item: Object) -> bool:
    return any(
        (entry.get("source") or {}).get(name)
        for rule in rules(item)
        for entry in rule.get("from") or ()
        for name in ("ipBlocks", "notIpBlocks")
    )


def strict(facts: Facts) -> Iterator[Finding]:
    """Find clients that were refused in the last hour because they did not use mTLS."""
    found = False
    for node, dump in facts.dumps():
        denials = dump.get("denials")
        if denials is None:
            continue  # the Rust ztunnel does not count refusals
        found = True
        for each in denials:
            last = o.seconds_of(each.get("lastTime"))
            recent = last is not None and facts.now_s - last < _HOUR_S
            if recent and each.get("direction") == "inbound" and not each.get("identity"):
                yield warning(
                    f"{each.get('count')} connections without mTLS from {each.get('source')} were refused: "
                    f"{each.get('reason')}",
                    f"workload {each.get('destination')}",
                    node,
                )
    if not found:
        raise NotGathered("no proxy counts denials")


def network_policies(facts: Facts) -> Iterator[Finding]:
    """Find NetworkPolicies that isolate pods of the mesh from tunnels or probes."""
    isolating = [
        item
        for item in facts.listed("NetworkPolicy")
        if "Ingress" in (o.spec(item).get("policyTypes") or ["Ingress"])
    ]
    for pod in o.captured(facts):
        namespace, name = o.key(pod)
        chosen = [
            item
            for item in isolating
            if o.key(item)[0] == namespace and o.selects(o.spec(item).get("podSelector"), o.labels(pod))
        ]
        if not chosen:
            continue
        entries = [entry for item in chosen for entry in o.spec(item).get("ingress") or ()]
        about, names = f"pod {namespace}/{name}", ", ".join(o.key(item)[1] for item in chosen)
        if not any(_has_port(entry, HBONE_PORT) for entry in entries):
            yield error(f"NetworkPolicy {names} does not allow TCP port 15008", about)
            continue
        # Kubelet probes a pod at the first of its addresses.
        probes = PROBES[6 if ":" in str(o.status(pod).get("podIP") or "") else 4]
        if _is_probed(pod) and not any(_allows(entry, probes) for entry in entries):
            yield warning(f"NetworkPolicy {names} does not allow probes, whose source is {probes}", about)


def _has_port(entry: Mapping[str, Any], port: int) -> bool:
    ports = entry.get("ports")
    if not ports:
        return True
    for each in ports:
        if each.get("protocol", "TCP") != "TCP":
            continue
        first = each.get("port")
        if first is None or (isinstance(first, int) and first <= port <= int(each.get("endPort") or first)):
            return True
    return False


def _allows(entry: Mapping[str, Any], source: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether a rule of a NetworkPolicy allows an address outside of the cluster."""
    peers = entry.get("from")
    if not peers:
        return True
    for peer in peers:
        block = peer.get("ipBlock")
        if not block or source not in ipaddress.ip_network(str(block.get("cidr")), strict=False):
            continue
        if not any(source in ipaddress.ip_network(str(each), strict=False) for each in block.get("except") or ()):
            return True
    return False


def _is_probed(pod: Object) -> bool:
    kinds = ("livenessProbe", "readinessProbe", "startupProbe")
    ways = ("httpGet", "tcpSocket", "grpc")
    return any(
        (container.get(kind) or {}).get(way)
        for container in o.spec(pod).get("containers") or ()
        for kind in kinds
        for way in ways
    )


CHECKS: Final = (
    Check(
        id="POL1", before=True, asks="policies of layer 7 have a waypoint", judge=layer_7,
        remedy="Attach it to a waypoint (targetRefs).",
    ),
    Check(
        id="POL2", asks="delivered policies have an effect", judge=delivered,
        remedy="Attach it to a waypoint (targetRefs). Until then, allow only the intended connections.", ), Check(
        id="POL3", before=True, asks="selectors select workloads", judge=selectors,
        remedy="Correct the labels; move the policy to its workloads' namespace.",
    ),
    Check(
        id="POL4", before=True, asks="actions, principals and ports can match", judge=mistakes,
        remedy="Write TRUST-DOMAIN/ns/NAMESPACE/sa/ACCOUNT and the application's port.",
    ),
    Check(
        id="POL5", asks="policies behind waypoints let the waypoint in", judge=waypoints,
        remedy="Allow the waypoint's account; judge clients at the waypoint.",
    ),
    Check(
        id="POL6", asks="clients without mTLS in the last hour", judge=strict,
        remedy="Enrol the callers, or exempt the port (PeerAuthentication).",
    ),
    Check(
        id="POL7", before=True, asks="NetworkPolicies allow tunnels and probes", judge=network_policies,
        remedy="Add TCP port 15008 and the source of probes (169.254.7.127/32) to the policy.",
    ),
)  # fmt: skip
