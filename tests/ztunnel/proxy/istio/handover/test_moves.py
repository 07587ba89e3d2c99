"""What moves from one generation of a proxy to the next, and what the second one makes of it."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from hbone.aio.poller import Handler
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from tests.ztunnel.proxy.istio.handover.generations import OUTSIDE, REMOTE_HOST, SERVER, Generations, echoed, play
from tests.ztunnel.proxy.istio.inbound_case import DENY, GATED
from tests.ztunnel.proxy.istio.pods import APP_PORT, LOOPS, ROOT, Cluster, End, identity
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import POLICY_CHANGE, REVOKED


async def everything(made: Generations) -> dict[str, End]:
    """One connection of each kind that has carried something."""
    old = made.old
    old.peer("far", REMOTE_HOST)
    opened = {
        "tunnel": old.dial(f"{REMOTE_HOST}:{APP_PORT}"),
        "second tunnel": old.dial(f"{REMOTE_HOST}:{APP_PORT}"),
        "joined": old.dial(f"{SERVER}:{APP_PORT}"),
        "plain out": old.dial(f"{OUTSIDE}:{APP_PORT}"),
        "plain in": old.plain(f"{SERVER}:{APP_PORT}"),
    }
    for end in opened.values():
        await echoed(end)
    return opened


async def tunnel_in(of: Cluster) -> Tunnel:
    """A tunnel from another node, to the server's application."""
    connection = await of.tunnels_to("server", "far", source=REMOTE_HOST)
    return await connection.open(((b":method", b"CONNECT"), (b":authority", f"{SERVER}:{APP_PORT}".encode())))


@pytest.mark.parametrize("loop", LOOPS)
def test_every_kind_of_connection_moves_with_one_line_and_exact_counts(tmp_path: Path, loop: str) -> None:
    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        opened = await everything(made)
        dialled = len(old.wire.dialled)
        await made.meet()
        result = await made.before.give()
        assert result is not None
        assert (result.given, result.left) == (6, 0), str(result)
        for end in opened.values():
            await echoed(end, b"again")
        assert old.is_idle
        assert len(new.pods["client"].connections.outbound) == 4
        assert len(new.pods["server"].connections.inbound) == 2
        for end in opened.values():
            assert await end.ask(b"last") == b"last"
        await new.line(6)
        assert old.lines() == []
        for line in new.lines():
            assert "error" not in line
            assert (line["bytes_sent"], line["bytes_recv"]) == (14, 14)
        assert old.opened("source") == 4
        assert old.opened("destination") == 2
        assert new.opened("source") == new.opened("destination") == 0
        assert (new.closed("source"), new.closed("destination")) == ({"-": 4}, {"-": 2})
        assert (old.closed("source"), old.closed("destination")) == ({}, {})
        for cluster, carried in ((old, 5), (new, 9)):
            for series in cluster.node.metrics.series:
                count = series.opened or sum(series.closed.values())
                assert (series.received, series.sent) == (carried * count, carried * count)
                assert series.idle
        assert len(old.wire.dialled) == dialled

    play(tmp_path, body, loop=loop)


def test_connection_whose_socket_cannot_be_watched_is_closed_and_the_others_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's limit of watches (fs.epoll.max_user_watches) is reached: epoll_ctl fails with ENOSPC."""

    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        opened = await everything(made)
        await made.meet()
        register = new.node.poller.register
        refused: list[int] = []

        def full(fd: int, handler: Handler) -> None:
            if isinstance(handler, PlainSocket) and not refused:
                refused.append(fd)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            register(fd, handler)

        monkeypatch.setattr(new.node.poller, "register", full)
        result = await made.before.give()
        assert result is not None
        assert result.left == 0
        await new.until(new.lines)
        assert refused
        assert all("connection lost on its way" in line["error"] for line in new.lines())
        lost = len(new.lines())
        served = 0
        for end in opened.values():
            served += await end.ask(b"last") == b"last"
        assert served == len(opened) - 1
        await new.line(6)
        assert sum("error" in line for line in new.lines()) == lost
        await new.until(lambda: new.is_idle)
        assert old.lines() == []

    play(tmp_path, body)


def test_new_tunnels_use_the_connections_that_have_moved(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        opened = await everything(made)
        dialled = len(old.wire.dialled)
        await made.meet()
        await made.before.give()
        end = new.dial(f"{REMOTE_HOST}:{APP_PORT}")
        await echoed(end)
        assert len(old.wire.dialled) == dialled
        assert await end.ask() == b"ping"
        for each in opened.values():
            each.eof()

    play(tmp_path, body)


def test_moved_tunnel_connection_accepts_further_requests(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        connection = await old.tunnels_to("server", "far", source=REMOTE_HOST)
        request = ((b":method", b"CONNECT"), (b":authority", f"{SERVER}:{APP_PORT}".encode()))
        first = await connection.open(request)
        await made.meet()
        result = await made.before.give()
        assert result is not None
        assert (result.given, result.carriers, result.left) == (1, 1, 0)
        second = await connection.open(request)
        assert len(new.pods["server"].connections.inbound) == 2
        entry, *_ = new.pods["server"].connections.inbound
        assert str(entry.record.source_identity) == identity("far")
        first.close()
        second.close()
        await new.line(2)
        connection.close()
        await new.until(lambda: not new.pods["server"].connections.carriers)
        assert old.lines() == []

    play(tmp_path, body)


def test_pods_that_the_successor_does_not_carry_stay(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        opened = await everything(made)
        await new.pods.pop("client").stop()
        await made.meet()
        result = await made.before.give(0.0)
        assert result is not None
        assert (result.given, dict(result.stays)) == (1, {"declined: pod not carried": 5})
        for end in opened.values():
            await echoed(end)
        assert len(old.pods["client"].connections.outbound) == 4
        assert made.before.statistics.connections[("kept", "declined")] == 5
        assert made.after.statistics.connections[("declined", "pod not carried")] == 5
        for end in opened.values():
            await end.ask()
        await old.line(5)

    play(tmp_path, body)


def test_the_successor_judges_by_its_own_policies(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        new = made.new
        opened = await everything(made)
        new.mesh.apply([GATED, DENY])
        await made.meet()
        await made.before.give()
        for name in ("joined", "plain in"):
            assert await opened[name].read(1) == b""
        await echoed(opened["tunnel"])
        await new.until(lambda: len(new.lines()) >= 3)
        assert {line["error"] for line in new.lines() if line["direction"] == "inbound"} == {POLICY_CHANGE}
        for name in ("tunnel", "second tunnel", "plain out"):
            await opened[name].ask()
        await new.line(6)

    play(tmp_path, body)


def test_the_successor_judges_by_its_own_revocation_lists(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        peer = old.peer("far", REMOTE_HOST)
        end = old.dial(f"{REMOTE_HOST}:{APP_PORT}")
        await echoed(end)
        new.revoke(RevocationLists.parse(ROOT.revoke(peer.shown.issued.chain[0])))
        await made.meet()
        await made.before.give()
        assert await end.is_reset()
        line = await new.line(1)
        assert REVOKED in line["error"]

    play(tmp_path, body)


def test_opening_connections_move_once_they_are_open(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old = made.old
        peer = old.peer("far", REMOTE_HOST)
        answer, gate = peer.answer, asyncio.Event()

        async def late(request: object) -> None:
            await gate.wait()
            await answer(request)  # type: ignore[arg-type]

        peer.answer = late
        end = old.dial(f"{REMOTE_HOST}:{APP_PORT}")
        await old.until(lambda: peer.requests)
        await made.meet()
        giving = asyncio.get_running_loop().create_task(made.before.give(30.0))
        await asyncio.sleep(1.0)
        gate.set()
        result = await giving
        assert result is not None
        assert (result.given, result.left) == (1, 0)
        assert await end.ask() == b"ping"
        await made.new.line(1)
        assert old.lines() == []

    play(tmp_path, body)


def test_connections_opened_late_are_given_late(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old = made.old
        await made.meet()
        assert await made.before.give(0.0) is not None
        late = asyncio.get_running_loop().create_task(made.before.give_late())
        end = old.plain(f"{SERVER}:{APP_PORT}")
        await echoed(end)
        await old.until(lambda: made.new.pods["server"].connections.inbound)
        assert await end.ask() == b"ping"
        late.cancel()
        await made.new.line(1)

    play(tmp_path, body)


def test_a_successor_becomes_the_next_predecessor(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        end = old.plain(f"{SERVER}:{APP_PORT}")
        await echoed(end)
        await made.meet()
        await made.before.give()
        await made.before.close()
        await new.until(lambda: made.after.status()["listening"])
        made.before = made.service(old, "third")
        made.before.begin()
        await new.until(lambda: made.before.status()["predecessor"] == "after")
        result = await made.after.give()
        assert result is not None
        assert result.given == 1
        assert await end.ask() == b"ping"
        line = await old.line(1)
        assert line["bytes_sent"] == 9
        assert new.lines() == []

    play(tmp_path, body)


def test_taking_now_is_passed_on(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        made.after = made.service(made.new, "after", replace=True)
        await made.meet()
        await made.new.until(lambda: made.taken_now == ["before"])

    play(tmp_path, body)


def test_many_moves_leak_no_descriptors(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        old, new = made.old, made.new
        opened = await everything(made)
        sides = [(made.before, old), (made.after, new)]
        await made.meet()
        descriptors: list[int] = []
        for number in range(12):
            giver, taker = sides[number % 2], sides[1 - number % 2]
            result = await giver[0].give()
            assert result is not None
            assert (result.given, result.left) == (6, 0)
            for end in opened.values():
                await echoed(end, b"%d" % (number % 10))
            assert giver[1].is_idle
            await giver[0].close()
            await old.until(lambda taker=taker: taker[0].status()["listening"])
            version = f"generation {number}"
            again = made.service(giver[1], version)
            sides[number % 2] = again, giver[1]
            again.begin()
            await old.until(lambda again=again: again.status()["predecessor"])
            descriptors.append(len(os.listdir("/proc/self/fd")))
        made.before, made.after = sides[0][0], sides[1][0]
        assert max(descriptors[2:]) <= min(descriptors[:2]) + 2, descriptors
        for end in opened.values():
            assert await end.ask() == b"ping"
        await old.line(6)

    play(tmp_path, body)
