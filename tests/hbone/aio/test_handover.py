"""Relays and connections that move while bytes flow: applications and peers notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.handover import Frozen, Resumed, UnitState, Unmovable, resumed
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, Relay, relay
from hbone.aio.requests import Requests
from hbone.aio.socket import PlainSocket
from hbone.errors import HboneError, TlsError
from tests.hbone.aio.harness import CONNECT, LOOPS, App, Pair, connected, polling, run, tcp_pair, until
from tests.limits import WAIT_S


class Unit:
    """The relays and the connection that move together."""

    def __init__(self, relays: list[Relay], connection: Connection | None) -> None:
        self.relays = relays
        self.connection = connection
        self.settings = ConnectionSettings()
        self.moves = 0
        self.ends = [end for each in relays for end in each.ends or ()]

    def freeze(self) -> Frozen:
        return Frozen(self.relays, self.connection)

    def move(self, poller: Poller) -> bool:
        """Continue at another poller; return False if that is not possible now."""
        try:
            frozen = self.freeze()
        except Unmovable:
            return False
        there = self.made(frozen, poller)
        assert frozen.unchanged
        frozen.leave()
        there.start()
        self.relays, self.connection = there.relays, there.connection
        self.ends = [end for pair in there.ends for end in pair]
        self.moves += 1
        return True

    def made(self, frozen: Frozen, poller: Poller) -> Resumed:
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(frozen.state), type=UnitState)
        socks = [socket.socket(fileno=os.dup(fd)) for fd in frozen.descriptors]
        requests = Requests(refuse_all) if self.connection is not None else None
        return resumed(state, socks, self.settings, poller, requests)

    def close(self) -> None:
        for each in self.relays:
            each.abort("the test is over")
        for end in self.ends:
            end.close()
        if self.connection is not None:
            self.connection.close()


async def refuse_all(request: object) -> None:
    raise AssertionError("no request was expected")


class Site:
    """Applications on both sides of tunnels of one connection, and beside them a relay of plain sockets."""

    def __init__(self, here: Poller, there: Poller) -> None:
        self.pollers = here, there
        self.apps: list[tuple[App, App]] = []
        self.units: list[Unit] = []

    async def build(self, pair: Pair, tunnels: int) -> None:
        near_relays, far_relays = [], []
        poller = self.pollers[0]
        for _ in range(tunnels):
            opened, accepted = await pair.tunnel()
            app_near, near = tcp_pair()
            far, app_far = tcp_pair()
            near_relays.append(relay(PlainSocket(near, poller), opened, ByteCounts()))
            far_relays.append(relay(accepted, PlainSocket(far, poller), ByteCounts()))
            self.apps.append((App(app_near), App(app_far)))
        self.units = [Unit(near_relays, pair.client), Unit(far_relays, pair.server)]
        app_near, near = tcp_pair()
        far, app_far = tcp_pair()
        self.units.append(Unit([relay(PlainSocket(near, poller), PlainSocket(far, poller), ByteCounts())], None))
        self.apps.append((App(app_near), App(app_far)))

    def close(self) -> None:
        for unit in self.units:
            unit.close()
        for each in self.apps:
            for app in each:
                app.close()


@contextlib.asynccontextmanager
async def site(tunnels: int = 3, *, tls: bool = True) -> AsyncIterator[Site]:
    with polling() as here, polling() as there:
        made = Site(here, there)
        async with connected(here, tls=tls) as pair:
            await made.build(pair, tunnels)
            try:
                yield made
            finally:
                made.close()
                await asyncio.sleep(0.01)


async def echoes(a: App, b: App, text: bytes) -> None:
    for one, other in ((a, b), (b, a)):
        await one.send(text)
        assert await other.read(len(text)) == text


def test_the_idle_time_goes_on_where_it_was() -> None:
    async def main() -> None:
        with polling() as here, polling() as there:
            app, near = tcp_pair()
            far, other = tcp_pair()
            running = relay(PlainSocket(near, here), PlainSocket(far, here), ByteCounts(), idle_timeout_s=3600.0)
            for _ in range(6):
                running.on_interval()  # the first has no check before it
            frozen = Frozen([running], None)
            moved = Unit([running], None).made(frozen, there)
            frozen.leave()
            moved.idle_timeouts_s = [3600.0]
            moved.start()
            (continued,) = moved.relays
            for _ in range(2):
                continued.on_interval()
                assert continued.ends is not None
            continued.on_interval()
            assert (await continued).timed_out
            for end in moved.ends[0]:
                end.close()
            for sock in (app, other):
                sock.close()

    run(main)


@pytest.mark.parametrize("asked", [False, True], ids=["no request", "a request"])
def test_a_moved_connection_without_a_request_is_closed(asked: bool) -> None:
    async def main() -> None:
        with polling() as here, polling() as there:
            async with connected(here) as pair:
                if asked:
                    opened, accepted = await pair.tunnel()
                    opened.close()
                    accepted.close()
                    await until(lambda: not pair.server.settle())
                unit = Unit([], pair.server)
                unit.settings = ConnectionSettings(first_request_timeout_s=0.05)
                await until(lambda: unit.move(there))
                if asked:
                    await asyncio.sleep(0.2)
                    assert pair.client.error is None
                else:
                    async with asyncio.timeout(WAIT_S):
                        await pair.client.wait_closed()
                    assert pair.client.engine.going_away
                unit.close()

    run(main)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("tls", [True, False], ids=["tls", "cleartext"])
def test_every_kind_moves_there_and_back(loop: str, tls: bool) -> None:
    async def main() -> None:
        async with site(tls=tls) as made:
            for number in range(6):
                for a, b in made.apps:
                    await echoes(a, b, b"%d" % number * 100)
                for unit in made.units:
                    await until(lambda unit=unit, number=number: unit.move(made.pollers[1 - number % 2]))
            for unit in made.units:
                assert unit.moves == 6
                for each in unit.relays:
                    assert each.counts.sent == each.counts.received == 600

    run(main, loop)


@pytest.mark.parametrize("seed", range(3))
def test_bulk_in_both_directions_moves_at_any_time(seed: int) -> None:
    rng = random.Random(seed)
    size = 6_000_000

    async def main() -> None:
        async with site() as made:

            async def one_way(source: App, sink: App, data: bytes) -> None:
                async def send() -> None:
                    await source.send(data)
                    source.eof()

                async def receive() -> None:
                    assert await sink.read_all() == data

                await asyncio.gather(send(), receive())

            async def moving() -> None:
                side = 0
                while True:
                    await asyncio.sleep(rng.random() * 0.004)
                    side = 1 - side
                    for unit in made.units:
                        if rng.random() < 0.5:
                            unit.move(made.pollers[side])
                        else:
                            with contextlib.suppress(Unmovable):
                                frozen = unit.freeze()
                                await asyncio.sleep(rng.random() * 0.002)
                                assert frozen.unchanged or unit.connection is not None  # a PING
                                frozen.thaw()

            mover = asyncio.get_running_loop().create_task(moving())
            flows = [
                one_way(one, other, rng.randbytes(size)) for a, b in made.apps for one, other in ((a, b), (b, a))
            ]
            await asyncio.gather(*flows)
            mover.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await mover
            assert all(unit.moves for unit in made.units), [unit.moves for unit in made.units]
            for unit in made.units:
                for each in unit.relays:
                    assert each.ends is None  # half-closes have passed in both directions
                    assert (each.counts.sent, each.counts.received) == (size, size)

    run(main)


def test_half_closed_relays_move() -> None:
    async def main() -> None:
        async with site() as made:
            for a, b in made.apps:
                await echoes(a, b, b"first")
                a.eof()
                assert await b.read(1) == b""
            for unit in made.units:
                await until(lambda unit=unit: unit.move(made.pollers[1]))
            for a, b in made.apps:
                await b.send(b"still")
                assert await a.read(5) == b"still"
                b.eof()
                assert await a.read(1) == b""
            for unit in made.units:
                await until(lambda unit=unit: all(each.ends is None for each in unit.relays))

    run(main)


def test_bytes_that_an_application_does_not_read_move_with_their_credit() -> None:
    data = random.Random(1).randbytes(8_000_000)

    async def main() -> None:
        async with site(2) as made:
            sending = [asyncio.get_running_loop().create_task(a.send(data)) for a, _ in made.apps]
            await asyncio.sleep(0.2)  # everything between is full
            for number in range(4):
                for unit in made.units:
                    await until(lambda unit=unit, number=number: unit.move(made.pollers[1 - number % 2]))
            for _, b in made.apps:
                assert await b.read(len(data)) == data
            await asyncio.gather(*sending)

    run(main)


def test_a_frozen_unit_reads_nothing_and_a_discarded_copy_has_no_effect() -> None:
    async def main() -> None:
        async with site() as made:
            for unit in made.units:
                frozen = unit.freeze()
                copy = unit.made(frozen, made.pollers[1])
                for a, _ in made.apps:
                    await a.send(b"meanwhile")
                await asyncio.sleep(0.02)
                assert frozen.unchanged
                copy.discard()
                frozen.thaw()
                for _, b in made.apps:
                    assert await b.read(9) == b"meanwhile"

    run(main)


def test_a_relay_that_ends_while_frozen_is_detected() -> None:
    async def main() -> None:
        async with site() as made:
            for unit in made.units:
                frozen = unit.freeze()
                unit.relays[0].abort("a policy")
                assert not frozen.unchanged
                frozen.thaw()
            for a, b in made.apps[1:3]:
                await echoes(a, b, b"others live")

    run(main)


@pytest.mark.pure
@pytest.mark.parametrize("index", [0, 1, 2])
def test_unit_that_cannot_be_watched_again_ends_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """While it was frozen, other sockets have used up the user's limit (fs.epoll.max_user_watches)."""

    async def main() -> None:
        async with site(1) as made:
            unit, others = made.units[index], made.units[2:] if index < 2 else made.units[:2]
            frozen = unit.freeze()

            def full(fd: int, handler: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with monkeypatch.context() as limit:
                limit.setattr(made.pollers[0], "register", full)
                frozen.thaw()
            (running,) = unit.relays
            assert isinstance((await running).error, (OSError, HboneError))
            for end in unit.ends:
                end.close()
            assert others
            await echoes(*made.apps[1 if index < 2 else 0], b"others live")

    run(main)


def test_a_request_that_waits_for_its_answer_stays() -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT))
                request = await pair.requests.get()
                with pytest.raises(Unmovable, match="answer"):
                    Frozen([], pair.client)
                with pytest.raises(Unmovable, match="being opened"):
                    Frozen([], pair.server)
                accepted = request.accept()
                (await opening).close()
                accepted.close()

    run(main)


def test_connections_without_tunnels_move_and_take_new_ones() -> None:
    async def main() -> None:
        with polling() as here, polling() as there:
            async with connected(here) as pair:
                opened, accepted = await pair.tunnel()
                opened.close()
                accepted.close()
                await until(lambda: not pair.client.open_streams and not pair.server.open_streams)
                client, server = Unit([], pair.client), Unit([], pair.server)
                await until(lambda: client.move(there))
                assert client.connection is not None
                opening = asyncio.get_running_loop().create_task(client.connection.open(CONNECT))
                accepted = (await pair.requests.get()).accept()
                near, end = tcp_pair()
                running = relay(PlainSocket(end, there), await opening, ByteCounts())
                client.relays, client.ends = [running], list(running.ends or ())
                await until(lambda: client.move(here))
                there_, far = tcp_pair()
                server.relays = [relay(accepted, PlainSocket(far, here), ByteCounts())]
                server.ends = list(server.relays[0].ends or ())
                await echoes(App(near), App(there_), b"on a moved connection")
                client.close()
                server.close()
                near.close()
                there_.close()

    run(main)


def test_states_that_do_not_fit_are_refused() -> None:
    async def main() -> None:
        async with site(1) as made:
            unit = made.units[0]
            frozen = unit.freeze()
            with pytest.raises(ValueError, match="number of sockets"):
                resumed(frozen.state, [], ConnectionSettings(), made.pollers[1])
            carrier = frozen.state.carrier
            assert carrier is not None
            wrong = msgspec.structs.replace(carrier, waiting=(99,))
            socks = [socket.socket(fileno=os.dup(fd)) for fd in frozen.descriptors]
            with pytest.raises(ValueError, match="no stream 99"):
                resumed(
                    msgspec.structs.replace(frozen.state, carrier=wrong),
                    socks,
                    ConnectionSettings(),
                    made.pollers[1],
                )
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.close()
            frozen.thaw()

    run(main)


@pytest.mark.parametrize("moves", [False, True])
def test_a_corrupt_record_ends_the_connection_with_an_alert(moves: bool) -> None:
    async def main() -> None:
        async with site(1) as made:
            unit = made.units[1]
            (a, b) = made.apps[0]
            await echoes(a, b, b"before")
            if moves:
                await until(lambda: unit.move(made.pollers[1]))
            client = made.units[0].connection
            assert client is not None
            client.link.sock.send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
            await until(lambda: unit.connection is not None and unit.connection.error is not None)
            assert unit.connection is not None
            assert isinstance(unit.connection.error, TlsError)
            await until(lambda: client.error is not None)
            assert isinstance(client.error, TlsError)
            assert client.error.by_peer
            assert "bad record mac" in str(client.error)

    run(main)
