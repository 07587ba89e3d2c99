"""From istio-cni to our agent and back: rules are taken over in place, and open connections continue."""

import asyncio
import contextlib
import ctypes
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deploy.lab import Lab, Place
from tests.netns.foreign import foreign_tables
from tests.netns.istio_cni import FORMS, ip, routing, write_routing, write_rules
from tests.netns.test_agent import described, has_rules
from tests.netns.test_enroller import LABELLED, WEB, Scene, on_stage, until
from tests.netns.toys import WAIT_S, app, ask
from tproxy.aio.istio_cni import foreign_chains
from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect
from tproxy.inpod import OWNERSHIP, TABLE
from tproxy.render import nftables
from tproxy.render.nf_tables import NFTA_CHAIN_NAME, NFTA_CHAIN_TABLE
from tproxy.render.nftables_dump import nft_parts
from tproxy.wire import read_text
from ztunnel.node.agent.auditor import Auditor
from ztunnel.node.agent.enrolment import REDIRECTION
from ztunnel.node.agent.namespaces import apply_rules, remove_rules, take_over_rules
from ztunnel.node.agent.server import Announced, ZdsServer
from ztunnel.proxy.istio.zds.pods import PodInfo

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
both_forms = pytest.mark.parametrize("form", FORMS)
INFO = PodInfo(name="web", namespace="shop", service_account="default")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["web", "db"]}) as lab:
        yield lab


class Live:
    """Open connections from and to a pod in the mesh, of both IP versions."""

    def __init__(self, web: Place, db: Place) -> None:
        self.web, self.db = web, db
        self.sockets: list[socket.socket] = []

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for source, destination, port in ((self.web, self.db, b"15001"), (self.db, self.web, b"15006")):
            for version in (4, 6):
                sock = await connect((destination.address(version), 8080), netns=source.netns)
                self.sockets.append(sock)
                assert (await loop.sock_recv(sock, 100)).startswith(port)

    async def check(self) -> None:
        """Bytes pass through each connection, and new connections are captured."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S):
            for sock in self.sockets:
                await loop.sock_sendall(sock, b"still")
                assert await loop.sock_recv(sock, 100) == b"still"
            for version in (4, 6):
                assert (await ask(self.web, self.db.address(version))).startswith("15001")
                assert (await ask(self.db, self.web.address(version))).startswith("15006")

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


@contextlib.asynccontextmanager
async def live(web: Place, db: Place) -> AsyncIterator[Live]:
    found = Live(web, db)
    try:
        async with app(db):
            await found.open()
            yield found
    finally:
        found.close()


@contextlib.asynccontextmanager
async def istio_cni(scene: Scene, form: str) -> AsyncIterator[None]:
    """Another agent that has enrolled the pod, until the end of the block."""
    write_rules(scene.web.netns, form)
    async with ZdsServer(scene.folder / "zds", lambda: [Announced(WEB, INFO, scene.web.netns)]):
        yield


@both_forms
def test_rules_of_istio_cni_are_taken_over_in_place(lab: Lab, tmp_path: Path, form: str) -> None:
    async def body(scene: Scene) -> None:
        cluster, web = scene.cluster, scene.web
        cluster.label("shop", LABELLED)
        scene.start(web)
        cluster.run(web, annotations={REDIRECTION: "enabled"})
        async with contextlib.AsyncExitStack() as stack:
            other = contextlib.AsyncExitStack()
            await other.enter_async_context(istio_cni(scene, form))
            manager = await stack.enter_async_context(scene.proxy())
            await until(lambda: manager.ready, "served by the other agent")
            routes = routing(web.netns)
            connections = await stack.enter_async_context(live(web, scene.db))
            await connections.check()
            # The other agent ends; ours starts, and the proxy finds it at the same path.
            await other.aclose()
            await connections.check()
            enroller = await stack.enter_async_context(scene.enroller())
            await until(lambda: WEB in enroller.agent.pods(), "enrolled")
            await until(lambda: not enroller.waiting and manager.ready, "settled")
            await connections.check()
            assert foreign_chains(web.netns) == set()
            assert has_rules(web.netns)
            assert len(routing(web.netns)) == len(routes) == 4
            assert len(scene.toys.started) == 1
            assert cluster.annotations == []
            assert cluster.events == []
            auditor = Auditor(enroller, cluster, "w1")
            report = await auditor.report(repair=True)
            assert report["repaired"] == []
            assert [each["findings"] for each in report["pods"]] == [[]]
        assert has_rules(web.netns)

    on_stage(lab, tmp_path, body)


def test_proxies_keep_their_pods_until_the_api_server_has_shown_them(lab: Lab, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        cluster, web = scene.cluster, scene.web
        cluster.label("shop", LABELLED)
        scene.start(web)
        cluster.run(web, annotations={REDIRECTION: "enabled"})
        async with contextlib.AsyncExitStack() as stack:
            other = contextlib.AsyncExitStack()
            await other.enter_async_context(istio_cni(scene, "nft"))
            manager = await stack.enter_async_context(scene.proxy())
            await until(lambda: manager.ready, "served by the other agent")
            connections = await stack.enter_async_context(live(web, scene.db))
            await other.aclose()
            cluster.changed.clear()  # the API server does not answer
            enroller = await stack.enter_async_context(scene.enroller())
            await until(lambda: enroller.agent.proxies == 1, "connected")
            await asyncio.sleep(0.2)  # the time that a snapshot would take, many times
            assert (enroller.synced, manager.ready) == (False, False)
            await connections.check()
            cluster.restarted()
            await until(lambda: WEB in enroller.agent.pods() and manager.ready, "enrolled")
            await connections.check()
            assert len(scene.toys.started) == 1

    on_stage(lab, tmp_path, body)


def test_pod_whose_rules_cannot_be_taken_over_keeps_working_and_is_named(lab: Lab, tmp_path: Path) -> None:
    """Table 100 has a route that belongs to neither agent, so ours cannot be added."""

    async def body(scene: Scene) -> None:
        cluster, web = scene.cluster, scene.web
        cluster.label("shop", LABELLED)
        scene.start(web)
        cluster.run(web, annotations={REDIRECTION: "enabled"})
        async with contextlib.AsyncExitStack() as stack:
            other = contextlib.AsyncExitStack()
            await other.enter_async_context(istio_cni(scene, "nft"))
            stand_in_the_way(web)
            manager = await stack.enter_async_context(scene.proxy())
            await until(lambda: manager.ready, "served by the other agent")
            connections = await stack.enter_async_context(live(web, scene.db))
            await other.aclose()
            enroller = await stack.enter_async_context(scene.enroller())
            await until(lambda: enroller.steps["enrol", "failed"] >= 4, "tried again and again")
            await connections.check()
            assert cluster.annotation("web") == "enabled"
            assert len(scene.toys.started) == 1
            [(name, reason, text)] = cluster.events
            assert (name, reason) == ("web", "MeshTwoAgents")
            assert "the pod keeps the rules of its earlier agent and works; restart it" in text
            report = await Auditor(enroller, cluster, "w1").report(repair=True)
            assert report["repaired"] == []
            await connections.check()

    on_stage(lab, tmp_path, body)


def stand_in_the_way(web: Place) -> None:
    """Put a default route of another kind where ours belongs."""
    ip(web.netns, "route", "del", "local", "0.0.0.0/0", "dev", "lo", "table", "100")
    ip(web.netns, "route", "add", "default", "dev", "eth0", "metric", "0", "table", "100")


@both_forms
def test_istio_cni_takes_a_pod_of_ours_back(lab: Lab, tmp_path: Path, form: str) -> None:
    async def body(scene: Scene) -> None:
        cluster, web = scene.cluster, scene.web
        cluster.label("shop", LABELLED)
        scene.start(web)
        async with contextlib.AsyncExitStack() as stack:
            agent = contextlib.AsyncExitStack()
            enroller = await agent.enter_async_context(scene.enroller())
            manager = await stack.enter_async_context(scene.proxy())
            await until(lambda: cluster.annotation("web") == "enabled", "enabled")
            connections = await stack.enter_async_context(live(web, scene.db))
            # istio-cni is installed, writes its rules beside ours, and has the path of the socket from then on.
            await stack.enter_async_context(istio_cni(scene, form))
            await connections.check()
            # Our agent has no successor: it leaves the pod to the other one.
            await enroller.withdraw(0.1)
            await agent.aclose()
            await until(lambda: manager.ready, "served by the other agent")
            await connections.check()
            assert not has_table(web)
            assert foreign_chains(web.netns)
            assert cluster.annotation("web") == "enabled"
            assert cluster.annotations == [("web", "enabled")]
            assert len(set(routing(web.netns))) == 4
            assert len(scene.toys.started) == 1

    on_stage(lab, tmp_path, body)


def has_table(place: Place) -> bool:
    return any(name.startswith(f"{TABLE} ") for name in chains(place.netns))


@both_forms
def test_removing_our_rules_leaves_what_istio_cni_needs(lab: Lab, tmp_path: Path, form: str) -> None:
    async def body(scene: Scene) -> None:
        scene.cluster.label("shop", LABELLED)
        scene.start(scene.web)
        async with scene.proxy():
            async with scene.enroller():
                await until(lambda: scene.cluster.annotation("web") == "enabled", "enabled")
            write_rules(scene.web.netns, form)
            async with live(scene.web, scene.db) as connections:
                await connections.check()
                # Our rules are removed, except those that istio-cni needs.
                assert remove_rules(scene.web.netns) > 0
                await connections.check()
                assert len(set(routing(scene.web.netns))) == 4

    on_stage(lab, tmp_path, body)


@both_forms
def test_a_second_takeover_changes_no_rule(lab: Lab, form: str) -> None:
    web = lab.pod("web")
    write_rules(web.netns, form)
    before = routing(web.netns)
    description = described(web)
    removed = take_over_rules(web.netns, description)
    assert removed
    assert all(
        name.startswith(("istio-ambient-", "nat ISTIO_", "mangle ISTIO_", "raw ISTIO_")) for name in removed
    )
    assert take_over_rules(web.netns, description) == set()
    assert apply_rules(web.netns, description) == 0
    assert len(routing(web.netns)) == len(before)
    # The routes of istio-cni alone, as a second agent writes them at its start.
    write_routing(web.netns)
    assert take_over_rules(web.netns, description) == set()
    assert apply_rules(web.netns, description) == 0
    assert remove_rules(web.netns) > 0
    assert routing(web.netns) == []


def test_chains_of_iptables_legacy_are_found_and_stay(lab: Lab) -> None:
    web = lab.pod("web")
    with web.netns.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            replace_legacy_table(sock, "nat", "ISTIO_OUTPUT")
        except OSError as error:
            pytest.skip(f"NOT TESTED: this kernel has no tables of iptables-legacy: {error}")
    assert foreign_chains(web.netns) == {"nat ISTIO_OUTPUT (iptables-legacy)"}
    assert take_over_rules(web.netns, described(web)) == set()
    assert foreign_chains(web.netns) == {"nat ISTIO_OUTPUT (iptables-legacy)"}
    assert foreign_chains(lab.pod("db").netns) == set()
    # Its rules need the route, so that it stays.
    assert remove_rules(web.netns) > 0
    assert len(routing(web.netns)) == 4


def replace_legacy_table(sock: socket.socket, table: str, chain: str) -> None:
    """Give a table of iptables-legacy one chain, which returns at once.

    ``struct ipt_replace`` and entries as iptables(8) sends them (linux/netfilter_ipv4/ip_tables.h): each base
    chain accepts, then the chain's head, an ERROR target with its name, and its end.
    """
    accept, back = -2, -5
    hooks = {0: 0, 1: 1, 3: 2, 4: 3}  # prerouting, input, output, postrouting: their order in the table

    def entry(target: bytes) -> bytes:
        head = bytes(84) + struct.pack("=IHHI", 0, 112, 112 + len(target), 0) + bytes(16)
        return head + target

    def standard(verdict: int) -> bytes:
        return entry(struct.pack("=H29sBi4x", 40, b"", 0, verdict))

    def error(name: str) -> bytes:
        return entry(struct.pack("=H29sB30s2x", 64, b"ERROR", 0, name.encode()))

    base = b"".join(standard(accept) for _ in hooks)
    entries = base + error(chain) + standard(back) + error("ERROR")
    each = len(standard(accept))
    offsets = [hooks[hook] * each if hook in hooks else 0 for hook in range(5)]
    valid = sum(1 << hook for hook in hooks)
    number = len(hooks) + 3
    counters = ctypes.create_string_buffer(16 * 64)
    head = struct.pack("=32sIII", table.encode(), valid, number, len(entries))
    head += struct.pack("=5I5I", *offsets, *offsets) + struct.pack(
        "=IQ", len(hooks) + 1, ctypes.addressof(counters)
    )
    sock.setsockopt(socket.IPPROTO_IP, 64, head + entries)


def test_chains_of_others_in_the_same_tables_stay(lab: Lab) -> None:
    web = lab.pod("web")
    foreign_tables(web.netns)
    write_rules(web.netns, "iptables")
    take_over_rules(web.netns, described(web))
    assert foreign_chains(web.netns) == set()
    assert {"nat DOCKER", "nat KUBE-SERVICES", "filter DOCKER-USER", "kube-proxy service-x"} <= chains(web.netns)


def chains(netns: Netns) -> set[str]:
    message = nftables.nft_message(nftables.NFT_GETCHAIN, 0, nftables.DUMP)
    with NetlinkSocket(NETLINK_NETFILTER, netns) as link:
        parts = [nft_parts(body)[1] for body in link.dump(message)]
    return {f"{read_text(part[NFTA_CHAIN_TABLE])} {read_text(part[NFTA_CHAIN_NAME])}" for part in parts}


def test_a_takeover_continues_where_an_earlier_one_was_cut_off(lab: Lab) -> None:
    web = lab.pod("web")
    write_rules(web.netns, "nft")
    before = routing(web.netns)
    for version in ("-4", "-6"):  # the agent was killed after the first step of each rule
        arguments = ("fwmark", "0x111/0xfff", "pref", "32763", "lookup", "100")
        ip(web.netns, version, "rule", "add", *arguments, "protocol", str(OWNERSHIP.protocol))
    description = described(web)
    take_over_rules(web.netns, description)
    assert apply_rules(web.netns, description) == 0
    assert len(routing(web.netns)) == len(before)
