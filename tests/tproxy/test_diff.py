"""Applying a difference leads to the desired state from any found state, and the order is safe in between."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.tproxy.model import ToyKernel
from tests.tproxy.nodes import described, member
from tests.tproxy.tables import tables
from tproxy.diff import diff
from tproxy.expressions import TCP, Family, accept, jump, protocol_is
from tproxy.node import HOST, ZTUNNEL, node
from tproxy.operations import (
    AddElements,
    AddIpRule,
    DeleteIpRule,
    DeleteTable,
    NftTransaction,
    Remember,
    SetSysctl,
)
from tproxy.resources import (
    Chain,
    Element,
    Namespace,
    NamespaceName,
    Rule,
    Set,
    SetKey,
    State,
    SysctlKey,
    Table,
    VethPair,
    nothing,
)

members = st.lists(st.integers(10, 14), unique=True).map(lambda numbers: tuple(member(n) for n in numbers))
nodes = st.builds(lambda pods, ipv6: node(described(*pods, ipv6=ipv6)), members, st.booleans())
EMPTY = State({ZTUNNEL: Namespace(), HOST: Namespace()})


def before_us() -> State:
    """Return sysctls with a distribution's defaults. Devices of others always exist."""
    spaces = {}
    everything = node(described(*(member(number) for number in range(10, 15))))
    for name, space in everything.namespaces.items():
        ours = space.up
        spaces[name] = Namespace(sysctls={key: "2" for key in space.sysctls if key.device not in ours})
    return State(spaces)


@st.composite
def damaged(draw: st.DrawFn) -> State:
    """Draw a node's state with parts removed, changed and added."""
    toy = ToyKernel(before_us())
    toy.apply(diff(before_us(), draw(nodes)))
    state = toy.state()
    spaces: dict[NamespaceName, Namespace] = {}
    for name, space in state.namespaces.items():
        spaces[name] = replace(
            space,
            rules=frozenset(rule for rule in space.rules if draw(st.booleans())),
            routes=frozenset(route for route in space.routes if draw(st.booleans())),
            addresses=frozenset(item for item in space.addresses if draw(st.booleans())),
            up=frozenset(device for device in space.up if draw(st.booleans())),
            tables=tuple(_damaged(draw, table) for table in space.tables if draw(st.booleans())),
            sysctls={key: draw(st.sampled_from("012")) for key in space.sysctls},
        )
    pairs = set()
    for pair in state.pairs:
        match draw(st.sampled_from(["keep", "gone", "astray"])):
            case "keep":
                pairs.add(pair)
            case "astray":
                pairs.add(VethPair(pair.left, None))
    return State(spaces, frozenset(pairs))


def _damaged(draw: st.DrawFn, table: Table) -> Table:
    match draw(st.sampled_from(["whole", "rules", "chain", "extra", "hook", "elements"])):
        case "rules":
            chains = tuple(replace(chain, rules=chain.rules[:-1]) for chain in table.chains)
            return replace(table, chains=chains)
        case "chain":
            keep = [chain for chain in table.chains if chain.name in ("save", "forward", "input", "prerouting")]
            return replace(table, chains=tuple(keep))
        case "extra":
            extra = Chain("extra", (Rule(jump("deeper")),))
            deeper = Chain("deeper", (Rule(accept()),))
            return replace(table, chains=(*table.chains, extra, deeper))
        case "hook":
            first = table.chains[-1]
            return replace(table, chains=(*table.chains[:-1], replace(first, hook=None)))
        case "elements":
            foreign = Element(bytes(4), "foreign")
            sets = tuple(
                replace(item, elements=frozenset(replace(e, comment="") for e in item.elements) | {foreign})
                for item in table.sets
            )
            return replace(table, sets=sets)
    return table


@settings(max_examples=examples(150), deadline=None)
@given(damaged(), nodes)
def test_applying_the_difference_gives_what_is_wanted(found: State, wanted: State) -> None:
    toy = ToyKernel(found)
    toy.apply(diff(found, wanted))
    # A vanished device takes its sysctls along, so a second diff can find one more operation, but never a third.
    toy.apply(diff(toy.state(), wanted))
    assert diff(toy.state(), wanted) == ()
    for name, space in wanted.namespaces.items():
        have = toy.state().namespaces[name]
        assert (have.rules, have.routes, have.addresses, have.up) == (
            space.rules,
            space.routes,
            space.addresses,
            space.up,
        )
        assert _by_name(have.tables) == _by_name(space.tables)
        assert {key: have.sysctls[key] for key in space.sysctls} == space.sysctls
    assert toy.state().pairs == wanted.pairs


def _by_name(tables: tuple[Table, ...]) -> Mapping[str, object]:
    return {
        table.name: (
            {chain.name: chain for chain in table.chains},
            {item.name: item for item in table.sets},
        )
        for table in tables
    }


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(nodes, min_size=1, max_size=4))
def test_removal_restores_the_initial_state_after_any_changes(history: list[State]) -> None:
    toy = ToyKernel(before_us())
    for wanted in history:
        toy.apply(diff(toy.state(), wanted))
    toy.apply(diff(toy.state(), nothing(history[-1])))
    assert diff(toy.state(), nothing(history[-1])) == ()
    for name, space in before_us().namespaces.items():
        left = toy.state().namespaces[name]
        assert {key: left.sysctls[key] for key in space.sysctls} == space.sysctls
        assert replace(left, sysctls={}) == Namespace(sysctls={})
    assert not toy.state().pairs


@given(nodes)
def test_equal_states_have_no_difference(wanted: State) -> None:
    assert diff(wanted, wanted) == ()


def test_steering_comes_last_and_goes_first() -> None:
    wanted = node(described(member(10)))

    def positions(operations: tuple[object, ...], kind: type, marked: bool) -> list[int]:
        return [
            position
            for position, item in enumerate(operations)
            if isinstance(item, kind) and (item.rule.mark is not None) == marked  # type: ignore[attr-defined]
        ]

    def transactions(operations: tuple[object, ...]) -> list[int]:
        return [at for at, item in enumerate(operations) if isinstance(item, NftTransaction)]

    come = diff(EMPTY, wanted)
    assert max(positions(come, AddIpRule, marked=True)) < min(transactions(come))
    assert max(transactions(come)) < min(positions(come, AddIpRule, marked=False))
    go = diff(wanted, nothing(wanted))
    assert max(positions(go, DeleteIpRule, marked=False)) < min(transactions(go))
    assert max(transactions(go)) < min(positions(go, DeleteIpRule, marked=True))


def test_the_catching_side_is_ready_before_the_sending_side_and_leaves_after_it() -> None:
    wanted = node(described(member(10)))
    come = [item.namespace for item in diff(EMPTY, wanted) if isinstance(item, NftTransaction)]
    go = [item.namespace for item in diff(wanted, nothing(wanted)) if isinstance(item, NftTransaction)]
    assert (come, go) == ([ZTUNNEL, HOST], [HOST, ZTUNNEL])


def test_a_new_member_changes_only_its_own_things() -> None:
    toy = ToyKernel(before_us())
    toy.apply(diff(before_us(), node(described(member(10)))))
    operations = diff(toy.state(), node(described(member(10), member(11))))
    assert [type(item).__name__ for item in operations] == [
        "Remember",
        "SetSysctl",
        "AddRoute",
        "AddRoute",
        "NftTransaction",
    ]


def test_a_sysctl_is_remembered_once_and_before_it_changes() -> None:
    wanted = node(described(ipv6=False))
    key = SysctlKey("ipv4", "all", "rp_filter")
    found = State({ZTUNNEL: Namespace(), HOST: Namespace(sysctls={key: "1"})})
    operations = [item for item in diff(found, wanted) if getattr(item, "namespace", None) == HOST]
    remember = next(item for item in operations if isinstance(item, Remember))
    change = next(item for item in operations if isinstance(item, SetSysctl) and item.key == key)
    assert remember.values == {key: "1"}
    assert operations.index(remember) < operations.index(change)
    again = State({ZTUNNEL: Namespace(), HOST: Namespace(sysctls={key: "2"}, remembered={key: "1"})})
    assert not any(isinstance(item, Remember) for item in diff(again, wanted))


@pytest.mark.parametrize("change", ["set type", "chain hook"])
def test_what_the_kernel_cannot_alter_is_built_anew(change: str) -> None:
    rule = Rule((*protocol_is(TCP), *accept()))
    have = Table("t", Family.INET, (Chain("c", (rule,)),), (Set("s", SetKey.IPV4_ADDRESS),))
    want = {
        "set type": replace(have, sets=(Set("s", SetKey.IPV6_ADDRESS),)),
        "chain hook": replace(have, chains=(node(described()).namespaces[HOST].tables[0].chains[1],)),
    }[change]
    want = replace(want, chains=tuple(replace(chain, rules=(rule,), name="c") for chain in want.chains))
    [transaction] = diff(State({HOST: Namespace(tables=(have,))}), State({HOST: Namespace(tables=(want,))}))
    assert isinstance(transaction, NftTransaction)
    assert [type(step).__name__ for step in transaction.steps][:2] == ["DeleteTable", "AddTable"]


@settings(max_examples=examples(150), deadline=None)
@given(tables(), tables())
def test_a_table_changes_in_place_into_any_other(have: Table, want: Table) -> None:
    toy = ToyKernel(State({HOST: Namespace(tables=(have,))}))
    operations = diff(toy.state(), State({HOST: Namespace(tables=(want,))}))
    toy.apply(operations)
    assert _by_name(toy.state().namespaces[HOST].tables) == _by_name((want,))
    steps = [step for item in operations if isinstance(item, NftTransaction) for step in item.steps]
    assert not any(isinstance(step, DeleteTable) for step in steps)


def test_a_change_of_one_element_is_one_element() -> None:
    before = frozenset(Element(bytes((10, 0, 0, number))) for number in range(200))
    have = Table("t", sets=(Set("s", SetKey.IPV4_ADDRESS, before),))
    want = Table("t", sets=(Set("s", SetKey.IPV4_ADDRESS, before | {Element(bytes((10, 0, 1, 1)))}),))
    [transaction] = diff(State({HOST: Namespace(tables=(have,))}), State({HOST: Namespace(tables=(want,))}))
    assert isinstance(transaction, NftTransaction)
    assert transaction.steps == (AddElements(Family.INET, "t", "s", (Element(bytes((10, 0, 1, 1))),)),)
