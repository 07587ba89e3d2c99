"""Node-local tunnels between two pods, without a network connection."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.hbone.certificates import Authority
from tests.ztunnel.proxy.istio.inbound_case import APP, DENY, GATED, NEAR, POD
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    ELSEWHERE,
    LOOPS,
    OTHER,
    ROOT,
    SERVER,
    VIP,
    Cluster,
    Revoked,
    certificate,
    endpoint,
    identity,
    play,
    shop,
)
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.workload import WorkloadUid
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import DRAINED, POLICY_CHANGE, REVOKED
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.settings.config import HBONE_PORT, PLAINTEXT_PORT

# InboundHalf tunnels


async def both(cluster: Cluster) -> None:
    await cluster.start(POD, NEAR)
    cluster.application(SERVER)


@pytest.mark.parametrize("loop", LOOPS)
def test_node_local_tunnel_skips_the_network(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        cluster.mesh.apply([shop(), replace(POD, services=endpoint("x").services)])
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        assert cluster.pods["client"].dump()["outbound"]
        assert cluster.pods["server"].dump()["inbound"]
        assert await client.ask(b"x" * 50_000) == b"x" * 50_000
        assert cluster.wire.dialled == [(APP, None)], "no tunnel connection"
        await cluster.line(2)
        inner, outer = sorted(cluster.lines(), key=lambda line: line["direction"])
        assert (inner["direction"], outer["direction"]) == ("inbound", "outbound")
        for line in (inner, outer):
            assert (line["src.identity"], line["dst.identity"]) == (identity("client"), identity("server"))
            assert line["dst.service"] == "shop.example"
            assert line["dst.hbone_addr"] == f"{SERVER}:{APP_PORT}"
        assert (inner["bytes_recv"], outer["bytes_sent"]) == (50_005, 50_005)
        assert cluster.closed("source") == cluster.closed("destination") == {"-": 1}

    play(tmp_path, body, loop=loop)


def test_disabled_shortcut_uses_the_network(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert cluster.wire.addresses == [f"{SERVER}:15008", str(APP)]
        await cluster.line(2)

    play(tmp_path, body, {"ZTUNNEL_NODE_LOCAL_SHORTCUT": "false"})


BAD_CERTIFICATES: dict[str, tuple[str, dict[str, Any]]] = {
    "expired client": ("client", {"from_day": -2, "to_day": -1}),
    "expired server": ("server", {"from_day": -2, "to_day": -1}),
    "client of the future": ("client", {"from_day": 1, "to_day": 2}),
    "client of another root": ("client", {"authority": Authority("other"), "roots": (Authority("other"),)}),
    "server that trusts other roots": ("server", {"roots": (Authority("other"),)}),
    "server of another root": ("server", {"authority": Authority("other")}),
}


@pytest.mark.parametrize("case", BAD_CERTIFICATES)
def test_certificates_that_do_not_agree_use_the_network(tmp_path: Path, case: str) -> None:
    """It goes over the wire, where it fails with the right alert."""
    name, how = BAD_CERTIFICATES[case]

    async def body(cluster: Cluster) -> None:
        cluster.certificates.put(identity(name), **how)
        await both(cluster)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"], "the application was never dialled"
        await cluster.until(lambda: cluster.closed())
        assert cluster.opened("destination") == 0

    play(tmp_path, body)


def test_expired_certificate_allows_no_node_local_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        made = cluster.certificates.put(identity("client"), to_day=60 / 86400)
        await both(cluster)
        left_s = made.issued.not_after.timestamp() - cluster.node.clock.wall()
        await asyncio.sleep(left_s - 1.5)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert cluster.wire.addresses == [str(APP)]
        await asyncio.sleep(3)
        await cluster.dial(f"{SERVER}:{APP_PORT}").ask()
        assert cluster.wire.addresses[1] == f"{SERVER}:15008"
        await cluster.until(lambda: len(cluster.lines()) >= 3)

    play(tmp_path, body)


def test_revoked_pod_gets_no_node_local_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        own = certificate(identity("client"))
        cluster.certificates.lists = RevocationLists.parse(ROOT.revoke(own.issued.chain[0]))
        made = type(own)(own.issued, 7, own._policy, cluster.certificates.lists)
        cluster.certificates.held[own.issued.identity] = made
        await both(cluster)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"]

    play(tmp_path, body, revocations=Revoked())


@pytest.mark.parametrize("which", ["client", "server"])
def test_revocation_ends_a_node_local_tunnel(tmp_path: Path, which: str) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        found = next(each for key, each in cluster.certificates.held.items() if str(key) == identity(which))
        lists = RevocationLists.parse(ROOT.revoke(found.issued.chain[0]))
        cluster.revoke(lists)
        await client.read_all()
        await cluster.line(2)
        assert REVOKED in [line.get("error") for line in cluster.lines()]
        reporter = {"client": "destination", "server": "source"}[which]
        assert cluster.node.metrics.crl_rejections[reporter] == 1
        assert cluster.closed(reporter) == {"CERT_REVOKED": 1}

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("what", "error", "flags"),
    [
        ("policy", "http status: 401 Unauthorized", {"DENY": 1}),
        ("refused", "http status: 503 Service Unavailable", {"CONNECT": 1}),
        ("ourselves", "http status: 503 Service Unavailable", {}),
    ],
)
def test_node_local_tunnel_is_refused_like_over_the_network(
    tmp_path: Path, what: str, error: str, flags: dict[str, int]
) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, NEAR)
        port = PLAINTEXT_PORT if what == "ourselves" else APP_PORT
        cluster.mesh.apply(
            [shop(ports={80: port}), replace(POD, services=endpoint("x", ports={80: port}).services)]
        )
        if what == "policy":
            cluster.mesh.apply([replace(GATED, services=endpoint("x").services), DENY])
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        await cluster.line(2)
        outer = next(line for line in cluster.lines() if line["direction"] == "outbound")
        assert outer["error"] == error
        assert cluster.closed("destination") == flags
        assert cluster.closed("source") == {"CONNECT": 1}

    play(tmp_path, body)


def test_policy_change_while_dialling_a_node_local_tunnel_is_401(tmp_path: Path) -> None:
    """The task belongs to the outbound half: it must go on with the answer, not die, and not try elsewhere."""

    async def body(cluster: Cluster) -> None:
        await both(cluster)
        cluster.wire.gates[APP] = asyncio.Event()
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await cluster.until(lambda: cluster.wire.dialled)
        cluster.mesh.apply([GATED, DENY])
        assert await client.ask() == b""
        await cluster.line(2)
        errors = {line["direction"]: line["error"] for line in cluster.lines()}
        assert errors == {"inbound": POLICY_CHANGE, "outbound": "http status: 401 Unauthorized"}
        assert cluster.wire.dialled == [(APP, None)]
        assert (cluster.closed("destination"), cluster.closed("source")) == ({"DENY": 1}, {"CONNECT": 1})

    play(tmp_path, body)


def test_policy_that_arrives_before_the_certificate_applies_to_the_node_local_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        issued, wanted, fetch = asyncio.Event(), asyncio.Event(), cluster.certificates.fetch

        async def later(name: SpiffeId) -> WorkloadCertificate:
            if str(name) == identity("server"):
                wanted.set()
                await issued.wait()
            return await fetch(name)

        cluster.certificates.fetch = later  # type: ignore[method-assign]
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await wanted.wait()
        cluster.mesh.apply([GATED, DENY])
        issued.set()
        assert await client.ask() == b""
        await cluster.line(2)
        errors = {line["direction"]: line["error"] for line in cluster.lines()}
        assert errors["inbound"].endswith("explicitly denied by: default/gate")
        assert cluster.wire.dialled == []

    play(tmp_path, body)


def test_stopping_pod_ends_an_opening_node_local_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        cluster.wire.gates[APP] = asyncio.Event()
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await cluster.until(lambda: cluster.wire.dialled)
        await cluster.pods["server"].stop()
        assert await client.ask() == b""
        await cluster.line(2)
        errors = {line["direction"]: line["error"] for line in cluster.lines()}
        # On the wire the client's side learns no reason either, and may try another endpoint.
        assert errors == {"inbound": DRAINED, "outbound": f"h2 failed: {DRAINED}"}

    play(tmp_path, body)


@pytest.mark.parametrize("half", ["client", "server", "policy"])
def test_either_half_of_a_node_local_tunnel_ends_both(tmp_path: Path, half: str) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        if half == "policy":
            cluster.mesh.apply([GATED, DENY])
        else:
            await cluster.pods[half].stop()
        await client.read_all()
        await cluster.line(2)
        errors = {line["direction"]: line.get("error") for line in cluster.lines()}
        if half == "client":
            assert errors["outbound"] == DRAINED
        else:
            # Over the wire the client's side sees CANCEL, an ordinary end.
            assert errors == {"inbound": POLICY_CHANGE if half == "policy" else DRAINED, "outbound": None}

    play(tmp_path, body)


def test_stopped_pod_gets_no_node_local_tunnel(tmp_path: Path) -> None:
    """It stops between the look-up and the certificate: what is registered then would never be ended."""

    async def body(cluster: Cluster) -> None:
        await both(cluster)
        fetch = cluster.certificates.fetch

        async def stopping(wanted: object) -> object:
            found = await fetch(wanted)  # type: ignore[arg-type]
            if str(wanted) == identity("server"):
                await cluster.pods["server"].stop()
            return found

        cluster.certificates.fetch = stopping  # type: ignore[assignment,method-assign]  # the moment that matters
        cluster.wire.handlers.pop(SocketAddress(SERVER, HBONE_PORT))
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"]
        assert (await cluster.line())["error"] == "io error: Connection refused (os error 111)"

    play(tmp_path, body)


def test_refused_node_local_tunnel_is_retried_at_another_endpoint(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        here = replace(POD, services=endpoint("x").services)
        await cluster.start(here, NEAR)
        cluster.mesh.apply([shop(), endpoint("good", OTHER, node=ELSEWHERE)])
        cluster.peer("good", OTHER)
        for _ in range(4):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        await cluster.until(lambda: cluster.closed() == {"-": 4})
        assert cluster.node.metrics.connect_retries <= 1

    play(tmp_path, body)


def test_a_stopped_pod_is_unregistered_and_a_successor_is_not(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        first = cluster.pods["server"]
        await cluster.start(POD)
        await first.stop()
        assert len(cluster.node.pods) == 2
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        await cluster.line(2)

    play(tmp_path, body)


def test_pod_without_an_address_of_the_family_gets_no_node_local_tunnel(tmp_path: Path) -> None:
    """The application would see an address of another pod, or of none."""

    async def body(cluster: Cluster) -> None:
        await both(cluster)
        await cluster.start(replace(NEAR, uid=WorkloadUid("six"), name="six", addresses=(OTHER,)))
        cluster.mesh.apply([replace(NEAR, uid=WorkloadUid("six"), name="six", addresses=("fd00::6",))])
        assert await cluster.dial(f"{SERVER}:{APP_PORT}", pod="six").ask() == b"ping"
        assert cluster.wire.addresses == [f"{SERVER}:15008", str(APP)]
        await cluster.line(2)

    play(tmp_path, body)
