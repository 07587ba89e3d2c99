"""A kernel in a dictionary: carries out operations as strictly as the real one, to test ``diff`` against."""

from dataclasses import replace

from tproxy.expressions import Lookup, Verdict
from tproxy.operations import (
    AddAddress,
    AddChain,
    AddElements,
    AddIpRule,
    AddRoute,
    AddSet,
    AddTable,
    AppendRule,
    CreatePair,
    DeleteAddress,
    DeleteChain,
    DeleteElements,
    DeleteIpRule,
    DeletePair,
    DeleteRoute,
    DeleteSet,
    DeleteTable,
    FlushChain,
    Forget,
    NftStep,
    NftTransaction,
    Operation,
    Remember,
    SetSysctl,
    SetUp,
)
from tproxy.resources import Chain, Element, Namespace, NamespaceName, Set, State, Table


class ToyKernel:
    """Devices that are not ours always exist. Sysctls start with the values in ``before``, or "1"."""

    def __init__(self, state: State) -> None:
        self.spaces = dict(state.namespaces)
        self.pairs = set(state.pairs)

    def state(self) -> State:
        return State(dict(self.spaces), frozenset(self.pairs))

    def apply(self, operations: tuple[Operation, ...]) -> None:
        for operation in operations:
            self._one(operation)

    def _space(self, name: NamespaceName) -> Namespace:
        return self.spaces.get(name, Namespace())

    def _one(self, operation: Operation) -> None:
        match operation:
            case CreatePair(pair):
                taken = {end for existing in self.pairs for end in existing.ends}
                assert not taken & set(pair.ends), "EEXIST"
                self.pairs.add(pair)
            case DeletePair(pair):
                self.pairs.remove(pair)
                for end in pair.ends:
                    self._device_gone(end.namespace, end.device)
            case SetUp(name, device):
                space = self._space(name)
                self.spaces[name] = replace(space, up=space.up | {device})
            case AddAddress(name, address):
                space = self._space(name)
                assert address not in space.addresses, "EEXIST"
                self.spaces[name] = replace(space, addresses=space.addresses | {address})
            case DeleteAddress(name, address):
                space = self._space(name)
                assert address in space.addresses
                self.spaces[name] = replace(space, addresses=space.addresses - {address})
            case AddRoute(name, route, exchange):
                space = self._space(name)
                same = {other for other in space.routes if other.slot == route.slot}
                assert bool(same) == exchange, "EEXIST or ENOENT"
                self.spaces[name] = replace(space, routes=space.routes - same | {route})
            case DeleteRoute(name, route):
                space = self._space(name)
                assert route in space.routes, "ESRCH"
                self.spaces[name] = replace(space, routes=space.routes - {route})
            case AddIpRule(name, rule):
                space = self._space(name)
                assert rule not in space.rules, "EEXIST"
                self.spaces[name] = replace(space, rules=space.rules | {rule})
            case DeleteIpRule(name, rule):
                space = self._space(name)
                assert rule in space.rules, "ENOENT"
                self.spaces[name] = replace(space, rules=space.rules - {rule})
            case Remember(name, values):
                space = self._space(name)
                assert not set(values) & set(space.remembered), "the first value would be lost"
                assert all(space.sysctls[key] == value for key, value in values.items())
                self.spaces[name] = replace(space, remembered={**space.remembered, **values})
            case SetSysctl(name, key, value):
                space = self._space(name)
                self.spaces[name] = replace(space, sysctls={**space.sysctls, key: value})
            case Forget(name, values, everything):
                space = self._space(name)
                left = {key: value for key, value in space.remembered.items() if key not in values}
                assert everything == (not left)
                self.spaces[name] = replace(space, remembered=left)
            case NftTransaction(name, steps):
                space = self._space(name)
                tables = {table.name: table for table in space.tables}
                for step in steps:
                    _nft(tables, step)
                for table in tables.values():
                    _check(table)
                self.spaces[name] = replace(space, tables=tuple(tables.values()))

    def _device_gone(self, name: NamespaceName, device: str) -> None:
        space = self._space(name)
        self.spaces[name] = replace(
            space,
            up=space.up - {device},
            addresses=frozenset(item for item in space.addresses if item.device != device),
            routes=frozenset(route for route in space.routes if route.device != device),
            sysctls={key: value for key, value in space.sysctls.items() if key.device != device},
        )


def _nft(tables: dict[str, Table], step: NftStep) -> None:
    if isinstance(step, AddTable):
        assert step.table not in tables
        tables[step.table] = Table(step.table, step.family)
        return
    if isinstance(step, DeleteTable):
        del tables[step.table]
        return
    table = tables[step.table]
    chains = {chain.name: chain for chain in table.chains}
    sets = {item.name: item for item in table.sets}
    match step:
        case AddChain(chain=chain):
            assert chain.name not in chains
            chains[chain.name] = Chain(chain.name, hook=chain.hook)
        case FlushChain(chain=name):
            chains[name] = replace(chains[name], rules=())
        case DeleteChain(chain=name):
            assert not chains[name].rules, "EBUSY"
            assert not _used(chains, name), "EBUSY"
            assert not any(name in _chains(item) for item in sets.values()), "EBUSY"
            del chains[name]
        case AppendRule(chain=name, rule=rule):
            chains[name] = replace(chains[name], rules=(*chains[name].rules, rule))
        case AddSet(set=item):
            assert item.name not in sets
            sets[item.name] = replace(item, elements=frozenset())
        case DeleteSet(set_name=name):
            assert not _used(chains, name), "EBUSY"
            del sets[name]
        case AddElements(set_name=name, elements=elements):
            keys = {element.key for element in sets[name].elements}
            assert not keys & {element.key for element in elements}, "EEXIST"
            sets[name] = replace(sets[name], elements=sets[name].elements | set(elements))
        case DeleteElements(set_name=name, elements=elements):
            gone = {element.key for element in elements}
            assert gone <= {element.key for element in sets[name].elements}, "ENOENT"
            left: frozenset[Element] = frozenset(
                element for element in sets[name].elements if element.key not in gone
            )
            sets[name] = replace(sets[name], elements=left)
    tables[step.table] = replace(table, chains=tuple(chains.values()), sets=tuple(sets.values()))
    _check(tables[step.table])


def _names(chain: Chain) -> set[str]:
    names = set()
    for rule in chain.rules:
        for expression in rule.phrase:
            match expression:
                case Lookup(set_name=name) | Verdict(chain=name) if name:
                    names.add(name)
    return names


def _chains(item: Set) -> set[str]:
    named = {element.verdict.chain for element in item.elements if element.verdict is not None}
    return named - {""}


def _used(chains: dict[str, Chain], name: str) -> bool:
    return any(name in _names(chain) for chain in chains.values())


def _check(table: Table) -> None:
    known = {chain.name for chain in table.chains} | {item.name for item in table.sets}
    for chain in table.chains:
        assert _names(chain) <= known, "ENOENT"
    for item in table.sets:
        assert _chains(item) <= known, "ENOENT"
        assert all((element.verdict is not None) == item.verdicts for element in item.elements), "EINVAL"
        assert all(len(element.last) == (item.key.octets if item.interval else 0) for element in item.elements)
