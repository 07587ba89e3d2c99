"""Reads policies of a cluster: AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy. Pure.

The API is policy.networking.k8s.io: v1alpha1 has the first two, v1alpha2 the third, with a field ``tier``. Admin
policies are evaluated before NetworkPolicy, baseline policies afterwards, and only for a pod and direction without
an isolating NetworkPolicy. They become policies of Calico's tiers ``kube-admin`` and ``kube-baseline``. A flow
without a matching rule passes these tiers.

A rule whose peer cannot be evaluated here (a domain name, a kind from a later release) fails closed as the API
requires: an allowing rule does not match such a peer, and any other rule denies all traffic. The policy's
``notes`` name each such rule.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Final

from xds.model import calico as c
from ztunnel.policy.calico.kubernetes import (
    ALLOWS_NOTHING,
    ALLOWS_THE_REST,
    Document,
    Json,
    KubernetesReader,
    RuleFaults,
    given,
    is_port,
    with_ports,
)
from ztunnel.policy.calico.resources import ApiPolicy, ApiRule, Entity

_ADMIN: Final = "kube-admin"
_BASELINE: Final = "kube-baseline"
_TIERS: Final = {"Admin": _ADMIN, "Baseline": _BASELINE}
_MAX_PRIORITY: Final = 1000
#: v1alpha1's only baseline policy has no priority in the API. It comes after all policies with a priority.
_AFTER_ALL: Final = _MAX_PRIORITY + 1.0
_ALLOWS: Final = {"ClusterNetworkPolicy": "Accept"}
_PROTOCOLS: Final = ("TCP", "UDP", "SCTP")
#: The fields of an entry of v1alpha2's ``protocols`` that name a protocol.
_PROTOCOL_FIELDS: Final = ("tcp", "udp", "sctp")
_DENY_ALL: Final = ApiRule(c.Action.DENY)

#: A protocol and its ports, or a named port. Without either it matches all traffic.
_Ports = tuple[str | None, tuple[tuple[int, int] | str, ...]]


class ClusterPolicyReader(KubernetesReader):
    """Adds the kinds of policy.networking.k8s.io to the reader of Kubernetes' own kinds."""

    def cluster_policy(self, resource: Document) -> None:
        """Read a policy of policy.networking.k8s.io. The kind in its id is ``Kubernetes`` followed by the
        resource's kind.
        """
        where = f"{resource.where}: spec"
        spec, unclear = self.attempt(lambda: self._cluster_spec(resource, where))
        self.faults += unclear
        notes: list[str] = []
        inbound = self._cluster_rules(spec, "ingress", "from", resource.kind, where, notes)
        outbound = self._cluster_rules(spec, "egress", "to", resource.kind, where, notes)
        selected = self._pods_of(spec.get("subject"), f"{where}.subject")
        policy = ApiPolicy(
            id=c.PolicyId(f"Kubernetes{resource.kind}", "", resource.name),
            tier=self._tier(spec, resource.kind, where),
            order=self._priority(spec, resource.kind, where),
            selector=selected.selector,
            namespace_selector=selected.namespace_selector,
            # If such a policy has no rules for a direction, it does not govern that direction, unlike a
            # NetworkPolicy.
            ingress=bool(inbound or unclear),
            egress=bool(outbound or unclear),
            inbound=inbound,
            outbound=outbound,
            notes=tuple(notes),
        )
        self.put(self.found.policies, policy.id, policy, resource.where)

    def _cluster_spec(self, resource: Document, where: str) -> Json:
        given = resource.body.get("spec")
        if not isinstance(given, Mapping):
            self.fault(where, "is missing")
            return {}
        fields: tuple[str, ...] = ("subject", "ingress", "egress")
        if resource.kind == "ClusterNetworkPolicy":
            fields += ("tier", "priority")
        elif resource.kind == "AdminNetworkPolicy":
            fields += ("priority",)
        return self.mapping(given, where, fields)

    def _tier(self, spec: Json, kind: str, where: str) -> str:
        if kind != "ClusterNetworkPolicy":
            return _ADMIN if kind == "AdminNetworkPolicy" else _BASELINE
        found = spec.get("tier")
        if not isinstance(found, str) or found not in _TIERS:
            self.fault(f"{where}.tier", f"must be Admin or Baseline, not {found!r}")
            return _ADMIN
        return _TIERS[found]

    def _priority(self, spec: Json, kind: str, where: str) -> float:
        if kind == "BaselineAdminNetworkPolicy":
            return _AFTER_ALL
        value = spec.get("priority")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_PRIORITY:
            self.fault(f"{where}.priority", f"must be 0 to {_MAX_PRIORITY}, not {value!r}")
            return 0.0
        return float(value)

    def _pods_of(self, value: object, where: str) -> Entity:
        """Return the pods of a subject. A faulty subject selects all pods. So the policy that replaces the faulty
        one denies for every pod.
        """
        subject = given(self.mapping(value, where, ("namespaces", "pods")))
        if len(subject) != 1:
            self.fault(where, "must be either namespaces or pods")
            return Entity()
        [(kind, found)] = subject.items()
        return self._pods(kind, found, where)

    def _pods(self, kind: str, value: object, where: str) -> Entity:
        """Return the pods that ``namespaces`` selects, or ``pods`` with its namespaces. An empty selector selects
        all.
        """
        if kind == "namespaces":
            pods, namespaces, place = None, value, f"{where}.namespaces"
        else:
            chosen = self.mapping(value, f"{where}.pods", ("podSelector", "namespaceSelector"))
            pods, namespaces = chosen.get("podSelector"), chosen.get("namespaceSelector")
            place = f"{where}.pods.namespaceSelector"
        return Entity(
            selector=self.label_selector(pods, f"{where}.pods.podSelector", pods=True),
            namespace_selector=self.label_selector(namespaces, place, pods=False),
        )

    # Rules

    def _cluster_rules(
        self, spec: Json, key: str, peers_key: str, kind: str, where: str, notes: list[str]
    ) -> tuple[ApiRule, ...]:
        items, faults = self.attempt(lambda: self.items(spec, key, where))
        if faults:
            self.flawed(faults, "everything is denied there")
            return (_DENY_ALL,)
        rules: list[ApiRule] = []
        for index, item in enumerate(items):
            place = f"{where}.{key}[{index}]"
            unknown: list[str] = []
            allows = isinstance(item, Mapping) and item.get("action") == _ALLOWS.get(kind, "Allow")
            found = RuleFaults(allows=allows)
            made = list(self._cluster_rule(item, key, peers_key, kind, place, found, unknown))
            what = "it allows nothing to that peer" if allows else "it denies everything"
            notes += [f"{place.removeprefix(where + '.')}.{text}, so {what}" for text in unknown]
            if allows:
                self.flawed(found.faults, ALLOWS_NOTHING if found.opens else ALLOWS_THE_REST)
                rules += () if found.opens else made
            else:
                self.flawed(found.faults, "the rule denies everything")
                rules += [_DENY_ALL] if found.faults or unknown else made
        return tuple(rules)

    def _cluster_rule(
        self,
        item: object,
        key: str,
        peers_key: str,
        kind: str,
        where: str,
        found: RuleFaults,
        unknown: list[str],
    ) -> Iterator[ApiRule]:
        """Convert one rule: yield a rule for each peer and protocol; for ``unknown`` see :meth:`_peers`."""
        ports_key = "protocols" if kind == "ClusterNetworkPolicy" else "ports"
        entry = self.needed(found, lambda: self.mapping(item, where, ("name", "action", peers_key, ports_key)))
        action = self.needed(found, lambda: self._action(entry, kind, where))
        peers = self._peers(entry, peers_key, where, found, unknown)
        ports = self.entries(found, lambda: self._cluster_ports(entry, ports_key, where))
        named = any(isinstance(port, str) for _, each in ports for port in each)
        if named and any(peer.nets or peer.nodes is not None for peer in peers):
            found.note(f"{where}.{ports_key}", "names of ports are those of pods; nodes and networks have none")
        for protocol, each in ports:
            for peer in peers:
                source, destination = (peer, Entity()) if key == "ingress" else (Entity(), peer)
                yield ApiRule(action, source, with_ports(destination, each), protocol)

    def _action(self, entry: Json, kind: str, where: str) -> c.Action:
        allows = _ALLOWS.get(kind, "Allow")
        known = {allows: c.Action.ALLOW, "Deny": c.Action.DENY}
        if kind != "BaselineAdminNetworkPolicy":
            known["Pass"] = c.Action.PASS
        value = entry.get("action")
        if not isinstance(value, str) or value not in known:
            self.fault(f"{where}.action", f"must be one of {', '.join(known)}, not {value!r}")
            return c.Action.DENY
        return known[value]

    def _peers(self, entry: Json, key: str, where: str, rule: RuleFaults, unknown: list[str]) -> list[Entity]:
        """Return the peers that this reader can evaluate. ``unknown`` receives notes about all other peers."""
        found: list[Entity] = []
        items = self.needed(rule, lambda: self.items(entry, key, where))
        if not items:
            rule.note(f"{where}.{key}", "must have at least one peer")
        for index, item in enumerate(items):
            read = functools.partial(self._cluster_peer, item, f"{key}[{index}]", where, rule, unknown)
            peer, faults = self.attempt(read)
            rule.faults += faults
            found += [peer] if peer is not None and not faults else []
        return found

    def _cluster_peer(
        self, item: object, place: str, where: str, rule: RuleFaults, unknown: list[str]
    ) -> Entity | None:
        outward = place.startswith("to[")
        peer = given(self.mapping(item, f"{where}.{place}", None))
        if len(peer) > 1:
            self.fault(f"{where}.{place}", f"must be one kind of peer, not {' and '.join(map(str, peer))}")
            return None
        kind, value = next(iter(peer.items()), ("", None))
        match kind:
            case "namespaces" | "pods":
                return self._pods(kind, value, f"{where}.{place}")
            case "networks" if outward:
                nets, faults = self.attempt(lambda: self.nets(peer, "networks", f"{where}.{place}"))
                rule.faults += faults
                if not nets:
                    self.fault(f"{where}.{place}.networks", "must have at least one network")
                return Entity(nets=nets)
            case "nodes" if outward:
                return Entity(nodes=self.label_selector(value, f"{where}.{place}.nodes", pods=False))
            case "domainNames" if outward:
                unknown.append(f"{place}.domainNames: names are not followed here")
            case "":
                # The API requires this for a kind of peer that the API server supports but this reader lacks.
                unknown.append(f"{place}: no kind of peer that is known here")
            case _:
                unknown.append(f"{place}.{kind}: no kind of peer that is known here")
        return None

    def _cluster_ports(self, entry: Json, key: str, where: str) -> tuple[_Ports, ...]:
        """Return the protocols and ports in ``ports`` (v1alpha1) or ``protocols`` (v1alpha2). A missing list
        matches all.
        """
        if entry.get(key) is None:
            return ((None, ()),)
        items = self.items(entry, key, where)
        if not items:
            self.fault(f"{where}.{key}", "must not be empty")
        by_protocol: dict[str, list[tuple[int, int]] | None] = {}
        names: list[_Ports] = []
        for index, item in enumerate(items):
            place = f"{where}.{key}[{index}]"
            found, faults = self.attempt(functools.partial(self._cluster_port, item, key, place))
            self.faults += faults
            if faults or found is None:
                continue
            protocol, ports = found
            if isinstance(ports, str):
                names.append((None, (ports,)))
            elif ports is None:
                by_protocol[protocol] = None  # every port of the protocol, whatever else is listed
            elif (listed := by_protocol.setdefault(protocol, [])) is not None:
                listed.append(ports)
        numbers = ((protocol, tuple(ports or ())) for protocol, ports in sorted(by_protocol.items()))
        return (*numbers, *names)

    def _cluster_port(self, item: object, key: str, where: str) -> tuple[str, tuple[int, int] | str | None] | None:
        """Return the protocol of an entry, and its ports: a range, a port's name, or None for all ports."""
        port = given(self.mapping(item, where, None))
        if len(port) != 1:
            self.fault(where, "must be one of the ways to say a port")
            return None
        [(way, value)] = port.items()
        if way in ("namedPort", "destinationNamedPort") and (way == "namedPort") == (key == "ports"):
            if not isinstance(value, str) or not value:
                self.fault(f"{where}.{way}", f"must be the name of a port, not {value!r}")
                return None
            return "", value
        read = self._port_of_v1alpha1 if key == "ports" else self._port_of_v1alpha2
        return read(way, value, where)

    def _port_of_v1alpha1(self, way: str, value: object, where: str) -> tuple[str, tuple[int, int] | None] | None:
        """Read ``portNumber`` or ``portRange``."""
        fields = {"portNumber": ("protocol", "port"), "portRange": ("protocol", "start", "end")}.get(way)
        if fields is None:
            self.fault(f"{where}.{way}", "unknown; known are portNumber, portRange, namedPort")
            return None
        entry = self.mapping(value, f"{where}.{way}", fields)
        protocol = self.choice(entry, "protocol", f"{where}.{way}", _PROTOCOLS)
        found = self._range(entry.get(fields[1]), entry.get(fields[-1]), f"{where}.{way}")
        return (protocol, found) if found is not None else None

    def _port_of_v1alpha2(self, way: str, value: object, where: str) -> tuple[str, tuple[int, int] | None] | None:
        """Read ``tcp``, ``udp`` or ``sctp``. Without ``destinationPort`` the entry means every port of the
        protocol.
        """
        if way not in _PROTOCOL_FIELDS:
            self.fault(f"{where}.{way}", "unknown; known are tcp, udp, sctp, destinationNamedPort")
            return None
        entry = self.mapping(value, f"{where}.{way}", ("destinationPort",))
        if entry.get("destinationPort") is None:
            return way.upper(), None
        place = f"{where}.{way}.destinationPort"
        port = given(self.mapping(entry["destinationPort"], place, ("number", "range")))
        if len(port) != 1:
            self.fault(place, "must be either number or range")
            return None
        if "number" in port:
            found = self._range(port["number"], port["number"], f"{place}.number")
        elif "range" not in port:
            return None  # a field of a later release, which mapping() has recorded
        else:
            limits = self.mapping(port["range"], f"{place}.range", ("start", "end"))
            found = self._range(limits.get("start"), limits.get("end"), f"{place}.range")
        return (way.upper(), found) if found is not None else None

    def _range(self, first: object, last: object, where: str) -> tuple[int, int] | None:
        if is_port(first) and is_port(last):
            assert isinstance(first, int)
            assert isinstance(last, int)
            if 0 < first <= last:
                return first, last
        said = f"{first!r}" if first == last else f"{first!r} to {last!r}"
        self.fault(where, f"must be a port, or two in order, not {said}")
        return None
