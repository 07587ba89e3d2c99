"""Reading, applying, repairing and removing against the running kernel."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path

import pytest
import uvloop

from deploy.lab import Lab, Worker
from tests.generated import at_night
from tests.netns.dumps import everything
from tests.netns.toys import WAIT_S, app, ask, toy_ztunnel
from tests.programs import needed
from tproxy.aio import rtnetlink
from tproxy.aio.kernel import BlockingKernel, Kernel
from tproxy.aio.netlink import NETLINK_NETFILTER, NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect
from tproxy.aio.sysctl_memory import SysctlMemory, cookie_of
from tproxy.errors import NotOurs, UnknownInterface
from tproxy.expressions import TCP, Family, Immediate, Nat, NatKind, destination_is, mark_is, protocol_is
from tproxy.node import HOST, OWNERSHIP, TABLE, ZTUNNEL, Member, member_sets, node
from tproxy.operations import (
    AddChain,
    AddTable,
    AppendRule,
    DeleteElements,
    DeleteTable,
    FlushChain,
    NftTransaction,
)
from tproxy.render import nftables
from tproxy.resources import (
    DSTNAT,
    Chain,
    Element,
    Hook,
    HookPoint,
    Namespace,
    NamespaceName,
    Ownership,
    Route,
    Rule,
    State,
    Table,
    nothing,
)

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
VIP = {4: "10.96.183.192", 6: "fd00:10:96::c0"}
STATIC = 4
RP_FILTER = Path("/proc/sys/net/ipv4/conf/all/rp_filter")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["productpage", "ratings"], "w2": ["reviews"]}, rp_filter=1) as lab:
        yield lab


@pytest.fixture
def w1(lab: Lab) -> Worker:
    return lab.worker("w1")


@pytest.fixture
def netns(w1: Worker) -> dict[NamespaceName, Netns]:
    return {ZTUNNEL: w1.ztunnel.netns, HOST: w1.place.netns}


@pytest.fixture
def kernel(netns: dict[NamespaceName, Netns]) -> Iterator[BlockingKernel]:
    with contextlib.closing(BlockingKernel(netns, OWNERSHIP)) as kernel:
        yield kernel


def test_found_is_what_was_wanted_and_twice_changes_nothing(kernel: BlockingKernel, w1: Worker) -> None:
    wanted = node(w1.wanted())
    assert kernel.apply(wanted)
    found = kernel.read(wanted)
    assert found.pairs == wanted.pairs
    for name, space in wanted.namespaces.items():
        have = found.namespaces[name]
        assert have.rules == space.rules
        assert have.routes == space.routes
        assert have.addresses == space.addresses
        assert {key: have.sysctls[key] for key in space.sysctls} == space.sysctls
        assert set(have.tables) == set(space.tables)
    assert kernel.apply(wanted) == ()


def test_removal_leaves_no_trace(kernel: BlockingKernel, lab: Lab, w1: Worker) -> None:
    before = {space.name: everything(space) for space in (w1.place.netns, w1.ztunnel.netns)}
    wanted = node(w1.wanted())
    kernel.apply(wanted)
    assert everything(w1.place.netns) != before[w1.place.netns.name]
    kernel.apply(nothing(wanted))
    for space in (w1.place.netns, w1.ztunnel.netns):
        after = everything(space)
        for part, value in before[space.name].items():
            assert after[part] == value, part
    assert kernel.apply(nothing(wanted)) == ()


def test_removal_by_another_process_puts_sysctls_back(
    kernel: BlockingKernel, netns: dict[NamespaceName, Netns], w1: Worker
) -> None:
    before = everything(w1.place.netns)["sysctls"]
    kernel.apply(node(w1.wanted(["productpage"])))
    kernel.apply(node(w1.wanted(["ratings"])))
    with contextlib.closing(BlockingKernel(netns, OWNERSHIP)) as other:
        other.apply(State({name: Namespace() for name in netns}))
    assert everything(w1.place.netns)["sysctls"] == before


@pytest.mark.parametrize("applied_again", [False, True])
def test_removal_after_a_foreign_flush_puts_sysctls_back(
    kernel: BlockingKernel, netns: dict[NamespaceName, Netns], w1: Worker, applied_again: bool
) -> None:
    """``nft flush ruleset`` also deletes our memory table. The file still has the previous values."""
    before = everything(w1.place.netns)
    wanted = node(w1.wanted(["productpage"]))
    kernel.apply(wanted)
    steps = tuple(DeleteTable(Family.INET, table) for table in (TABLE, OWNERSHIP.memory_table))
    kernel._transaction(HOST, steps)
    with contextlib.closing(BlockingKernel(netns, OWNERSHIP)) as other:
        if applied_again:
            other.apply(wanted)
        other.apply(State({name: Namespace() for name in netns}))
    assert everything(w1.place.netns) == before
    assert SysctlMemory(cookie_of(netns[HOST])).load() == {}


def test_members_come_and_go_without_touching_anything_else(kernel: BlockingKernel, w1: Worker) -> None:
    kernel.apply(node(w1.wanted(["productpage"])))
    operations = kernel.apply(node(w1.wanted(["productpage", "ratings"])))
    steps = [step for item in operations if isinstance(item, NftTransaction) for step in item.steps]
    assert {type(step).__name__ for step in steps} == {"AddElements"}
    assert {type(item).__name__ for item in operations} == {
        "AddRoute",
        "NftTransaction",
        "Remember",
        "SetSysctl",
    }
    kernel.apply(node(w1.wanted([])))
    assert kernel.apply(node(w1.wanted([]))) == ()


def test_a_member_whose_interface_is_missing_is_an_error_with_its_name(kernel: BlockingKernel, w1: Worker) -> None:
    wanted = w1.wanted()
    lost = Member(uid="lost", addresses=(ip_address("10.244.1.99"),), device="vethlost")
    with pytest.raises(UnknownInterface, match="vethlost"):
        kernel.apply(node(replace(wanted, members=(*wanted.members, lost))))


def test_a_route_of_somebody_else_is_not_replaced(kernel: BlockingKernel, w1: Worker) -> None:
    theirs = Route(table=100, destination=ip_network("10.244.1.10/32"), device="v-ratings")
    with NetlinkSocket(NETLINK_ROUTE, w1.place.netns) as link:
        index = kernel._places[HOST].index
        link.request(rtnetlink.route_message(rtnetlink.RTM_NEWROUTE, theirs, STATIC, index))
    with pytest.raises(NotOurs, match=r"10\.244\.1\.10"):
        kernel.apply(node(w1.wanted()))
    kernel.apply(State({HOST: Namespace(), ZTUNNEL: Namespace()}))
    assert any("10.244.1.10" in line for line in _routes(w1, 100))


def _routes(worker: Worker, table: int) -> list[str]:
    process = worker.place.popen([needed("ip"), "route", "show", "table", str(table)], stdout=-1, text=True)
    output, _ = process.communicate(timeout=WAIT_S)
    return output.splitlines()


def test_a_refused_transaction_changes_nothing(kernel: BlockingKernel, w1: Worker) -> None:
    kernel.apply(node(w1.wanted()))
    before = everything(w1.place.netns)
    steps = (
        AddTable(Family.INET, "ztunnel_other"),
        AddChain(Family.INET, "ztunnel_other", Chain("good")),
        AppendRule(Family.INET, "ztunnel_other", "missing", Rule(protocol_is(TCP), "into nowhere")),
    )
    with pytest.raises(Exception, match="into nowhere"):
        kernel._transaction(HOST, steps)
    assert everything(w1.place.netns) == before


# Damage that people and programs do, and that must be repaired.


def _delete_rules(w1: Worker) -> None:
    with NetlinkSocket(NETLINK_NETFILTER, w1.place.netns) as nft:
        nft.batch(nftables.nft_batch([FlushChain(Family.INET, "ztunnel", "prerouting")]))


def _delete_element(w1: Worker) -> None:
    element = Element(w1.pods["productpage"].ipv4.packed)
    with NetlinkSocket(NETLINK_NETFILTER, w1.place.netns) as nft:
        nft.batch(nftables.nft_batch([DeleteElements(Family.INET, "ztunnel", "mesh_pods4", (element,))]))


def _add_rule(w1: Worker) -> None:
    foreign = Rule((*protocol_is(TCP), *mark_is(1)), "not ours")
    with NetlinkSocket(NETLINK_NETFILTER, w1.place.netns) as nft:
        nft.batch(nftables.nft_batch([AppendRule(Family.INET, "ztunnel", "prerouting", foreign)]))


def _ip(w1: Worker, *words: str) -> None:
    assert w1.place.popen([needed("ip"), *words]).wait(WAIT_S) == 0


def _delete_tproxy_table(w1: Worker) -> None:
    from tproxy.operations import DeleteTable

    with NetlinkSocket(NETLINK_NETFILTER, w1.ztunnel.netns) as nft:
        nft.batch(nftables.nft_batch([DeleteTable(Family.INET, "ztunnel")]))


DAMAGE: dict[str, Callable[[Worker], None]] = {
    "rules of a chain": _delete_rules,
    "a set element": _delete_element,
    "a rule added to our chain": _add_rule,
    "the table in the ztunnel": _delete_tproxy_table,
    "a policy rule": lambda w1: _ip(w1, "rule", "del", "priority", "101"),
    "an IPv6 policy rule": lambda w1: _ip(w1, "-6", "rule", "del", "priority", "103"),
    "a member's route": lambda w1: _ip(w1, "route", "flush", "table", "100"),
    "all routes out": lambda w1: _ip(w1, "-6", "route", "flush", "table", "101"),
    "a device taken down": lambda w1: _ip(w1, "link", "set", "istioin", "down"),
    "a device deleted": lambda w1: _ip(w1, "link", "del", "istioout"),
    "an address": lambda w1: _ip(w1, "addr", "flush", "dev", "istioin"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_damage_is_repaired_when_the_kernel_notifies(
    netns: dict[NamespaceName, Netns],
    w1: Worker,
    damage: Callable[[Worker], None],
    run: Callable[..., None],
) -> None:
    wanted = node(w1.wanted())

    async def main() -> None:
        # The recheck is far away: what repairs here is the kernel's notification.
        async with (
            Kernel(netns, OWNERSHIP) as kernel,
            contextlib.aclosing(kernel.keep(lambda: wanted, recheck_s=600)) as results,
        ):
            async with asyncio.timeout(WAIT_S):
                await anext(results)
            damage(w1)
            async with asyncio.timeout(WAIT_S):
                repair = await anext(results)
            assert isinstance(repair, tuple)
            assert await kernel.apply(wanted) == ()

    run(main())


def test_a_sysctl_is_repaired_at_the_recheck(netns: dict[NamespaceName, Netns], w1: Worker) -> None:
    wanted = node(w1.wanted())

    async def main() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            Kernel(netns, OWNERSHIP) as kernel,
            contextlib.aclosing(kernel.keep(lambda: wanted, recheck_s=0.05)) as results,
        ):
            await anext(results)
            w1.place.run(RP_FILTER.write_text, "1")
            assert [type(item).__name__ for item in await anext(results)] == ["SetSysctl"]  # type: ignore[union-attr]

    asyncio.run(main())


def test_keep_looks_again_when_it_is_told_to(netns: dict[NamespaceName, Netns], w1: Worker) -> None:
    async def main() -> None:
        members = ["productpage"]
        edited = asyncio.Event()
        async with Kernel(netns, OWNERSHIP) as kernel, asyncio.timeout(30):
            keeping = kernel.keep(lambda: node(w1.wanted(members)), recheck_s=3600, changed=edited)
            async with contextlib.aclosing(keeping) as results:
                assert await anext(results)
                members.append("ratings")
                edited.set()
                done = await anext(results)
                assert isinstance(done, tuple)
                assert done

    asyncio.run(main())


def test_keep_reports_an_error_and_goes_on(netns: dict[NamespaceName, Netns], w1: Worker) -> None:
    good = node(w1.wanted())
    lost = Member(uid="lost", addresses=(), device="vethlost")
    bad = node(replace(w1.wanted(), members=(lost,)))

    async def main() -> None:
        wanted = [bad]
        async with Kernel(netns, OWNERSHIP) as kernel, asyncio.timeout(WAIT_S):
            async with contextlib.aclosing(kernel.keep(lambda: wanted[0], recheck_s=0.05)) as keeping:
                first = await anext(keeping)
                assert isinstance(first, UnknownInterface)
                wanted[0] = good
                second = await anext(keeping)
                assert isinstance(second, tuple)
            assert await kernel.apply(good) == ()

    asyncio.run(main())


def test_a_replaced_ztunnel_namespace_gets_new_pairs(lab: Lab, w1: Worker) -> None:
    """The old namespace still exists when the new one appears, so the node's devices exist but lead to the old
    one.
    """
    wanted = node(w1.wanted())
    with contextlib.closing(BlockingKernel({ZTUNNEL: w1.ztunnel.netns, HOST: w1.place.netns}, OWNERSHIP)) as old:
        old.apply(wanted)
    with Netns.create() as fresh:
        with NetlinkSocket(NETLINK_ROUTE, w1.place.netns) as link:
            from tproxy.resources import End, VethPair

            pair = VethPair(End(HOST, "v-new"), End(ZTUNNEL, "eth0"))
            link.request(rtnetlink.create_pair(pair, fresh.fileno()))
        addresses = (ip_address("10.244.1.6"), ip_address("fd00:10:244:1::6"))
        described = replace(w1.wanted(), ztunnel_device="v-new", ztunnel_addresses=addresses)
        replaced = node(described)
        with contextlib.closing(BlockingKernel({ZTUNNEL: fresh, HOST: w1.place.netns}, OWNERSHIP)) as new:
            for space in (fresh, w1.place.netns):
                with NetlinkSocket(NETLINK_ROUTE, space) as link:
                    for name in ("lo", "eth0", "v-new"):
                        with contextlib.suppress(UnknownInterface):
                            index = next(p for p in new._places.values() if p.netns is space).index(name)
                            link.request(rtnetlink.set_up(index))
            # The routes through a device without addresses need one.
            _ip(w1, "addr", "add", "10.244.1.1/32", "dev", "v-new")
            new.apply(replaced)
            assert new.apply(replaced) == ()
            assert new.read(replaced).pairs == replaced.pairs


def _kube_proxy(worker: Worker, version: int, target: IPv4Address | object) -> None:
    """A service translated in somebody else's table, at the usual priority."""
    family = Family.IPV4 if version == 4 else Family.IPV6
    vip = ip_address(VIP[version])
    rule = Rule(
        (
            *destination_is(vip),
            *protocol_is(TCP),
            Immediate(target.packed),  # type: ignore[attr-defined]
            Nat(NatKind.DESTINATION, family, 1, 1),
        )
    )
    hook = Hook(kind="nat", point=HookPoint.PREROUTING, priority=DSTNAT)
    state = State({HOST: Namespace(tables=(Table("kube-proxy", chains=(Chain("services", (rule,), hook),)),))})
    ownership = Ownership(tables=frozenset({"kube-proxy"}), memory_table="unused", protocol=77)
    with contextlib.closing(BlockingKernel({HOST: worker.place.netns}, ownership)) as theirs:
        theirs.apply(state)


@pytest.mark.parametrize("version", [4, 6])
def test_kube_proxy_does_not_translate_captured_traffic(
    kernel: BlockingKernel, lab: Lab, w1: Worker, version: int
) -> None:
    reviews, client = lab.pod("reviews"), lab.pod("productpage")
    _kube_proxy(w1, version, reviews.address(version))

    async def main() -> None:
        async with app(reviews), toy_ztunnel(w1.ztunnel):
            # Without us it works as a service does, which shows that the rule is a real one.
            line = await ask(lab.pod("ratings"), VIP[version])
            assert line.startswith("app reviews")
            kernel.apply(node(w1.wanted(["productpage"])))
            line = await ask(client, VIP[version])
            assert line == f"15001 from {client.address(version)} to {VIP[version]} 8080 True"
            line = await ask(lab.pod("ratings"), VIP[version])
            assert line.startswith("app reviews")

    asyncio.run(main())


def test_without_keepvip_kube_proxy_would_translate(kernel: BlockingKernel, lab: Lab, w1: Worker) -> None:
    """The trap that keepvip is for: should this fail, keepvip can go."""
    reviews, client = lab.pod("reviews"), lab.pod("productpage")
    _kube_proxy(w1, 4, reviews.ipv4)
    wanted = node(w1.wanted(["productpage"]))
    host = wanted.namespaces[HOST]
    table = host.tables[0]
    bare = replace(table, chains=tuple(chain for chain in table.chains if chain.name != "keepvip"))
    kernel.apply(replace(wanted, namespaces={**wanted.namespaces, HOST: replace(host, tables=(bare,))}))

    async def main() -> None:
        async with app(reviews), toy_ztunnel(w1.ztunnel):
            assert f"to {reviews.ipv4} 8080" in await ask(client, VIP[4])

    asyncio.run(main())


#: How often all rules are written again.
ROUNDS = at_night(50, 15)


def test_applications_from_scratch_disturb_no_connection(
    kernel: BlockingKernel, netns: dict[NamespaceName, Netns], lab: Lab, w1: Worker
) -> None:
    """Each time all rules are written again, in one transaction, while dials and an echo continue."""
    wanted = node(w1.wanted(["productpage"]))
    host, inner = wanted.namespaces[HOST], wanted.namespaces[ZTUNNEL]

    def touched(space: Namespace, round_: int) -> Namespace:
        table = space.tables[0]
        chains = tuple(
            replace(chain, rules=tuple(replace(rule, comment=f"round {round_}") for rule in chain.rules))
            for chain in table.chains
        )
        return replace(space, tables=(replace(table, chains=chains),))

    kernel.apply(wanted)
    client = lab.pod("productpage")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rounds = 0
        dials = 0
        async with toy_ztunnel(w1.ztunnel), app(lab.pod("reviews")), Kernel(netns, OWNERSHIP) as writer:
            with await connect((VIP[4], 80), netns=client.netns) as lasting:
                while not (await loop.sock_recv(lasting, 4096)).endswith(b"\n"):
                    pass

                async def dial() -> None:
                    nonlocal dials
                    while rounds < ROUNDS:
                        for version in (4, 6):
                            target = lab.pod("reviews").address(version)
                            line = await ask(client, target)
                            assert line == f"15001 from {client.address(version)} to {target} 8080 True"
                            dials += 1

                async def echo() -> None:
                    while rounds < ROUNDS:
                        await loop.sock_sendall(lasting, b"still here")
                        async with asyncio.timeout(WAIT_S):
                            assert await loop.sock_recv(lasting, 100) == b"still here"

                async with asyncio.TaskGroup() as group:
                    group.create_task(dial())
                    group.create_task(echo())
                    for round_ in range(ROUNDS):
                        spaces = {ZTUNNEL: touched(inner, round_), HOST: touched(host, round_)}
                        done = await writer.apply(replace(wanted, namespaces=spaces))
                        assert sum(isinstance(item, NftTransaction) for item in done) == 2
                        rounds += 1
        assert dials > ROUNDS

    asyncio.run(main())


def test_two_thousand_members_fit(lab: Lab) -> None:
    members = tuple(
        Member(uid=f"{number:036d}", addresses=(IPv4Address(0x0A800000 + number),), device="unused")
        for number in range(2000)
    )
    with Netns.create() as space, contextlib.closing(BlockingKernel({HOST: space}, OWNERSHIP)) as kernel:
        with NetlinkSocket(NETLINK_ROUTE, space) as link:
            link.request(rtnetlink.set_up(1))
        wanted = State({HOST: Namespace(tables=(Table(TABLE, Family.INET, sets=member_sets(members)),))})
        kernel.apply(wanted)
        assert kernel.apply(wanted) == ()
        assert len(kernel.read(wanted).namespaces[HOST].tables[0].sets[0].elements) == 2000
