"""IP sets, indexed by member, so that a few look-ups find all sets with an address, however many sets exist.

One table per prefix length maps a network to the sets that list it. Another table maps addresses with ports. A
member of a single set costs one entry and no separate object. Sets have internal numbers. Removing or replacing a
set retires its number, and entries of retired numbers are swept when they outnumber the active entries. So every
update costs in proportion to its size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Final, TypeAlias

from xds.digits import whole_number
from xds.model.calico import PROTOCOLS, IpSetType

#: The number of the set that lists a member, or a tuple if several sets do. One set is the usual case, and needs
#: no tuple.
_Owners: TypeAlias = int | tuple[int, ...]

_Table: TypeAlias = dict[int, _Owners]

_NOTHING: Final[frozenset[str]] = frozenset()


@dataclass(slots=True)
class _Set:
    """One IP set. ``broken`` has its unreadable members."""

    id: str
    type: IpSetType
    number: int
    size: int = 0
    broken: set[str] = field(default_factory=set)


class MalformedMember(ValueError):
    """A text is not a valid member for a set of this type."""


class IpSets:
    """The IP sets of a store.

    A set with an unreadable member still contains its other members. Whether it contains any further address is
    unknown, like for a missing set.

    Attributes:
        generation: changes when sets appear, disappear or become (un)usable, but not with their members.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._sets: dict[str, _Set] = {}
        self._by_number: dict[int, _Set] = {}
        self._next = 0
        self._tables: dict[int, dict[int, _Table]] = {4: {}, 6: {}}
        self._ports: dict[int, _Table] = {4: {}, 6: {}}
        self._retired = 0
        self._members = 0
        self._unreadable = 0

    def __contains__(self, set_id: str) -> bool:
        """Return whether a set exists and all its members are readable."""
        found = self._sets.get(set_id)
        return found is not None and not found.broken

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def members(self) -> int:
        """The number of members in all sets."""
        return self._members

    @property
    def weight(self) -> int:
        """The memory of the sets, in units of one member. An unreadable member is stored as its text."""
        return self._members + self._unreadable

    @property
    def unusable(self) -> int:
        """The number of sets with an unreadable member."""
        return sum(bool(found.broken) for found in self._sets.values())

    def broken(self) -> Iterator[tuple[str, str]]:
        """For each unusable set, yield its id and one of its unreadable members."""
        for found in self._sets.values():
            if found.broken:
                yield found.id, min(found.broken)

    def replace(self, set_id: str, kind: IpSetType, members: Iterable[str]) -> None:
        """Add a set, or replace one of the same id."""
        self._retire(set_id)
        added = _Set(set_id, kind, self._next)
        self._next += 1
        self._sets[set_id] = added
        self._by_number[added.number] = added
        self.generation += 1
        for member in members:
            self._add(added, member)

    def change(self, set_id: str, added: Iterable[str], removed: Iterable[str]) -> bool:
        """Add and remove members. Return False without a change if the set does not exist."""
        found = self._sets.get(set_id)
        if found is None:
            return False
        for member in added:
            self._add(found, member)
        for member in removed:
            self._remove(found, member)
        return True

    def rename(self, set_id: str, name: str) -> None:
        """Give a set another id. A set that had this id is replaced."""
        found = self._sets.pop(set_id)
        self._retire(name)
        found.id = name
        self._sets[name] = found
        self.generation += 1

    def remove(self, set_id: str) -> None:
        """Remove a set; idempotent."""
        if set_id in self._sets:
            self._retire(set_id)
            self.generation += 1

    def containing(self, address: str | None) -> frozenset[str]:
        """Return the ids of the sets without ports that are known to contain an address."""
        if address is None:
            return _NOTHING
        version, number = address_number(address)
        width = 32 if version == 4 else 128
        found: set[int] = set()
        for length, table in self._tables[version].items():
            owners = table.get(number >> (width - length))
            if owners is not None:
                found.update((owners,) if isinstance(owners, int) else owners)
        return self._ids(found)

    def holds(self, set_id: str, address: str | None) -> bool:
        """Return whether a set exists, is readable, and contains an address. Cheaper than :meth:`containing`."""
        found = self._sets.get(set_id)
        if found is None or found.broken or address is None:
            return False
        version, number = address_number(address)
        width = 32 if version == 4 else 128
        for length, table in self._tables[version].items():
            owners = table.get(number >> (width - length))
            if owners is not None and (
                found.number == owners if isinstance(owners, int) else found.number in owners
            ):
                return True
        return False

    def containing_port(self, address: str | None, protocol: int, port: int) -> frozenset[str]:
        """Return the ids of the sets that are known to contain an address with protocol and port."""
        if address is None:
            return _NOTHING
        version, number = address_number(address)
        owners = self._ports[version].get(_port_key(number, protocol, port))
        if owners is None:
            return _NOTHING
        return self._ids((owners,) if isinstance(owners, int) else owners)

    def _ids(self, numbers: Iterable[int]) -> frozenset[str]:
        found = (self._by_number.get(number) for number in numbers)
        return frozenset(each.id for each in found if each is not None)

    def _add(self, target: _Set, member: str) -> None:
        try:
            table, key = self._place(target.type, member)
        except MalformedMember:
            if not target.broken:
                self.generation += 1
            if member not in target.broken:
                target.broken.add(member)
                self._unreadable += _weight(member)
            return
        owners = table.get(key)
        if owners is None:
            table[key] = target.number
        elif isinstance(owners, int):
            if owners == target.number:
                return
            table[key] = (owners, target.number) if owners in self._by_number else target.number
        elif target.number in owners:
            return
        else:
            alive = tuple(owner for owner in owners if owner in self._by_number)
            table[key] = (*alive, target.number) if alive else target.number
        target.size += 1
        self._members += 1

    def _remove(self, target: _Set, member: str) -> None:
        try:
            table, key = self._place(target.type, member)
        except MalformedMember:
            if target.broken == {member}:
                self.generation += 1
            if member in target.broken:
                target.broken.discard(member)
                self._unreadable -= _weight(member)
            return
        owners = table.get(key)
        if owners is None:
            return
        if isinstance(owners, int):
            if owners != target.number:
                return
            del table[key]
        elif target.number not in owners:
            return
        else:
            left = tuple(owner for owner in owners if owner != target.number)
            table[key] = left if len(left) > 1 else left[0]
        target.size -= 1
        self._members -= 1

    def _place(self, kind: IpSetType, member: str) -> tuple[_Table, int]:
        """Return the table that a member belongs to, and the member's key in it.

        Raises:
            MalformedMember: the member does not fit the set's type.
        """
        if kind is IpSetType.IP_AND_PORT:
            version, key = _parse_port_member(member)
            return self._ports[version], key
        version, length, key = _parse_network(member)
        return self._tables[version].setdefault(length, {}), key

    def _retire(self, set_id: str) -> None:
        old = self._sets.pop(set_id, None)
        if old is None:
            return
        del self._by_number[old.number]
        self._unreadable -= sum(map(_weight, old.broken))
        self._retired += old.size
        self._members -= old.size
        if self._retired > self._members + 1000:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the table entries that belong to retired sets."""
        alive = self._by_number
        for tables in self._tables.values():
            for length, table in list(tables.items()):
                tables[length] = _swept(table, alive)
                if not tables[length]:
                    del tables[length]
        for version, table in self._ports.items():
            self._ports[version] = _swept(table, alive)
        self._retired = 0


def _weight(text: str) -> int:
    """Return the memory of an invalid text as a number of members."""
    return 1 + len(text) // 64


def _swept(table: _Table, alive: dict[int, _Set]) -> _Table:
    kept: _Table = {}
    for key, owners in table.items():
        if isinstance(owners, int):
            if owners in alive:
                kept[key] = owners
            continue
        left = tuple(owner for owner in owners if owner in alive)
        if left:
            kept[key] = left if len(left) > 1 else left[0]
    return kept


@lru_cache(maxsize=4096)  # the same few addresses are looked up again and again
def address_number(address: str) -> tuple[int, int]:
    """Return an address as its version and its number. IPv4 mapped to IPv6 counts as IPv4."""
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if parsed.version == 6 else None
    return (4, int(mapped)) if mapped is not None else (parsed.version, int(parsed))


def _parse_network(member: str) -> tuple[int, int, int]:
    """Return a network as version, prefix length, and prefix as a number. A text without a length is one
    address.
    """
    address, slash, length = member.partition("/")
    parts = address.split(".")
    # This is faster than ipaddress, which takes 3 us for an address: nearly all members are IPv4, and sets have
    # 50,000.
    if len(parts) == 4 and all(part.isascii() and part.isdigit() and len(part) <= 3 for part in parts):
        a, b, c, d = map(int, parts)
        bits = int(length) if length.isascii() and length.isdigit() and len(length) <= 2 else (33 if slash else 32)
        if max(a, b, c, d) < 256 and bits <= 32:
            return 4, bits, ((a << 24) | (b << 16) | (c << 8) | d) >> (32 - bits)
        raise MalformedMember(member)
    try:
        network = ip_network(member, strict=False)
    except ValueError as error:
        raise MalformedMember(member) from error
    number, bits, version = int(network.network_address), network.prefixlen, network.version
    if version == 6 and bits >= 96 and number >> 32 == 0xFFFF:
        version, bits, number = 4, bits - 96, number & 0xFFFFFFFF
    return version, bits, number >> ((32 if version == 4 else 128) - bits)


def _port_key(address: int, protocol: int, port: int) -> int:
    return (address << 24) | (protocol << 16) | port


def _parse_port_member(member: str) -> tuple[int, int]:
    """Return the version and the key of a member ``address,protocol:port``."""
    address, comma, rest = member.partition(",")
    name, colon, digits = rest.partition(":")
    protocol = PROTOCOLS.get(name.lower()) or whole_number(name, 255)
    port = whole_number(digits, 65535)
    if not comma or not colon or not protocol or port is None:
        raise MalformedMember(member)
    try:
        version, number = address_number(address.removesuffix("/32").removesuffix("/128"))
    except ValueError as error:
        raise MalformedMember(member) from error
    return version, _port_key(number, protocol, port)
