"""Reads policy resources from YAML, and reports every fault with its position. Pure.

A file can have documents of all kinds in :data:`_KINDS`, in any order. ``List`` documents are unpacked. The reader
refuses what Calico's own validation refuses, and input that would otherwise be accepted without effect.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from xds.errors import ConfigError
from xds.model import calico as c
from xds.model.selector import Global, Node, Not, Selector, SelectorError, parse_selector
from ztunnel.policy.calico.cluster_policy import ClusterPolicyReader
from ztunnel.policy.calico.kubernetes import (
    ALLOWS_NOTHING,
    ALLOWS_THE_REST,
    Document,
    Flaw,
    Json,
    RuleFaults,
    read_port,
)
from ztunnel.policy.calico.resources import (
    BUILT_IN_TIERS,
    DEFAULT_TIER,
    LAST,
    NO_HTTP,
    ApiPolicy,
    ApiProfile,
    ApiRule,
    ApiTier,
    Entity,
    HostEndpoint,
    NamedPort,
    NetworkSet,
    Resources,
)
from ztunnel.runtime.formats.config_reader import Faults
from ztunnel.runtime.formats.go_yaml import load_all
from ztunnel.runtime.formats.object_lists import items_of

_WITH_PORTS: Final = frozenset({6, 17, 132})


def read_resources(texts: Mapping[str, str]) -> Resources:
    """Read files, given as texts by name.

    Raises:
        Faults: lists every fault, with file, resource and field. Two resources with the same key are also a fault.
    """
    reader = _Reader()
    for name, text in texts.items():
        reader.file(name, text)
    faults = [*reader.faults, *(flaw.fault for flaw in reader.flaws)]
    if faults:
        raise Faults(faults)
    return reader.found


@dataclass(frozen=True, slots=True)
class ReadObject:
    """The result of reading one object.

    Attributes:
        found: the resource without its unusable parts. If ``faults`` is not empty, it only has the object's
            selection.
        faults: the reasons why the object is unusable, each with resource and field.
        flaws: the parts that are not enforced as written.
    """

    found: Resources
    faults: tuple[str, ...]
    flaws: tuple[Flaw, ...]


def read_object(document: Mapping[str, object]) -> ReadObject:
    """Read one object, and return its resource and faults."""
    reader = _Reader()
    reader.document_of("", document)
    return ReadObject(reader.found, tuple(reader.faults), tuple(reader.flaws))


#: The API groups of Calico's resources.
CALICO_GROUPS: Final = ("projectcalico.org", "crd.projectcalico.org")
_SKIPPED: Final = frozenset({"FelixConfiguration"})


def refusal(group: str, kind: str) -> str:
    """Return why policy files must not contain objects of a kind. Empty for a kind that is ignored. An unknown
    kind is a fault, because it can be a policy with a misspelt kind.
    """
    if group in CALICO_GROUPS and kind in _SKIPPED:
        return ""
    return f"{group}{'/' if group else ''}{kind} makes no policy here"


class _Reader(ClusterPolicyReader):
    def file(self, name: str, text: str) -> None:
        try:
            documents = load_all(text)
        except ConfigError as error:
            self.fault(name, str(error))
            return
        for document in documents:
            if document is not None:
                self.document_of(name, document)

    def document_of(self, file: str, document: object) -> None:
        if not isinstance(document, Mapping):
            self.fault(file, f"must be resources, not {document!r}")
            return
        items = items_of(document)
        if items is not None:
            for item in items:
                self.document_of(file, item)
            return
        kind = str(document.get("kind", ""))
        metadata = document.get("metadata")
        metadata = metadata if isinstance(metadata, Mapping) else {}
        name = metadata.get("name")
        called = "/".join(str(part) for part in (metadata.get("namespace"), name) if part)
        where = f"{file}{': ' if file else ''}{kind or 'resource'} {called}".rstrip()
        group = str(document.get("apiVersion", "")).partition("/")[0]
        if not isinstance(name, str) or not name:
            self.fault(where, "metadata.name is missing")
            return
        if not isinstance(metadata.get("namespace"), str | None):
            # The namespace can be a number without quotes, for example. If it were ignored, the object would apply
            # to pods in "default".
            self.fault(where, f"metadata.namespace must be text, not {metadata['namespace']!r}")
            return
        if "/" in (metadata.get("namespace") or ""):
            # A slash separates a pod's namespace from its name in the id of its endpoint.
            self.fault(where, f"metadata.namespace must be a name, not {metadata['namespace']!r}")
            return
        if group in CALICO_GROUPS and kind in _SKIPPED:
            return
        read = _KINDS.get((("projectcalico.org" if group in CALICO_GROUPS else group), kind))
        if read is None:
            known = ", ".join(sorted({kind for _, kind in _KINDS}))
            self.fault(where, f"{document.get('apiVersion')} {kind} makes no policy here; known are {known}")
            return
        fields = ("apiVersion", "kind", "metadata", "spec", "status", *_TOP_LEVEL.get(kind, ()))
        self.without(lambda: self.mapping(document, where, fields), "it has no effect")
        read(self, Document(kind, name, metadata, document, where))

    def order(self, spec: Json, where: str) -> float:
        value = spec.get("order")
        if value is None:
            return LAST
        try:
            order = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:
            order = math.inf
        # A number that is greater than each other number, or not comparable with them, has no place in an order.
        if not math.isfinite(order):
            self.fault(f"{where}.order", f"must be a number, not {value!r}")
            return LAST
        return order

    def selector_text(self, spec: Json, key: str, where: str, *, global_allowed: bool = False) -> str:
        """Return a selector. If it is faulty, the result selects all objects."""
        text = self.text(spec, key, where, "")
        try:
            found = parse_selector(text)
        except SelectorError as error:
            self.fault(f"{where}.{key}", str(error))
            return ""
        if not global_allowed and any(isinstance(node, Global) for node in _nodes(found)):
            self.fault(f"{where}.{key}", "global() is for namespaceSelector in rules only")
            return ""
        return text

    # Policies

    def policy(self, resource: Document) -> None:
        namespaced = resource.kind in ("NetworkPolicy", "StagedNetworkPolicy")
        namespace = self.namespace_of(resource) if namespaced else ""
        where = f"{resource.where}: spec"
        spec, unclear = self.attempt(
            lambda: self.mapping(
                resource.body.get("spec"), where, _POLICY_FIELDS if namespaced else _GLOBAL_POLICY_FIELDS
            )
        )
        if spec.get("doNotTrack") is True or spec.get("preDNAT") is True:
            return  # for host endpoints only, unlike policies with applyOnForward, which also apply to pods
        if self.is_staged_removal(resource, spec, where):
            return
        inbound = self.rules(spec, "ingress", where, namespace)
        outbound = self.rules(spec, "egress", where, namespace)
        (ingress, egress), faults = self.attempt(
            lambda: self.types(
                spec, where, has_ingress=bool(spec.get("ingress")), has_egress=bool(spec.get("egress"))
            )
        )
        unclear += faults
        self.faults += unclear
        for key, rules, governed in (("ingress", inbound, ingress), ("egress", outbound, egress)):
            if rules and not governed and not unclear:
                fault = f"{where}.{key}: has rules, but types says that the policy does not govern {key}"
                self.flawed([fault], "they have no effect")
        policy = ApiPolicy(
            id=c.PolicyId(resource.kind, namespace, resource.name),
            tier=self.text(spec, "tier", where, "") or DEFAULT_TIER,
            order=self.order(spec, where),
            selector=self.selector_text(spec, "selector", where),
            namespace_selector=self.selector_text(spec, "namespaceSelector", where),
            account_selector=self.selector_text(spec, "serviceAccountSelector", where),
            ingress=ingress or bool(unclear),
            egress=egress or bool(unclear),
            inbound=inbound,
            outbound=outbound,
        )
        self.put(self.found.policies, policy.id, policy, resource.where)

    def types(self, spec: Json, where: str, *, has_ingress: bool, has_egress: bool) -> tuple[bool, bool]:
        given = self.texts(spec, "types", where)
        for value in given:
            if value not in ("Ingress", "Egress"):
                self.fault(f"{where}.types", f"must be Ingress or Egress, not {value!r}")
        if not given:
            return has_ingress or not has_egress, has_egress
        return "Ingress" in given, "Egress" in given

    def rules(self, spec: Json, key: str, where: str, namespace: str) -> tuple[ApiRule, ...]:
        """Return the rules of one direction, each reduced to its usable parts. If the value is not a list, all
        traffic is denied.
        """
        items, faults = self.attempt(lambda: self.items(spec, key, where))
        if faults:
            self.flawed(faults, "everything is denied there")
            return (ApiRule(c.Action.DENY),)
        found = (self.usable_rule(item, f"{where}.{key}[{index}]", namespace) for index, item in enumerate(items))
        return tuple(rule for rule in found if rule is not None)

    def usable_rule(self, item: object, where: str, namespace: str) -> ApiRule | None:
        """Return a rule. A faulty one is reduced so that it admits no more traffic than intended. None if that is
        impossible.
        """
        action = item.get("action") if isinstance(item, Mapping) else None
        faults = RuleFaults(allows=action == "Allow")
        rule = self.rule(item, where, faults, namespace)
        if not faults.faults:
            return rule
        match rule.action:
            case c.Action.ALLOW:
                consequence = ALLOWS_NOTHING if faults.opens else ALLOWS_THE_REST
            case c.Action.LOG:
                consequence = "nothing is logged"
            case c.Action.PASS:
                # A faulty passing rule becomes a denying rule: omitting it, or letting it pass more flows, could
                # admit more traffic.
                consequence = "the rule denies, without these clauses, what it would pass on"
                rule = replace(rule, action=c.Action.DENY)
            case _:
                consequence = "the rule denies whatever the rest of it says"
        self.flawed(faults.faults, consequence)
        unusable = rule.action is c.Action.LOG or (rule.action is c.Action.ALLOW and faults.opens)
        return None if unusable else rule

    def rule(self, item: object, where: str, faults: RuleFaults, namespace: str) -> ApiRule:
        entry = self.needed(faults, lambda: self.mapping(item, where, _RULE_FIELDS))
        action = entry.get("action")
        known = action in ("Allow", "Deny", "Log", "Pass")
        if not known:
            faults.note(f"{where}.action", f"must be Allow, Deny, Log or Pass, not {action!r}")
            action = "Deny"
        protocol, not_protocol = (
            self.needed(faults, functools.partial(self.protocol, entry, key, where))
            for key in ("protocol", "notProtocol")
        )
        number = protocol if isinstance(protocol, int) else c.PROTOCOLS.get(str(protocol).lower())
        version = self.needed(faults, lambda: self.ip_version(entry, number, where))
        icmp, not_icmp = (
            self.needed(faults, functools.partial(self.icmp, entry, key, number, where))
            for key in ("icmp", "notICMP")
        )
        source = self.entity(entry, "source", where, faults, namespace)
        destination = self.entity(entry, "destination", where, faults, namespace)
        for side, entity in (("source", source), ("destination", destination)):
            numeric = any(isinstance(port, tuple) for port in (*entity.ports, *entity.not_ports))
            if numeric and number not in _WITH_PORTS:
                faults.note(f"{where}.{side}.ports", "need protocol TCP, UDP or SCTP")
        if destination.service is not None and (destination.ports or destination.not_ports):
            faults.note(f"{where}.destination", "services have their own ports")
            destination = replace(destination, service=None)
        http, unread = self.attempt(lambda: self.http(entry, where))
        faults.faults += unread
        if http != NO_HTTP and known and action != "Allow":
            unread.append("http")
            faults.note(f"{where}.http", "is for rules that allow")
        if http != NO_HTTP and protocol is not None and number != 6:
            unread.append("http")
            faults.note(f"{where}.http", f"needs protocol TCP, not {protocol}")
        faults.opens = faults.opens or bool(unread)
        return ApiRule(
            c.Action(str(action).lower()),
            source,
            destination,
            protocol,
            not_protocol,
            version,
            NO_HTTP if unread else http,
            icmp,
            not_icmp,
        )

    def ip_version(self, entry: Json, protocol: int | None, where: str) -> int:
        version = entry.get("ipVersion") or 0
        if version not in (0, 4, 6) or isinstance(version, bool):
            self.fault(f"{where}.ipVersion", f"must be 4 or 6, not {version!r}")
            version = 0
        implied = next((number for number, icmp in c.ICMP_PROTOCOLS.items() if icmp == protocol), 0)
        if implied and version not in (0, implied):
            self.fault(f"{where}.ipVersion", f"must be {implied} for {entry.get('protocol')}")
        return implied or int(version)

    def icmp(self, entry: Json, key: str, protocol: int | None, where: str) -> c.IcmpMatch | None:
        place = f"{where}.{key}"
        given = self.mapping(entry.get(key), place, ("type", "code"))
        kind, code = given.get("type"), given.get("code")
        if kind is None and code is None:
            return None
        if kind is None:
            self.fault(f"{place}.type", "must be given beside a code")
            return None
        for name, value in (("type", kind), ("code", code)):
            if value is not None and not (
                isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 256
            ):
                self.fault(f"{place}.{name}", f"must be 0 to 255, not {value!r}")
                return None
        if protocol not in c.ICMP_PROTOCOLS.values():
            self.fault(place, "needs protocol ICMP or ICMPv6")
            return c.IcmpMatch(kind, code) if protocol is None and key == "icmp" else None
        return c.IcmpMatch(kind, code)

    def protocol(self, entry: Json, key: str, where: str) -> int | str | None:
        value = entry.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 3:
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 256:
            return value
        if isinstance(value, str) and value.lower() in c.PROTOCOLS:
            return value
        self.fault(f"{where}.{key}", f"must be TCP, UDP, ICMP, ICMPv6, SCTP, UDPLite or 1 to 255, not {value!r}")
        return None

    def entity(self, entry: Json, key: str, where: str, faults: RuleFaults, namespace: str) -> Entity:
        place = f"{where}.{key}"
        side = self.needed(faults, lambda: self.mapping(entry.get(key), place, _ENTITY_FIELDS))
        accounts = self.needed(
            faults,
            lambda: self.mapping(side.get("serviceAccounts"), f"{place}.serviceAccounts", ("names", "selector")),
        )
        selector, not_selector = (
            self.needed(faults, functools.partial(self.selector_text, side, name, place))
            for name in ("selector", "notSelector")
        )
        return Entity(
            nets=self.entries(faults, lambda: self.nets(side, "nets", place)),
            not_nets=self.needed(faults, lambda: self.nets(side, "notNets", place)),
            ports=self.entries(faults, lambda: self.ports(side, "ports", place)),
            not_ports=self.needed(faults, lambda: self.ports(side, "notPorts", place)),
            selector=selector,
            not_selector=not_selector,
            namespace_selector=self.needed(
                faults, lambda: self.selector_text(side, "namespaceSelector", place, global_allowed=True)
            ),
            account_names=self.entries(faults, lambda: self.account_names(accounts, f"{place}.serviceAccounts")),
            account_selector=self.needed(
                faults, lambda: self.selector_text(accounts, "selector", f"{place}.serviceAccounts")
            ),
            service=self.needed(faults, lambda: self.service_of(side, place, namespace)),
        )

    def account_names(self, accounts: Json, where: str) -> tuple[str, ...]:
        names = self.items(accounts, "names", where)
        for name in names:
            if not isinstance(name, str) or not name:
                self.fault(f"{where}.names", f"must be texts, not {name!r}")
        return tuple(name for name in names if isinstance(name, str) and name)

    def service_of(self, side: Json, where: str, namespace: str) -> tuple[str, str] | None:
        """Return the Service that one side of a rule names. The default namespace is the policy's."""
        place = f"{where}.services"
        services, faults = self.attempt(lambda: self.mapping(side.get("services"), place, ("name", "namespace")))
        if side.get("services") is None:
            return None
        self.faults += faults
        name = self.text(services, "name", place, "")
        found = self.text(services, "namespace", place, "") or namespace
        for key, value in (("name", name), ("namespace", found)):
            if not value:
                self.fault(f"{place}.{key}", "is missing")
        for other in ("selector", "notSelector", "namespaceSelector", "nets", "notNets", "serviceAccounts"):
            if side.get(other):
                self.fault(f"{where}.{other}", "cannot stand beside services")
                return None
        return (found, name) if name and found and not faults else None

    def ports(self, entry: Json, key: str, where: str) -> tuple[tuple[int, int] | str, ...]:
        found: list[tuple[int, int] | str] = []
        for item in self.items(entry, key, where):
            port = read_port(item)
            if port is None:
                self.fault(f"{where}.{key}", f"must be a port, a range such as 80:90 or a name, not {item!r}")
            else:
                found.append(port)
        return tuple(found)

    def http(self, entry: Json, where: str) -> c.HttpMatch:
        place = f"{where}.http"
        http = self.mapping(entry.get("http"), place, ("methods", "paths"))
        methods = self.texts(http, "methods", place)
        items = self.items(http, "paths", place)
        paths = []
        for index, item in enumerate(items):
            here = f"{place}.paths[{index}]"
            path = self.mapping(item, here, ("exact", "prefix"))
            if len(path) != 1:
                self.fault(here, "must be either exact or prefix")
                continue
            [(kind, text)] = path.items()
            if not isinstance(text, str) or not text.startswith("/") or re.search(r"[ ?#]", text):
                self.fault(f"{here}.{kind}", f"must begin with / and have no space, ? or #, not {text!r}")
                continue
            paths.append(c.PathMatch(text, kind == "prefix"))
        return c.HttpMatch(methods, tuple(paths))

    # Calico's other kinds

    def tier(self, resource: Document) -> None:
        where = f"{resource.where}: spec"
        known = ("order", "defaultAction")
        spec = self.without(lambda: self.mapping(resource.body.get("spec"), where, known), "it has no effect")
        order = self.order(spec, where)
        built_in = BUILT_IN_TIERS.get(resource.name)
        action = self.without(
            lambda: self.choice(spec, "defaultAction", where, ("Deny", "Pass")), "the end of the tier denies"
        )
        passes = action == "Pass"
        if built_in is not None and "defaultAction" not in spec:
            passes = built_in[1]
        if built_in is not None and (((order, passes) != built_in and order != LAST) or passes != built_in[1]):
            self.fault(
                where, f"{resource.name} always has order {built_in[0]:g} and {'Pass' if built_in[1] else 'Deny'}"
            )
        tier = ApiTier(resource.name, built_in[0] if built_in else order, passes)
        self.put(self.found.tiers, resource.name, tier, resource.where)

    def profile(self, resource: Document) -> None:
        where = f"{resource.where}: spec"
        known = ("ingress", "egress", "labelsToApply")
        spec = self.without(lambda: self.mapping(resource.body.get("spec"), where, known), "it has no effect")
        place = f"{where}.labelsToApply"
        found = self.without(lambda: self.mapping(spec.get("labelsToApply"), place, None), "it gives no labels")
        labels = self.without(lambda: self.label_texts(found, place), "it counts as that text")
        profile = ApiProfile(
            resource.name,
            self.rules(spec, "ingress", where, ""),
            self.rules(spec, "egress", where, ""),
            labels,
        )
        self.put(self.found.profiles, resource.name, profile, resource.where)

    def network_set(self, resource: Document) -> None:
        where = f"{resource.where}: spec"
        spec = self.without(lambda: self.mapping(resource.body.get("spec"), where, ("nets",)), "it has no effect")
        namespace = self.namespace_of(resource) if resource.kind == "NetworkSet" else ""
        found = NetworkSet(
            namespace,
            resource.name,
            self.labels(resource.metadata, resource.where),
            self.without(lambda: self.nets(spec, "nets", where), "it is not in the set"),
        )
        self.put(self.found.network_sets, (namespace, resource.name), found, resource.where)

    def host_endpoint(self, resource: Document) -> None:
        """Read a HostEndpoint. No policy applies to it here, but rules of pods' policies may select it."""
        where = f"{resource.where}: spec"
        spec = self.without(
            lambda: self.mapping(resource.body.get("spec"), where, _HOST_FIELDS), "it has no effect"
        )
        texts = self.without(lambda: self.items(spec, "expectedIPs", where), "it has no addresses")
        addresses = (
            self.without(lambda: self.addresses(texts, f"{where}.expectedIPs"), "it is not one of its addresses")
            if texts
            else ()
        )
        found = HostEndpoint(
            resource.name,
            self.labels(resource.metadata, resource.where),
            addresses,
            tuple(self._host_ports(spec, where)),
            self.without(lambda: self.texts(spec, "profiles", where), "it has no labels of such a profile"),
        )
        self.put(self.found.host_endpoints, resource.name, found, resource.where)

    def _host_ports(self, spec: Json, where: str) -> Iterator[NamedPort]:
        items = self.without(lambda: self.items(spec, "ports", where), "it has no ports")
        for index, item in enumerate(items):
            port, faults = self.attempt(functools.partial(self._host_port, item, f"{where}.ports[{index}]"))
            self.flawed(faults, "it has no such port")
            if not faults:
                yield port

    def _host_port(self, item: object, where: str) -> NamedPort:
        entry = self.mapping(item, where, ("name", "protocol", "port"))
        protocol = self.protocol(entry, "protocol", where)
        return NamedPort(
            self.text(entry, "name", where, ""),
            str(protocol).lower(),
            self.port(entry.get("port"), f"{where}.port"),
        )


_RULE_FIELDS: Final = (
    "action", "ipVersion", "protocol", "notProtocol", "icmp", "notICMP", "source", "destination", "http",
    "metadata",
)  # fmt: skip
_ENTITY_FIELDS: Final = (
    "nets", "notNets", "selector", "notSelector", "namespaceSelector", "ports", "notPorts", "serviceAccounts",
    "services",
)  # fmt: skip
_HOST_FIELDS: Final = ("node", "interfaceName", "expectedIPs", "profiles", "ports")
_POLICY_FIELDS: Final = (
    "tier", "order", "selector", "serviceAccountSelector", "types", "ingress", "egress", "performanceHints",
    "stagedAction",
)  # fmt: skip
_GLOBAL_POLICY_FIELDS: Final = (*_POLICY_FIELDS, "namespaceSelector", "doNotTrack", "preDNAT", "applyOnForward")

#: The valid keys of an object beside ``spec`` and ``status``.
_TOP_LEVEL: Final = {
    "ServiceAccount": ("secrets", "imagePullSecrets", "automountServiceAccountToken"),
}

_KINDS: Final = {
    ("projectcalico.org", "GlobalNetworkPolicy"): _Reader.policy,
    ("projectcalico.org", "NetworkPolicy"): _Reader.policy,
    ("projectcalico.org", "StagedGlobalNetworkPolicy"): _Reader.policy,
    ("projectcalico.org", "StagedNetworkPolicy"): _Reader.policy,
    ("projectcalico.org", "Tier"): _Reader.tier,
    ("projectcalico.org", "Profile"): _Reader.profile,
    ("projectcalico.org", "NetworkSet"): _Reader.network_set,
    ("projectcalico.org", "GlobalNetworkSet"): _Reader.network_set,
    ("projectcalico.org", "HostEndpoint"): _Reader.host_endpoint,
    ("projectcalico.org", "StagedKubernetesNetworkPolicy"): _Reader.network_policy,
    ("networking.k8s.io", "NetworkPolicy"): _Reader.network_policy,
    ("policy.networking.k8s.io", "AdminNetworkPolicy"): _Reader.cluster_policy,
    ("policy.networking.k8s.io", "BaselineAdminNetworkPolicy"): _Reader.cluster_policy,
    ("policy.networking.k8s.io", "ClusterNetworkPolicy"): _Reader.cluster_policy,
    ("v1", "Namespace"): _Reader.read_namespace,
    ("v1", "Node"): _Reader.node,
    ("v1", "ServiceAccount"): _Reader.account,
    ("v1", "Pod"): _Reader.pod,
    ("v1", "Service"): _Reader.service,
}


def _nodes(selector: Selector) -> Iterator[Node]:
    waiting: list[Node] = [selector.root]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Not):
            waiting.append(node.operand)
        else:
            waiting += getattr(node, "operands", ())
