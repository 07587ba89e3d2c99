"""Reads the mesh from ztunnel's local file: YAML with workloads, policies and services.

The file is written by hand, so it is read strictly: unknown keys, bad values and repeated keys are all reported
with their positions, and a faulty file is not used at all.

Where the Rust ztunnel treats such a file differently from wire messages, this reader follows the wire messages:
trust domain, service account and cluster have the same defaults, and a workload belongs to the services that it
names.
"""

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import IO, Any, TypeVar

from xds.dialects.istio.reading import network_of, port, service_key
from xds.dialects.istio.rules import (
    ATTRIBUTES,
    Account,
    Comparison,
    Item,
    Text,
    condition_of_clause,
    condition_of_match,
    condition_of_rule,
    condition_of_rules,
    negated,
    never_matches,
    shown,
)
from xds.digits import whole_number
from xds.errors import ConfigError
from xds.model.address import IpNetwork, canonical
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.policy import Condition
from xds.model.refused import RefusedResource
from xds.model.service import (
    BalancerMode,
    CidrAddress,
    HealthPolicy,
    IpFamilies,
    LoadBalancing,
    Scope,
    Service,
    Visibility,
    WeightedWaypoint,
)
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Health,
    Locality,
    NamespacedHostname,
    NetworkAddress,
    NetworkMode,
    PolicyKey,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)

Word = TypeVar("Word", bound=StrEnum)
Read = TypeVar("Read")
Other = TypeVar("Other")

_WORKLOAD_TYPES = ("deployment", "cronjob", "pod", "job")


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """The workloads, services and policies of a local file."""

    workloads: tuple[Workload, ...] = ()
    policies: tuple[AuthorizationPolicy, ...] = ()
    services: tuple[Service, ...] = ()


def parse_local_file(source: str | IO[str]) -> LocalMesh:
    """Read a local file, given as text or as an open file.

    Raises:
        ConfigError: the file has faults. The text lists all faults with their positions.
        OSError, UnicodeDecodeError: raised by reading the file.
    """
    from xds.dialects.istio import local_yaml  # most meshes come from a control plane

    reader = _Reader()
    try:
        mesh = reader.mesh(local_yaml.sections(source))
    except local_yaml.Unreadable as error:
        raise ConfigError(str(error)) from None
    if reader.faults:
        raise ConfigError("; ".join(reader.faults))
    return mesh


# Readers of single entries, which config dumps show in the same form


def read_workload(value: object) -> Workload:
    """Read a workload. Its ``services`` can be missing, like in dumps: the services' own entries then list their
    workloads.

    Raises:
        ConfigError: the entry has faults. The text lists all faults with their positions.
    """
    return _alone(lambda reader: reader.workload({"services": {}, **_mapping(value)}, ""))


def read_service(value: object) -> tuple[Service, Mapping[str, tuple[Mapping[int, int], Health]]]:
    """Read a service. Return it with the ports and health of its endpoints, by their workloads' uids."""
    return _alone(lambda reader: reader.service(value, ""))


def read_refused(value: object) -> RefusedResource:
    """Read a refused resource of a dump."""
    return _alone(lambda reader: reader.refused(value, ""))


def read_policy(value: object) -> AuthorizationPolicy:
    """Read an authorization policy."""
    return _alone(lambda reader: reader.policy(value, ""))


def _alone(read: Callable[["_Reader"], Read]) -> Read:
    reader = _Reader()
    found = read(reader)
    if reader.faults:
        raise ConfigError("; ".join(reader.faults))
    return found


class _Fields:
    """One mapping in the file. Readers take each known key once. Keys that were not taken are unknown."""

    def __init__(self, reader: "_Reader", value: object, place: str) -> None:
        self.place = place
        self._reader = reader
        self._left: dict[object, object] = {}
        if isinstance(value, dict):
            self._left = dict(value)
        else:
            reader.fault(place, "must be a mapping")

    def take(self, key: str, read: Callable[[object, str], Read], default: Other) -> Read | Other:
        """Return the value of a key, or ``default`` if it is missing or unreadable."""
        value = self._left.pop(key, None)
        return default if value is None else self._reader.read(read, value, f"{self.place}.{key}", default)

    def need(self, key: str, read: Callable[[object, str], Read], default: Other) -> Read | Other:
        """Return the value of a required key. If it is missing, this is a fault."""
        if self._left.get(key) is None:
            self._left.pop(key, None)
            self._reader.fault(f"{self.place}.{key}", "is required")
            return default
        return self.take(key, read, default)

    def end(self) -> None:
        """Report the keys that were not taken as unknown."""
        for key in self._left:
            self._reader.fault(f"{self.place}.{key}", "unknown key")


@dataclass(slots=True)
class _Reader:
    """Reads the file's values, and collects all faults."""

    faults: list[str] = field(default_factory=list)

    def fault(self, place: str, reason: str) -> None:
        self.faults.append(f"{place.removeprefix('.')}: {reason}" if place else reason)

    def read(self, read: Callable[[object, str], Read], value: object, place: str, default: Other) -> Read | Other:
        try:
            return read(value, place)
        except ConfigError as error:
            self.fault(place, error.reason)
            return default

    def mesh(self, sections: Iterable[tuple[object, object]]) -> LocalMesh:
        """Read the whole file. Each list element is converted before the next element is parsed, to save
        memory.
        """
        workloads: list[Workload] = []
        policies: list[AuthorizationPolicy] = []
        services: list[tuple[Service, dict[str, tuple[dict[int, int], Health]]]] = []
        for key, value in sections:
            match key:
                case "workloads" | "policies" | "services" if value is None:
                    pass
                case "workloads":
                    workloads = self.read(self._list(self.workload), value, key, [])
                case "policies":
                    policies = self.read(self._list(self.policy), value, key, [])
                case "services":
                    services = self.read(self._list(self.service), value, key, [])
                case _:
                    self.fault(str(key), "unknown key")
        self._unique("workloads", [workload.uid for workload in workloads])
        self._unique("policies", [policy.key for policy in policies])
        self._unique("services", [service.key for service, _ in services])
        places = {workload.uid: place for place, workload in enumerate(workloads)}
        for index, (service, endpoints) in enumerate(services):
            self._join(workloads, places, service.key, endpoints, f"services[{index}].endpoints")
        return LocalMesh(tuple(workloads), tuple(policies), tuple(service for service, _ in services))

    def _unique(self, place: str, names: list[Any]) -> None:
        seen: dict[Any, int] = {}
        for index, name in enumerate(names):
            if name in seen:
                self.fault(f"{place}[{index}]", f"{name} is {place}[{seen[name]}] already")
            seen.setdefault(name, index)

    def _join(
        self,
        workloads: list[Workload],
        places: Mapping[WorkloadUid, int],
        key: ServiceKey,
        endpoints: Mapping[str, tuple[dict[int, int], Health]],
        where: str,
    ) -> None:
        """Add a service to each workload that it names as an endpoint."""
        for uid, (ports, status) in endpoints.items():
            place = places.get(WorkloadUid(uid))
            if place is None:
                self.fault(f"{where}.{uid}", "no such workload in this file")
                continue
            workload = workloads[place]
            if workload.status is not status:
                self.fault(f"{where}.{uid}.status", f"{status} but the workload is {workload.status}")
            workloads[place] = replace(workload, services={**workload.services, key: ports})

    def workload(self, value: object, place: str) -> Workload:
        found = _plain_workload(value)
        if found is not None:
            return found
        fields = _Fields(self, value, place)
        workload = Workload(
            uid=WorkloadUid(fields.take("uid", _text, "")),
            name=fields.take("name", _text, ""),
            namespace=fields.need("namespace", _text, ""),
            service_account=fields.take("serviceAccount", _text, "") or "default",
            trust_domain=fields.take("trustDomain", _text, "") or "cluster.local",
            addresses=tuple(fields.need("workloadIps", self._list(_host), [])),
            hostname=fields.take("hostname", _text, ""),
            protocol=fields.take("protocol", _word(Protocol), Protocol.TCP),
            network_mode=fields.take("networkMode", _word(NetworkMode), NetworkMode.STANDARD),
            node=fields.take("node", _text, ""),
            network=fields.take("network", _text, ""),
            cluster_id=fields.take("clusterId", _text, "") or "Kubernetes",
            workload_name=fields.take("workloadName", _text, ""),
            workload_type=fields.take("workloadType", _workload_type, "deployment"),
            canonical_name=fields.take("canonicalName", _text, ""),
            canonical_revision=fields.take("canonicalRevision", _text, ""),
            native_tunnel=fields.take("nativeTunnel", _flag, False),
            application_tunnel=fields.take("applicationTunnel", self.application_tunnel, None),
            locality=fields.take("locality", self.locality, Locality()),
            status=fields.take("status", _word(Health), Health.HEALTHY),
            capacity=fields.take("capacity", _count, 1),
            authorization_policies=tuple(fields.take("authorizationPolicies", self._list(_policy_key), [])),
            waypoint=fields.take("waypoint", self.gateway, None),
            network_gateway=fields.take("networkGateway", self.gateway, None),
            services=fields.need("services", self.services_of, {}),
        )
        fields.end()
        if not workload.uid:
            self.fault(f"{place}.uid", "is required")
        return workload

    def services_of(self, value: object, place: str) -> dict[ServiceKey, dict[int, int]]:
        services: dict[ServiceKey, dict[int, int]] = {}
        for key, ports in _mapping(value).items():
            where = f"{place}.{key}"
            name = self.read(lambda text, _: service_key(_text(text, "")), key, where, ServiceKey(""))
            services[name] = self.read(_ports, ports, where, {})
        return services

    def locality(self, value: object, place: str) -> Locality:
        fields = _Fields(self, value, place)
        locality = Locality(*(fields.need(key, _text, "") for key in ("region", "zone", "subzone")))
        fields.end()
        return locality

    def application_tunnel(self, value: object, place: str) -> ApplicationTunnel | None:
        fields = _Fields(self, value, place)
        protocol = fields.need("protocol", _word(AppProtocol), AppProtocol.NONE)
        number = fields.take("port", _port, 0)
        fields.end()
        return ApplicationTunnel(protocol, number)

    def gateway(self, value: object, place: str) -> GatewayAddress | None:
        fields = _Fields(self, value, place)
        destination = fields.need("destination", _destination, NetworkAddress("", ""))
        number = fields.need("hboneMtlsPort", _port, 0)
        fields.end()
        return GatewayAddress(destination, number)

    def service(self, value: object, place: str) -> tuple[Service, dict[str, tuple[dict[int, int], Health]]]:
        fields = _Fields(self, value, place)
        service = Service(
            name=fields.need("name", _text, ""),
            namespace=fields.need("namespace", _text, ""),
            hostname=fields.need("hostname", _text, ""),
            vips=tuple(fields.need("vips", self._list(_network_address), [])),
            cidr_vips=tuple(fields.take("cidrVips", self._list(self.block), [])),
            ports=fields.need("ports", _ports, {}),
            subject_alt_names=tuple(fields.take("subjectAltNames", self._list(_text), [])),
            waypoint=fields.take("waypoint", self.gateway, None),
            weighted_waypoints=tuple(fields.take("weightedWaypoints", self._list(self.weighted_waypoint), [])),
            load_balancing=fields.take("loadBalancer", self.load_balancing, None),
            ip_families=fields.take("ipFamilies", _word(IpFamilies), None),
            canonical=fields.take("canonical", _flag, False),
            visibility=fields.take("visibility", _word(Visibility), Visibility.PUBLIC),
        )
        endpoints = fields.take("endpoints", self.endpoints, {})
        fields.end()
        self.read(lambda text, _: service_key(_text(text, "")), service.key, place, service.key)
        return service, endpoints

    def refused(self, value: object, place: str) -> RefusedResource:
        fields = _Fields(self, value, place)
        refused = RefusedResource(
            name=fields.need("name", _text, ""),
            reason=fields.need("reason", _text, ""),
            addresses=tuple(fields.take("vips", self._list(_network_address), [])),
            blocks=tuple(fields.take("cidrVips", self._list(self.block), [])),
        )
        fields.end()
        return refused

    def endpoints(self, value: object, place: str) -> dict[str, tuple[dict[int, int], Health]]:
        endpoints: dict[str, tuple[dict[int, int], Health]] = {}
        for key, endpoint in _mapping(value).items():
            fields = _Fields(self, endpoint, f"{place}.{key}")
            uid = fields.need("workloadUid", _text, "")
            if uid != key:
                self.fault(f"{place}.{key}.workloadUid", f"{uid} is not the key")
            endpoints[uid] = (
                fields.need("port", _ports, {}),
                fields.take("status", _word(Health), Health.HEALTHY),
            )
            fields.end()
        return endpoints

    def block(self, value: object, place: str) -> CidrAddress:
        fields = _Fields(self, value, place)
        network = fields.take("network", _text, "")
        cidr = fields.need("cidr", _network, ipaddress.ip_network("0.0.0.0/32"))
        fields.end()
        return CidrAddress(network, cidr)

    def weighted_waypoint(self, value: object, place: str) -> WeightedWaypoint:
        fields = _Fields(self, value, place)
        destination = fields.need("destination", self.gateway, None)
        weight = fields.need("weight", _count, 0)
        fields.end()
        return WeightedWaypoint(destination or GatewayAddress(NetworkAddress("", ""), 0), weight)

    def load_balancing(self, value: object, place: str) -> LoadBalancing | None:
        fields = _Fields(self, value, place)
        balancing = LoadBalancing(
            preferences=tuple(fields.take("routingPreferences", self._list(_word(Scope)), [])),
            mode=fields.take("mode", _word(BalancerMode), BalancerMode.STANDARD),
            health=fields.take("healthPolicy", _word(HealthPolicy), HealthPolicy.ONLY_HEALTHY),
        )
        fields.end()
        return balancing

    def policy(self, value: object, place: str) -> AuthorizationPolicy:
        fields = _Fields(self, value, place)
        name = fields.need("name", _text, "")
        namespace = fields.need("namespace", _text, "")
        scope = fields.need("scope", _word(PolicyScope), PolicyScope.GLOBAL)
        action = fields.need("action", _word(Action), Action.DENY)
        dry_run = fields.need("dryRun", _flag, False)
        rules = fields.need("rules", self._list(self.rule), [])
        fields.end()
        return AuthorizationPolicy(
            name=name,
            namespace=namespace,
            scope=scope,
            action=action,
            dry_run=dry_run,
            condition=condition_of_rules([condition for condition, _ in rules]),
            rules=tuple(rule for _, rule in rules),
        )

    def rule(self, value: object, place: str) -> tuple[Condition, object]:
        clauses = self._list(self.clause)(value, place)
        return condition_of_rule([condition for condition, _ in clauses]), [clause for _, clause in clauses]

    def clause(self, value: object, place: str) -> tuple[Condition, object]:
        matches = self._list(self.match)(value, place)
        return condition_of_clause([condition for condition, _ in matches]), [match for _, match in matches]

    def match(self, value: object, place: str) -> tuple[Condition, object]:
        fields = _Fields(self, value, place)
        match: dict[str, list[Item]] = {}
        for attribute in ATTRIBUTES:
            for name in (attribute, negated(attribute)):
                match[name] = fields.take(name, self._list(self._item(attribute)), [])
        fields.end()
        return condition_of_match(match), shown(match)

    def _item(self, attribute: str) -> Callable[[object, str], Item]:
        def read(value: object, place: str) -> Item:
            item: Item
            match attribute:
                case "serviceAccounts":
                    fields = _Fields(self, value, place)
                    item = Account(fields.need("namespace", _text, ""), fields.need("serviceAccount", _text, ""))
                    fields.end()
                case "sourceIps" | "destinationIps":
                    item = _network(value, place)
                case "destinationPorts":
                    item = _port(value, place)
                case _:
                    item = _string_match(value, place)
            if reason := never_matches(attribute, item):
                raise ConfigError(reason)
            return item

        return read

    def _list(self, read: Callable[[object, str], Read]) -> Callable[[object, str], list[Read]]:
        """Return a function that reads a list. It reports bad elements as faults, and omits them."""

        def each(value: Iterable[object], place: str) -> Iterator[Read]:
            for index, element in enumerate(value):
                where = f"{place}[{index}]"
                try:
                    yield read(element, where)
                except ConfigError as error:
                    self.fault(where, error.reason)

        def read_list(value: object, place: str) -> list[Read]:
            if not isinstance(value, list | Iterator):
                raise ConfigError("must be a list")
            return list(each(value, place))

        return read_list


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is no string")
    return value


def _plain_workload(value: object) -> Workload | None:
    """Read a workload without faults and gateways in half the time of the general reader. Return ``None`` for
    others.
    """
    found: dict[str, Any] = {}
    try:
        for key, given in _mapping(value).items():
            name, read = _PLAIN_FIELDS[key]
            if given is not None:
                found[name] = read(given, "")
    except (ConfigError, KeyError):
        return None
    return Workload(**found) if found.get("uid") and found.keys() >= _NEEDED else None


def _all(read: Callable[[object, str], Read]) -> Callable[[object, str], tuple[Read, ...]]:
    def read_list(value: object, place: str) -> tuple[Read, ...]:
        if not isinstance(value, list):
            raise ConfigError("must be a list")
        return tuple([read(element, place) for element in value])

    return read_list


def _plain_services(value: object, place: str) -> dict[ServiceKey, dict[int, int]]:
    return {service_key(_text(key, "")): _ports(ports, place) for key, ports in _mapping(value).items()}


def _flag(value: object, place: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{value!r} is neither true nor false")
    return value


def _count(value: object, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise ConfigError(f"{value!r} is no number from 0 to 4294967295")
    return value


def _port(value: object, place: str) -> int:
    if isinstance(value, str):  # keys of JSON are strings
        number = whole_number(value, 65535)
        value = value if number is None else number
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{value!r} is no port")
    return port(value, "")


def _mapping(value: object) -> dict[Any, object]:
    if not isinstance(value, dict):
        raise ConfigError("must be a mapping")
    return value


def _ports(value: object, place: str) -> dict[int, int]:
    return {_port(key, place): _port(target, place) for key, target in _mapping(value).items()}


def _word(words: type[Word]) -> Callable[[object, str], Word]:
    def read(value: object, place: str) -> Word:
        try:
            return words(value)  # type: ignore[arg-type] # anything else than a member's text is refused below
        except ValueError:
            raise ConfigError(f"{value!r} is none of {', '.join(words)}") from None

    return read


def _workload_type(value: object, place: str) -> str:
    if value not in _WORKLOAD_TYPES:
        raise ConfigError(f"{value!r} is none of {', '.join(_WORKLOAD_TYPES)}")
    return str(value)


def _policy_key(value: object, place: str) -> PolicyKey:
    return PolicyKey(_text(value, place))


def _host(value: object, place: str) -> str:
    try:
        return canonical(_text(value, place))
    except ValueError:
        raise ConfigError(f"{value!r} is no IP address") from None


def _network(value: object, place: str) -> IpNetwork:
    try:
        block = ipaddress.ip_network(_text(value, place), strict=False)
    except ValueError:
        raise ConfigError(f"{value!r} is no block of addresses") from None
    return network_of(block.network_address.packed, block.prefixlen)


def _network_address(value: object, place: str) -> NetworkAddress:
    network, slash, host = _text(value, place).partition("/")
    if not slash:
        raise ConfigError(f"{value!r} is not network/address")
    return NetworkAddress(network, _host(host, place))


def _destination(value: object, place: str) -> NetworkAddress | NamespacedHostname:
    before, slash, after = _text(value, place).partition("/")
    try:
        return NetworkAddress(before, canonical(after))
    except ValueError:
        pass  # not an address, so it is a name
    if not slash or not before or not after or "/" in after:
        raise ConfigError(f"{value!r} is neither network/address nor namespace/hostname")
    return NamespacedHostname(before, after)


def _string_match(value: object, place: str) -> Text:
    if isinstance(value, Text):
        return value
    # A string match in the form of JSON and dumps: {"Exact": "x"}.
    if isinstance(value, dict) and len(value) == 1:
        ((kind, text),) = value.items()
        if kind == Comparison.PRESENCE:
            return Text(Comparison.PRESENCE)
        if kind in (Comparison.EXACT, Comparison.PREFIX, Comparison.SUFFIX) and isinstance(text, str):
            return Text(Comparison(kind), text)
    raise ConfigError("a string match is !Exact, !Prefix, !Suffix or !Presence")


_NEEDED = frozenset(("namespace", "addresses", "services"))
#: The keys of a workload, each with the attribute that it sets, and a reader. The reader raises an error for an
#: invalid value.
_PLAIN_FIELDS: Mapping[str, tuple[str, Callable[[object, str], object]]] = {
    "uid": ("uid", _text),
    "name": ("name", _text),
    "namespace": ("namespace", _text),
    "serviceAccount": ("service_account", lambda value, place: _text(value, place) or "default"),
    "trustDomain": ("trust_domain", lambda value, place: _text(value, place) or "cluster.local"),
    "workloadIps": ("addresses", _all(_host)),
    "hostname": ("hostname", _text),
    "protocol": ("protocol", _word(Protocol)),
    "networkMode": ("network_mode", _word(NetworkMode)),
    "node": ("node", _text),
    "network": ("network", _text),
    "clusterId": ("cluster_id", lambda value, place: _text(value, place) or "Kubernetes"),
    "workloadName": ("workload_name", _text),
    "workloadType": ("workload_type", _workload_type),
    "canonicalName": ("canonical_name", _text),
    "canonicalRevision": ("canonical_revision", _text),
    "nativeTunnel": ("native_tunnel", _flag),
    "status": ("status", _word(Health)),
    "capacity": ("capacity", _count),
    "authorizationPolicies": ("authorization_policies", _all(_policy_key)),
    "services": ("services", _plain_services),
}
