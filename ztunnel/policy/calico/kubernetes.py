"""Reads Kubernetes objects that policies need: pods, namespaces, accounts, services, nodes, NetworkPolicy. Pure.

An unusable part of an object is a :class:`Flaw`. The part left out is chosen so that no more traffic is admitted:
a list's entry, a whole allowing rule, or a denying rule's clause. A fault makes the whole object unusable. Only
parts that select pods or decide when the object applies can have faults.

The number of entries is not limited, because an API server stores no objects of more than a few megabytes.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final, TypeAlias, TypeVar

from xds.digits import whole_number
from xds.model import calico as c
from xds.model.address import IpNetwork, parse_network
from xds.model.selector import SelectorError, parse_selector
from ztunnel.policy.calico.resources import (
    ApiPolicy,
    ApiRule,
    Entity,
    Labelled,
    NamedPort,
    Node,
    Pod,
    Resources,
    Service,
    own_label,
)
from ztunnel.runtime.formats.config_reader import ConfigReader

Json: TypeAlias = Mapping[str, Any]
_Value = TypeVar("_Value")
IpAddress: TypeAlias = IPv4Address | IPv6Address

#: The kinds of Kubernetes' policies, as policy ids contain them.
_POLICY_KINDS: Final = {
    "NetworkPolicy": "KubernetesNetworkPolicy",
    "StagedKubernetesNetworkPolicy": "StagedKubernetesNetworkPolicy",
}
#: The annotation of enrolled pods, written by Istio's node agent and ours.
_REDIRECTION: Final = "ambient.istio.io/redirection"
_NAMED_PORT: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
#: The values of Calico's ``stagedAction``; the first is the default.
STAGED_ACTIONS: Final = ("Set", "Delete", "Learn", "Ignore")
_ZEROS: Final = re.compile(r"(?<![0-9])0+(?=[0-9])")
_RANGE: Final = re.compile(r"([0-9]{1,5}):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Document:
    """A document whose kind the reader knows."""

    kind: str
    name: str
    metadata: Json
    body: Json
    where: str


@dataclass(frozen=True, slots=True)
class Flaw:
    """A part of an object that is not enforced as written.

    Attributes:
        fault: the problem, starting with the path of the field.
        consequence: the resulting behaviour.
    """

    fault: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.fault}, so {self.consequence}"


@dataclass(slots=True)
class RuleFaults:
    """The unreadable parts of one rule.

    Attributes:
        allows: whether the rule allows.
        faults: the faults of these parts, each beginning with its place.
        opens: whether the rest of the rule matches more than the rule as written, which is acceptable for a
            denying rule.
    """

    allows: bool
    faults: list[str] = field(default_factory=list)
    opens: bool = False

    def note(self, place: str, reason: str) -> None:
        """Record a fault that concerns the whole rule."""
        self.faults.append(f"{place}: {reason}")
        self.opens = True


class KubernetesReader(ConfigReader):
    """Reads documents, each of a single kind, into :attr:`found`.

    Attributes:
        found: the resources read.
        flaws: the parts that were left out or made stricter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = Resources()
        self.flaws: list[Flaw] = []

    def attempt(self, read: Callable[[], _Value]) -> tuple[_Value, list[str]]:
        """Read a value, and return it with the faults found in it. These do not count as faults of the object."""
        before = len(self.faults)
        value = read()
        faults = self.faults[before:]
        del self.faults[before:]
        return value, faults

    def flawed(self, faults: Iterable[str], consequence: str) -> None:
        """Record the faults of a part as flaws with this consequence."""
        self.flaws += [Flaw(fault, consequence) for fault in faults]

    def without(self, read: Callable[[], _Value], consequence: str) -> _Value:
        """Return a value without its faulty parts. Each such part is reported as a flaw with this consequence."""
        value, faults = self.attempt(read)
        self.flawed(faults, consequence)
        return value

    def needed(self, rule: RuleFaults, read: Callable[[], _Value]) -> _Value:
        """Return a clause that is only valid with all of its entries. If one is faulty, the rule could match more
        than it does as written.
        """
        value, faults = self.attempt(read)
        rule.faults += faults
        rule.opens = rule.opens or bool(faults)
        return value

    def entries(self, rule: RuleFaults, read: Callable[[], tuple[_Value, ...]]) -> tuple[_Value, ...]:
        """Return the alternatives of a rule's clause. A faulty one is removed from an allowing rule. It makes any
        other rule match any value.
        """
        values, faults = self.attempt(read)
        rule.faults += faults
        if faults and not (rule.allows and values):
            rule.opens = True
            return ()
        return values

    def put(self, table: dict[Any, Any], key: Any, value: Any, where: str) -> None:
        """Add a resource to its table, or record a fault if the table has it already."""
        if key in table:
            self.fault(where, "is repeated")
        table[key] = value

    def labels(self, metadata: Json, where: str) -> Mapping[str, str]:
        place = f"{where}: metadata.labels"
        found = self.without(lambda: self.mapping(metadata.get("labels"), place, None), "it has no labels")
        return self.without(lambda: self.label_texts(found, place), "it counts as that text")

    def label_texts(self, value: object, where: str) -> Mapping[str, str]:
        """Return labels. A null value is read as the empty text, like by API servers. Other values must be
        texts.
        """
        labels = self.mapping(value, where, None)
        for key, text in labels.items():
            if text is not None and not isinstance(text, str):
                self.fault(f"{where}.{key}", f"must be text, not {text!r}")
        return {str(key): "" if text is None else str(text) for key, text in labels.items()}

    def namespace_of(self, resource: Document) -> str:
        """Return the namespace of a resource, ``default`` if it names none."""
        value = resource.metadata.get("namespace", "default")
        return value if isinstance(value, str) and value else "default"

    def nets(self, entry: Json, key: str, where: str) -> tuple[IpNetwork, ...]:
        """Return a list of networks without invalid entries. The bits behind a prefix are cleared."""
        found = []
        for value in self.items(entry, key, where):
            network = parse_network(value) if isinstance(value, str) else None
            if network is None:
                self.fault(f"{where}.{key}", f"must be networks, such as 10.0.0.0/8, not {value!r}")
            else:
                found.append(network)
        return tuple(found)

    def read_namespace(self, resource: Document) -> None:
        found = Labelled("", resource.name, self.labels(resource.metadata, resource.where))
        self.put(self.found.namespaces, resource.name, found, resource.where)

    def account(self, resource: Document) -> None:
        """Read a ServiceAccount."""
        namespace = self.namespace_of(resource)
        found = Labelled(namespace, resource.name, self.labels(resource.metadata, resource.where))
        self.put(self.found.accounts, (namespace, resource.name), found, resource.where)

    def pod(self, resource: Document) -> None:
        """Read a Pod. A pod that has finished no longer has addresses."""
        spec = self.mapping(resource.body.get("spec"), f"{resource.where}: spec", None)
        status = self.mapping(resource.body.get("status"), f"{resource.where}: status", None)
        annotations = self.mapping(resource.metadata.get("annotations"), f"{resource.where}: annotations", None)
        finished = status.get("phase") in ("Failed", "Succeeded")
        listed = [
            entry.get("ip")
            for entry in self.items(status, "podIPs", f"{resource.where}: status")
            if isinstance(entry, Mapping)
        ]
        texts = listed or [text for text in [status.get("podIP")] if text]
        addresses: tuple[IpAddress, ...] = ()
        if texts and not finished:
            addresses = self.without(
                lambda: self.addresses(texts, f"{resource.where}: status.podIPs"), "it is not one of its addresses"
            )
        pod = Pod(
            namespace=self.namespace_of(resource),
            name=resource.name,
            uid=str(resource.metadata.get("uid", "")),
            labels=self.labels(resource.metadata, resource.where),
            account=self.text(spec, "serviceAccountName", f"{resource.where}: spec", "default"),
            node=self.text(spec, "nodeName", f"{resource.where}: spec", ""),
            addresses=addresses,
            ports=tuple(self._named_ports(spec, f"{resource.where}: spec")),
            host_network=spec.get("hostNetwork") is True,
            captured=annotations.get(_REDIRECTION) == "enabled",
            created=str(resource.metadata.get("creationTimestamp") or ""),
            terminating=bool(resource.metadata.get("deletionTimestamp")),
        )
        self.put(self.found.pods, (pod.namespace, pod.name), pod, resource.where)

    def _named_ports(self, spec: Json, where: str) -> Iterator[NamedPort]:
        # Init containers that keep running (native sidecars) have ports as well.
        for key in ("containers", "initContainers"):
            for container in self.items(spec, key, where):
                ports = container.get("ports") if isinstance(container, Mapping) else None
                for port in ports if isinstance(ports, list) else ():
                    if isinstance(port, Mapping) and port.get("name"):
                        name, protocol = str(port["name"]), str(port.get("protocol", "TCP")).lower()
                        number, faults = self.attempt(
                            functools.partial(self.port, port.get("containerPort"), f"{where}.{key}.ports")
                        )
                        self.flawed(faults, f"it has no port of the name {name}")
                        if not faults:
                            yield NamedPort(name, protocol, number)

    def node(self, resource: Document) -> None:
        """Read a Node: its labels and its IP addresses."""
        place = f"{resource.where}: status"
        status = self.mapping(resource.body.get("status"), place, None)
        found: list[IpAddress] = []
        for entry in self.items(status, "addresses", place):
            text = entry.get("address") if isinstance(entry, Mapping) else None
            if isinstance(entry, Mapping) and str(entry.get("type", "")).endswith("IP"):  # others are host names
                read = functools.partial(self.addresses, [text], f"{place}.addresses")
                found += self.without(read, "it is not one of its addresses")
        node = Node(resource.name, self.labels(resource.metadata, resource.where), tuple(found))
        self.put(self.found.nodes, resource.name, node, resource.where)

    def service(self, resource: Document) -> None:
        where = f"{resource.where}: spec"
        spec = self.mapping(resource.body.get("spec"), where, None)
        labels = self.label_texts(spec.get("selector"), f"{where}.selector")
        selector = {own_label(key): value for key, value in labels.items()}
        targets = []
        for port in self.items(spec, "ports", where):
            entry = self.mapping(port, f"{where}.ports", None)
            target = entry.get("targetPort", entry.get("port"))
            if not isinstance(target, int | str):
                fault = f"{where}.ports: needs port or targetPort, not {port!r}"
                self.flawed([fault], "it has no such port")
                continue
            targets.append((str(entry.get("protocol", "TCP")).lower(), target))
        found = Service(
            self.namespace_of(resource),
            resource.name,
            selector,
            tuple(targets),
        )
        self.put(self.found.services, (found.namespace, found.name), found, resource.where)

    def network_policy(self, resource: Document) -> None:
        """Convert a Kubernetes NetworkPolicy to a policy with allowing rules only, of order 1,000 in the tier
        ``default``.
        """
        where = f"{resource.where}: spec"
        (spec, types), unclear = self.attempt(lambda: self._spec_and_types(resource, where))
        self.faults += unclear
        if self.is_staged_removal(resource, spec, where):
            return
        policy = ApiPolicy(
            id=c.PolicyId(_POLICY_KINDS[resource.kind], self.namespace_of(resource), resource.name),
            order=1000.0,
            selector=self.label_selector(spec.get("podSelector"), f"{where}.podSelector", pods=True),
            ingress=bool(unclear) or "Ingress" in types or not types,
            egress=bool(unclear) or "Egress" in types or (not types and bool(spec.get("egress"))),
            inbound=self._rules(spec, "ingress", "from", where),
            outbound=self._rules(spec, "egress", "to", where),
        )
        self.put(self.found.policies, policy.id, policy, resource.where)

    def _spec_and_types(self, resource: Document, where: str) -> tuple[Json, tuple[str, ...]]:
        known: tuple[str, ...] = ("podSelector", "policyTypes", "ingress", "egress")
        if resource.kind.startswith("Staged"):
            known += ("stagedAction",)
        spec = self.mapping(resource.body.get("spec"), where, known)
        types = self.texts(spec, "policyTypes", where)
        for value in types:
            if value not in ("Ingress", "Egress"):
                self.fault(f"{where}.policyTypes", f"must be Ingress or Egress, not {value!r}")
        return spec, types

    def is_staged_removal(self, resource: Document, spec: Json, where: str) -> bool:
        """Return whether this is a staged policy that stands for the removal of a policy, or for nothing. Such a
        policy has no rules to evaluate.
        """
        if not resource.kind.startswith("Staged"):
            return False
        return self.choice(spec, "stagedAction", where, STAGED_ACTIONS) in ("Delete", "Ignore")

    def _rules(self, spec: Json, key: str, peers_key: str, where: str) -> tuple[ApiRule, ...]:
        rules: list[ApiRule] = []
        items = self.without(functools.partial(self.items, spec, key, where), "it allows nothing there")
        for index, item in enumerate(items):
            rule = RuleFaults(allows=True)
            found = list(self._rule(item, key, peers_key, f"{where}.{key}[{index}]", rule))
            self.flawed(rule.faults, ALLOWS_NOTHING if rule.opens else ALLOWS_THE_REST)
            rules += () if rule.opens else found
        return tuple(rules)

    def _rule(self, item: object, key: str, peers_key: str, where: str, rule: RuleFaults) -> Iterator[ApiRule]:
        """Convert one rule: yield an allow rule for each peer and protocol."""
        entry = self.needed(rule, lambda: self.mapping(item, where, (peers_key, "ports")))
        peers: list[Entity] = []
        listed = self.needed(rule, lambda: self.items(entry, peers_key, where))
        for number, peer in enumerate(listed):
            read = functools.partial(self._peer, peer, f"{where}.{peers_key}[{number}]")
            found, faults = self.attempt(read)
            rule.faults += faults
            peers += () if faults else [found]
        # A rule without peers matches any peer. A rule without usable peers matches none.
        rule.opens = rule.opens or bool(listed and not peers)
        for protocol, ports in self.entries(rule, lambda: self._ports(entry, where)):
            for peer in peers or [Entity()]:
                source, destination = (peer, Entity()) if key == "ingress" else (Entity(), peer)
                yield ApiRule(c.Action.ALLOW, source, with_ports(destination, ports), protocol)

    def _ports(self, entry: Json, where: str) -> tuple[tuple[str | None, tuple[tuple[int, int] | str, ...]], ...]:
        """Return the protocols and ports of a rule, without unreadable ones. A missing list matches any."""
        items = self.items(entry, "ports", where)
        if not items:
            return ((None, ()),)
        by_protocol: dict[str, list[tuple[int, int] | str] | None] = {}
        for index, item in enumerate(items):
            place = f"{where}.ports[{index}]"
            found, faults = self.attempt(functools.partial(self._port, item, place))
            self.faults += faults
            if faults or found is None:
                continue
            protocol, port = found
            if port is None:
                by_protocol[protocol] = None  # every port of the protocol, whatever else is listed
                continue
            ports = by_protocol.setdefault(protocol, [])
            if ports is not None:
                ports.append(port)
        return tuple((protocol, tuple(ports or ())) for protocol, ports in sorted(by_protocol.items()))

    def _port(self, item: object, where: str) -> tuple[str, tuple[int, int] | str | None] | None:
        """Return the protocol of an entry and its port, None for all ports of the protocol."""
        port = given(self.mapping(item, where, ("protocol", "port", "endPort")))
        protocol = self.choice(port, "protocol", where, ("TCP", "UDP", "SCTP"))
        first, end = port.get("port"), port.get("endPort")
        if first is None:
            if end is not None:
                self.fault(f"{where}.endPort", "needs port")
            return protocol, None
        found = read_port(first)
        if found is None or (
            end is not None and not (isinstance(found, tuple) and is_port(end) and end >= found[0])
        ):
            self.fault(where, f"must be a port or a name, and endPort no lower, not {first!r} to {end!r}")
            return None
        return protocol, (found[0], end) if isinstance(found, tuple) and end is not None else found

    def _peer(self, item: object, where: str) -> Entity:
        peer = given(self.mapping(item, where, ("ipBlock", "podSelector", "namespaceSelector")))
        if not peer:
            self.fault(where, "must be ipBlock, podSelector or namespaceSelector")
        if "ipBlock" in peer:
            if len(peer) > 1:
                self.fault(where, "ipBlock stands alone")
            block = self.mapping(peer["ipBlock"], f"{where}.ipBlock", ("cidr", "except"))
            excepted = self.items(block, "except", f"{where}.ipBlock")
            blocks = {"cidr": [_decimal(block.get("cidr") or "")], "except": list(map(_decimal, excepted))}
            nets = self.nets(blocks, "cidr", f"{where}.ipBlock")
            return Entity(nets=nets, not_nets=self.nets(blocks, "except", f"{where}.ipBlock"))
        namespaces = peer.get("namespaceSelector")
        return Entity(
            selector=self.label_selector(peer.get("podSelector"), f"{where}.podSelector", pods=True),
            namespace_selector=""
            if namespaces is None
            else self.label_selector(namespaces, f"{where}.namespaceSelector", pods=False),
        )

    def label_selector(self, value: object, where: str, *, pods: bool) -> str:
        """Return a LabelSelector in Calico's language. A selector of pods also gets the term that selects only
        Kubernetes' pods.

        If the selector is faulty, the result selects all objects.
        """
        everything = ["projectcalico.org/orchestrator == 'k8s'"] if pods else []
        terms, faults = self.attempt(lambda: self._label_terms(value, where, own_label if pods else str))
        text = " && ".join([*everything, *(() if faults else terms)]) or "all()"
        try:
            parse_selector(text)
        except SelectorError as error:
            faults.append(f"{where}: {error}")
            text = " && ".join(everything) or "all()"
        self.faults += faults
        return text

    def _label_terms(self, value: object, where: str, label: Callable[[str], str]) -> list[str]:
        """Return the terms of a LabelSelector. ``label`` returns the key of a label in Calico's language."""
        selector = self.mapping(value, where, ("matchLabels", "matchExpressions"))
        labels = self.label_texts(selector.get("matchLabels"), f"{where}.matchLabels")
        terms = [_is(label(key), labels[key]) for key in sorted(labels)]
        for index, item in enumerate(self.items(selector, "matchExpressions", where)):
            place = f"{where}.matchExpressions[{index}]"
            entry = self.mapping(item, place, ("key", "operator", "values"))
            key = label(self.text(entry, "key", place, ""))
            values = self.items(entry, "values", place)
            if not all(isinstance(each, str) for each in values):
                self.fault(f"{place}.values", "must be texts")
            texts = [str(each) for each in values]
            match self.choice(entry, "operator", place, ("In", "NotIn", "Exists", "DoesNotExist")):
                case "In":
                    terms.append(_is_one_of(key, "in", texts))
                case "NotIn":
                    terms.append(_is_one_of(key, "not in", texts))
                case "Exists":
                    terms.append(f"has({key})")
                case _:
                    terms.append(f"!has({key})")
        return terms


#: The consequence for an allowing rule that has faults.
ALLOWS_NOTHING: Final = "the rule allows nothing"
ALLOWS_THE_REST: Final = "the rule allows only what the rest of it says"


def _decimal(value: object) -> object:
    """Return a network of a NetworkPolicy without leading zeros in its octets.

    API servers accept leading zeros (``netutils.ParseCIDRSloppy``), and read the octets as decimal numbers.
    """
    if not isinstance(value, str) or ":" in value:
        return value
    return _ZEROS.sub("", value)


def _is_one_of(label: str, operator: str, values: list[str]) -> str:
    """Return a term of Calico's selector language. A text with both kinds of quotes cannot be quoted, but no label
    has such a value.
    """
    return f"{label} {operator} {{{', '.join(map(_quoted, filter(_is_value, values)))}}}"


def _is(label: str, value: str) -> str:
    return f"{label} == {_quoted(value)}" if _is_value(value) else _is_one_of(label, "in", [])


def _is_value(text: str) -> bool:
    return not {"'", '"'} <= set(text)


def _quoted(value: str) -> str:
    return f'"{value}"' if "'" in value else f"'{value}'"


def given(entry: Json) -> Json:
    """Return the fields of an object that are set. API servers read a null like a missing field."""
    return {key: value for key, value in entry.items() if value is not None}


def read_port(value: object) -> tuple[int, int] | str | None:
    """Read a port, a range ``first:last`` or the name of a port. Return None for any other text."""
    if is_port(value):
        assert isinstance(value, int)
        return value, value
    if not isinstance(value, str):
        return None
    if value.isascii() and value.isdigit():
        number = whole_number(value, 65535)
        return None if number is None else (number, number)
    if (found := _RANGE.fullmatch(value)) is not None:
        first, last = int(found[1]), int(found[2])
        return (first, last) if first <= last <= 65535 else None
    return value if _NAMED_PORT.fullmatch(value) else None


def is_port(value: object) -> bool:
    """Return whether a value is a valid port number."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 65536


def with_ports(entity: Entity, ports: tuple[tuple[int, int] | str, ...]) -> Entity:
    """Return a peer that was read from Kubernetes' form, with the ports of its rule."""
    return replace(entity, ports=ports)
