"""Connections of pods that fail: early denials, every error of dialling, and what is tried again."""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest

from hbone.aio.requests import Request
from hbone.errors import HboneError
from tests.hbone.certificates import Authority
from tests.ztunnel.proxy.istio.inbound_case import fields
from tests.ztunnel.proxy.istio.outbound_case import POD, REMOTE
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    OTHER,
    ROOT,
    SERVER,
    VIP,
    Answering,
    Cluster,
    certificate,
    endpoint,
    identity,
    play,
    refusing,
    shop,
    workload,
)
from tproxy.errors import ConnectFailed, ConnectTimedOut
from xds.model.address import SocketAddress
from xds.model.workload import WorkloadUid
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import RECURSIVE_CALL
from ztunnel.proxy.istio.path.admission import Admission
from ztunnel.proxy.istio.path.inbound import Inbound
from ztunnel.proxy.istio.path.outbound import Outbound
from ztunnel.proxy.istio.settings.config import OUTBOUND_PORT

# Early denials


def test_a_call_to_the_proxy_itself_is_denied(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        assert await cluster.dial(f"{CLIENT}:{OUTBOUND_PORT}").ask() == b""
        assert (await cluster.line())["error"] == RECURSIVE_CALL
        assert cluster.wire.dialled == []

    play(tmp_path, body)


def test_connection_of_an_unknown_pod_waits_and_is_denied(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, described=False)
        began_s = cluster.node.clock.monotonic()
        assert await cluster.dial(f"{SERVER}:80").ask() == b""
        assert 5 <= cluster.node.clock.monotonic() - began_s < 6
        line = await cluster.line()
        assert line["error"] == "failed to fetch information about local workload: client.default (client)"

    play(tmp_path, body)


def test_connection_is_served_if_its_pod_is_described_in_time(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, described=False)
        cluster.application(SERVER)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await cluster.until(lambda: cluster.pods["client"].dump()["outbound"])
        cluster.mesh.apply([workload("unrelated", OTHER)])
        cluster.mesh.apply([POD])
        assert await client.ask() == b"ping"
        assert (await cluster.line())["src.workload"] == "client"

    play(tmp_path, body)


# Errors of dialling: what line and flags each gives, and whether another endpoint is tried


TARGET = (SERVER, 15008)


@pytest.mark.parametrize(
    ("error", "text", "flags", "retried"),
    [
        (
            ConnectFailed(TARGET, ConnectionRefusedError(errno.ECONNREFUSED, "x")),
            "io error: Connection refused (os error 111)",
            "CONNECT",
            True,
        ),
        (
            ConnectTimedOut(TARGET, 10.0),
            "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed",
            "NETWORK_POLICY",
            True,
        ),
        (OSError(errno.EMFILE, "x"), "io error: Too many open files (os error 24)", "CONNECT", False),
    ],
    ids=["refused", "timed out", "ours"],
)
def test_dial_errors_are_logged_and_retried(
    tmp_path: Path, error: Exception, text: str, flags: str, retried: bool
) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        for host in (SERVER, OTHER):
            cluster.wire.errors[SocketAddress(host, 15008)] = error
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        line = await cluster.line()
        assert (line["level"], line["error"]) == ("error", text)
        assert cluster.closed() == {flags: 1}
        assert len(cluster.wire.dialled) == (2 if retried else 1)
        assert cluster.node.metrics.connect_retries == (1 if retried else 0)
        assert len(cluster.node.failed_endpoints) == (2 if retried else 0)

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("answer", "text", "retried"),
    [
        (refusing(401), "http status: 401 Unauthorized", False),
        (refusing(400), "http status: 400 Bad Request", False),
        (refusing(503), "http status: 503 Service Unavailable", True),
    ],
    ids=["401", "400", "503"],
)
def test_answers_other_than_200(tmp_path: Path, answer: Answering, text: str, retried: bool) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]
        for peer in peers:
            peer.answer = answer
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert (await cluster.line())["error"] == text
        assert sum(len(peer.requests) for peer in peers) == (2 if retried else 1)
        assert cluster.closed() == {"CONNECT": 1}

    play(tmp_path, body)


def test_client_bytes_reach_the_next_endpoint_after_a_failure(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        good = endpoint("good", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), good])
        await cluster.start(POD)
        cluster.peer("server", SERVER).answer = refusing(503)
        cluster.peer("good", OTHER)
        for number in range(1, 9):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
            assert (await cluster.line(number))["dst.workload"] == "good"
        assert cluster.node.metrics.connect_retries == 1, "once, then all pass it over"
        assert cluster.closed() == {"-": 8}
        await asyncio.sleep(10)
        assert WorkloadUid("Kubernetes//Pod/default/server") not in cluster.node.failed_endpoints.current(
            cluster.node.clock.monotonic()
        )

    play(tmp_path, body)


def test_without_retries_the_drawn_endpoint_is_final(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert len(cluster.wire.dialled) == 1
        assert len(cluster.node.failed_endpoints) == 0
        await cluster.line()

    play(tmp_path, body, {"ZTUNNEL_CONNECT_RETRIES": "0"})


def test_the_only_endpoint_is_tried_once(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"]
        assert (await cluster.line())["error"] == "io error: Connection refused (os error 111)"
        cluster.peer("server", SERVER)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping", "there is no other, so it is tried all the same"

    play(tmp_path, body)


def test_error_of_a_removed_endpoint_is_reported(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER)

        async def gone(request: Request) -> None:
            cluster.mesh.apply((), [WorkloadUid("Kubernetes//Pod/default/server")])
            request.refuse(503)

        peer.answer = gone
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        line = await cluster.line()
        assert (line["message"], line["error"]) == ("connection complete", "http status: 503 Service Unavailable")

    play(tmp_path, body)


def test_attempts_end_with_the_time_window(tmp_path: Path) -> None:
    """Each of two endpoints takes eight seconds to fail: the third attempt would begin after 16."""

    async def body(cluster: Cluster) -> None:
        hosts = ["127.0.4.1", "127.0.4.2", "127.0.4.3"]
        cluster.mesh.apply([shop(), *(endpoint(f"e{host}", host, node=ELSEWHERE) for host in hosts)])
        await cluster.start(POD)

        async def slowly(request: Request) -> None:
            await asyncio.sleep(8)
            request.refuse(503)

        peers = [cluster.peer(f"e{host}", host) for host in hosts]
        for peer in peers:
            peer.answer = slowly
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert sum(len(peer.requests) for peer in peers) == 2

    play(tmp_path, body, {"ZTUNNEL_CONNECT_RETRIES": "5"})


def test_late_answer_is_not_retried(tmp_path: Path) -> None:
    """The application can have received the first bytes, so they must not be sent to another one."""

    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]

        async def never(request: Request) -> None:
            await asyncio.sleep(100)

        for peer in peers:
            peer.answer = never
        began_s = cluster.node.clock.monotonic()
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert 15 <= cluster.node.clock.monotonic() - began_s < 16
        assert (await cluster.line())["error"] == "http status: the peer did not answer in time"
        assert sum(len(peer.requests) for peer in peers) == 1

    play(tmp_path, body)


def test_early_data_that_was_perhaps_delivered_is_not_sent_twice(tmp_path: Path) -> None:
    """The peer announces that it holds first bytes, gets them with the CONNECT, and its connection breaks."""

    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]

        async def breaks(request: Request) -> None:
            await asyncio.sleep(0.01)
            request.connection.abort("the node dies")

        for peer in peers:
            peer.answer = breaks
            peer.settings = replace(peer.settings, http2=replace(peer.settings.http2, early_data=True))
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"order one")
        assert await client.read_all() == b""
        assert "h2 failed" in (await cluster.line())["error"]
        assert sum(len(peer.requests) for peer in peers) == 1
        assert cluster.closed() == {"H2_HANDSHAKE_FAILURE": 1}

    play(tmp_path, body)


def test_refused_early_data_is_sent_to_the_next_endpoint(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        good = endpoint("good", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), good])
        await cluster.start(POD)
        refuses = cluster.peer("server", SERVER)
        accepts = cluster.peer("good", OTHER)
        refuses.answer = refusing(503)
        for peer in (refuses, accepts):
            peer.settings = replace(peer.settings, http2=replace(peer.settings.http2, early_data=True))
        for _ in range(3):
            client = cluster.dial(f"{VIP}:80")
            await client.send(b"order one")
            assert await client.read(9) == b"order one"
            assert await client.ask(b", two") == b", two"

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (certificate(identity("another")), "identity verification error: peer did not present the expected SAN"),
        (certificate(identity("server"), Authority("other")), ""),
        (certificate(identity("server"), from_day=-2, to_day=-1), ""),
    ],
    ids=["name", "root", "expired"],
)
def test_a_peer_with_a_wrong_certificate_gets_no_bytes(tmp_path: Path, shown: object, text: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER, shown=shown)  # type: ignore[arg-type]
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert peer.requests == []
        line = await cluster.line()
        assert line["error"].startswith("io error: ")
        assert text in line["error"]
        assert cluster.closed() == {"TLS_FAILURE": 1}

    play(tmp_path, body)


def test_a_revoked_peer_is_counted(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        shown = certificate(identity("server"))
        cluster.certificates.lists = RevocationLists.parse(ROOT.revoke(shown.issued.chain[0]))
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER, shown=shown)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert (await cluster.line())["error"] == "io error: certificate revoked by a revocation list"
        assert cluster.node.metrics.crl_rejections["source"] == 1

    play(tmp_path, body)


def test_tunnel_fails_without_a_certificate(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.certificates.errors[identity("client")] = "the CA says no"
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert (await cluster.line())["error"] == "identity error: the CA says no"
        assert cluster.closed() == {"IDENTITY_ERROR": 1}
        assert cluster.wire.dialled == []

    play(tmp_path, body)


def test_a_context_that_cannot_be_made_opens_no_socket(tmp_path: Path) -> None:
    """A key that OpenSSL refuses, say: the socket that was dialled for it leaked."""

    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        good = cluster.certificates.put(identity("client"))
        broken = replace(good.issued, key_pem=b"no key")
        made = type(good)(broken, good.generation, good._policy)
        cluster.certificates.held[broken.identity] = made
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.dialled == []

    play(tmp_path, body)


@pytest.mark.parametrize("way", ["outbound", "node-local", "tunnel", "plain"])
def test_bug_that_ends_a_connection_is_in_its_access_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    async def fails(*args: object) -> None:
        raise KeyError("our bug")

    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, workload("server", SERVER))
        if way == "outbound":
            monkeypatch.setattr(Outbound, "_open", fails)
        else:
            monkeypatch.setattr(Admission, "authorize", fails)
            monkeypatch.setattr(Inbound, "take", lambda *args: None)  # without a plan
        connection = await cluster.tunnels_to("server") if way == "tunnel" else None
        if connection is not None:
            with pytest.raises(HboneError):
                await connection.open(fields())
            connection.close()
        elif way == "plain":
            assert await cluster.plain(f"{SERVER}:{APP_PORT}").ask() == b""
        else:
            assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        await cluster.until(lambda: len(cluster.lines()) == (2 if way == "node-local" else 1))
        for line in cluster.lines():
            # The first connection fails before it counts as opened.
            assert line["level"] == ("warn" if way == "outbound" else "error")
            assert line["error"] == "internal error: KeyError('our bug')"
        errors = cluster.node.metrics.errors
        assert {reason for _, _, reason in errors} == {"internal"}

    play(tmp_path, body)
    assert "our bug" in caplog.text
