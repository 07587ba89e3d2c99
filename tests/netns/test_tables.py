"""Tables with sets of every shape against the running kernel: what it reports is what was sent."""

import contextlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.tproxy.tables import HOOK, tables
from tproxy import expressions as e
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.netns import Netns
from tproxy.expressions import Family
from tproxy.operations import AddElements, NftTransaction
from tproxy.resources import Chain, Element, Namespace, NamespaceName, Ownership, Rule, Set, SetKey, State, Table

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
OWNED = Ownership(frozenset({"t"}), "memory")
HERE = NamespaceName("here")


@pytest.fixture(scope="module")
def kernel() -> Iterator[BlockingKernel]:
    with Netns.create(f"pt-{os.getpid()}-tables") as netns:
        try:
            with contextlib.closing(
                BlockingKernel({HERE: netns}, Ownership(frozenset({"t"}), "memory"))
            ) as kernel:
                yield kernel
        finally:
            netns.remove_name()


def state(*tables: Table) -> State:
    return State({HERE: Namespace(tables=tables)})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(want=tables())
def test_any_table_becomes_any_other_and_reads_back(kernel: BlockingKernel, want: Table) -> None:
    # apply() compares what it reads with what was wanted; the table of the example before is what it starts from.
    kernel.apply(state(want))
    assert kernel.apply(state(want)) == ()


def test_a_large_table_is_one_transaction(kernel: BlockingKernel) -> None:
    members = frozenset(Element(number.to_bytes(4, "big")) for number in range(1, 40_000, 2))
    ranges = frozenset(
        Element(number.to_bytes(4, "big"), last=(number + 5).to_bytes(4, "big")) for number in range(0, 40_000, 10)
    )
    rules = [Rule((*e.address_in(Family.IPV4, "s", source=True), e.Counter(), *e.accept()), "why" * 30)] * 10
    chains = tuple(Chain(f"c{number}", tuple(rules)) for number in range(600))
    sets = (Set("s", SetKey.IPV4_ADDRESS, members), Set("i", SetKey.IPV4_ADDRESS, ranges, interval=True))
    want = Table("t", chains=(Chain("base", (), HOOK), *chains), sets=sets)
    kernel.apply(state())
    assert len(kernel.apply(state(want))) == 1
    more = Set("s", SetKey.IPV4_ADDRESS, members | {Element(bytes((10, 0, 0, 1)))})
    [change] = kernel.apply(state(Table("t", chains=want.chains, sets=(more, sets[1]))))
    assert isinstance(change, NftTransaction)
    assert [type(step) for step in change.steps] == [AddElements]
    kernel.apply(state())
