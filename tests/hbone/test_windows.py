"""Receive windows: streams that nothing reads pin their share, and the others move at full speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hbone import frames
from hbone.engine import Engine
from hbone.errors import LocalProtocolError
from hbone.events import DataReceived, RequestReceived, ResponseReceived
from hbone.flow import PeerQuota, PeerQuotas, WindowPool
from hbone.limits import Limits
from hbone.settings import Role, client_settings, server_settings
from hbone.windows import FAST_S, PROVEN_BYTES, SLOW_S, ConnectionWindow, StreamWindow
from tests.generated import at_night
from tests.hbone.wire import CONNECT, take

KERNEL = 3 << 20  # bytes that sockets take from a stream which nothing reads
MIB = 1 << 20
CHUNK = bytes(256 * 1024)


class Wire:
    """A client and a server of ours, and readers behind the one that receives."""

    def __init__(self, receiver: Role) -> None:
        self.client = Engine(Role.CLIENT, client_settings())
        self.server = Engine(Role.SERVER, replace(server_settings(), max_concurrent_streams=256))
        self.receiver, self.sender = (
            (self.server, self.client) if receiver is Role.SERVER else (self.client, self.server)
        )
        self.now_s = 0.0
        self.room: dict[int, int] = {}
        """What the reader of a stream still takes."""
        self.received: dict[int, int] = {}
        for engine in (self.client, self.server):
            engine.start()
        self.exchange()

    @property
    def waiting(self) -> int:
        """Bytes held for readers."""
        return sum(size - self.delivered(stream_id) for stream_id, size in self.received.items())

    def delivered(self, stream_id: int) -> int:
        """Bytes that a stream's reader has taken."""
        return min(self.received[stream_id], self.room[stream_id])

    def open(self, room: int) -> int:
        stream_id = self.client.open_stream(CONNECT)
        self.room[stream_id], self.received[stream_id] = room, 0
        self.exchange()
        return stream_id

    def exchange(self) -> None:
        """Carry bytes both ways until neither side sends any more; a round trip takes a millisecond."""
        while self.client.output or self.server.output:
            self.now_s += 0.001
            for one, other in ((self.client, self.server), (self.server, self.client)):
                for event in other.receive_data(take(one), self.now_s):
                    assert isinstance(event, RequestReceived | ResponseReceived | DataReceived) or not isinstance(
                        event, Exception
                    )
                    if isinstance(event, RequestReceived):
                        self.server.respond(event.stream_id, 200)
                    elif isinstance(event, DataReceived):
                        before = self.delivered(event.stream_id)
                        self.received[event.stream_id] += event.size
                        taken = self.delivered(event.stream_id) - before
                        if taken:
                            other.acknowledge(event.stream_id, taken)

    def fill(self, stream_id: int) -> None:
        """Send until the window is full."""
        while self.sender.send_data(stream_id, CHUNK):
            self.exchange()

    def push(self, stream_id: int, size: int) -> int:
        """Send ``size`` bytes as fast as the windows permit. Return the number of round trips."""
        trips = 0
        while size > 0:
            sent = self.sender.send_data(stream_id, CHUNK if size >= len(CHUNK) else bytes(size))
            size -= sent
            if not sent or self.sender.output.full:
                begun_s = self.now_s
                self.exchange()
                trips += 1
                assert self.now_s > begun_s, f"stands still with {size} bytes to go"
        self.exchange()
        return trips


def engine_of(role: Role) -> Engine:
    return Engine(role, server_settings() if role is Role.SERVER else client_settings())


#: How many streams nobody reads, and the bytes that each reader takes before it stops.
UNREAD = at_night(
    [(unread, room) for unread in (1, 3, 8, 20, 30, 64, 199) for room in (0, KERNEL)],
    [(1, 0), (1, KERNEL), (30, 0), (30, KERNEL), (199, 0)],
)


@pytest.mark.parametrize(("unread", "room"), UNREAD)
@pytest.mark.parametrize("receiver", Role)
def test_unread_streams_hold_a_bounded_amount_and_leave_the_next_one_at_full_speed(
    receiver: Role, unread: int, room: int
) -> None:
    wire = Wire(receiver)
    for _ in range(unread):
        wire.fill(wire.open(room))
    assert wire.waiting <= 3 * MIB + unread * 16_384
    assert unread > 64 or wire.waiting <= 4 * MIB
    live = wire.open(1 << 40)
    wire.push(live, PROVEN_BYTES)
    # At full speed a round trip carries as much as the output holds at once, a quarter of a MiB, or more.
    assert wire.push(live, 64 * MIB) <= 4 * 64 + 64


@pytest.mark.parametrize("receiver", Role)
def test_streams_that_are_read_slowly_hold_what_they_use(receiver: Role) -> None:
    """All of them fill up at once, which is the order in which credit is shared worst."""
    wire = Wire(receiver)
    streams = [wire.open(KERNEL) for _ in range(199)]
    for _ in range(40):
        for stream_id in streams:
            wire.sender.send_data(stream_id, bytes(128 * 1024))
            if wire.sender.output.full:
                wire.exchange()
        wire.exchange()
    wire.push(wire.open(1 << 40), 16 * MIB)


@pytest.mark.parametrize("receiver", Role)
def test_readers_that_stop_after_much_leave_the_last_one_moving(receiver: Role) -> None:
    wire = Wire(receiver)
    for _ in range(40):
        stream_id = wire.open(10 * MIB)
        wire.push(stream_id, 10 * MIB)
        wire.fill(stream_id)
    assert wire.waiting <= 16 * MIB
    wire.push(wire.open(1 << 40), 16 * MIB)


def test_bulk_gets_the_whole_window_of_a_stream() -> None:
    wire = Wire(Role.SERVER)
    stream_id = wire.open(1 << 40)
    wire.push(stream_id, 64 * MIB)
    sent = 0
    while size := wire.sender.send_data(stream_id, bytes(256 * 1024)):
        sent += size
        take(wire.sender)  # on its way
    assert sent >= 2 * MIB  # credit for half of the 4 MiB may be outstanding at any time


def test_credit_of_a_connection_comes_back_relative_to_what_is_left() -> None:
    """When the remaining window is small and no reader reads, an amount of credit is sent that was too small for a
    frame before.
    """
    wire = Wire(Role.SERVER)
    live = wire.open(1 << 40)
    wire.push(live, 300 * 1024)
    for _ in range(80):
        wire.fill(wire.open(0))
    wire.push(live, MIB)


# The parts


def window(**changes: int) -> ConnectionWindow:
    return ConnectionWindow(replace(server_settings(), **changes))  # type: ignore[arg-type]


def use(connection: ConnectionWindow, stream: StreamWindow, now_s: float) -> int:
    """Use half of a stream's window and deliver it at ``now_s``."""
    stream.credit -= stream.step
    stream.unacknowledged += stream.step
    return connection.renew(stream, now_s, 1)


def test_a_fast_stream_grows_fourfold_then_twofold() -> None:
    connection, stream = window(), StreamWindow(16_384, 0.0)
    sizes = []
    for number in range(5):
        use(connection, stream, number * 0.01)
        sizes.append(stream.size)
    most = 16_384 + 3 * MIB // 4  # of what streams that are not proven have together
    assert sizes == [65_536, 262_144, 524_288, most, most]
    stream.delivered = PROVEN_BYTES
    for number in range(5, 10):
        use(connection, stream, number * 0.01)
    assert stream.size == 4 * MIB
    assert stream.borrowed == 0


def test_a_stream_at_an_easy_pace_keeps_its_window() -> None:
    connection, stream = window(), StreamWindow(16_384, 0.0)
    for number in range(1, 20):
        assert use(connection, stream, number * FAST_S * 2) == 8192
    assert stream.size == 16_384


def test_a_stream_that_waits_for_its_reader_does_not_grow() -> None:
    connection, stream = window(), StreamWindow(65_536, 0.0)
    stream.credit = 0
    stream.unacknowledged = 32_768  # the other half waits for its reader
    assert connection.renew(stream, 0.001, 1) == 32_768
    assert stream.size == 65_536


def test_a_stream_that_slows_down_gives_its_growth_back() -> None:
    connection, stream = window(), StreamWindow(16_384, 0.0)
    for number in range(4):
        use(connection, stream, number * 0.01)
    size, now_s = stream.size, 10.0
    assert use(connection, stream, now_s) == 0
    assert stream.size == size - size // 2
    while stream.size > 65_536:
        now_s += 2 * SLOW_S
        use(connection, stream, now_s)
    assert (stream.size, stream.credit + stream.unacknowledged) == (65_536, 65_536)
    connection.closed(stream, 0)
    assert connection.size == connection.first


def test_connections_of_one_peer_share_its_bytes() -> None:
    share = PeerQuota(Limits(peer_window_bytes=2 * MIB))
    connections = [window() for _ in range(4)]
    streams = [StreamWindow(16_384, 0.0) for _ in connections]
    for connection, stream in zip(connections, streams, strict=True):
        connection.join(share)
        stream.delivered = PROVEN_BYTES
        for number in range(12):
            use(connection, stream, number * 0.01)
    assert sum(stream.size for stream in streams) <= 2 * MIB + 4 * MIB
    assert share.window_bytes <= 2 * MIB
    assert streams[-1].size == 16_384  # backpressure, and no error
    for connection in connections:
        connection.leave()
        connection.leave()
    assert share.window_bytes == 0


def test_pods_and_the_process_bound_windows_too() -> None:
    shares, pods = PeerQuotas(), [WindowPool(2 * MIB), WindowPool(8 * MIB)]
    shares.windows.limit = 5 * MIB
    connections = []
    for number in range(8):
        connection, stream = window(), StreamWindow(16_384, 0.0)
        connection.join(shares.join(f"peer {number}", Limits()), pods[number % 2])
        stream.delivered = PROVEN_BYTES
        for turn in range(12):
            use(connection, stream, turn * 0.01)
        connections.append(connection)
        assert pods[0].used <= 2 * MIB
        assert shares.windows.used == pods[0].used + pods[1].used <= 5 * MIB
    assert shares.windows.used > 4 * MIB
    for connection in connections:
        connection.leave()
    assert (shares.windows.used, pods[0].used, pods[1].used) == (0, 0, 0)


@pytest.mark.parametrize("receiver", Role)
def test_streams_that_are_gone_return_their_growth(receiver: Role) -> None:
    wire = Wire(receiver)
    share = PeerQuota(Limits())
    wire.receiver.share(share)
    for end in ("reset here", "reset there", "ended"):
        stream_id = wire.open(1 << 40)
        wire.push(stream_id, 16 * MIB)
        assert share.window_bytes >= MIB
        if end == "reset here":
            wire.receiver.reset_stream(stream_id, 8)
        elif end == "reset there":
            wire.sender.reset_stream(stream_id, 8)
        else:
            wire.sender.end_stream(stream_id)
            wire.receiver.end_stream(stream_id)
        wire.exchange()
        assert share.window_bytes == 0
        with pytest.raises(LocalProtocolError):
            wire.sender.reserve(stream_id, 1)


def test_many_streams_have_a_window_that_fits_them() -> None:
    def sizes() -> Iterator[int]:
        connection = window()
        for streams in range(1, 201):
            connection.opened(streams)
            yield connection.size - streams * connection.initial

    assert all(size >= 32 * 16_384 - 16_384 for size in sizes())


def test_no_window_update_of_zero_is_sent() -> None:
    wire = Wire(Role.SERVER)
    stream_id = wire.open(1 << 40)
    frames_seen = []
    for _ in range(200):
        wire.client.send_data(stream_id, bytes(1000))
        wire.server.receive_data(take(wire.client), 0.0)
        wire.server.acknowledge(stream_id, 1000)
        data = take(wire.server)
        position = 0
        while position < len(data):
            high, low, kind, _, _ = frames.HEADER.unpack_from(data, position)
            if kind == frames.WINDOW_UPDATE:
                frames_seen.append(frames.U32.unpack_from(data, position + 9)[0])
            position += 9 + (high << 8 | low)
        wire.client.receive_data(data)
    assert frames_seen
    assert all(frames_seen)
