"""Addons and the connections of an Istio mesh: the facts passed to hooks, and the effect of each verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hbone.errors import ConnectRefused, HboneError
from tests.ztunnel.proxy.dataplane.test_client_hello import hello
from tests.ztunnel.proxy.istio.inbound_case import DENY, GATED, closing, fields, refused
from tests.ztunnel.proxy.istio.outbound_case import POD, REMOTE
from tests.ztunnel.proxy.istio.path.test_planned import remote, steps_taken
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    OTHER,
    SERVER,
    VIP,
    Cluster,
    certificate,
    endpoint,
    identity,
    play,
    shop,
    workload,
)
from xds.model.address import SocketAddress
from xds.model.workload import GatewayAddress, NetworkAddress
from ztunnel.addons import Addon, Cut, Delay, Deny, Direction, Facts, Metric, Prefer, Record, Verdict
from ztunnel.addons import Path as Way
from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.addons.report import page
from ztunnel.proxy.dataplane.life_table import ALLOWED, State
from ztunnel.proxy.dataplane.names_answered import NamesAnswered
from ztunnel.proxy.istio.accounting.access_record import Direction as Direction_
from ztunnel.proxy.istio.accounting.access_record import Record as Record_
from ztunnel.proxy.istio.accounting.families import families
from ztunnel.proxy.istio.accounting.flows import ring_of, shape
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.handover.units import movable_units
from ztunnel.proxy.istio.path.addons import PodAddons
from ztunnel.proxy.istio.path.planned import PlannedConnection
from ztunnel.proxy.istio.path.planned_request import PlannedRequest
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.workers.messages import CountsPart, FrameDecoder, Response, encode

NEAR = workload("client", CLIENT, canonical_name="client", canonical_revision="v1")


class Scripted(Addon):
    """Returns the test's verdicts, and stores the received facts."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.connect: Callable[[Facts], Verdict | None] = lambda facts: None
        self.accept: Callable[[Facts], Deny | None] = lambda facts: None

    def connecting(self, facts: Facts) -> Verdict | None:
        self.said.append(("connecting", facts))
        return self.connect(facts)

    def accepting(self, facts: Facts) -> Deny | None:
        self.said.append(("accepting", facts))
        return self.accept(facts)

    def opened(self, facts: Facts) -> None:
        self.said.append(("opened", facts))

    def closed(self, record: Record) -> None:
        self.said.append(("closed", record))

    def refused(self, record: Record) -> None:
        self.said.append(("refused", record))

    def metrics(self) -> Iterator[Metric]:
        yield Metric("said", "Values", {("pod",): float(len(self.said))}, ("kind",), "gauge")

    def names(self) -> list[str]:
        return [name for name, _ in self.said]


class Waiting(Scripted):
    """The same with ``async def`` hooks. They wait for :attr:`gate` while it is set."""

    gate: asyncio.Event | None = None

    async def connecting(self, facts: Facts) -> Verdict | None:  # type: ignore[override]
        if self.gate is not None:
            await self.gate.wait()
        return Scripted.connecting(self, facts)

    async def accepting(self, facts: Facts) -> Deny | None:  # type: ignore[override]
        if self.gate is not None:
            await self.gate.wait()
        return Scripted.accepting(self, facts)


def scripted(cluster: Cluster, kind: type[Scripted] = Scripted) -> Scripted:
    """Have an addon in the node."""
    host = AddonHost([load_class(kind, {})])
    cluster.node.addons = PodAddons(host)
    cluster.node.metrics.addons_here = host.report
    instance = host.addons[0].loaded.instance
    assert isinstance(instance, Scripted)
    return instance


def test_addon_hooks_of_an_outbound_connection(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE, canonical_revision="v2")])
        await cluster.start(NEAR)
        cluster.peer("server", SERVER)
        client = cluster.dial(f"{VIP}:80")
        assert await client.ask() == b"ping"
        assert "addon" not in await cluster.line()
        assert addon.names() == ["connecting", "opened", "closed"]
        facts = addon.said[0][1]
        assert facts == Facts(
            connection=1,
            dialect="istio",
            direction=Direction.OUTBOUND,
            path=Way.TUNNEL,
            source=facts.source,
            source_address=CLIENT,
            source_port=client.sock.getsockname()[1],
            source_identity=identity("client"),
            destination=facts.destination,
            destination_address=VIP,
            destination_port=80,
            destination_identity=identity("server"),
            endpoint=f"{SERVER}:15008",
            service="shop.example",
        )
        assert (facts.source.name, facts.source.namespace, facts.source.service_account) == (
            "client",
            "default",
            "client",
        )
        assert dict(facts.destination.labels) == {"version": "v2", "kubernetes.io/hostname": ELSEWHERE}
        assert addon.said[1][1] is facts
        record = addon.said[2][1]
        assert record == Record(facts, 4, 4, record.duration_s)

    play(tmp_path, body)


def test_a_denied_outbound_connection_is_never_dialled(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.node.metrics.flows = ring_of(8)
        addon = scripted(cluster)
        addon.connect = lambda facts: Deny("closed on Sundays")
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        line = await cluster.line()
        assert line["error"] == "connection refused by addon scripted: closed on Sundays"
        assert line["addon"] == "scripted"
        assert cluster.wire.addresses == []
        assert cluster.closed() == {"DENY": 1}
        assert addon.names() == ["connecting", "refused"]
        assert addon.said[1][1].reason == line["error"]
        (entry,) = cluster.node.metrics.flows.entries()
        flow = shape(cluster.node.config)(entry)
        assert flow["flow"]["extensions"]["value"]["addon"] == "scripted"
        assert addon.said[1][1].addon == "scripted"

    play(tmp_path, body)


def test_a_delay_is_waited_for_and_named(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        scripted(cluster).connect = lambda facts: Delay(3)
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        began_s = cluster.node.clock.monotonic()
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert cluster.node.clock.monotonic() - began_s >= 3
        assert (await cluster.line())["addon"] == "scripted"

    play(tmp_path, body)


def test_connection_is_routed_again_after_a_delay(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        other = cluster.peer("other", OTHER)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"  # leaves a plan and a tunnel connection
        addon.connect = lambda facts: Delay(3)
        client = cluster.dial(f"{VIP}:80")
        await cluster.until(lambda: addon.names().count("connecting") == 2)
        # Meanwhile the service gets a waypoint.
        waypoint = GatewayAddress(NetworkAddress("", OTHER), 15008)
        cluster.mesh.apply([shop(waypoint=waypoint), workload("other", OTHER, node=ELSEWHERE)])
        assert await client.ask() == b"ping"
        assert other.headers()[":authority"] == f"{VIP}:80"
        assert (await cluster.line(2))["dst.addr"] == f"{OTHER}:15008"

    play(tmp_path, body)


@pytest.mark.parametrize(("version", "hosts"), [("v2", {OTHER}), ("v3", {SERVER, OTHER})])
def test_preference_narrows_the_draw_if_an_endpoint_fits(tmp_path: Path, version: str, hosts: set[str]) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        addon.connect = lambda facts: Prefer({"version": version})
        cluster.mesh.apply(
            [
                shop(),
                endpoint("server", SERVER, node=ELSEWHERE, canonical_revision="v1"),
                endpoint("other", OTHER, node=ELSEWHERE, canonical_revision="v2"),
            ]
        )
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        cluster.peer("other", OTHER)
        drawn = iter([0, 0, 1, 1] * 20)
        cluster.node.rng.randrange = lambda below: next(drawn) % below  # type: ignore[method-assign, assignment, misc]
        for _ in range(4):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        await cluster.until(lambda: len(cluster.lines()) == 4)
        assert {line["dst.addr"].partition(":")[0] for line in cluster.lines()} == hosts
        opened = [facts for name, facts in addon.said if name == "opened"]
        assert {facts.endpoint.partition(":")[0] for facts in opened} == hosts

    play(tmp_path, body)


def test_a_failed_preferred_endpoint_is_replaced_by_another(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        addon.connect = lambda facts: Prefer({"version": "v2"})
        cluster.mesh.apply(
            [
                shop(),
                endpoint("server", SERVER, node=ELSEWHERE, canonical_revision="v1"),
                endpoint("other", OTHER, node=ELSEWHERE, canonical_revision="v2"),
            ]
        )
        await cluster.start(POD)
        cluster.peer("server", SERVER)  # nothing listens at the other
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert addon.names() == ["connecting", "opened", "closed"]
        assert addon.said[1][1].endpoint == f"{SERVER}:15008"

    play(tmp_path, body)


@pytest.mark.parametrize("cut", [Cut("chaos", after_s=5), Cut("chaos", after_bytes=8)])
def test_a_connection_is_cut_at_its_limit(tmp_path: Path, cut: Cut) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        addon.connect = lambda facts: cut
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"ping")
        assert await client.read(4) == b"ping"
        await client.read_all()
        line = await cluster.line()
        assert line["error"] == "connection cut by addon scripted: chaos"
        assert addon.names() == ["connecting", "opened", "closed"]
        assert addon.said[2][1].reason == line["error"]

    play(tmp_path, body)


def test_an_inbound_connection_can_be_denied_after_policy(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Any) -> None:
        addon = scripted(cluster)
        cluster.application(SERVER)
        addon.accept = lambda facts: Deny("not you")
        assert await refused(connection, *fields()) == 403
        line = await cluster.line()
        assert line["error"] == "connection refused by addon scripted: not you"
        facts = addon.said[0][1]
        assert (facts.direction, facts.path) == (Direction.INBOUND, Way.TUNNEL)
        assert (facts.source_identity, facts.destination_port) == (identity("client"), APP_PORT)
        assert facts.destination.name == "server"
        assert addon.names() == ["accepting", "refused"]
        assert cluster.closed("destination") == {"DENY": 1}
        assert cluster.node.metrics.errors == {("destination", "connect", "addon"): 1}

    play(tmp_path, closing(body))


def test_addons_are_not_called_for_connections_denied_by_policy(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Any) -> None:
        addon = scripted(cluster)
        cluster.application(SERVER)
        cluster.mesh.apply([GATED, DENY])
        assert await refused(connection, *fields()) == 401
        assert addon.names() == ["refused"]
        assert "policy rejection" in addon.said[0][1].reason

    play(tmp_path, closing(body))


def test_addons_are_called_for_plain_inbound_connections(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        addon.accept = lambda facts: Deny("plain") if facts.path is Way.DIRECT else None
        await cluster.start(workload("server", SERVER))
        cluster.application(SERVER)
        assert await cluster.plain(f"{SERVER}:{APP_PORT}").ask() == b""
        assert (await cluster.line())["addon"] == "scripted"
        assert cluster.wire.addresses == []

    play(tmp_path, body)


def test_both_halves_of_a_tunnel_within_the_node_have_their_hooks(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        await cluster.start(workload("server", SERVER), POD)
        cluster.application(SERVER)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        await cluster.until(lambda: len(cluster.lines()) == 2)
        told = [
            (name, (each if isinstance(each, Facts) else each.facts).direction.value) for name, each in addon.said
        ]
        assert sorted(told) == [
            ("accepting", "inbound"),
            ("closed", "inbound"),
            ("closed", "outbound"),
            ("connecting", "outbound"),
            ("opened", "inbound"),
            ("opened", "outbound"),
        ]

    play(tmp_path, body)


def test_a_connection_without_a_route_is_reported_as_refused(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        cluster.mesh.apply([shop()])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        await cluster.until(lambda: addon.said)
        assert addon.names() == ["refused"]
        assert addon.said[0][1].reason.startswith("no healthy upstream")

    play(tmp_path, body)


def test_the_metrics_page_and_the_list_have_the_addon(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        addon.connect = lambda facts: Deny("no")
        await cluster.start(POD)
        cluster.mesh.apply([REMOTE])
        await cluster.dial(f"{SERVER}:{APP_PORT}").ask()
        await cluster.line()
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in families(cluster.node.metrics)
            for sample in family.samples
            if sample.name.startswith("ztunnel_addon")
        }
        assert samples["ztunnel_addon_calls_total", "scripted", "connecting", "deny"] == 1
        assert samples["ztunnel_addon_calls_total", "scripted", "refused", "none"] == 1
        assert samples["ztunnel_addon_suspended", "scripted"] == 0
        assert samples["ztunnel_addon_call_seconds_count", "scripted", "connecting"] == 1
        assert samples["ztunnel_addon_call_seconds_bucket", "scripted", "connecting", "+Inf"] == 1
        assert samples["ztunnel_addon_scripted_said", "pod"] == 2
        (entry,) = page(cluster.node.metrics.addons)
        assert (entry["name"], entry["state"], entry["denials"], entry["faults"]) == ("scripted", "active", 1, 0)

        total = Metrics("", 100)
        for process in range(2):
            for part in cluster.node.metrics.counts():
                encoded = encode(Response(number=process, value=CountsPart(part)))
                decoder = FrameDecoder(from_main=False)
                decoder.receive(encoded)
                ((message, _),) = list(decoder)
                assert isinstance(message, Response)
                assert isinstance(message.value, CountsPart)
                total.add(message.value.counts)
        (entry,) = page(total.addons)
        assert (entry["processes"], entry["denials"]) == (2, 2)
        assert cluster.node.addons is not None
        cluster.node.addons.host.addons[0].suspend("for the test")
        for part in cluster.node.metrics.counts():
            total.add(part)
        (entry,) = page(total.addons)
        assert entry["state"] == "suspended in 1 of 3 processes: for the test"

    play(tmp_path, body)


HELLO = hello("files.example", [])


@pytest.mark.parametrize(("first", "name"), [(HELLO, "files.example"), (b"GET / HTTP/1.1\r\n", ""), (b"", "")])
def test_server_name_of_connections_outside_the_mesh_is_read(tmp_path: Path, first: bytes, name: str) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        assert cluster.node.addons is not None
        cluster.node.addons.host.needs = frozenset({"server_name"})
        cluster.node.addons.names.note(("default", "client"), "Files.Example.", ["127.0.9.1"])
        await cluster.start(POD)
        cluster.application("127.0.9.1", 443)
        client = cluster.dial("127.0.9.1:443")
        await client.send(first)
        await cluster.until(lambda: addon.said)
        facts = addon.said[0][1]
        assert (facts.server_name, facts.names) == (name, ("files.example",))
        assert await client.ask(b"ping") == first + b"ping"

    play(tmp_path, body)


def test_names_answered_are_bounded() -> None:
    names = NamesAnswered()
    for number in range(5000):
        names.note(("ns", "pod"), f"name{number}", [f"10.0.{number // 256}.{number % 256}"])
    assert names.of(("ns", "pod"), "10.0.0.0") == ()
    assert names.of(("ns", "pod"), "10.0.19.135") == ("name4999",)
    assert names.of(("ns", "other"), "10.0.19.135") == ()
    for number in range(10):
        names.note(("ns", "pod"), f"also{number}", ["10.0.19.135"])
    assert names.of(("ns", "pod"), "10.0.19.135") == tuple(f"also{number}" for number in range(2, 10))


def test_moved_connection_calls_opened_and_closed_hooks_only(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        await cluster.start(POD)
        source, there = SocketAddress(CLIENT, 4000), SocketAddress(SERVER, 15008)
        record = Record_(cluster.node, Direction_.OUTBOUND, source, there)
        record.hbone_authority = f"{SERVER}:{APP_PORT}"
        group = cluster.pods["client"].connections.outbound
        entry = PodConnection(group, record, lambda reason: None, lambda entry: ALLOWED)
        record.opened()
        entry.opened(lambda reason: None)
        entry.tell_addons()
        entry.close()
        record.complete()
        assert addon.names() == ["opened", "closed"]
        assert addon.said[0][1].path is Way.TUNNEL

    play(tmp_path, body)


def test_connection_with_addon_verdicts_does_not_move(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        addon = scripted(cluster)
        addon.connect = lambda facts: Delay(5)
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await cluster.until(lambda: any(life.state is State.HELD for life in cluster.node.live))
        units, stays = movable_units(cluster.pods.values())
        assert (units, +stays) == ([], {"being opened": 1})
        await client.send(b"ping")
        assert await client.read(4) == b"ping"
        units, stays = movable_units(cluster.pods.values())
        assert sum(unit.entries for unit in units) == 0
        assert +stays == {"watched by an addon": 1}
        client.eof()
        await client.read_all()

    play(tmp_path, body)


# With an open tunnel connection, where steps carry a connection and ask the addons


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    return steps_taken(monkeypatch)


@pytest.mark.parametrize("kind", [Scripted, Waiting])
@pytest.mark.parametrize(
    "verdict", [None, Deny("no"), Delay(3), Prefer({"version": "v9"}), Cut("chaos", after_s=60)], ids=str
)
def test_planned_connection_obeys_addon_verdicts(
    tmp_path: Path, taken: dict[type, int], verdict: Verdict | None, kind: type[Scripted]
) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        addon = scripted(cluster, kind)
        addon.connect = lambda facts: verdict
        began_s, denied = cluster.node.clock.monotonic(), isinstance(verdict, Deny)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == (b"" if denied else b"ping")
        assert taken[PlannedConnection] == 1
        await cluster.until(lambda: len(cluster.lines()) == 2)
        assert cluster.lines()[1].get("addon") == (None if verdict is None else kind.__name__.lower())
        assert ("error" in cluster.lines()[1]) is denied
        assert addon.names() == (["connecting", "refused"] if denied else ["connecting", "opened", "closed"])
        assert addon.said[0][1].path is Way.TUNNEL
        assert (cluster.node.clock.monotonic() - began_s >= 3) is isinstance(verdict, Delay)
        assert cluster.closed() == ({"-": 1, "DENY": 1} if denied else {"-": 2})
        addon.connect = lambda facts: None
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert (len(peer.connections), len(peer.requests)) == (1, 2 if denied else 3)

    play(tmp_path, body)


@pytest.mark.parametrize("kind", [Scripted, Waiting])
@pytest.mark.parametrize("verdict", [None, Deny("not you")], ids=str)
def test_planned_request_obeys_addon_verdicts(
    tmp_path: Path, taken: dict[type, int], verdict: Deny | None, kind: type[Scripted]
) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(workload("server", SERVER))
        cluster.mesh.apply([workload("client", CLIENT, node=ELSEWHERE)])
        cluster.application(SERVER)
        addon = scripted(cluster, kind)
        addon.accept = lambda facts: verdict
        connection = await cluster.tunnels_to("server", shown=certificate(identity("client")))
        if verdict is not None:
            assert await refused(connection, *fields()) == 403
        else:
            (await connection.open(fields())).close()
        assert taken[PlannedRequest] == 1
        await cluster.until(lambda: len(cluster.lines()) == 1)
        assert addon.names() == (["accepting", "refused"] if verdict else ["accepting", "opened", "closed"])
        assert ("not you" in cluster.lines()[0].get("error", "")) is (verdict is not None)
        connection.close()

    play(tmp_path, body)


@pytest.mark.parametrize("what", ["policy", "stop", "gone"])
def test_planned_request_waiting_for_an_addon_obeys_changes(
    tmp_path: Path, taken: dict[type, int], what: str
) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(workload("server", SERVER))
        cluster.mesh.apply([workload("client", CLIENT, node=ELSEWHERE)])
        cluster.application(SERVER)
        addon = scripted(cluster, Waiting)
        addon.gate = asyncio.Event()  # type: ignore[attr-defined]
        connection = await cluster.tunnels_to("server", shown=certificate(identity("client")))
        opening = cluster.tasks.create_task(refused_or_broken(connection))
        await cluster.until(lambda: any(life.state is State.HELD for life in cluster.node.live))
        if what == "policy":
            cluster.mesh.apply([GATED, DENY])
            assert await opening == "401"
        elif what == "stop":
            await cluster.pods["server"].stop()
            assert await opening == "broken"
        else:
            opening.cancel()
            await asyncio.wait([opening])
        await cluster.until(lambda: len(cluster.lines()) == 1)
        assert taken[PlannedRequest] == 1
        assert addon.names() == ["refused"]
        assert not cluster.wire.dialled
        connection.close()

    play(tmp_path, body)


async def refused_or_broken(connection: Any) -> str:
    try:
        (await connection.open(fields())).close()
    except ConnectRefused as error:
        return str(error.status)
    except HboneError:
        return "broken"
    return "open"
