"""Tables with sets of every shape against the running kernel: what it reports is what was sent."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.generated import examples
from tests.tproxy.tables import HOOK, tables
from tproxy import expressions as e
from tproxy.aio import rtnetlink
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.aio.table import BlockingTable, KeptTable
from tproxy.diff import table_steps
from tproxy.errors import KernelRefused
from tproxy.expressions import Family
from tproxy.operations import (
    AddElements,
    AddSet,
    AddTable,
    DeleteElements,
    DeleteTable,
    FlushChain,
    NftTransaction,
)
from tproxy.render import nf_tables as nf
from tproxy.render import nftables
from tproxy.resources import Chain, Element, Namespace, NamespaceName, Ownership, Rule, Set, SetKey, State, Table
from tproxy.wire import be32, nest, text

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
OWNED = Ownership(frozenset({"t"}), "memory")
HERE = NamespaceName("here")
INET = Family.INET


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


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(want=tables())
def test_any_table_becomes_any_other_and_reads_back(kernel: BlockingKernel, want: Table) -> None:
    # apply() compares the table that it reads back with the desired one. It starts from the previous example's
    # table.
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


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Netns]:
    with Netns.create(f"pt-{os.getpid()}-kept") as netns:
        try:
            yield netns
        finally:
            netns.remove_name()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(want=tables())
def test_a_kept_table_changes_by_what_differs(elsewhere: Netns, want: Table) -> None:
    with contextlib.closing(_kept(elsewhere)) as kept:
        kept.apply(want)
        assert not table_steps(kept.read(), want)


def _kept(netns: Netns) -> BlockingTable:
    return BlockingTable("t", netns)


def _two(*numbers: int) -> Table:
    members = frozenset(Element(bytes((10, 0, 0, number))) for number in numbers)
    return Table("t", chains=(Chain("base", (), HOOK),), sets=(Set("s", SetKey.IPV4_ADDRESS, members),))


def test_changes_by_others_are_noticed_and_repaired_ours_are_not(elsewhere: Netns) -> None:
    async def main() -> None:
        async with KeptTable("t", elsewhere) as kept:
            await kept.apply(_two(1, 2))
            assert [type(step) for step in await kept.apply(_two(1, 2, 3))] == [AddElements]
            with NetlinkSocket(NETLINK_NETFILTER, elsewhere) as nft:
                theirs = [AddTable(Family.INET, "other"), AddSet(Family.INET, "other", Set("s", SetKey.PORT))]
                nft.batch(nftables.nft_batch(theirs))
                # Notifications arrive in order: had ours or those of another table counted, it would be known now.
                await asyncio.sleep(0)
                assert not kept.disturbed.is_set()
                gone = DeleteElements(Family.INET, "t", "s", (Element(bytes((10, 0, 0, 1))),))
                nft.batch(nftables.nft_batch([gone]))
            async with asyncio.timeout(20):
                await kept.disturbed.wait()
            assert [type(step) for step in await kept.apply(_two(1, 2, 3))] == [AddElements]
            assert await kept.apply(_two(1, 2, 3)) == ()
            assert [type(step) for step in await kept.apply(None)] == [DeleteTable]
            assert await kept.apply(None) == ()

    asyncio.run(main())


def test_a_refused_change_leaves_the_table_and_the_next_one_succeeds(elsewhere: Netns) -> None:
    with contextlib.closing(_kept(elsewhere)) as kept:
        kept.apply(_two(1))
        nowhere = Chain("bad", (Rule(e.jump("nowhere"), "into nowhere"),))
        with pytest.raises(KernelRefused, match="into nowhere"):
            kept.apply(Table("t", chains=(*_two(1).chains, nowhere), sets=_two(1).sets))
        assert kept.apply(_two(1)) == ()
        assert [type(step) for step in kept.apply(_two(1, 2))] == [AddElements]


def test_more_refusals_than_the_receive_buffer_holds_are_one_error(elsewhere: Netns) -> None:
    """The kernel answers every refused message of a transaction, here after another program's ``nft flush
    ruleset``.
    """
    steps = [FlushChain(Family.INET, "gone", f"chain{number}") for number in range(5_000)]
    with NetlinkSocket(NETLINK_NETFILTER, elsewhere) as link:
        for _ in range(2):
            with pytest.raises(KernelRefused) as refused:
                link.batch(nftables.nft_batch(steps))
            assert refused.value.code == errno.ENOENT
            assert refused.value.doing.endswith("chain0")
        request = nftables.nft_message(nftables.NFT_GETTABLE, 0, nftables.DUMP)
        with NetlinkSocket(NETLINK_NETFILTER, elsewhere) as fresh:
            assert link.dump(request) == fresh.dump(request)


@pytest.mark.parametrize(
    ("device", "leaf"),
    [
        ("lo", "../../../../../..{}"),
        ("..", "ip_forward"),
        ("lo/../all", "rp_filter"),
        ("lo\0lo", "rp_filter"),
    ],
    ids=["leaf", "parent", "device", "zero"],
)
def test_saved_sysctl_that_names_another_file_is_ignored(
    elsewhere: Netns, tmp_path: Path, device: str, leaf: str
) -> None:
    """As a container with CAP_NET_ADMIN can write it."""
    target = tmp_path / "file"
    target.write_text("before")
    item = Set(f"ipv4-{leaf.format(target)}", SetKey.INTERFACE)
    element = Element(device.encode().ljust(16, b"\0"), "1")
    steps = (AddTable(INET, "memory"), AddSet(INET, "memory", item))
    with (
        NetlinkSocket(NETLINK_NETFILTER, elsewhere) as link,
        contextlib.closing(BlockingKernel({HERE: elsewhere}, OWNED)) as kernel,
    ):
        kernel.apply(state())
        link.batch(nftables.nft_batch((*steps, AddElements(INET, "memory", item.name, (element,)))))
        try:
            assert kernel.apply(state()) == ()
        finally:
            link.batch(nftables.nft_batch([DeleteTable(INET, "memory")]))
    assert target.read_text() == "before"


def test_foreign_set_with_a_catch_all_interval_is_removed(elsewhere: Netns) -> None:
    item = Set("foreign", SetKey.IPV4_ADDRESS, interval=True)
    element = Element(b"\x0a\0\0\1", "", last=b"\x0a\0\0\5")
    table = Table("t")
    steps = (AddTable(INET, "t"), AddSet(INET, "t", item), AddElements(INET, "t", item.name, (element,)))
    begin, *messages, end = nftables.nft_batch(steps)
    names = text(nf.NFTA_SET_ELEM_LIST_TABLE, "t") + text(nf.NFTA_SET_ELEM_LIST_SET, item.name)
    catch_all = nest(nf.NFTA_LIST_ELEM, be32(nf.NFTA_SET_ELEM_FLAGS, 2))
    body = messages[-1].body[:4] + names + nest(nf.NFTA_SET_ELEM_LIST_ELEMENTS, catch_all)
    with NetlinkSocket(NETLINK_NETFILTER, elsewhere) as link:
        link.batch([begin, *messages, replace(messages[-1], body=body), end])
        with contextlib.closing(BlockingKernel({HERE: elsewhere}, OWNED)) as kernel:
            kernel.apply(state(table))
            assert kernel.read().namespaces[HERE].tables == (table,)
            kernel.apply(state())


def test_a_dump_that_fails_after_its_start_is_an_error(elsewhere: Netns) -> None:
    """The kernel reports an unknown device of an address dump in NLMSG_DONE, without NLMSG_ERROR before it."""
    everything = rtnetlink.dump_request(rtnetlink.RTM_GETADDR)
    ipv4 = socket.AF_INET.to_bytes(1, sys.byteorder)
    of_device = replace(everything, body=ipv4 + everything.body[1:4] + (1 << 30).to_bytes(4, sys.byteorder))
    with NetlinkSocket(NETLINK_ROUTE, elsewhere) as link:
        for _ in range(2):
            with pytest.raises(KernelRefused) as refused:
                link.dump(of_device)
            assert refused.value.code == errno.ENODEV
