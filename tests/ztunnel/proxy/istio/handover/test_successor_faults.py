"""Successors that fail, lie or hesitate during a hand-over: connections are lost with their process only."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.ztunnel.proxy.istio.handover.generations import REMOTE_HOST, Generations, echoed, play
from tests.ztunnel.proxy.istio.handover.scripted import (
    GREETING,
    SLICING,
    Scripted,
    giving,
    greeted,
    plain,
    scripted_taker,
    still_served,
)
from tests.ztunnel.proxy.istio.pods import APP_PORT
from ztunnel.proxy.dataplane.handover.giver import Giver, Result
from ztunnel.proxy.dataplane.handover.messages import (
    SCHEMA,
    Busy,
    Declined,
    Finished,
    Go,
    Greeting,
    Keep,
    Ready,
    SliceBegins,
    SliceEnds,
    Taken,
    encode,
)
from ztunnel.proxy.dataplane.rendezvous import MAX_BYTES, Rendezvous, RendezvousError
from ztunnel.proxy.istio.accounting.outcome import POLICY_CHANGE
from ztunnel.proxy.istio.handover.messages import Offer
from ztunnel.runtime.descriptors import lowest_free
from ztunnel.runtime.settings import HANDOVER_SOCKET
from ztunnel.runtime.sockets import PeerProcess, UnixListener


@pytest.mark.parametrize("step", ["greeted", "offered"])
def test_dying_successor_leaves_connections_with_the_predecessor(tmp_path: Path, step: str) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with scripted_taker(made) as taker:
            await greeted(taker)
            await made.old.until(lambda: made.before.successor_waits)
            task = giving(made)
            if step != "greeted":
                offer = await taker.hear()
                assert isinstance(offer, Offer)
        result = await task
        assert result is None or result.given == 0
        await still_served(made, end)

    play(tmp_path, body)


def test_successor_that_dies_after_the_last_offer_does_not_end_the_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        give = Giver.give

        async def then_dies(self: Giver, again_s: float) -> Result:
            result = await give(self, again_s)
            taker.close()  # the giver has not read the EOF yet
            return result

        async with scripted_taker(made) as taker:
            await greeted(taker)
            await made.old.until(lambda: made.before.successor_waits)
            monkeypatch.setattr(Giver, "give", then_dies)
            task = giving(made, 0.0)
            offer = await taker.hear()
            assert isinstance(offer, Offer)
            await taker.say(Declined(offer.number, "later"))
            result = await task
            assert result is not None
            assert result.given == 0
        await still_served(made, end)

    play(tmp_path, body)


def test_unresponsive_successor_leaves_connections_with_the_predecessor(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with scripted_taker(made) as taker:
            await greeted(taker)
            task = giving(made, 60.0)
            for number in (1, 2, 3):
                offer = await taker.hear()
                assert isinstance(offer, Offer)
                assert await taker.hear() == Keep(number)
                await echoed(end, b"")
            result = await task
            assert result is not None
            assert result.given == 0
            # Otherwise it could keep descriptors of the connection open for ever.
            assert await taker.hear() is None
        await still_served(made, end)

    play(tmp_path, body)


def test_unmovable_connections_are_offered_again_after_a_long_first_walk(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        peer = made.old.peer("far", REMOTE_HOST)
        answer, gate = peer.answer, asyncio.Event()

        async def late(request: object) -> None:
            await gate.wait()
            await answer(request)  # type: ignore[arg-type]

        peer.answer = late
        held = await plain(made), await plain(made)
        opening = made.old.dial(f"{REMOTE_HOST}:{APP_PORT}")
        await made.old.until(lambda: peer.requests)
        async with scripted_taker(made) as taker:
            await greeted(taker)
            task = giving(made, 1.0)
            offers = [await taker.hear() for _ in held]
            await asyncio.sleep(1.5)
            for offer in offers:
                assert isinstance(offer, Offer)
                await taker.say(Declined(offer.number, "later"))
                assert await taker.hear() == Keep(offer.number)
            gate.set()
            offer = await taker.hear()
            assert isinstance(offer, Offer)
            assert offer.carrier is not None
            await taker.say(Declined(offer.number, "later"))
            result = await task
            assert result is not None
            assert result.given == 0
        for end in (*held, opening):
            end.eof()

    play(tmp_path, body)


def test_connection_that_ends_during_its_offer_stays(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with scripted_taker(made) as taker:
            await greeted(taker)
            task = giving(made)
            offer = await taker.hear()
            assert isinstance(offer, Offer)
            entry, *_ = made.old.pods["server"].connections.inbound
            entry.end(POLICY_CHANGE)
            await taker.say(Taken(offer.number))
            assert await taker.hear() == Keep(offer.number)
            result = await task
            assert result is not None
            assert result.given == 0
        assert await end.read(1) == b""
        assert (await made.old.line(1))["error"] == POLICY_CHANGE

    play(tmp_path, body)


def test_given_connection_has_no_access_line_here(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with scripted_taker(made) as taker:
            await greeted(taker)
            task = giving(made)
            offer = await taker.hear()
            assert isinstance(offer, Offer)
            kept = taker.parcel.take_all()
            await taker.say(Taken(offer.number))
            assert await taker.hear() == Go(offer.number)
            result = await task
            assert result is not None
            assert (result.given, result.left) == (1, 0)
            await made.old.until(lambda: made.old.is_idle)
            # This process has the client's socket now: nothing was shut down.
            await end.send(b"to its new owner")
            with socket.socket(fileno=kept[0]) as sock:
                await asyncio.sleep(0.01)
                assert sock.recv(100) == b"to its new owner"
            os.close(kept[1])
        assert made.old.lines() == []

    play(tmp_path, body)


@contextlib.asynccontextmanager
async def first_slice(made: Generations) -> AsyncIterator[tuple[Scripted, "asyncio.Task[Result | None]"]]:
    """A successor that has been asked to be ready, and the old proxy's hand-over."""
    async with scripted_taker(made, SLICING) as taker:
        await greeted(taker)
        task = giving(made)
        assert isinstance(await taker.hear(), SliceBegins)
        yield taker, task


def test_connections_are_served_until_the_successor_is_ready_for_a_slice(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with first_slice(made) as (taker, task):
            await echoed(end)
            await taker.say(Ready())
            await taker.say(Ready())  # without a question, and ignored
            assert isinstance(await taker.hear(), Offer)
            await taker.say(Taken(1))
            assert await taker.hear() == Go(1)
            assert isinstance(await taker.hear(), SliceEnds)
            result = await task
            assert result is not None
            assert result.given == 1

    play(tmp_path, body)


def test_remaining_connections_are_offered_again_without_pausing_others(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with first_slice(made) as (taker, task):
            await taker.say(Ready())
            assert isinstance(await taker.hear(), Offer)
            await taker.say(Declined(1, "later"))
            assert await taker.hear() == Keep(1)
            assert isinstance(await taker.hear(), SliceEnds)
            await task
            task = giving(made)
            assert isinstance(await taker.hear(), Finished)
            assert isinstance(await taker.hear(), Offer)
            await taker.say(Taken(2))
            assert await taker.hear() == Go(2)
            result = await task
            assert result is not None
            assert (result.given, result.left) == (1, 0)
        end.eof()

    play(tmp_path, body)


@pytest.mark.parametrize("dies", [False, True])
def test_successor_that_is_never_ready_gets_no_connections(tmp_path: Path, dies: bool) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with first_slice(made) as (taker, task):
            if dies:
                taker.close()
            result = await task
            assert result is not None
            assert (result.given, set(result.stays)) == (0, {"no taker"})
        await still_served(made, end)

    play(tmp_path, body)


def test_only_one_successor_at_a_time(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with scripted_taker(made) as first:
            await greeted(first)
            async with scripted_taker(made) as second:
                assert await second.hear() == Busy(reason="another process takes over already")
                assert await second.hear() is None
        await made.old.until(lambda: not made.before.successor_waits)
        async with scripted_taker(made) as third:
            await greeted(third)
        await still_served(made, end)

    play(tmp_path, body)


def test_the_path_is_removed_before_the_successor_listens_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor puts its own socket there at the end of the channel. That one must stay."""
    steps: list[str] = []

    def note(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def noted(self: object) -> None:
            steps.append(kind.__name__)
            original(self)

        monkeypatch.setattr(kind, name, noted)

    async def body(made: Generations) -> None:
        async with scripted_taker(made) as taker:
            await greeted(taker)
            note(UnixListener, "remove")
            note(Rendezvous, "close")
            await made.before.close()
            assert await taker.hear() is None

    play(tmp_path, body)
    assert steps[0] == "UnixListener"


def test_successor_of_an_incompatible_schema_gets_no_connections(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        later = Greeting(version="later", schema=SCHEMA + 5, oldest=SCHEMA + 1)
        async with scripted_taker(made, later) as taker:
            message = await taker.hear()
            assert isinstance(message, Busy)
            assert "schemas" in message.reason
        earlier = Greeting(version="earlier", schema=SCHEMA - 1, oldest=0)
        async with scripted_taker(made, earlier) as taker:
            assert isinstance(await taker.hear(), Busy)
        other = msgspec.structs.replace(GREETING, dialect="envoy")
        async with scripted_taker(made, other) as taker:
            message = await taker.hear()
            assert isinstance(message, Busy)
            assert "dialect" in message.reason

    play(tmp_path, body)


@pytest.mark.parametrize(
    "wire",
    [
        b"\0\0\0\5\0\0hello",
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_BYTES + 1).to_bytes(4) + b"\0\0",
        b"\0\0\0\1\xff\xffx",
        b"\0\0\0\1\0\1x",
        encode(GREETING)[:-3],
        b"\0\0\0",
        b"",
    ],
)
def test_invalid_message_of_a_successor_only_ends_its_connection(tmp_path: Path, wire: bytes) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with scripted_taker(made, None) as taker:
            taker.channel._socket.send(wire) if wire else None
            assert await taker.hear() is None  # at once, or after the time for a greeting
        async with scripted_taker(made) as taker:
            await greeted(taker)
        await still_served(made, end)

    play(tmp_path, body)


def test_answers_without_an_offer_are_ignored(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        async with scripted_taker(made) as taker:
            await greeted(taker)
            await taker.say(Taken(77))
            await taker.say(Declined(78, "no"))
            await taker.say(GREETING)
            task = giving(made)
            assert await taker.hear() is not None  # Finished
            await task

    play(tmp_path, body)


def test_a_process_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(made: Generations) -> None:
        made.before.begin()
        await made.old.until(lambda: made.before.status()["listening"])
        path = made.folder / HANDOVER_SOCKET
        assert path.stat().st_mode & 0o777 == 0o600
        child = os.fork()
        if not child:
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as sock:
                try:
                    sock.connect(str(path))
                except PermissionError:
                    os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        # Should the mode be changed, the kernel's word about the peer decides.
        monkeypatch.setattr(PeerProcess, "of", lambda descriptor: PeerProcess(1, 65534))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with sock:
            sock.connect(str(path))
            await asyncio.sleep(0.05)
            assert sock.recv(10) == b""
        one, other = socket.socketpair()
        with other, pytest.raises(RendezvousError, match="another user"):
            Rendezvous(one)

    if os.geteuid():
        pytest.skip("needs root, to become another user")
    play(tmp_path, body)


@contextlib.contextmanager
def full_descriptor_table() -> Iterator[None]:
    """No descriptor can be made in this process, which plays both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_stay_if_the_successor_has_no_free_descriptors(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        await made.meet()
        with full_descriptor_table():
            result = await giving(made)
            assert result is not None
            assert (result.given, result.left) == (0, 1)
            await echoed(end, b"")
        before = len(os.listdir("/proc/self/fd"))
        await made.old.until(lambda: made.after.status()["predecessor"] and made.before.successor_waits)
        result = await giving(made)
        assert result is not None
        assert result.given == 1
        assert await end.ask() == b"ping"
        line = await made.new.line(1)
        assert line["bytes_sent"] == 9
        assert len(os.listdir("/proc/self/fd")) <= before + 2

    play(tmp_path, body)


def test_a_predecessor_with_a_full_descriptor_table_accepts_its_successor_later(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        made.before.begin()
        await made.old.until(lambda: made.before.status()["listening"])
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with full_descriptor_table():
            sock.connect(str(made.folder / HANDOVER_SOCKET))
            taker = Scripted(Rendezvous(sock))
            await taker.say(GREETING)
            await asyncio.sleep(3.0)
            assert not made.before.successor_waits
            await echoed(end, b"")
        await greeted(taker)
        taker.close()
        await still_served(made, end)

    play(tmp_path, body)


def test_a_successor_connects_once_its_descriptor_table_has_room(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        made.before.begin()
        await made.old.until(lambda: made.before.status()["listening"])
        with full_descriptor_table():
            made.after.begin()
            await asyncio.sleep(3.0)
            assert not made.before.successor_waits
        await made.old.until(lambda: made.after.status()["predecessor"])

    play(tmp_path, body)
