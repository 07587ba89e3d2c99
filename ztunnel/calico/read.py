"""Reads policy resources from YAML, with every fault at its place. Pure.

A file has documents of any kind in :data:`_KINDS`, in any order; ``List`` documents are opened. What is refused
is what Calico's own validation refuses, and what would otherwise be accepted without effect. The limits are those
of its API.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from xds.errors import ConfigError
from xds.model import calico as c
from xds.model.selector import Global, Node, Not, Selector, SelectorError, parse_selector
from xds.proto.core_yaml import load_all
from ztunnel.calico.cluster_policy import ClusterPolicyReader
from ztunnel.calico.kubernetes import Document, Json, read_port
from ztunnel.calico.resources import (
    BUILT_IN_TIERS,
    DEFAULT_TIER,
    LAST,
    NO_HTTP,
    ApiPolicy,
    ApiProfile,
    ApiRule,
    ApiTier,
    Entity,
    NetworkSet,
    Resources,
)
from ztunnel.runtime.config_reader import Faults

MAX_RULES: Final = 1024
MAX_PORTS: Final = 50
MAX_METHODS: Final = 20
MAX_PATHS: Final = 20
MAX_TEXT: Final = 1024

_WITH_PORTS: Final = frozenset({6, 17, 132})


def read_resources(texts: Mapping[str, str]) -> Resources:
    """Read files, given as texts by name.

    Raises:
        Faults: all of them, each with file, resource and field; or two resources are one.
    """
    reader = _Reader()
    for name, text in texts.items():
        reader.file(name, text)
    if reader.faults:
        raise Faults(reader.faults)
    return reader.found


def read_object(document: Mapping[str, object]) -> tuple[Resources, list[str]]:
    """Return what one object becomes, with its faults, each with resource and field.

    With faults the result is only good for saying what the object is about: faulty parts are left out of it.
    """
    reader = _Reader()
    reader.document_of("", document)
    return reader.found, [fault.removeprefix(": ") for fault in reader.faults]


#: Readers of kinds, by apiVersion's group and kind.
_CALICO: Final = ("projectcalico.org", "crd.projectcalico.org")
_SKIPPED: Final = frozenset({"FelixConfiguration"})


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
        kind = str(document.get("kind", ""))
        if kind.endswith("List") and isinstance(document.get("items"), list):
            for item in document["items"]:
                self.document_of(file, item)
            return
        metadata = document.get("metadata")
        metadata = metadata if isinstance(metadata, Mapping) else {}
        name = metadata.get("name")
        called = "/".join(str(part) for part in (metadata.get("namespace"), name) if part)
        where = f"{file}{': ' if file else ''}{kind or 'resource'} {called}".rstrip()
        group = str(document.get("apiVersion", "")).partition("/")[0]
        if not isinstance(name, str) or not name:
            self.fault(where, "metadata.name is missing")
            return
        if group in _CALICO and kind in _SKIPPED:
            return
        read = _KINDS.get((("projectcalico.org" if group in _CALICO else group), kind))
        if read is None:
            known = ", ".join(sorted({kind for _, kind in _KINDS}))
            self.fault(where, f"{document.get('apiVersion')} {kind} makes no policy here; known are {known}")
            return
        self.mapping(
            document, where, ("apiVersion", "kind", "metadata", "spec", "status", *_TOP_LEVEL.get(kind, ()))
        )
        read(self, Document(kind, name, metadata, document, where))

    def order(self, spec: Json, where: str) -> float:
        value = spec.get("order")
        if value is None:
            return LAST
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fault(f"{where}.order", f"must be a number, not {value!r}")
            return LAST
        return float(value)

    def selector_text(self, spec: Json, key: str, where: str, *, global_allowed: bool = False) -> str:
        text = self.text(spec, key, where, "")
        if len(text) > MAX_TEXT:
            self.fault(f"{where}.{key}", f"has more than {MAX_TEXT} characters")
            return ""
        try:
            found = parse_selector(text)
        except SelectorError as error:
            self.fault(f"{where}.{key}", str(error))
            return ""
        if not global_allowed and any(isinstance(node, Global) for node in _nodes(found)):
            self.fault(f"{where}.{key}", "global() is for namespaceSelector in rules only")
        return text

    # Policies

    def policy(self, resource: Document) -> None:
        namespaced = resource.kind in ("NetworkPolicy", "StagedNetworkPolicy")
        where = f"{resource.where}: spec"
        spec = self.mapping(
            resource.body.get("spec"), where, _POLICY_FIELDS if namespaced else _GLOBAL_POLICY_FIELDS
        )
        for key in ("doNotTrack", "preDNAT", "applyOnForward"):
            if spec.get(key):
                self.fault(f"{where}.{key}", "is for host endpoints, of which there are none here")
        if resource.kind.startswith("Staged"):
            action = self.choice(spec, "stagedAction", where, ("Set", "Delete", "Learn", "Ignore"))
            if action in ("Delete", "Ignore"):
                return
        inbound = self.rules(spec, "ingress", where)
        outbound = self.rules(spec, "egress", where)
        ingress, egress = self.types(spec, where, has_ingress=bool(inbound), has_egress=bool(outbound))
        if inbound and not ingress:
            self.fault(f"{where}.ingress", "has rules, but types says that the policy does not govern ingress")
        if outbound and not egress:
            self.fault(f"{where}.egress", "has rules, but types says that the policy does not govern egress")
        policy = ApiPolicy(
            id=c.PolicyId(resource.kind, self.namespace_of(resource) if namespaced else "", resource.name),
            tier=self.text(spec, "tier", where, "") or DEFAULT_TIER,
            order=self.order(spec, where),
            selector=self.selector_text(spec, "selector", where),
            namespace_selector=self.selector_text(spec, "namespaceSelector", where),
            account_selector=self.selector_text(spec, "serviceAccountSelector", where),
            ingress=ingress,
            egress=egress,
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

    def rules(self, spec: Json, key: str, where: str) -> tuple[ApiRule, ...]:
        items = self.items(spec, key, where)
        if len(items) > MAX_RULES:
            self.fault(f"{where}.{key}", f"has more than {MAX_RULES} rules")
        return tuple(self.rule(item, f"{where}.{key}[{index}]") for index, item in enumerate(items[:MAX_RULES]))

    def rule(self, item: object, where: str) -> ApiRule:
        entry = self.mapping(item, where, _RULE_FIELDS)
        action = self.text(entry, "action", where, "")
        known = action in ("Allow", "Deny", "Log", "Pass")
        if not known:
            self.fault(f"{where}.action", f"must be Allow, Deny, Log or Pass, not {action!r}")
            action = "Deny"
        protocol = self.protocol(entry, "protocol", where)
        not_protocol = self.protocol(entry, "notProtocol", where)
        version = entry.get("ipVersion", 0)
        if version not in (0, 4, 6) or isinstance(version, bool):
            self.fault(f"{where}.ipVersion", f"must be 4 or 6, not {version!r}")
            version = 0
        number = protocol if isinstance(protocol, int) else c.PROTOCOLS.get(str(protocol).lower())
        if number in (1, 58):
            needed = 4 if number == 1 else 6
            if version not in (0, needed):
                self.fault(f"{where}.ipVersion", f"must be {needed} for {protocol}")
            version = needed
        icmp, not_icmp = (self.icmp(entry, key, number, where) for key in ("icmp", "notICMP"))
        source = self.entity(entry, "source", where)
        destination = self.entity(entry, "destination", where)
        for side, entity in (("source", source), ("destination", destination)):
            if (
                any(isinstance(port, tuple) for port in (*entity.ports, *entity.not_ports))
                and number not in _WITH_PORTS
            ):
                self.fault(f"{where}.{side}.ports", "need protocol TCP, UDP or SCTP")
        if destination.service is not None and (destination.ports or destination.not_ports):
            self.fault(f"{where}.destination", "services have their own ports")
        http = self.http(entry, where)
        if http != NO_HTTP:
            if action != "Allow" and known:
                self.fault(f"{where}.http", "is for rules that allow")
            if protocol is not None and number != 6:
                self.fault(f"{where}.http", f"needs protocol TCP, not {protocol}")
        return ApiRule(
            c.Action(action.lower()), source, destination, protocol, not_protocol, version, http, icmp, not_icmp
        )

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
        return c.IcmpMatch(kind, code)

    def protocol(self, entry: Json, key: str, where: str) -> int | str | None:
        value = entry.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 256:
            return value
        if isinstance(value, str) and value.lower() in c.PROTOCOLS:
            return value
        self.fault(f"{where}.{key}", f"must be TCP, UDP, ICMP, ICMPv6, SCTP, UDPLite or 1 to 255, not {value!r}")
        return None

    def entity(self, entry: Json, key: str, where: str) -> Entity:
        place = f"{where}.{key}"
        side = self.mapping(entry.get(key), place, _ENTITY_FIELDS)
        accounts = self.mapping(side.get("serviceAccounts"), f"{place}.serviceAccounts", ("names", "selector"))
        services = self.mapping(side.get("services"), f"{place}.services", ("name", "namespace"))
        service = None
        if services:
            service = (
                self.text(services, "namespace", f"{place}.services", "default"),
                self.text(services, "name", f"{place}.services", ""),
            )
            for other in ("selector", "notSelector", "namespaceSelector", "nets", "notNets", "serviceAccounts"):
                if side.get(other):
                    self.fault(f"{place}.{other}", "cannot stand beside services")
        return Entity(
            nets=self.nets(side, "nets", place),
            not_nets=self.nets(side, "notNets", place),
            ports=self.ports(side, "ports", place),
            not_ports=self.ports(side, "notPorts", place),
            selector=self.selector_text(side, "selector", place),
            not_selector=self.selector_text(side, "notSelector", place),
            namespace_selector=self.selector_text(side, "namespaceSelector", place, global_allowed=True),
            account_names=self.texts(accounts, "names", f"{place}.serviceAccounts"),
            account_selector=self.selector_text(accounts, "selector", f"{place}.serviceAccounts"),
            service=service,
        )

    def ports(self, entry: Json, key: str, where: str) -> tuple[tuple[int, int] | str, ...]:
        items = self.items(entry, key, where)
        if len(items) > MAX_PORTS:
            self.fault(f"{where}.{key}", f"has more than {MAX_PORTS} ports")
        found: list[tuple[int, int] | str] = []
        for item in items:
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
        if len(methods) > MAX_METHODS or len(set(methods)) < len(methods):
            self.fault(f"{place}.methods", f"must be at most {MAX_METHODS} different methods")
        items = self.items(http, "paths", place)
        if len(items) > MAX_PATHS:
            self.fault(f"{place}.paths", f"has more than {MAX_PATHS} paths")
        paths = []
        for index, item in enumerate(items):
            here = f"{place}.paths[{index}]"
            path = self.mapping(item, here, ("exact", "prefix"))
            if len(path) != 1:
                self.fault(here, "must be either exact or prefix")
                continue
            [(kind, text)] = path.items()
            if (
                not isinstance(text, str)
                or not text.startswith("/")
                or re.search(r"[ ?#]", text)
                or len(text) > MAX_TEXT
            ):
                self.fault(f"{here}.{kind}", f"must begin with / and have no space, ? or #, not {text!r}")
                continue
            paths.append(c.PathMatch(text, kind == "prefix"))
        return c.HttpMatch(methods, tuple(paths))

    # The rest of Calico's kinds

    def tier(self, resource: Document) -> None:
        where = f"{resource.where}: spec"
        spec = self.mapping(resource.body.get("spec"), where, ("order", "defaultAction"))
        order = self.order(spec, where)
        built_in = BUILT_IN_TIERS.get(resource.name)
        passes = self.choice(spec, "defaultAction", where, ("Deny", "Pass")) == "Pass"
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
        spec = self.mapping(resource.body.get("spec"), where, ("ingress", "egress", "labelsToApply"))
        labels = self.mapping(spec.get("labelsToApply"), f"{where}.labelsToApply", None)
        profile = ApiProfile(
            resource.name,
            self.rules(spec, "ingress", where),
            self.rules(spec, "egress", where),
            {str(key): str(value) for key, value in labels.items()},
        )
        self.put(self.found.profiles, resource.name, profile, resource.where)

    def network_set(self, resource: Document) -> None:
        where = f"{resource.where}: spec"
        spec = self.mapping(resource.body.get("spec"), where, ("nets",))
        namespace = self.namespace_of(resource) if resource.kind == "NetworkSet" else ""
        found = NetworkSet(
            namespace,
            resource.name,
            self.labels(resource.metadata, resource.where),
            self.nets(spec, "nets", where),
        )
        self.put(self.found.network_sets, (namespace, resource.name), found, resource.where)

    def host_endpoint(self, resource: Document) -> None:
        self.fault(resource.where, "host endpoints are the kernel's part, this project polices pods")


_RULE_FIELDS: Final = (
    "action", "ipVersion", "protocol", "notProtocol", "icmp", "notICMP", "source", "destination", "http",
    "metadata",
)  # fmt: skip
_ENTITY_FIELDS: Final = (
    "nets", "notNets", "selector", "notSelector", "namespaceSelector", "ports", "notPorts", "serviceAccounts",
    "services",
)  # fmt: skip
_POLICY_FIELDS: Final = (
    "tier", "order", "selector", "serviceAccountSelector", "types", "ingress", "egress", "performanceHints",
    "stagedAction",
)  # fmt: skip
_GLOBAL_POLICY_FIELDS: Final = (*_POLICY_FIELDS, "namespaceSelector", "doNotTrack", "preDNAT", "applyOnForward")

#: Keys beside ``spec`` and ``status``.
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
