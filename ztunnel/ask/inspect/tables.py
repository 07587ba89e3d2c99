"""Builds tables of a proxy's state in an Istio mesh from its ``/config_dump``, ours or the Rust ztunnel's. Pure.

Columns are the same as in ``istioctl ztunnel-config``. Serial numbers are hexadecimal. A dump is JSON of any
origin: missing values are ``None``, or ``-`` where a text is needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ztunnel.ask.inspect import kinds
from ztunnel.ask.inspect.ages import shown_age
from ztunnel.policy.effect import without_effect
from ztunnel.runtime.console.output import Kind

Dump = Mapping[str, Any]
#: The most pairs with denials that ``status`` lists.
_MOST_DENIALS: Final = 10
_NONE: Final = "-"
#: The most digits of a decimal serial number: RFC 5280, 4.1.2.2 allows 20 octets.
_LONGEST_SERIAL: Final = 49
#: The lists of a dump whose lengths ``status`` shows.
_COUNTED: Final = {
    "workloads": ("workload", "workloads"),
    "services": ("service", "services"),
    "policies": ("policy", "policies"),
}


class NotAMesh(ValueError):
    """An answer is not from a proxy in an Istio mesh: it is in Envoy's dialect or no dump. The text says which."""


def mesh_dump(value: object) -> Dump:
    """Return the dump if it comes from a proxy of an Istio mesh.

    Raises:
        NotAMesh: it is not.
    """
    if not isinstance(value, Mapping):
        raise NotAMesh("not a config_dump: not an object")
    if is_envoy_dump(value):
        raise NotAMesh(
            "a proxy in Envoy's dialect has listeners and clusters instead: ztunnel config listeners, clusters"
        )
    if "workloads" not in value or "certificates" not in value:
        raise NotAMesh("not a config_dump of an Istio mesh's proxy: it has no workloads or no certificates")
    return value


def workloads(dump: Dump, namespace: str = "") -> Iterator[kinds.Workload]:
    """Yield the workloads by name."""
    for each in sorted(_of(dump, "workloads", namespace), key=_name):
        namespace_, name = _name(each)
        yield kinds.Workload(
            namespace=namespace_,
            name=name,
            addresses=tuple(str(address) for address in each.get("workloadIps") or ()),
            workload_node=text_of(each, "node"),
            waypoint=_gateway(each),
            protocol=cell(each, "protocol"),
            status=cell(each, "status"),
            service_account=text_of(each, "serviceAccount"),
            uid=text_of(each, "uid"),
        )


def services(dump: Dump, namespace: str = "") -> Iterator[kinds.Service]:
    """Yield the services by name."""
    for each in sorted(_of(dump, "services", namespace), key=_name):
        endpoints = each.get("endpoints") or {}
        listed = endpoints.values() if isinstance(endpoints, Mapping) else endpoints
        namespace_, name = _name(each)
        yield kinds.Service(
            namespace=namespace_,
            name=name,
            hostname=text_of(each, "hostname"),
            vips=tuple(str(vip).rpartition("/")[2] for vip in each.get("vips") or ()),
            waypoint=_gateway(each),
            healthy_endpoints=sum(1 for one in listed if one.get("status", "Healthy") == "Healthy"),
            endpoints=len(endpoints),
        )


def policies(dump: Dump, namespace: str = "") -> Iterator[kinds.Policy]:
    """Yield the policies with the numbers of their decisions. For a dry-run policy these are hypothetical.

    The last item counts the connections that were denied because no ALLOW policy matched, if there are any.
    """
    for each in sorted(_of(dump, "policies", namespace), key=_name):
        namespace_, name = _name(each)
        yield kinds.Policy(
            namespace=namespace_,
            name=name,
            action=text_of(each, "action"),
            scope=text_of(each, "scope"),
            enforced=not each.get("dryRun"),
            without_effect=without_effect(each) or None,
            faults=tuple(str(fault) for fault in each.get("faults") or ()),
            **decisions(each.get("decisions") or {}),
        )
    implied = dump.get("noPolicyMatched")
    if implied and not namespace:
        name = "(no ALLOW policy matched)"
        yield kinds.Policy(name=name, action="Deny", enforced=None, **decisions(implied))


def decisions(made: Dump, before: str = "") -> dict[str, Any]:
    """Return the fields of a policy that describe its decisions."""
    return {
        "allowed": number(made, f"{before}allowed"),
        "denied": number(made, f"{before}denied"),
        "ended": number(made, "ended"),
        "last_time": text_of(made, "lastTime"),
    }


def certificates(dump: Dump, namespace: str = "") -> Iterator[kinds.Certificate]:
    """Yield the certificates of each identity: its leaf, intermediates, then its roots."""
    for each in dump.get("certificates") or []:
        identity = cell(each, "identity")
        if namespace and f"/ns/{namespace}/" not in identity:
            continue
        chain: list[tuple[str | None, Dump]] = [
            ("Leaf" if place == 0 else "Intermediate", held)
            for place, held in enumerate(each.get("certChain") or [])
        ]
        chain += [("Root", held) for held in each.get("rootCerts") or []]
        for kind, held in chain or [(None, {})]:
            serial = text_of(held, "serialNumber")
            yield kinds.Certificate(
                identity=identity,
                type=kind,
                state=cell(each, "state"),
                serial_number=None if serial is None else _serial(serial),
                not_after=text_of(held, "expirationTime"),
                not_before=text_of(held, "validFrom"),
            )


def _serial(shown: str) -> str:
    """Convert a serial number from a dump's decimal form to the form of OpenSSL, the live page and Envoy."""
    if not (shown.isascii() and shown.isdecimal()) or len(shown) > _LONGEST_SERIAL:
        return shown
    digits = f"{int(shown):x}"
    return digits.zfill(len(digits) + len(digits) % 2)


def connections(dump: Dump, namespace: str = "") -> Iterator[kinds.Connection]:
    """Yield the live connections, by pod."""
    ways: tuple[tuple[Literal["Inbound", "Outbound"], str, str, str], ...] = (
        ("Inbound", "actualDst", "src", "srcIdentity"),
        ("Outbound", "src", "actualDst", "dstIdentity"),
    )
    for pod, space, state in sorted(_pods(dump, namespace), key=lambda found: found[:2]):
        carried = state.get("connections") or {}
        for way, local, remote, identity in ways:
            for each in carried.get(way.lower()) or []:
                yield kinds.Connection(
                    namespace=space or None,
                    pod=pod,
                    direction=way,
                    local=cell(each, local),
                    remote=cell(each, remote),
                    remote_target=text_of(each, "originalDst"),
                    protocol=cell(each, "protocol"),
                    identity=text_of(each, identity),
                    service=text_of(each, "service"),
                    age_seconds=seconds(each, "ageSeconds"),
                    bytes_sent=number(each, "bytesSent"),
                    bytes_received=number(each, "bytesReceived"),
                )


def denials(found: Any, namespace: str = "") -> Iterator[kinds.Denial]:
    """Yield the last denials from ``/denials`` of either dialect, or from a dump."""
    for each in found or []:
        if not namespace or _concerns(each, namespace):
            yield kinds.Denial(
                direction=text_of(each, "direction"),
                source=text_of(each, "source"),
                identity=text_of(each, "identity"),
                destination=text_of(each, "destination"),
                listener=text_of(each, "listener"),
                chain=text_of(each, "chain"),
                reason=text_of(each, "reason"),
                count=number(each, "count") or 0,
                last_address=text_of(each, "lastAddress"),
                last_time=text_of(each, "lastTime"),
            )


def addon_facts(found: Sequence[Dump]) -> Iterator[kinds.Fact]:
    """Yield the number of active addons, and a line for each addon that is suspended or whose changed file is not
    used.
    """
    if not found:
        return
    yield fact("addons", counted(cell(each, "state").partition(" ")[0].rstrip(":") for each in found))
    for each in found:
        if each.get("state") != "active":
            why = cell(each, "state").partition(": ")[2]
            yield fact("addon suspended", f"{cell(each, 'name')}: {why}", "error")
        if each.get("problem"):
            yield fact("addon not replaced", f"{cell(each, 'name')}: {each['problem']}", "error")


def status(dump: Dump, namespace: str = "") -> Iterator[kinds.Fact]:
    """Yield the status lines: version, pods, connections, certificates, the mesh, and faults."""
    plane = dump.get("controlPlane") or {}
    if plane.get("address"):
        yield control_plane(
            cell(plane, "address"), plane.get("awaySeconds"), connected=bool(plane.get("connected"))
        )
    if dump.get("pending"):
        yield fact("not ready", f"waits for {', '.join(dump['pending'])}", "error")
    version = dump.get("version") or {}
    yield fact("version", cell(version, "version"))
    pods = [
        (f"{name}.{space}" if space else name, state)
        for name, space, state in sorted(_pods(dump, namespace), key=lambda found: found[:2])
    ]
    yield fact("pods", counted(cell(state, "state") for _, state in pods))
    numbers = {
        way: sum(len((state.get("connections") or {}).get(way) or []) for _, state in pods)
        for way in ("inbound", "outbound")
    }
    yield fact("connections", f"{numbers['inbound']} inbound, {numbers['outbound']} outbound")
    yield from addon_facts(dump.get("addons") or [])
    held = dump.get("certificates") or []
    yield fact("certificates", counted(cell(each, "state").partition(":")[0] for each in held))
    sizes = (_number(len(dump.get(name) or []), *words) for name, words in _COUNTED.items())
    yield fact("the mesh", ", ".join(sizes))
    yield from _node(dump, captures=bool(pods))
    yield from _wrong(held, pods, dump.get("policies") or [])
    found = list(denials(dump.get("denials"), namespace))
    for each in found[:_MOST_DENIALS]:
        yield fact("denied", shown_denial(each), "warning")
    if len(found) > _MOST_DENIALS:
        yield fact("denied", f"and {len(found) - _MOST_DENIALS} pairs more: see /denials", "warning")


def _node(dump: Dump, *, captures: bool) -> Iterator[kinds.Fact]:
    """Yield the faults of the proxy's node name, which selects the workloads of its node.

    Args:
        dump: the dump of a proxy in an Istio mesh.
        captures: whether the proxy has pods. The mesh must place them on this node.
    """
    config = dump.get("config") or {}
    if config.get("proxyMode") != "Shared":
        return
    node, found = config.get("localNode"), dump.get("workloads") or []
    if not node:
        yield fact(
            "node", "NODE_NAME is not set: the control plane cannot know which node this proxy serves", "warning"
        )
    elif captures and found and not any(each.get("node") == node for each in found):
        yield fact(
            "node", f"the mesh has no workload on node {node}: is NODE_NAME the name that it knows?", "error"
        )


def _wrong(held: Sequence[Dump], pods: Sequence[tuple[str, Dump]], found: Sequence[Dump]) -> Iterator[kinds.Fact]:
    for each in held:
        if cell(each, "state").startswith("Unavailable"):
            reason = cell(each, "state").partition(":")[2].strip()
            yield fact("no certificate", f"{cell(each, 'identity')}: {reason}", "error")
    for pod, state in pods:
        if state.get("state") != "Up":
            yield fact("not up", f"{pod}: {cell(state, 'state')}", "error")
    for policy in found:
        if policy.get("faults"):
            yield fact("policy not understood", f"{'/'.join(_name(policy))}: {policy['faults'][0]}", "error")
        if reason := without_effect(policy):
            yield fact("policy without effect", f"{'/'.join(_name(policy))}: {reason}", "error")


def fact(name: str, state: str, severity: Literal["ok", "warning", "error"] = "ok") -> kinds.Fact:
    """Return one line of ``status``."""
    return kinds.Fact(name=name, state=state, severity=severity)


def control_plane(address: str, away_s: float | None, *, connected: bool) -> kinds.Fact:
    """Return the line of ``status`` about the control plane: whether the proxy still receives configuration."""
    if connected:
        return fact("control plane", f"connected to {address}")
    away = f" for {shown_age(away_s)}" if away_s else ""
    return fact("control plane", f"NOT CONNECTED{away}: {address}; its last configuration follows", "error")


def _number(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _concerns(denial: Dump, namespace: str) -> bool:
    """Return whether either end of a denial is a workload of the namespace."""
    destination = cell(denial, "destination").rpartition(":")[0]
    return any(name.endswith(f".{namespace}") for name in (cell(denial, "source"), destination))


def shown_denial(each: kinds.Denial, where: str = "") -> str:
    """Format a denial as one line. ``where`` is the place of the denial, which only Envoy's dialect has."""
    identity = f" ({each.identity})" if each.identity else ""
    direction = f"{each.direction} " if each.direction else ""
    return (
        f"{each.count} x {direction}{each.source or _NONE}{identity} to {each.destination or _NONE}{where}: "
        f"{each.reason or _NONE}; last {each.last_time or _NONE} from {each.last_address or _NONE}"
    )


def _of(dump: Dump, key: str, namespace: str) -> Iterator[Dump]:
    found = dump.get(key) or []
    for each in found.values() if isinstance(found, Mapping) else found:
        if not namespace or each.get("namespace") == namespace:
            yield each


def _pods(dump: Dump, namespace: str) -> Iterator[tuple[str, str, Dump]]:
    """Yield each pod's name, namespace and state. If the name is unknown, yield the uid, and no namespace."""
    for uid, state in (dump.get("workloadState") or {}).items():
        info = state.get("info") or {}
        if not namespace or info.get("namespace") == namespace:
            name, space = str(info.get("name") or ""), str(info.get("namespace") or "")
            yield (name, space, state) if name else (str(uid), "", state)


def _name(each: Dump) -> tuple[str, str]:
    return cell(each, "namespace"), cell(each, "name")


def cell(each: Dump, key: str) -> str:
    """Return the value of an entry's field as the text of a table cell."""
    value = each.get(key)
    return _NONE if value is None or value == "" else str(value)


def text_of(each: Dump, key: str) -> str | None:
    """Return the text in an entry's field; ``None`` if the field is missing."""
    value = each.get(key)
    return None if value is None or value == "" else str(value)


def number(each: Dump, key: str) -> int | None:
    """Return the count in an entry's field; ``None`` if the field is missing."""
    value = each.get(key)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def seconds(each: Dump, key: str) -> float | None:
    """Return the time in seconds in an entry's field; ``None`` if the field is missing."""
    value = each.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _gateway(each: Dump) -> str | None:
    destination = (each.get("waypoint") or {}).get("destination")
    return str(destination) if destination else None


def counted(states: Iterator[str]) -> str:
    """Return the number of items in each state, as text."""
    found: dict[str, int] = {}
    for state in states:
        found[state] = found.get(state, 0) + 1
    return ", ".join(f"{number} {state}" for state, number in sorted(found.items())) or "none"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a dump: the function that makes its items, the kind of the items, and the command's help."""

    items: Callable[[Dump, str], Iterator[Any]]
    kind: Kind[Any]
    help: str


TABLES: Final = {
    "status": Table(status, kinds.FACT, "show the state and the faults"),
    "connections": Table(connections, kinds.CONNECTION, "list the live connections"),
    "workloads": Table(workloads, kinds.WORKLOAD, "list the workloads"),
    "services": Table(services, kinds.SERVICE, "list the services and their endpoints"),
    "policies": Table(policies, kinds.POLICY, "list the authorization policies"),
    "certificates": Table(certificates, kinds.CERTIFICATE, "list the certificates and their validity"),
    "denials": Table(
        lambda dump, namespace: denials(dump.get("denials"), namespace),
        kinds.DENIAL,
        "list connections that policies denied or ended, by pair of workloads",
    ),
}


def is_envoy_dump(value: object) -> bool:
    """Return whether a ``/config_dump`` is of Envoy's dialect."""
    return isinstance(value, Mapping) and "configs" in value
