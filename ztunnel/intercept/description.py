"""What ``ztunnel intercept`` is told about a node: a YAML file, flags, or both; flags win.

::

    host:
      namespace: null             # name below /run/netns, path, or process id; left out: where we run
      addresses: [172.18.0.2, "fd00:172:18::2"]     # the first of each IP version is the node's own
    ztunnel:
      namespace: 4711
      interface: veth1a2b3c       # the node's end of the ztunnel pod's cable
      uplink: eth0                # the pod's end
      addresses: [10.244.1.5, "fd00:10:244:1::5"]
    pods:
    - uid: 0b2c...
      addresses: [10.244.1.10]
      interface: veth4d5e6f

No input or output here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

import yaml

from tproxy.node import Member, Node
from tproxy.resources import IpAddress

_INTERFACE_BYTES = 15


class BadDescription(Exception):
    """The description is not usable; ``problems`` are all that is wrong with it, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Two namespaces, as told, and what is wanted in them."""

    host_namespace: str | None
    ztunnel_namespace: str
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line says; empty where it is silent."""

    host_namespace: str | None = None
    ztunnel_namespace: str | None = None
    host_addresses: tuple[str, ...] = ()
    ztunnel_interface: str | None = None
    ztunnel_uplink: str | None = None
    ztunnel_addresses: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()


def namespaces(text: str | None, flags: Flags) -> tuple[str | None, str]:
    """Only the two namespaces: all that removal needs.

    Raises:
        BadDescription: the ztunnel's is missing, or the file is not YAML.
    """
    problems: list[str] = []
    data = _document(text, problems)
    host = flags.host_namespace or _namespace(_part(data, "host", problems), "host", problems)
    ztunnel = flags.ztunnel_namespace or _namespace(_part(data, "ztunnel", problems), "ztunnel", problems)
    if ztunnel is None:
        problems.append("ztunnel.namespace is missing: say --ztunnel-netns NAME|PATH|PID")
    if problems or ztunnel is None:
        raise BadDescription(problems)
    return host, ztunnel


def parse(text: str | None, flags: Flags) -> Description:
    """Read the description.

    Args:
        text: the YAML file, None without one.
        flags: the command line.

    Raises:
        BadDescription: with every problem found.
    """
    problems: list[str] = []
    data = _document(text, problems)
    host = _part(data, "host", problems)
    ztunnel = _part(data, "ztunnel", problems)
    _unknown(data, {"host", "ztunnel", "pods"}, "", problems)
    _unknown(host, {"namespace", "addresses"}, "host.", problems)
    _unknown(ztunnel, {"namespace", "interface", "uplink", "addresses"}, "ztunnel.", problems)
    try:
        host_namespace, ztunnel_namespace = namespaces(text, flags)
    except BadDescription as error:
        problems += [problem for problem in error.problems if problem not in problems]
        host_namespace, ztunnel_namespace = None, ""
    interface = flags.ztunnel_interface or ztunnel.get("interface")
    node = Node(
        host_addresses=_addresses(flags.host_addresses or host.get("addresses"), "host.addresses", problems),
        ztunnel_addresses=_addresses(
            flags.ztunnel_addresses or ztunnel.get("addresses"), "ztunnel.addresses", problems
        ),
        ztunnel_device=_interface(interface, "ztunnel.interface", problems),
        uplink=_interface(flags.ztunnel_uplink or ztunnel.get("uplink", "eth0"), "ztunnel.uplink", problems),
        members=tuple(_members(data.get("pods"), flags.pods, problems)),
    )
    if not problems and not node.versions:
        problems.append("host and ztunnel have no IP version in common")
    if problems:
        raise BadDescription(problems)
    return Description(
        host_namespace=host_namespace,
        ztunnel_namespace=ztunnel_namespace,
        node=replace(node, members=_served(node)),
    )


def _served(node: Node) -> tuple[Member, ...]:
    """Members without the addresses of an IP version that the node does not serve."""
    return tuple(
        replace(member, addresses=tuple(item for item in member.addresses if item.version in node.versions))
        for member in node.members
    )


def _document(text: str | None, problems: list[str]) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.append(f"not YAML: {' '.join(str(error).split())}")
        return {}
    if data is None:
        return {}
    if not isinstance(data, dict):
        problems.append("the description is not a mapping with host, ztunnel and pods")
        return {}
    return data


def _part(data: Mapping[str, Any], name: str, problems: list[str]) -> Mapping[str, Any]:
    part = data.get(name) or {}
    if not isinstance(part, dict):
        problems.append(f"{name} is not a mapping")
        return {}
    return part


def _unknown(data: Mapping[str, Any], known: set[str], where: str, problems: list[str]) -> None:
    problems += [f"{where}{name} is not a known key" for name in data if name not in known]


def _namespace(part: Mapping[str, Any], where: str, problems: list[str]) -> str | None:
    value = part.get("namespace")
    if value is None:
        return None
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
        return str(value)
    problems.append(f"{where}.namespace is not a name, path or process id: {value!r}")
    return None


def _addresses(value: object, where: str, problems: list[str]) -> tuple[IpAddress, ...]:
    if not isinstance(value, list | tuple) or not value:
        problems.append(f"{where} is not a list of IP addresses")
        return ()
    found = []
    for item in value:
        try:
            found.append(ip_address(item if isinstance(item, str) else ""))
        except ValueError:
            problems.append(f"{where}: {item!r} is not an IP address")
    return tuple(found)


def _interface(value: object, where: str, problems: list[str]) -> str:
    name = value if isinstance(value, str) else ""
    if not name or len(name.encode()) > _INTERFACE_BYTES or "/" in name or name.split() != [name]:
        problems.append(f"{where} is not an interface name: {value!r}")
    return name


def _members(value: object, told: Sequence[str], problems: list[str]) -> Iterator[Member]:
    for position, item in enumerate(told):
        yield _told_member(item, f"--pod {item!r} (number {position + 1})", problems)
    if value is None or told:
        return
    if not isinstance(value, list):
        problems.append("pods is not a list")
        return
    for position, item in enumerate(value):
        where = f"pods[{position}]"
        if not isinstance(item, dict):
            problems.append(f"{where} is not a mapping")
            continue
        _unknown(item, {"uid", "addresses", "interface"}, f"{where}.", problems)
        uid = item.get("uid")
        if not isinstance(uid, str) or not uid or len(uid.encode()) > 120 or not uid.isascii():
            problems.append(f"{where}.uid is not a text of at most 120 ASCII characters: {uid!r}")
            uid = ""
        yield Member(
            uid=uid,
            addresses=_addresses(item.get("addresses"), f"{where}.addresses", problems),
            device=_interface(item.get("interface"), f"{where}.interface", problems),
        )


def _told_member(item: str, where: str, problems: list[str]) -> Member:
    """``UID=ADDRESS[,ADDRESS]@INTERFACE``."""
    uid, _, rest = item.partition("=")
    addresses, _, interface = rest.rpartition("@")
    if not uid or not addresses or len(uid.encode()) > 120 or not uid.isascii():
        problems.append(f"{where} is not UID=ADDRESS[,ADDRESS]@INTERFACE")
        return Member(uid="", addresses=(), device="")
    return Member(
        uid=uid,
        addresses=_addresses(addresses.split(","), where, problems),
        device=_interface(interface, where, problems),
    )
