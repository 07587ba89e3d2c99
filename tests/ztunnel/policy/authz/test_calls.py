"""One connection of unary calls, without sockets: what a client sends, however it is cut, and the answers."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.engine import Engine
from hbone.events import ConnectionFailed, DataReceived, ResponseReceived, StreamEnded
from hbone.frames import PREFACE, RST_STREAM, WINDOW_UPDATE, frame
from hbone.settings import Http2Settings, Role
from ztunnel.policy.authz import calls
from ztunnel.policy.authz.calls import MESSAGE_BYTES, STREAMS, Code, UnaryConnection

ECHO, FAILS, LONG = b"/x.Y/Echo", b"/x.Y/Fails", b"/x.Y/Long"


def fails(message: bytes) -> bytes:
    raise ZeroDivisionError(message)


ANSWERS = {ECHO: lambda message: message[::-1], FAILS: fails, LONG: lambda message: b"y" * 100_000}


@dataclass(slots=True)
class Answered:
    """What a call got: HTTP's status, the message with its prefix, and gRPC's status from head or trailers."""

    status: int = 0
    body: bytes = b""
    grpc: int | None = None
    ended: bool = False


@dataclass(slots=True)
class Client:
    """The other end: makes calls, and reads what it is answered."""

    window: int = 65_535
    engine: Engine = field(init=False)
    server: UnaryConnection = field(default_factory=lambda: UnaryConnection(ANSWERS))
    answers: dict[int, Answered] = field(default_factory=lambda: defaultdict(Answered))
    failed: int | None = None
    credit: bool = True

    def __post_init__(self) -> None:
        settings = Http2Settings(
            max_concurrent_streams=None,
            initial_window_bytes=self.window,
            stream_window_bytes=self.window,
            connection_window_bytes=65_535,
        )
        self.engine = Engine(Role.CLIENT, settings)
        self.engine.start()

    def open(self, path: bytes = ECHO, *, method: bytes = b"POST", kind: bytes = b"application/grpc") -> int:
        head = ((b":method", method), (b":scheme", b"http"), (b":path", path), (b":authority", b"x"))
        return self.engine.open_stream((*head, (b"content-type", kind)), tunnel=False)

    def call(self, message: bytes, path: bytes = ECHO, prefix: bytes | None = None) -> int:
        stream = self.open(path)
        framed = (b"\0" + len(message).to_bytes(4, "big") if prefix is None else prefix) + message
        assert self.engine.send_data(stream, framed) == len(framed)
        self.engine.end_stream(stream)
        return stream

    def sent(self) -> bytes:
        found = b"".join(self.engine.output.views())
        self.engine.output.taken()
        return found

    def exchange(self, *parts: bytes) -> None:
        """Pass bytes to the server, and the client's output as well, until neither has more to send."""
        waiting = list(parts) or [self.sent()]
        while waiting:
            for part in waiting:
                self.server.receive_data(part, 0.0)
                while self.server.engine.unparsed:
                    self.server.receive_data(b"", 0.0)
            while output := self.server.engine.output:
                data = b"".join(output.views())
                output.taken()
                self.read(data)
                self.server.sent()
            waiting = [data] if (data := self.sent()) else []

    def read(self, data: bytes) -> None:
        for event in self.engine.receive_data(data):
            match event:
                case ResponseReceived():
                    found = self.answers[event.stream_id]
                    found.status = event.status
                    found.grpc = _status(event.headers)
                    found.ended = event.ended
                case DataReceived():
                    self.answers[event.stream_id].body += b"".join(event.chunks)
                    if self.credit:
                        self.engine.acknowledge(event.stream_id, event.size)
                case StreamEnded():
                    found = self.answers[event.stream_id]
                    found.ended = True
                    found.grpc = _status(event.trailers) if event.trailers else found.grpc
                case ConnectionFailed():
                    raise AssertionError(event)
                case _:
                    pass
        if self.engine.going_away:
            self.failed = 1


def _status(fields: tuple[tuple[bytes, bytes], ...]) -> int | None:
    return next((int(value) for name, value in fields if name == b"grpc-status"), None)


def echoed(message: bytes) -> Answered:
    return Answered(200, b"\0" + len(message).to_bytes(4, "big") + message[::-1], 0, True)


def test_calls_are_answered() -> None:
    client = Client()
    streams = {client.call(message): message for message in (b"one", b"", b"three" * 1000)}
    client.exchange()
    assert {stream: client.answers[stream] for stream in streams} == {
        stream: echoed(message) for stream, message in streams.items()
    }


@pytest.mark.parametrize("step", [1, 2, 7, 8, 9, 10, 50])
def test_answers_do_not_depend_on_packet_boundaries(step: int) -> None:
    client = Client()
    streams = [client.call(b"message %d" % number) for number in range(3)]
    data = client.sent()
    client.exchange(*(data[at : at + step] for at in range(0, len(data), step)))
    assert [client.answers[stream] for stream in streams] == [
        echoed(b"message %d" % number) for number in range(3)
    ]


@pytest.mark.parametrize(
    ("prefix", "code"),
    [
        (b"", Code.INTERNAL),
        (b"\0\0\0\0\1", Code.INTERNAL),
        (b"\0\0\0\0\x09", Code.INTERNAL),
        (b"\1\0\0\0\7", Code.UNIMPLEMENTED),
    ],
)
def test_bodies_that_are_no_message_are_refused(prefix: bytes, code: Code) -> None:
    client = Client()
    bad, good = client.call(b"message", prefix=prefix), client.call(b"good")
    client.exchange()
    assert (client.answers[bad].status, client.answers[bad].grpc) == (200, code)
    assert client.answers[good] == echoed(b"good")


def test_unknown_methods_and_what_is_no_call_are_refused_without_reading_on() -> None:
    client = Client()
    unknown, get, html = client.open(b"/x.Y/Other"), client.open(method=b"GET"), client.open(kind=b"text/html")
    client.exchange()
    assert (client.answers[unknown].status, client.answers[unknown].grpc) == (200, Code.UNIMPLEMENTED)
    assert [client.answers[stream].status for stream in (get, html)] == [405, 415]
    assert client.server.engine.open_streams == 0


def test_a_handler_that_fails_is_an_error_of_its_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    bad, good = client.call(b"secret", FAILS), client.call(b"good")
    client.exchange()
    assert client.answers[bad].grpc == Code.INTERNAL
    assert client.answers[good] == echoed(b"good")
    assert "handler failed method=/x.Y/Fails" in caplog.text


def test_a_message_that_is_too_long_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MESSAGE_BYTES", 1000)
    client = Client()
    long, good = client.call(b"x" * 1001), client.call(b"x" * 1000)
    client.exchange()
    assert client.answers[long].grpc == Code.RESOURCE_EXHAUSTED
    assert client.answers[good] == echoed(b"x" * 1000)


def test_messages_that_are_not_complete_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "HELD_BYTES", 10_000)
    client = Client()
    streams = [client.open() for _ in range(20)]
    for stream in streams:
        client.engine.send_data(stream, b"\0\0\1\0\0" + b"x" * 995)
    client.exchange()
    assert [client.answers[stream].grpc for stream in streams] == [None] * 10 + [Code.RESOURCE_EXHAUSTED] * 10
    for stream in streams[:10]:
        client.engine.reset_stream(stream, 8)
    client.exchange()
    assert client.server._held == 0
    again = client.call(b"again")
    client.exchange()
    assert client.answers[again] == echoed(b"again")


@pytest.mark.parametrize("window", [1000, 65_535])
def test_answers_wait_for_credit(window: int) -> None:
    client = Client(window=window, credit=False)
    streams = [client.call(b"m", LONG) for _ in range(5)]
    client.exchange()
    got = [len(client.answers[stream].body) for stream in streams]
    assert sum(got) <= 65_535
    assert not any(client.answers[stream].ended for stream in streams)
    assert len(client.server._waiting) == 5
    other = client.call(b"")
    client.credit = True
    for stream, size in zip(streams, got, strict=True):
        client.engine.acknowledge(stream, size)
    client.exchange()
    for stream in streams:
        assert client.answers[stream] == Answered(
            200, b"\0" + (100_000).to_bytes(4, "big") + b"y" * 100_000, 0, True
        )
    assert client.answers[other].ended
    assert not client.server._waiting


def test_a_call_that_is_reset_gets_no_answer_and_leaves_nothing() -> None:
    client = Client()
    stream = client.call(b"gone")
    reset = frame(RST_STREAM, 0, stream, (8).to_bytes(4, "big"))
    client.exchange(client.sent() + reset)
    assert client.server.engine.open_streams == 0
    assert not client.server._calls
    later = client.call(b"later")
    client.exchange()
    assert client.answers[later] == echoed(b"later")


def test_no_more_calls_at_once_than_announced() -> None:
    client = Client()
    client.exchange()
    assert client.engine.peer_max_streams == STREAMS
    assert client.server.engine.settings.max_header_list_bytes == 1024 * 1024
    assert MESSAGE_BYTES == 4 * 1024 * 1024


def test_a_flood_of_resets_ends_the_connection() -> None:
    client = Client()
    client.exchange()
    for _ in range(300):
        for _ in range(100):
            stream = client.open()
            client.engine.reset_stream(stream, 8)
        client.exchange(client.sent())
        if client.server.engine.failed:
            return
    raise AssertionError("30,000 resets were taken")


def test_credit_for_nothing_costs_one_look_at_the_answers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(window=1_000_000, credit=False)
    for _ in range(200):
        client.call(b"m", LONG)
    client.exchange()
    looks = 0
    send_rest = UnaryConnection._send_rest

    def counted(connection: UnaryConnection, stream_id: int) -> None:
        nonlocal looks
        looks += 1
        send_rest(connection, stream_id)

    monkeypatch.setattr(UnaryConnection, "_send_rest", counted)
    client.server.receive_data(frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big")) * 5000, 0.0)
    assert 0 < looks <= 200


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes_are_taken_or_end_the_connection(parts: list[bytes]) -> None:
    client = Client()
    client.call(b"good")
    server = client.server
    server.receive_data(client.sent(), 0.0)
    for part in parts:
        server.receive_data(part, 0.0)
    rubbish = UnaryConnection(ANSWERS)
    for part in (PREFACE, *parts):
        rubbish.receive_data(part, 0.0)
