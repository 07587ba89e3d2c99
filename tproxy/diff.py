"""Computes the operations that turn the found state into the desired one. Equal states need no operations.

A found resource that is not in the desired state is removed. The order of the operations keeps every intermediate
state safe for traffic:

1. Delete policy rules that match every packet. They route packets without any mark, so they must not outlive the
   nftables rules that exempt some packets.
2. Add devices, addresses, sysctls, routes and rules that need a mark. Without marks they have no effect.
3. Change nftables, in one transaction per namespace, earlier namespaces first, so that the namespace which
   receives packets is ready before the one which sends them.
4. Add policy rules that match every packet.
5. Delete the remaining unwanted resources, later namespaces first.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

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
from tproxy.resources import (
    Address,
    Chain,
    Element,
    IpRule,
    Namespace,
    NamespaceName,
    Route,
    State,
    SysctlKey,
    Table,
    VethPair,
)


def diff(found: State, wanted: State) -> tuple[Operation, ...]:
    """Return the operations, in order, that turn the found state into the desired one.

    A namespace missing from either state counts as empty there.
    """
    names = list(wanted.namespaces) + [name for name in found.namespaces if name not in wanted.namespaces]
    stale = sorted(found.pairs - wanted.pairs, key=repr)
    pairs = [
        (name, _without(found.namespaces.get(name, Namespace()), name, stale), _of(wanted, name)) for name in names
    ]
    operations: list[Operation] = []
    for name, have, want in reversed(pairs):
        operations += [DeleteIpRule(name, rule) for rule in _sorted(have.rules - want.rules) if rule.mark is None]
    # If a desired device exists with wrong properties, delete it now instead of in step 5, because it blocks the
    # creation of the right one.
    replaced = {end for pair in wanted.pairs for end in pair.ends}
    blocking = [pair for pair in stale if replaced & set(pair.ends)]
    operations += [DeletePair(pair) for pair in blocking]
    operations += [CreatePair(pair) for pair in sorted(wanted.pairs - found.pairs, key=repr)]
    for name, have, want in pairs:
        operations += _prepare(name, have, want)
    for name, have, want in pairs:
        steps = tuple(_nft_steps(have.tables, want.tables))
        if steps:
            operations.append(NftTransaction(name, steps))
    for name, have, want in pairs:
        operations += [AddIpRule(name, rule) for rule in _sorted(want.rules - have.rules) if rule.mark is None]
    for name, have, want in reversed(pairs):
        gone = tuple(
            DeleteTable(table.family, table.name) for table in have.tables if not _same_name(table, want.tables)
        )
        if gone:
            operations.append(NftTransaction(name, gone))
    for name, have, want in reversed(pairs):
        operations += _clear(name, have, want)
    operations += [DeletePair(pair) for pair in stale if pair not in blocking]
    return tuple(operations)


def _of(state: State, name: NamespaceName) -> Namespace:
    return state.namespaces.get(name, Namespace())


def _without(namespace: Namespace, name: NamespaceName, stale: Iterable[VethPair]) -> Namespace:
    """Return the found namespace without stale devices, and without their routes, addresses and sysctls.

    The kernel removes these together with the device, so the operations must not contain them.
    """
    devices = {end.device for pair in stale for end in pair.ends if end.namespace == name}
    if not devices:
        return namespace
    return Namespace(
        tables=namespace.tables,
        rules=namespace.rules,
        routes=frozenset(route for route in namespace.routes if route.device not in devices),
        addresses=frozenset(item for item in namespace.addresses if item.device not in devices),
        up=namespace.up - devices,
        sysctls={key: value for key, value in namespace.sysctls.items() if key.device not in devices},
        remembered=namespace.remembered,
    )


def _prepare(name: NamespaceName, have: Namespace, want: Namespace) -> Iterator[Operation]:
    # Sysctls are set before devices are brought up, because IPv6 duplicate address detection starts when a device
    # comes up.
    changed = {key: value for key, value in want.sysctls.items() if have.sysctls.get(key) != value}
    first = _not_remembered(have, want)
    if first:
        yield Remember(name, first)
    for key, value in changed.items():
        yield SetSysctl(name, key, value)
    for device in sorted(want.up - have.up):
        yield SetUp(name, device)
    for address in _sorted_addresses(want.addresses - have.addresses):
        yield AddAddress(name, address)
    occupied = {route.slot for route in have.routes}
    for route in _sorted_routes(want.routes - have.routes):
        yield AddRoute(name, route, replace=route.slot in occupied)
    for rule in _sorted(want.rules - have.rules):
        if rule.mark is not None:
            yield AddIpRule(name, rule)


def _not_remembered(have: Namespace, want: Namespace) -> dict[SysctlKey, str]:
    """Return the current values of the sysctls that must be saved before they change.

    The sysctls of our own devices are not saved, because they disappear with the device.
    """
    ours = {address.device for address in want.addresses} | want.up
    return {
        key: have.sysctls[key]
        for key, value in want.sysctls.items()
        if have.sysctls.get(key, value) != value and key not in have.remembered and key.device not in ours
    }


def _clear(name: NamespaceName, have: Namespace, want: Namespace) -> Iterator[Operation]:
    for rule in _sorted(have.rules - want.rules):
        if rule.mark is not None:
            yield DeleteIpRule(name, rule)
    kept = {route.slot for route in want.routes}
    for route in _sorted_routes(have.routes - want.routes):
        if route.slot not in kept:
            yield DeleteRoute(name, route)
    for address in _sorted_addresses(have.addresses - want.addresses):
        yield DeleteAddress(name, address)
    over: Mapping[SysctlKey, str] = {
        key: value for key, value in have.remembered.items() if key not in want.sysctls
    }
    for key, value in over.items():
        yield SetSysctl(name, key, value, restore=True)
    if over:
        everything = len(over) == len(have.remembered) and not _not_remembered(have, want)
        yield Forget(name, over, all=everything)


def _same_name(table: Table, tables: Iterable[Table]) -> Table | None:
    return next((other for other in tables if (other.family, other.name) == (table.family, table.name)), None)


def _nft_steps(found: Iterable[Table], wanted: Iterable[Table]) -> Iterator[NftStep]:
    for table in wanted:
        have = _same_name(table, found)
        if have is None:
            yield from _build(table)
        elif not _compatible(have, table):
            yield DeleteTable(have.family, have.name)
            yield from _build(table)
        elif have != table:
            yield from _change(have, table)


def table_steps(found: Table | None, wanted: Table | None) -> tuple[NftStep, ...]:
    """Return the steps of one transaction that change a table to the desired one. None means no table."""
    if wanted is None:
        return (DeleteTable(found.family, found.name),) if found is not None else ()
    return tuple(_nft_steps((found,) if found is not None else (), (wanted,)))


def _build(table: Table) -> Iterator[NftStep]:
    yield AddTable(table.family, table.name)
    yield from _change(Table(table.name, table.family), table)


def _compatible(have: Table, want: Table) -> bool:
    """Return whether the table can be changed in place. The kernel cannot change the hook of a chain or the type
    of a set.
    """
    hooks = {chain.name: chain.hook for chain in have.chains}
    shapes = {item.name: item.shape for item in have.sets}
    return all(hooks.get(chain.name, chain.hook) == chain.hook for chain in want.chains) and all(
        shapes.get(item.name, item.shape) == item.shape for item in want.sets
    )


def _change(have: Table, want: Table) -> Iterator[NftStep]:
    """Return the steps that change one table in place.

    All rules of a changed chain are rewritten. Packets never see this, because it happens in one transaction.
    """
    # References determine the order: rules are removed before the chains and sets that they refer to, and are
    # added last. The same applies to elements of verdict maps, which refer to chains. In a changed set, only the
    # differing elements are sent, so that a new member costs one element, not the whole set. Objects that are
    # identical on both sides are not compared.
    where = (want.family, want.name)
    old = {chain.name: chain for chain in have.chains}
    new = {chain.name: chain for chain in want.chains}
    old_sets = {item.name: item for item in have.sets}
    new_sets = {item.name: item for item in want.sets}
    rewritten = [
        name
        for name, chain in new.items()
        if name not in old or (old[name] is not chain and old[name].rules != chain.rules)
    ]
    flushed = {name for name in rewritten if name in old} | (old.keys() - new.keys())
    for name, chain in old.items():
        if chain.rules and name in flushed:
            yield FlushChain(*where, name)
    added: list[AddElements] = []
    for name, before in old_sets.items():
        if name not in new_sets:
            yield DeleteSet(*where, name)
        elif (item := new_sets[name]) is not before:
            if gone := before.elements - item.elements:
                yield DeleteElements(*where, name, _by_key(gone))
            if come := item.elements - before.elements:
                added.append(AddElements(*where, name, _by_key(come)))
    for name in old:
        if name not in new:
            yield DeleteChain(*where, name)
    for name, item in new_sets.items():
        if name not in old_sets:
            yield AddSet(*where, replace(item, elements=frozenset()))
            if item.elements:
                added.append(AddElements(*where, name, _by_key(item.elements)))
    for name, chain in new.items():
        if name not in old:
            yield AddChain(*where, Chain(name, hook=chain.hook))
    yield from added
    for name in rewritten:
        for rule in new[name].rules:
            yield AppendRule(*where, name, rule)


def _by_key(elements: Iterable[Element]) -> tuple[Element, ...]:
    return tuple(sorted(elements, key=lambda element: element.key))


def _sorted(rules: Iterable[IpRule]) -> list[IpRule]:
    return sorted(rules, key=lambda rule: (rule.priority, rule.version, repr(rule)))


def _sorted_routes(routes: Iterable[Route]) -> list[Route]:
    """Sort routes. Those without a gateway come first, because the kernel refuses a gateway that no route
    reaches.
    """
    return sorted(
        routes,
        key=lambda route: (route.gateway is not None, route.version, route.table, str(route.destination)),
    )


def _sorted_addresses(addresses: Iterable[Address]) -> list[Address]:
    return sorted(addresses, key=lambda item: (item.device, item.interface.version, str(item.interface)))
