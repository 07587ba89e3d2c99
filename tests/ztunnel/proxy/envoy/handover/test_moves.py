"""What moves from one generation of a proxy of Envoy's dialect to the next, and how it continues there."""

import json
from pathlib import Path
from unittest import mock

import pytest

import ztunnel
from tests.ztunnel.proxy.envoy.handover.generations import PLACES, Generations, play
from tests.ztunnel.proxy.envoy.harness import SERVER, Identities, Open, ask, chain, listener, page, rbac, tcp, tls
from tests.ztunnel.proxy.envoy.path.test_calico import BY_OTHER, policies
from tests.ztunnel.proxy.envoy.test_lives import OTHER, POLICY_CHANGE, WAYS
from ztunnel.proxy.envoy.admin import metrics
from ztunnel.proxy.envoy.admin.commands import answer
from ztunnel.runtime.http.page import Page, PageRequest, Query

_MOST = 3


async def through(made: Generations, moves: int) -> dict[str, float]:
    """Move connections of each kind several times, and end them in order. Return their counts."""
    opened = await made.opened()
    await made.meet()
    for number in range(_MOST):
        if number < moves:
            if number:
                await made.meet_again()
            result = await made.give()
            assert result.left == 0, str(result)
            # The old process has no connections left.
            await made.old.until(lambda: not len(made.old.proxy.connections))
            assert not len(made.old.proxy.connections.hops)
        for each in opened.values():
            assert await each.say(b"again") == b"again"
    for each in opened.values():
        await each.close()
    for harness in (made.old, made.new):
        await harness.until(lambda harness=harness: not len(harness.proxy.connections.hops))
        for pool in harness.proxy.connector.tunnels.pools.values():
            await pool.close()
        await harness.until(lambda harness=harness: not len(harness.proxy.connections))
    return made.counts()


@WAYS
def test_moved_connections_have_the_lines_and_counters_of_unmoved_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    found: dict[int, dict[str, float]] = {}
    for moves in (0, 1, _MOST):
        folder = tmp_path / str(moves)
        folder.mkdir()

        async def body(made: Generations, moves: int = moves) -> None:
            found[moves] = await through(made, moves)
            last = made.new if moves else made.old
            # Of each connection, the hop behind the internal listener, and the inbound halves of two tunnels.
            lines = await last.log(len(PLACES) + 1 + 2)
            assert len(lines) == len(PLACES) + 1 + 2
            size = 5 + 5 * _MOST
            assert {(line["received"], line["sent"], line["flags"]) for line in lines} == {(size, size, "-")}
            assert all(line["upstream"] for line in lines)
            peers = [line["peer"] for line in lines]
            assert sum(peer is not None for peer in peers) == 2
            other = (made.old if moves else made.new).folder / "log"
            assert not other.exists() or not other.read_text()

        play(folder, body, monkeypatch, joined=joined)
    # The old and the new process together have counted what one would have.
    assert found[1] == found[0]
    assert found[_MOST] == found[0]


@WAYS
def test_the_successor_judges_by_its_own_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    async def body(made: Generations) -> None:
        opened = await made.opened()
        made.policy = rbac(OTHER)
        await made.meet()
        result = await made.give()
        assert result.left == 0
        assert await opened["plain"].say(b"again") == b"again"
        for name in ("tunnel", "behind"):
            assert await opened[name].ended()
        for each in opened.values():
            await each.close()
        # Both ends of a tunnel are here. The old process can still carry one end when the new one ends the other.
        lines = await made.log(len(PLACES) + 1 + 2)
        assert POLICY_CHANGE in {line["details"] for line in lines}

    play(tmp_path, body, monkeypatch, joined=joined)


@WAYS
def test_calico_policies_of_the_successor_judge_moved_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    async def body(made: Generations) -> None:
        opened = await made.opened()
        await made.meet()
        assert made.new.proxy.policies is not None
        source = made.new.proxy.policies.source
        source.in_sync = False
        result = await made.give(0.0)
        assert set(result.stays) == {"declined: policies have not arrived"}
        source.in_sync = True
        result = await made.give(0.0)
        assert result.left == 0
        for each in opened.values():
            assert await each.say(b"again") == b"again"
        before = made.new.proxy.policies.changes
        (tmp_path / "policies-new/all.yaml").write_text(policies(ingress=BY_OTHER))
        await made.new.until(lambda: made.new.proxy.policies.changes > before)
        for each in opened.values():
            assert await each.ended()
            await each.close()

    both = {"old": policies(), "new": policies()}
    play(tmp_path, body, monkeypatch, joined=joined, policies=both)


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        (("plain",), "its listener is not known"),
        (("app",), "its cluster is not known"),
        (("inner",), "its listener is not known"),
    ],
)
def test_connection_with_unknown_configuration_stays_and_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...], reason: str
) -> None:
    async def body(made: Generations) -> None:
        opened = await made.opened()
        await made.meet(*without)
        result = await made.give(0.0)
        assert f"declined: {reason}" in result.stays
        assert made.before.statistics.connections["kept", "declined"]
        assert made.after.statistics.connections["declined", reason]
        for each in opened.values():
            assert await each.say(b"again") == b"again"
            await each.close()
        await made.old.until(lambda: (made.old.folder / "log").exists())

    play(tmp_path, body, monkeypatch)


@pytest.mark.parametrize("change", ["chain", "tls", "match"])
def test_connection_of_a_changed_chain_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    async def body(made: Generations) -> None:
        opened = {"plain": await Open.to(made.old.port("plain"))}
        assert await opened["plain"].say(b"hello") == b"hello"
        changed = {
            "chain": chain(tcp(), name="another"),
            "tls": chain(tcp(), transport_socket=tls(SERVER, server=True)),
            "match": chain(
                tcp(),
                filter_chain_match={"source_prefix_ranges": [{"address_prefix": "9.9.9.9", "prefix_len": 32}]},
            ),
        }[change]
        await made.meet(more={"plain": listener(changed, name="plain")})
        result = await made.give(0.0)
        wanted = "no filter chain for it" if change == "match" else "its filter chain has changed"
        assert dict(result.stays) == {f"declined: {wanted}": 1}
        assert await opened["plain"].say(b"again") == b"again"
        await opened["plain"].close()

    play(tmp_path, body, monkeypatch)


@pytest.mark.parametrize("idle", [False, True], ids=["with tunnels", "idle"])
def test_new_tunnels_use_the_connections_that_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    async def body(made: Generations) -> None:
        opened = await made.opened()
        if idle:
            for name in ("tunnel", "behind"):
                await opened.pop(name).close()
            await made.old.until(lambda: len(made.old.proxy.connections) == 2)  # the plain one and the tunnels'
        await made.meet()
        assert (await made.give()).left == 0
        assert await ask(made.new.port("tunnel")) == b"ping"
        assert made.new.count("cluster.tunnel.upstream_cx_total") == 0
        assert made.new.count("cluster.tunnel.upstream_cx_active") == 1
        assert made.new.count("cluster.tunnel.upstream_rq_total") == 1
        for each in opened.values():
            assert await each.say(b"again") == b"again"
            await each.close()

    play(tmp_path, body, monkeypatch)


def test_a_peer_that_only_a_handshake_can_judge_gets_no_new_tunnels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(made: Generations) -> None:
        opened = await made.opened()
        made._secrets = [*made._secrets[:2], Identities().root()]  # of another authority
        await made.meet()
        result = await made.give()
        assert result.left == 0
        assert await opened["tunnel"].say(b"again") == b"again"
        assert await ask(made.new.port("tunnel")) == b""
        for each in opened.values():
            await each.close()

    play(tmp_path, body, monkeypatch)


def test_moved_connection_keeps_the_rest_of_its_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(made: Generations) -> None:
        limited = listener(chain(tcp(max_downstream_connection_duration="1.2s")), name="plain")
        await made.old.published(*(each for each in made.old.resources if each[1].get("name") != "plain"), limited)
        await made.old.until(lambda: made.old.proxy.listeners.draining == [])
        held = await Open.to(made.old.port("plain"))
        assert await held.say(b"hello") == b"hello"
        await made.meet(more={"plain": limited})
        result = await made.give()
        assert result.given == 1
        assert await held.say(b"again") == b"again"
        (life,) = made.new.proxy.connections
        assert await held.ended()
        await held.close()
        age_s = made.new.proxy.clock.monotonic() - life.info.started
        assert 1.1 < age_s < 2.2

    play(tmp_path, body, monkeypatch)


def test_connection_limit_counts_moved_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(made: Generations) -> None:
        kind = "type.googleapis.com/envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit"
        config = {"@type": kind, "stat_prefix": "few", "max_connections": 1}
        limited = listener(chain({"name": "limit", "typed_config": config}, tcp()), name="plain")
        held = await Open.to(made.old.port("plain"))
        assert await held.say(b"hello") == b"hello"
        await made.meet(more={"plain": limited})
        assert (await made.give()).given == 1
        assert await ask(made.new.port("plain")) == b""
        await held.close()
        await made.new.until(lambda: not len(made.new.proxy.connections))
        assert await ask(made.new.port("plain")) == b"ping"

    play(tmp_path, body, monkeypatch)


def test_handover_pages_show_remaining_connections_and_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(made: Generations) -> None:
        held = await Open.to(made.old.port("plain"))
        assert await held.say(b"hello") == b"hello"
        await made.meet()
        shown = json.loads(page(made.old, "/handover"))
        assert (shown["listening"], shown["successor"]) == (True, ztunnel.__version__)
        asked = PageRequest(method="POST", path="/handover", query=Query.parse(""), target="/handover")
        refused = answer(made.new.proxy, mock.Mock(), mock.Mock(), asked)
        assert isinstance(refused, Page)
        assert refused.status == 409  # it has no successor
        assert not made.new.proxy._stop.is_set()
        result = await made.give()
        assert result.given == 1
        assert json.loads(page(made.old, "/handover"))["connections"] == {"given": 1}
        assert await held.say(b"hello") == b"hello"
        (shown,) = json.loads(page(made.new, "/connections"))["connections"]
        assert shown["bytes_received"] == 10
        request = PageRequest(method="GET", path="/metrics", query=Query.parse(""), target="/metrics")
        text = "".join(str(piece, "ascii") for piece in metrics.page(made.new.proxy, request).body)  # type: ignore[arg-type]
        assert 'ztunnel_handover_connections_total{reason="",result="taken"} 1.0' in text
        await held.close()

    play(tmp_path, body, monkeypatch)
