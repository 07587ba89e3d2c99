"""The state sent by PolicySync: policies, profiles, endpoints, IP sets and labels. Pure. Each stream has its own
store.
"""

from dataclasses import dataclass, field
from typing import Final, TypeVar, assert_never

from xds.model import calico as c
from xds.model.selector import Labels
from ztunnel.policy.calico.ip_sets import IpSets

_NO_LABELS: Final[Labels] = {}

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class Store:
    """The state of one stream.

    Attributes:
        generation: counts the updates that changed something.
        in_sync: all objects that existed when the stream started have arrived.
        ignored: updates about IP sets that do not exist.
    """

    policies: dict[c.PolicyId, c.Policy] = field(default_factory=dict)
    profiles: dict[str, c.Policy] = field(default_factory=dict)
    endpoints: dict[c.EndpointId, c.Endpoint] = field(default_factory=dict)
    ip_sets: IpSets = field(default_factory=IpSets)
    service_accounts: dict[tuple[str, str], Labels] = field(default_factory=dict)
    namespaces: dict[str, Labels] = field(default_factory=dict)
    generation: int = 0
    in_sync: bool = False
    ignored: int = 0
    _by_address: dict[str, dict[c.EndpointId, None]] = field(default_factory=dict)

    def apply(self, update: c.Update) -> None:
        """Apply one update to the state. Applying an update twice has no further effect, and removing a missing
        object has none.
        """
        self.generation += 1
        match update:
            case c.IpSetUpdate():
                self.ip_sets.replace(update.id, update.type, update.members)
            case c.IpSetDelta():
                if not self.ip_sets.change(update.id, update.added, update.removed):
                    self.ignored += 1
            case c.IpSetRemove():
                self.ip_sets.remove(update.id)
            case c.PolicyUpdate():
                _put(self.policies, update.id, update.policy)
            case c.ProfileUpdate():
                _put(self.profiles, update.name, update.profile)
            case c.EndpointUpdate():
                self._put_endpoint(update.id, update.endpoint)
            case c.ServiceAccountUpdate():
                _put(self.service_accounts, (update.namespace, update.name), update.labels)
            case c.NamespaceUpdate():
                _put(self.namespaces, update.name, update.labels)
            case c.InSync():
                self.in_sync = True
            case _:
                assert_never(update)

    def rename_ip_set(self, set_id: str, name: str) -> None:
        """Rename an IP set, in place of any set with the new name. So a set that was filled in steps takes effect
        at once.
        """
        self.generation += 1
        self.ip_sets.rename(set_id, name)

    @property
    def size(self) -> int:
        """The number of objects, including members of IP sets."""
        objects = len(self.policies) + len(self.profiles) + len(self.endpoints)
        labels = len(self.service_accounts) + len(self.namespaces)
        return objects + labels + len(self.ip_sets) + self.ip_sets.weight

    def endpoint_at(self, address: str | None) -> c.EndpointId | None:
        """Return the endpoint with an address, the newest if several have it. None if there is none."""
        found = self._by_address.get(address or "")
        return next(reversed(found)) if found else None

    def labels_of_account(self, namespace: str, name: str) -> Labels:
        """Return the labels of a service account. Empty if it is unknown."""
        return self.service_accounts.get((namespace, name), _NO_LABELS)

    def labels_of_namespace(self, name: str) -> Labels:
        """Return the labels of a namespace. Empty if it is unknown."""
        return self.namespaces.get(name, _NO_LABELS)

    def _put_endpoint(self, key: c.EndpointId, endpoint: c.Endpoint | None) -> None:
        old = self.endpoints.pop(key, None)
        for address in _addresses(old):
            claims = self._by_address[address]
            del claims[key]
            if not claims:
                del self._by_address[address]
        if endpoint is not None:
            self.endpoints[key] = endpoint
            for address in _addresses(endpoint):
                self._by_address.setdefault(address, {})[key] = None


def _addresses(endpoint: c.Endpoint | None) -> set[str]:
    networks = endpoint.addresses if endpoint is not None else ()
    return {str(network.network_address) for network in networks if network.prefixlen == network.max_prefixlen}


def _put(table: dict[_Key, _Value], key: _Key, value: _Value | None) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
