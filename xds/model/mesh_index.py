"""The indexes of :class:`xds.model.mesh.Mesh`: values by a key that mostly has one value, values by address block,
services with their endpoints, and the addresses of refused resources.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from xds.model.address import IpAddress, IpNetwork
from xds.model.refused import RefusedResource
from xds.model.service import HealthPolicy, Service
from xds.model.workload import Health, NetworkAddress, ServiceKey, Workload, WorkloadUid

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", Workload, Service, RefusedResource)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One workload as an endpoint of one service.

    Attributes:
        ports: maps the service's ports to the ports of this endpoint.
    """

    uid: WorkloadUid
    ports: Mapping[int, int]
    status: Health


class Shared(Generic[Key, Value]):
    """An index of values by key. Nearly every key has a single value, which is stored without a list. Several
    values of one key are stored in order of arrival.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Key, Value | list[Value]] = {}

    def put(self, key: Key, value: Value, before: Value | None) -> None:
        """Add a value for a key. If the key has the value ``before``, the new value replaces it."""
        found = self._found.get(key)
        if found is None or found is before:
            self._found[key] = value
        elif isinstance(found, list):
            for place, other in enumerate(found):
                if other is before:
                    found[place] = value
                    return
            found.append(value)
        else:
            self._found[key] = [found, value]

    def remove(self, key: Key, value: Value) -> None:
        """Remove a value of a key. The value must be present."""
        found = self._found[key]
        if not isinstance(found, list):
            del self._found[key]
            return
        # Values are compared by identity, because comparing their contents takes long.
        found[:] = [other for other in found if other is not value]
        if len(found) == 1:
            self._found[key] = found[0]

    def get(self, key: Key) -> Value | list[Value] | None:
        return self._found.get(key)

    def each(self, key: Key) -> Collection[Value]:
        """Return all values of a key, in order of addition."""
        found = self._found.get(key)
        if found is None:
            return ()
        return found if isinstance(found, list) else (found,)

    def __bool__(self) -> bool:
        return bool(self._found)


@dataclass(slots=True)
class ServiceEntry:
    """A service and its endpoints. ``service`` is None while only endpoints have arrived.

    ``serving`` are the endpoints that can be chosen. ``unhealthy`` are all unhealthy endpoints, whether or not
    they can be chosen.
    """

    key: ServiceKey
    service: Service | None = None
    serving: dict[WorkloadUid, Endpoint] = field(default_factory=dict)
    unhealthy: dict[WorkloadUid, Endpoint] | None = None

    @property
    def serves_unhealthy(self) -> bool:
        balancing = self.service.load_balancing if self.service is not None else None
        return balancing is not None and balancing.health is HealthPolicy.ALLOW_ALL

    def put(self, endpoint: Endpoint) -> None:
        if endpoint.status is Health.UNHEALTHY:
            if self.unhealthy is None:
                self.unhealthy = {}
            self.unhealthy[endpoint.uid] = endpoint
            if not self.serves_unhealthy:
                return
        self.serving[endpoint.uid] = endpoint

    def remove(self, uid: WorkloadUid) -> None:
        self.serving.pop(uid, None)
        if self.unhealthy is not None:
            self.unhealthy.pop(uid, None)
            if not self.unhealthy:
                self.unhealthy = None

    def become(self, service: Service | None) -> None:
        before = self.serves_unhealthy
        self.service = service
        if self.unhealthy is None or before is self.serves_unhealthy:
            return
        if before:
            for uid in self.unhealthy:
                del self.serving[uid]
        else:
            self.serving.update(self.unhealthy)

    def all(self) -> Mapping[WorkloadUid, Endpoint]:
        return self.serving if self.unhealthy is None else {**self.serving, **self.unhealthy}

    @property
    def is_empty(self) -> bool:
        return self.service is None and not self.serving and self.unhealthy is None


class Blocks(Generic[Value]):
    """The values of one network by their address blocks. Each prefix length in use has a dictionary."""

    __slots__ = ("_lengths",)

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, int], Shared[int, Value]] = {}

    def put(self, block: IpNetwork, value: Value, old: Value | None) -> None:
        length = (block.version, block.prefixlen)
        self._lengths.setdefault(length, Shared()).put(int(block.network_address), value, old)

    def remove(self, block: IpNetwork, value: Value) -> None:
        length = (block.version, block.prefixlen)
        self._lengths[length].remove(int(block.network_address), value)
        if not self._lengths[length]:
            del self._lengths[length]

    def holding(self, address: IpAddress) -> Iterator[tuple[int, Value]]:
        """Yield each value whose block contains the address, with the block's prefix length."""
        number = int(address)
        for (version, length), blocks in self._lengths.items():
            if version == address.version:
                spare = address.max_prefixlen - length
                for value in blocks.each(number >> spare << spare):
                    yield length, value

    def __bool__(self) -> bool:
        return bool(self._lengths)


class RefusedAddresses:
    """The refused resources, by name and by address."""

    __slots__ = ("_blocks", "_by_address", "_by_name")

    def __init__(self) -> None:
        self._by_name: dict[str, RefusedResource] = {}
        self._by_address: Shared[NetworkAddress, RefusedResource] = Shared()
        self._blocks: dict[str, Blocks[RefusedResource]] = {}

    def put(self, resource: RefusedResource) -> bool:
        """Add a resource, or replace the one with this name. Return whether this changed anything."""
        if self._by_name.get(resource.name) == resource:
            return False
        self.remove(resource.name)
        self._by_name[resource.name] = resource
        for address in dict.fromkeys(resource.addresses):
            self._by_address.put(address, resource, None)
        for cidr in dict.fromkeys(resource.blocks):
            self._blocks.setdefault(cidr.network, Blocks()).put(cidr.block, resource, None)
        return True

    def remove(self, name: str) -> bool:
        """Remove the resource with a name. Return whether there was one."""
        old = self._by_name.pop(name, None)
        if old is None:
            return False
        for address in dict.fromkeys(old.addresses):
            self._by_address.remove(address, old)
        for cidr in dict.fromkeys(old.blocks):
            self._blocks[cidr.network].remove(cidr.block, old)
            if not self._blocks[cidr.network]:
                del self._blocks[cidr.network]
        return True

    def get(self, name: str) -> RefusedResource | None:
        return self._by_name.get(name)

    def values(self) -> Collection[RefusedResource]:
        return self._by_name.values()

    def at(self, network: str, host: str) -> RefusedResource | None:
        """Return a resource with exactly this address."""
        return next(iter(self._by_address.each(NetworkAddress(network, host))), None)

    def holding(self, network: str, address: IpAddress) -> RefusedResource | None:
        """Return a resource with a block that contains this address."""
        blocks = self._blocks.get(network)
        return next((value for _, value in blocks.holding(address)), None) if blocks is not None else None

    def __bool__(self) -> bool:
        return bool(self._by_name)
