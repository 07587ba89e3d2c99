"""Predecessors that fail, lie or hesitate during a hand-over."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from hbone.aio.handover import UnitState
from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.handover.generations import SERVER, Generations, echoed, play
from tests.ztunnel.proxy.istio.handover.scripted import (
    GREETING,
    Scripted,
    giving,
    greeted,
    plain,
    scripted_taker,
    still_served,
)
from tests.ztunnel.proxy.istio.pods import APP_PORT, End
from xds.model.address import SocketAddress
from xds.model.calico import Flow
from xds.model.identity import SpiffeId
from ztunnel.proxy.dataplane import rendezvous
from ztunnel.proxy.dataplane.handover import service
from ztunnel.proxy.dataplane.handover.messages import (
    SLICE_S,
    Declined,
    Go,
    Keep,
    Ready,
    SliceBegins,
    SliceEnds,
    Taken,
    Unreadable,
    encode,
    from_taker,
)
from ztunnel.proxy.dataplane.rendezvous import Rendezvous
from ztunnel.proxy.istio.accounting.metrics import PeerLabels
from ztunnel.proxy.istio.handover.messages import (
    CarrierValue,
    EntryValue,
    FactsValue,
    Offer,
    PeerValue,
    RecordValue,
    from_giver,
)
from ztunnel.runtime.settings import HANDOVER_SOCKET
from ztunnel.runtime.sockets import UnixListener


@contextlib.asynccontextmanager
async def scripted_giver(made: Generations) -> AsyncIterator[Scripted]:
    """A predecessor of the new proxy."""
    listener = UnixListener(made.folder / HANDOVER_SOCKET, socket.SOCK_STREAM, 1)
    made.after.begin()
    while True:
        try:
            sock, _ = listener.socket.accept()
            break
        except BlockingIOError:
            await asyncio.sleep(0.001)
    sock.setblocking(False)
    giver = Scripted(Rendezvous(sock))
    try:
        parcel = await giver.channel.receive()
        assert parcel is not None
        await giver.say(GREETING)
        yield giver
    finally:
        giver.close()
        listener.close()


async def an_offer(made: Generations, end: End) -> tuple[Offer, list[int]]:
    """What the old proxy would offer, with copies of its descriptors; it stays the owner."""
    async with scripted_taker(made) as taker:
        await greeted(taker)
        task = giving(made)
        offer = await taker.hear()
        assert isinstance(offer, Offer)
        descriptors = taker.parcel.take_all()
        await taker.say(Declined(offer.number, "only looking"))
        await task
    await made.before.close()
    await echoed(end)
    return offer, descriptors


async def answered(giver: Scripted) -> bytes:
    parcel = await giver.channel.receive()
    assert parcel is not None
    return parcel.data


@pytest.mark.parametrize("step", ["offered", "taken", "kept"])
def test_units_not_released_by_a_dying_predecessor_are_discarded(tmp_path: Path, step: str) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        offer, descriptors = await an_offer(made, end)
        async with scripted_giver(made) as giver:
            await giver.say(offer, tuple(descriptors))
            if step != "offered":
                assert await answered(giver) == encode(Taken(offer.number))
            if step == "kept":
                await giver.say(Keep(offer.number))
        for each in descriptors:
            os.close(each)
        await made.new.until(lambda: made.after.status()["listening"])
        assert made.new.is_idle
        assert made.after.statistics.connections == {}
        await echoed(end)
        assert await end.ask() == b"ping"

    play(tmp_path, body)


@pytest.mark.parametrize("ends", ["said", "by time", "with the predecessor"])
def test_the_successors_own_connections_wait_for_the_end_of_a_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    longest_s = SLICE_S if ends == "by time" else WAIT_S
    monkeypatch.setattr(service, "SLICE_S", longest_s)

    async def body(made: Generations) -> None:
        end = made.new.plain(f"{SERVER}:{APP_PORT}")
        await echoed(end)
        async with scripted_giver(made) as giver:
            began_s = asyncio.get_running_loop().time()
            await giver.say(SliceBegins())
            assert await answered(giver) == encode(Ready())
            await end.send(b"x")
            reading = asyncio.get_running_loop().create_task(end.read(1))
            if ends != "by time":
                await asyncio.sleep(SLICE_S / 2)
                assert not reading.done()
            if ends == "said":
                await giver.say(SliceEnds())
            elif ends == "with the predecessor":
                giver.close()
            assert await reading == b"x"
            took_s = asyncio.get_running_loop().time() - began_s
            assert (took_s > 0.9 * longest_s) is (ends == "by time")  # a timer can be a millisecond early
        end.eof()

    play(tmp_path, body)


@pytest.mark.parametrize("fault", ["descriptors", "entries", "pod", "role", "carrier"])
def test_contradictory_offers_are_declined(tmp_path: Path, fault: str) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        offer, descriptors = await an_offer(made, end)
        (value,) = offer.entries[0]
        wrong = {
            "descriptors": offer,
            "entries": msgspec.structs.replace(offer, entries=()),
            "pod": msgspec.structs.replace(
                offer, entries=((msgspec.structs.replace(value, pod=("a", "b", "c")),),)
            ),
            "role": msgspec.structs.replace(offer, entries=((value, value),)),
            "carrier": msgspec.structs.replace(offer, entries=((msgspec.structs.replace(value, facts=None),),)),
        }[fault]
        async with scripted_giver(made) as giver:
            await giver.say(wrong, tuple(descriptors[: 1 if fault == "descriptors" else 2]))
            assert b"Declined" in await answered(giver)
            await giver.say(Go(offer.number))  # of what is not here
            for each in descriptors:
                os.close(each)
            await giver.say(Keep(99))
        await made.new.until(lambda: made.after.status()["listening"])
        assert made.new.is_idle
        assert await end.ask() == b"ping"

    play(tmp_path, body)


@pytest.mark.parametrize("wire", [b"\0\0\0\5\0\0hello", b"\0\0\0\1\0\1x", (1 << 31).to_bytes(4) + b"\0\0"])
def test_invalid_message_of_a_predecessor_ends_the_hand_over(tmp_path: Path, wire: bytes) -> None:
    async def body(made: Generations) -> None:
        async with scripted_giver(made) as giver:
            giver.channel._socket.send(wire)
            assert await giver.channel.receive() is None
        await made.new.until(lambda: made.after.status()["listening"])

    play(tmp_path, body)


def test_frames_carry_many_descriptors_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        one, other = socket.socketpair()
        for sock in (one, other):
            sock.setblocking(False)
        near, far = Rendezvous(one), Rendezvous(other)
        files = [os.open(tmp_path / f"{number}", os.O_RDWR | os.O_CREAT) for number in range(600)]
        sending = asyncio.get_running_loop().create_task(near.send(b"x" * 700_000, files))
        parcel = await far.receive()
        await sending
        assert parcel is not None
        assert parcel.data == b"x" * 700_000
        arrived = parcel.take_all()
        assert [os.path.basename(os.readlink(f"/proc/self/fd/{each}")) for each in arrived] == [
            str(number) for number in range(600)
        ]
        for each in files + arrived:
            os.close(each)
        near.close()
        assert await far.receive() is None
        far.close()

    asyncio.run(main())
    assert rendezvous.MAX_DESCRIPTORS > 600


def test_unknown_fields_of_later_versions_are_ignored() -> None:
    wire = msgspec.msgpack.encode({**msgspec.to_builtins(GREETING), "type": "Greeting", "of_tomorrow": [1, 2]})
    assert from_giver(wire) == GREETING
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Tomorrow"}), msgspec.msgpack.encode([1])):
        with pytest.raises(Unreadable):
            from_giver(wrong)
        with pytest.raises(Unreadable):
            from_taker(wrong)
    with pytest.raises(Unreadable):
        from_taker(encode(Go(1)))


def test_an_answer_that_comes_too_late_has_no_effect(tmp_path: Path) -> None:
    async def body(made: Generations) -> None:
        end = await plain(made)
        async with scripted_taker(made) as taker:
            await greeted(taker)
            task = giving(made)
            assert isinstance(await taker.hear(), Offer)
            assert await taker.hear() == Keep(1)
            await taker.say(Taken(1))
            await task
            await echoed(end, b"")
        await still_served(made, end)

    play(tmp_path, body)


def test_handover_values_survive_encoding() -> None:
    flow = Flow(
        source_ip="10.0.0.1", destination_ip="10.0.0.2", destination_port=80, source_principal="spiffe://a"
    )
    identity = SpiffeId("cluster.local", "default", "a")
    address = SocketAddress("10.0.0.1", 1234)
    record = RecordValue(
        direction="outbound",
        source=address,
        destination=SocketAddress("fd00::1", 15008),
        age_s=1.5,
        source_labels=PeerLabels(workload="a", known=True),
        source_identity=identity,
        trace=b"00-1",
    )
    entry = EntryValue(
        pod=("default", "a", "a"),
        record=record,
        original="10.0.0.9:80",
        actual=address,
        facts=FactsValue(source=address, destination=address, names=("spiffe://b",)),
        flow=flow,
        peer=PeerValue(identity=identity, chain=(b"1",), roots=(b"2", b"3")),
    )
    offer = Offer(
        number=3,
        unit=UnitState(carrier=None, relays=()),
        carrier=CarrierValue(pod=entry.pod, dialled=(address, ("spiffe://b",))),
        entries=((entry,),),
    )
    assert from_giver(encode(offer)) == offer
