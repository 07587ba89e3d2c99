"""The description of a node for ``ztunnel intercept``: a YAML file, flags, or both; flags win.

::

    host:
      namespace: null             # name below /run/netns, path, or process id; default: the command's own
      addresses: [172.18.0.2, "fd00:172:18::2"]     # the first of each IP version is the node's own
    ztunnel:
      namespace: 4711
      interface: veth1a2b3c       # the node's end of the ztunnel pod's veth pair
      uplink: eth0                # the pod's end
      addresses: [10.244.1.5, "fd00:10:244:1::5"]
    pods:
    - uid: 0b2c...
      addresses: [10.244.1.10]
      interface: veth4d5e6f

No input or output here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tproxy.node import Member, Node
from ztunnel.runtime.formats.config_reader import ConfigReader, Faults
from ztunnel.runtime.formats.file_kinds import FileKind, explained

_UID_CHARACTERS = 120  # fits into the comment that marks the pod's rules


class BadDescription(Faults):
    """A description of a node is unusable; this lists all its faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The names of the host's and the ztunnel's network namespaces, and the node that the description defines."""

    host_namespace: str | None
    ztunnel_namespace: str
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The part of a description that the command line gives. Empty values leave the file's values unchanged."""

    host_namespace: str | None = None
    ztunnel_namespace: str | None = None
    host_addresses: tuple[str, ...] = ()
    ztunnel_interface: str | None = None
    ztunnel_uplink: str | None = None
    ztunnel_addresses: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()


def namespaces(text: str | None, flags: Flags) -> tuple[str | None, str]:
    """Return the names of the host's and the ztunnel's namespace, which are all that removal needs.

    Raises:
        BadDescription: the ztunnel's namespace is missing, or the file is not YAML.
    """
    reader = _Reader()
    data = reader.document(text or "", _KEYS)
    found = reader.namespaces(data, flags)
    # Removal ignores faults elsewhere in the file.
    faults = [fault for fault in reader.faults if fault.startswith(("file:", *_NAMESPACES))]
    if faults:
        raise BadDescription(explained(faults, text or "", FileKind.NODE))
    return found


def parse(text: str | None, flags: Flags) -> Description:
    """Parse the description.

    Args:
        text: content of the YAML file. None without a file.
        flags: the command line.

    Raises:
        BadDescription: with every fault.
    """
    reader = _Reader()
    data = reader.document(text or "", _KEYS)
    host_namespace, ztunnel_namespace = reader.namespaces(data, flags)
    node = reader.node(data, flags)
    if not reader.faults and not node.versions:
        reader.fault("addresses", "host and ztunnel have no IP version in common")
    if reader.faults:
        raise BadDescription(explained(reader.faults, text or "", FileKind.NODE))
    return Description(
        host_namespace=host_namespace,
        ztunnel_namespace=ztunnel_namespace,
        node=replace(node, members=_served(node)),
    )


def _served(node: Node) -> tuple[Member, ...]:
    """Return the members without addresses of IP versions that the node does not have."""
    return tuple(
        replace(member, addresses=tuple(item for item in member.addresses if item.version in node.versions))
        for member in node.members
    )


_KEYS = ("host", "ztunnel", "pods")
_NAMESPACES = ("host.namespace:", "ztunnel.namespace:")


class _Reader(ConfigReader):
    def namespaces(self, data: Mapping[str, Any], flags: Flags) -> tuple[str | None, str]:
        host, ztunnel = (self.mapping(data.get(name), name, None) for name in ("host", "ztunnel"))
        host_namespace = flags.host_namespace or self.namespace(host.get("namespace"), "host.namespace")
        given = flags.ztunnel_namespace or ztunnel.get("namespace")
        ztunnel_namespace = self.namespace(given, "ztunnel.namespace")
        if given is None:
            self.fault("ztunnel.namespace", "is missing: give it, or --ztunnel-netns NAME|PATH|PID")
        return host_namespace, ztunnel_namespace or ""

    def node(self, data: Mapping[str, Any], flags: Flags) -> Node:
        host = self.part(data, "host", ("namespace", "addresses"))
        ztunnel = self.part(data, "ztunnel", ("namespace", "interface", "uplink", "addresses"))
        return Node(
            host_addresses=self.addresses(flags.host_addresses or host.get("addresses"), "host.addresses"),
            ztunnel_addresses=self.addresses(
                flags.ztunnel_addresses or ztunnel.get("addresses"), "ztunnel.addresses"
            ),
            ztunnel_device=self.interface(
                flags.ztunnel_interface or ztunnel.get("interface"), "ztunnel.interface"
            ),
            uplink=self.interface(flags.ztunnel_uplink or ztunnel.get("uplink", "eth0"), "ztunnel.uplink"),
            members=self.members_of(flags) if flags.pods else self.members(data),
        )

    def part(self, data: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Mapping[str, Any]:
        value = data.get(name)
        # If the value is not a mapping, reading the namespaces has already reported it.
        return self.mapping(value, name, known) if isinstance(value, Mapping) else {}

    def members(self, data: Mapping[str, Any]) -> tuple[Member, ...]:
        found = []
        for position, item in enumerate(self.items(data, "pods", "file")):
            place = f"pods[{position}]"
            entry = self.mapping(item, place, ("uid", "addresses", "interface"))
            if not entry:
                self.fault(place, "must have uid, addresses and interface")
                continue
            found.append(
                Member(
                    uid=self.uid(entry.get("uid"), f"{place}.uid"),
                    addresses=self.addresses(entry.get("addresses"), f"{place}.addresses"),
                    device=self.interface(entry.get("interface"), f"{place}.interface"),
                )
            )
        return tuple(found)

    def members_of(self, flags: Flags) -> tuple[Member, ...]:
        """Return the members given as ``--pod UID=ADDRESS[,ADDRESS]@INTERFACE``."""
        found = []
        for position, item in enumerate(flags.pods):
            place = f"--pod {item!r} (number {position + 1})"
            uid, _, rest = item.partition("=")
            addresses, _, interface = rest.rpartition("@")
            if not uid or not addresses:
                self.fault(place, "must be UID=ADDRESS[,ADDRESS]@INTERFACE")
                continue
            found.append(
                Member(
                    uid=self.uid(uid, place),
                    addresses=self.addresses(addresses.split(","), place),
                    device=self.interface(interface, place),
                )
            )
        return tuple(found)

    def uid(self, value: object, place: str) -> str:
        if isinstance(value, str) and 0 < len(value) <= _UID_CHARACTERS and value.isascii():
            return value
        self.fault(place, f"must be a text of at most {_UID_CHARACTERS} ASCII characters, not {value!r}")
        return ""
