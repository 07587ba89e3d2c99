"""Tables of what a proxy of an Istio mesh knows, from its ``/config_dump``: ours or the Rust ztunnel's. Pure.

Columns are those of ``istioctl ztunnel-config``. Serial numbers are hexadecimal. A dump is JSON of any origin:
missing values are shown as ``-``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ztunnel.ask.inspect.ages import shown_age

Dump = Mapping[str, Any]
Row = tuple[str, ...]

#: The row of the status that is judged by the exit status.
CONTROL_PLANE: Final = "control plane"
_LOST: Final = "NOT CONNECTED"
#: Pairs that the table of the status shows.
_MOST_DENIALS: Final = 10
_NONE: Final = "-"
#: Decimal digits of 20 octets, the most that RFC 5280, 4.1.2.2 allows.
_LONGEST_SERIAL: Final = 49
#: The lists of a dump that other tables count.
_COUNTED: Final = {
    "workloads": ("workload", "workloads"),
    "services": ("service", "services"),
    "policies": ("policy", "policies"),
}


class NotAMesh(ValueError):
    """A dump is of another dialect, or none at all; the text says what it is."""


def mesh_dump(value: object) -> Dump:
    """Return a dump if it is one of an Istio mesh's proxy.

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


def workloads(dump: Dump, namespace: str = "") -> Iterator[Row]:
    """Yield a row per workload and address, after the heading."""
    yield ("NAMESPACE", "POD NAME", "ADDRESS", "NODE", "WAYPOINT", "PROTOCOL", "STATUS")
    for each in sorted(_of(dump, "workloads", namespace), key=_name):
        addresses = each.get("workloadIps") or [_NONE]
        for address in addresses:
            yield (
                *_name(each),
                str(address),
                cell(each, "node"),
                _gateway(each),
                cell(each, "protocol"),
                cell(each, "status"),
            )


def services(dump: Dump, namespace: str = "") -> Iterator[Row]:
    """Yield a row per service and address; endpoints are healthy ones of all that it has."""
    yield ("NAMESPACE", "SERVICE NAME", "SERVICE VIP", "WAYPOINT", "ENDPOINTS")
    for each in sorted(_of(dump, "services", namespace), key=_name):
        endpoints = each.get("endpoints") or {}
        listed = endpoints.values() if isinstance(endpoints, Mapping) else endpoints
        healthy = sum(1 for endpoint in listed if endpoint.get("status", "Healthy") == "Healthy")
        vips = each.get("vips") or [_NONE]
        for vip in vips:
            address = str(vip).rpartition("/")[2]
            yield (*_name(each), address, _gateway(each), f"{healthy}/{len(endpoints)}")


def policies(dump: Dump, namespace: str = "") -> Iterator[Row]:
    """Yield a row per policy with its number of decisions. For a dry-run policy these are hypothetical.

    The last row has the connections that were denied because no ALLOW policy matched, if any.
    """
    yield ("NAMESPACE", "POLICY NAME", "ACTION", "SCOPE", "ENFORCED", "ALLOWED", "DENIED", "LAST")
    for each in sorted(_of(dump, "policies", namespace), key=_name):
        enforced = "dry run" if each.get("dryRun") else "yes"
        if each.get("faults"):
            enforced += ", not understood in part"
        made = each.get("decisions") or {}
        yield (*_name(each), cell(each, "action"), cell(each, "scope"), enforced, *_counts(made))
    implied = dump.get("noPolicyMatched")
    if implied and not namespace:
        yield (_NONE, "(no ALLOW policy matched)", "Deny", _NONE, "implied", *_counts(implied))


def _counts(made: Dump) -> Row:
    """Return what was allowed and denied, and when last."""
    denied = cell(made, "denied") + (f", {made['ended']} ended" if made.get("ended") else "")
    return cell(made, "allowed"), denied, cell(made, "lastTime")


def certificates(dump: Dump, namespace: str = "") -> Iterator[Row]:
    """Yield a row per certificate of an identity: its leaf, then its roots."""
    yield ("CERTIFICATE NAME", "TYPE", "STATUS", "SERIAL NUMBER", "NOT AFTER", "NOT BEFORE")
    for each in dump.get("certificates") or []:
        identity = cell(each, "identity")
        if namespace and f"/ns/{namespace}/" not in identity:
            continue
        chain = [
            ("Leaf" if place == 0 else "Intermediate", held)
            for place, held in enumerate(each.get("certChain") or [])
        ]
        chain += [("Root", held) for held in each.get("rootCerts") or []]
        for kind, held in chain or [(_NONE, {})]:
            times = (cell(held, "expirationTime"), cell(held, "validFrom"))
            yield (identity, kind, cell(each, "state"), _serial(cell(held, "serialNumber")), *times)


def _serial(shown: str) -> str:
    """Return the serial number of a dump, which has it in decimal, as OpenSSL, the live page and Envoy show it."""
    if not (shown.isascii() and shown.isdecimal()) or len(shown) > _LONGEST_SERIAL:
        return shown
    digits = f"{int(shown):x}"
    return digits.zfill(len(digits) + len(digits) % 2)


def connections(dump: Dump, namespace: str = "") -> Iterator[Row]:
    """Yield a row per live connection, by pod."""
    yield ("WORKLOAD", "DIRECTION", "LOCAL", "REMOTE", "REMOTE TARGET", "PROTOCOL")
    for pod, state in sorted(_pods(dump, namespace)):
        carried = state.get("connections") or {}
        for way, local, remote in (("inbound", "actualDst", "src"), ("outbound", "src", "actualDst")):
            for each in carried.get(way) or []:
                cells = (cell(each, key) for key in (local, remote, "originalDst", "protocol"))
                yield (pod, way.capitalize(), *cells)


def status(dump: Dump, namespace: str = "") -> Iterator[Row]:
    """Yield what a person looks at first: version, pods, connections, certificates, the mesh."""
    plane = dump.get("controlPlane") or {}
    if plane.get("address"):
        yield control_plane(
            cell(plane, "address"), plane.get("awaySeconds"), connected=bool(plane.get("connected"))
        )
    version = dump.get("version") or {}
    yield ("version", cell(version, "version"))
    pods = list(_pods(dump, namespace))
    yield ("pods", counted(cell(state, "state") for _, state in pods))
    numbers = {
        way: sum(len((state.get("connections") or {}).get(way) or []) for _, state in pods)
        for way in ("inbound", "outbound")
    }
    yield ("connections", f"{numbers['inbound']} inbound, {numbers['outbound']} outbound")
    held = dump.get("certificates") or []
    yield ("certificates", counted(cell(each, "state").partition(":")[0] for each in held))
    yield ("the mesh", ", ".join(_number(len(dump.get(name) or []), *words) for name, words in _COUNTED.items()))
    for each in held:
        if cell(each, "state").startswith("Unavailable"):
            yield (
                "no certificate",
                f"{cell(each, 'identity')}: {cell(each, 'state').partition(':')[2].strip()}",
            )
    for pod, state in pods:
        if state.get("state") != "Up":
            yield ("not up", f"{pod}: {cell(state, 'state')}")
    for policy in dump.get("policies") or []:
        if policy.get("faults"):
            yield ("policy not understood", f"{'/'.join(_name(policy))}: {policy['faults'][0]}")
    denials = [each for each in dump.get("denials") or [] if not namespace or _concerns(each, namespace)]
    for each in denials[:_MOST_DENIALS]:
        yield ("denied", shown_denial(each, cell(each, "destination")))
    if len(denials) > _MOST_DENIALS:
        yield ("denied", f"and {len(denials) - _MOST_DENIALS} pairs more: see /denials")


def control_plane(address: str, away_s: float | None, *, connected: bool) -> Row:
    """Return the first row of the status: whether the configuration can still change."""
    if connected:
        return (CONTROL_PLANE, f"connected to {address}")
    away = f" for {shown_age(away_s)}" if away_s else ""
    return (CONTROL_PLANE, f"{_LOST}{away}: {address}; what follows is what it said last")


def is_good(rows: Sequence[Row]) -> bool:
    """Return whether a status reports a connected control plane, or none at all."""
    return not any(row[0] == CONTROL_PLANE and row[1].startswith(_LOST) for row in rows)


def _number(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _concerns(denial: Dump, namespace: str) -> bool:
    """Return whether a workload of a namespace is one of the two."""
    destination = cell(denial, "destination").rpartition(":")[0]
    return any(name.endswith(f".{namespace}") for name in (cell(denial, "source"), destination))


def shown_denial(each: Dump, destination: str) -> str:
    """Return an entry of ``/denials`` in words; each dialect has its own for the destination."""
    identity = f" ({each['identity']})" if each.get("identity") else ""
    direction = f"{each['direction']} " if each.get("direction") else ""
    return (
        f"{each.get('count')} x {direction}{cell(each, 'source')}{identity} to {destination}: "
        f"{cell(each, 'reason')}; last {cell(each, 'lastTime')} from {cell(each, 'lastAddress')}"
    )


def _of(dump: Dump, key: str, namespace: str) -> Iterator[Dump]:
    found = dump.get(key) or []
    for each in found.values() if isinstance(found, Mapping) else found:
        if not namespace or each.get("namespace") == namespace:
            yield each


def _pods(dump: Dump, namespace: str) -> Iterator[tuple[str, Dump]]:
    for uid, state in (dump.get("workloadState") or {}).items():
        info = state.get("info") or {}
        if not namespace or info.get("namespace") == namespace:
            yield (f"{info['name']}.{info['namespace']}" if info.get("name") else uid, state)


def _name(each: Dump) -> tuple[str, str]:
    return cell(each, "namespace"), cell(each, "name")


def cell(each: Dump, key: str) -> str:
    """Return what an entry has, for a column."""
    value = each.get(key)
    return _NONE if value is None or value == "" else str(value)


def _gateway(each: Dump) -> str:
    destination = (each.get("waypoint") or {}).get("destination")
    return str(destination) if destination else "None"


def counted(states: Iterator[str]) -> str:
    """Return how many there are of each state, in words."""
    found: dict[str, int] = {}
    for state in states:
        found[state] = found.get(state, 0) + 1
    return ", ".join(f"{number} {state}" for state, number in sorted(found.items())) or "none"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a dump: how its rows are made, and what its command's help says."""

    rows: Callable[[Dump, str], Iterator[Row]]
    help: str


TABLES: Final = {
    "status": Table(status, "show the state and what is missing"),
    "connections": Table(connections, "list the live connections"),
    "workloads": Table(workloads, "list the workloads"),
    "services": Table(services, "list the services and their endpoints"),
    "policies": Table(policies, "list the authorization policies"),
    "certificates": Table(certificates, "list the certificates and how long they are valid"),
}


def is_envoy_dump(value: object) -> bool:
    """Return whether a ``/config_dump`` is of Envoy's dialect."""
    return isinstance(value, Mapping) and "configs" in value
