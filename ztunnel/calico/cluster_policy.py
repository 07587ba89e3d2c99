"""Reads policies of a cluster: AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy. Pure.

The API is policy.networking.k8s.io: v1alpha1 has the first two, v1alpha2 the third, with a field ``tier``. Admin
policies are asked before NetworkPolicy, baseline ones after it, which only happens for a pod and direction that
no NetworkPolicy isolates. They become policies of Calico's tiers ``kube-admin`` and ``kube-baseline``, whose ends
pass.

A rule with a peer that cannot be judged here (a domain name, a kind of peer of a later release) fails closed as
the API says: a rule that allows does not match such a peer, any other rule denies everything. ``notes`` of the
policy names each.
"""

from collections.abc import Mapping
from typing import Final

from xds.model import calico as c
from ztunnel.calico.kubernetes import Document, Json, KubernetesReader, is_port, with_ports
from ztunnel.calico.resources import ApiPolicy, ApiRule, Entity

_ADMIN: Final = "kube-admin"
_BASELINE: Final = "kube-baseline"
_TIERS: Final = {"Admin": _ADMIN, "Baseline": _BASELINE}
_MAX_PRIORITY: Final = 1000
#: The API gives the baseline of v1alpha1, of which there is one, no priority: it comes after all that have one.
_AFTER_ALL: Final = _MAX_PRIORITY + 1.0
_ALLOWS: Final = {"ClusterNetworkPolicy": "Accept"}
_PROTOCOLS: Final = ("TCP", "UDP", "SCTP")
_DENY_ALL: Final = ApiRule(c.Action.DENY)

#: Protocol and ports, or one name of a port; no protocol and no ports is anything.
_Ports = tuple[str | None, tuple[tuple[int, int] | str, ...]]


class ClusterPolicyReader(KubernetesReader):
    """Adds the kinds of policy.networking.k8s.io to the readers of Kubernetes' own."""

    def cluster_policy(self, resource: Document) -> None:
        """Read a policy of one of the three kinds; the resource has kind ``Kubernetes`` and its own."""
        where = f"{resource.where}: spec"
        given = resource.body.get("spec")
        if not isinstance(given, Mapping):
            self.fault(where, "is missing")
        fields: tuple[str, ...] = ("subject", "ingress", "egress")
        if resource.kind == "ClusterNetworkPolicy":
            fields += ("tier", "priority")
        elif resource.kind == "AdminNetworkPolicy":
            fields += ("priority",)
        spec = self.mapping(given, where, fields)
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
            # A policy without rules of a direction has no say about it, other than a NetworkPolicy.
            ingress=bool(inbound),
            egress=bool(outbound),
            inbound=inbound,
            outbound=outbound,
            notes=tuple(notes),
        )
        self.put(self.found.policies, policy.id, policy, resource.where)

    def _tier(self, spec: Json, kind: str, where: str) -> str:
        if kind != "ClusterNetworkPolicy":
            return _ADMIN if kind == "AdminNetworkPolicy" else _BASELINE
        found = spec.get("tier")
        if found not in _TIERS:
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
        """Return the pods of a subject; one that is faulty selects all, which matters if it is closed for that."""
        subject = _given(self.mapping(value, where, ("namespaces", "pods")))
        if len(subject) != 1:
            self.fault(where, "must be either namespaces or pods")
            return Entity()
        [(kind, found)] = subject.items()
        return self._pods(kind, found, where)

    def _pods(self, kind: str, value: object, where: str) -> Entity:
        """Return the pods of ``namespaces``, or of ``pods`` in namespaces; an empty selector selects all."""
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
        rules: list[ApiRule] = []
        ports_key = "protocols" if kind == "ClusterNetworkPolicy" else "ports"
        for index, item in enumerate(self.items(spec, key, where)):
            place = f"{where}.{key}[{index}]"
            entry = self.mapping(item, place, ("name", "action", peers_key, ports_key))
            action = self._action(entry, kind, place)
            peers, unknown = self._peers(entry, peers_key, place, outward=key == "egress")
            ports = self._cluster_ports(entry, ports_key, place)
            if any(isinstance(port, str) for _, found in ports for port in found) and any(
                peer.nets or peer.nodes is not None for peer in peers
            ):
                self.fault(
                    f"{place}.{ports_key}", "names of ports are those of pods; nodes and networks have none"
                )
            if unknown:
                what = "it allows nothing to that peer" if action is c.Action.ALLOW else "it denies everything"
                notes += [f"{place.removeprefix(where + '.')}.{text}, so {what}" for text in unknown]
                if action is not c.Action.ALLOW:
                    rules.append(_DENY_ALL)
                    continue
            for protocol, found in ports:
                for peer in peers:
                    source, destination = (peer, Entity()) if key == "ingress" else (Entity(), peer)
                    rules.append(ApiRule(action, source, with_ports(destination, found), protocol))
        return tuple(rules)

    def _action(self, entry: Json, kind: str, where: str) -> c.Action:
        allows = _ALLOWS.get(kind, "Allow")
        known = {allows: c.Action.ALLOW, "Deny": c.Action.DENY}
        if kind != "BaselineAdminNetworkPolicy":
            known["Pass"] = c.Action.PASS
        value = entry.get("action")
        if value not in known:
            self.fault(f"{where}.action", f"must be one of {', '.join(known)}, not {value!r}")
            return c.Action.DENY
        return known[value]

    def _peers(self, entry: Json, key: str, where: str, *, outward: bool) -> tuple[list[Entity], list[str]]:
        """Return peers, and what is to be said of those that cannot be judged here."""
        found: list[Entity] = []
        unknown: list[str] = []
        items = self.items(entry, key, where)
        if not items:
            self.fault(f"{where}.{key}", "must have at least one peer")
        for index, item in enumerate(items):
            place = f"{key}[{index}]"
            peer = _given(self.mapping(item, f"{where}.{place}", None))
            if len(peer) > 1:
                self.fault(f"{where}.{place}", f"must be one kind of peer, not {' and '.join(map(str, peer))}")
                continue
            kind, value = next(iter(peer.items()), ("", None))
            match kind:
                case "namespaces" | "pods":
                    found.append(self._pods(kind, value, f"{where}.{place}"))
                case "networks" if outward:
                    nets = self.nets(peer, kind, f"{where}.{place}")
                    if not nets:
                        self.fault(f"{where}.{place}.networks", "must have at least one network")
                    found.append(Entity(nets=nets))
                case "nodes" if outward:
                    found.append(Entity(nodes=self.label_selector(value, f"{where}.{place}.nodes", pods=False)))
                case "domainNames" if outward:
                    unknown.append(f"{place}.domainNames: names are not followed here")
                case "":
                    # As the API has it: a kind of peer that its server knows and this reader's release does not.
                    unknown.append(f"{place}: no kind of peer that is known here")
                case _:
                    unknown.append(f"{place}.{kind}: no kind of peer that is known here")
        return found, unknown

    def _cluster_ports(self, entry: Json, key: str, where: str) -> list[_Ports]:
        """Return what ``ports`` of v1alpha1 or ``protocols`` of v1alpha2 mean; no list at all means anything."""
        if entry.get(key) is None:
            return [(None, ())]
        items = self.items(entry, key, where)
        if not items:
            self.fault(f"{where}.{key}", "must not be empty")
        by_protocol: dict[str, list[tuple[int, int]] | None] = {}
        names: list[_Ports] = []
        for index, item in enumerate(items):
            place = f"{where}.{key}[{index}]"
            port = _given(self.mapping(item, place, None))
            if len(port) != 1:
                self.fault(place, "must be one of the ways to say a port")
                continue
            [(way, value)] = port.items()
            if way in ("namedPort", "destinationNamedPort") and (way == "namedPort") == (key == "ports"):
                if not isinstance(value, str) or not value:
                    self.fault(f"{place}.{way}", f"must be the name of a port, not {value!r}")
                    continue
                names.append((None, (value,)))
                continue
            read = self._port_of_v1alpha1 if key == "ports" else self._port_of_v1alpha2
            found = read(way, value, place)
            if found is None:
                continue
            protocol, ports = found
            if ports is None:
                by_protocol[protocol] = None  # every port of the protocol, whatever else is listed
                continue
            listed = by_protocol.setdefault(protocol, [])
            if listed is not None:
                listed.append(ports)
        return [(protocol, tuple(ports or ())) for protocol, ports in sorted(by_protocol.items())] + names

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
        """Read ``tcp``, ``udp`` or ``sctp``; without ``destinationPort`` it is every port of the protocol."""
        if way.upper() not in _PROTOCOLS or way != way.lower():
            self.fault(f"{where}.{way}", "unknown; known are tcp, udp, sctp, destinationNamedPort")
            return None
        entry = self.mapping(value, f"{where}.{way}", ("destinationPort",))
        if entry.get("destinationPort") is None:
            return way.upper(), None
        place = f"{where}.{way}.destinationPort"
        port = _given(self.mapping(entry["destinationPort"], place, ("number", "range")))
        if len(port) != 1:
            self.fault(place, "must be either number or range")
            return None
        if "number" in port:
            found = self._range(port["number"], port["number"], f"{place}.number")
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


def _given(entry: Json) -> Json:
    """Return the fields that are set: JSON's null is none."""
    return {key: value for key, value in entry.items() if value is not None}
