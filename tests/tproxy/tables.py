"""Random tables with every shape of set, for hypothesis."""

from hypothesis import strategies as st

from tproxy import expressions as e
from tproxy.expressions import Family, Verdict, VerdictCode
from tproxy.resources import Chain, Element, Hook, HookPoint, Rule, Set, SetKey, Table

HOOK = Hook(kind="filter", point=HookPoint.FORWARD, priority=-1)
_CHAINS = ("a", "b", "c")


@st.composite
def intervals(draw: st.DrawFn, key: SetKey) -> frozenset[Element]:
    """Intervals that neither overlap nor touch, the lowest and the highest key among them now and then."""
    highest = (1 << 8 * key.octets) - 1
    bounds = sorted(draw(st.sets(st.integers(0, 40) | st.integers(highest - 40, highest), max_size=12)))
    found = []
    before = -2
    for first, last in zip(bounds[::2], bounds[1::2], strict=False):
        if first > before + 1:
            found.append(Element(first.to_bytes(key.octets, "big"), last=last.to_bytes(key.octets, "big")))
            before = last
    return frozenset(found)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    chains = tuple(name for name in _CHAINS if draw(st.booleans()))
    sets = [
        Set(f"i{key.name.lower()}", key, draw(intervals(key)), interval=True)
        for key in (SetKey.IPV4_ADDRESS, SetKey.IPV6_ADDRESS, SetKey.PORT)
        if draw(st.booleans())
    ]
    for key in (SetKey.IPV4_PAIR, SetKey.IPV6_PORT):
        keys = draw(st.sets(st.binary(min_size=key.octets, max_size=key.octets), max_size=4))
        sets.append(Set(f"c{key.name.lower()}", key, frozenset(map(Element, keys))))
    verdicts = [Verdict(VerdictCode.GOTO, name) for name in chains] + [Verdict(VerdictCode.DROP)]
    keys = draw(st.sets(st.integers(0, 9), max_size=4))
    members = frozenset(
        Element(key.to_bytes(4, "big"), "why", verdict=draw(st.sampled_from(verdicts))) for key in sorted(keys)
    )
    sets.append(Set("verdicts", SetKey.IPV4_ADDRESS, members, verdicts=True))
    rules = [
        Rule((*e.verdict_by_address(Family.IPV4, "verdicts", source=True),)),
        Rule((*e.addresses_in(Family.IPV4, "cipv4_pair"), e.Counter(), *e.accept()), "both"),
        Rule((*e.address_and_port_in(Family.IPV6, "cipv6_port", source=False), *e.drop())),
        Rule((*e.neighbour_discovery(), *e.accept())),
        Rule((*e.connection_state(e.CT_ESTABLISHED), *e.accept())),
        *(Rule(e.jump(name)) for name in chains),
    ]
    base = Chain("base", tuple(draw(st.lists(st.sampled_from(rules), max_size=5))), HOOK)
    return Table("t", Family.INET, (base, *(Chain(name, (Rule(e.accept()),)) for name in chains)), tuple(sets))
