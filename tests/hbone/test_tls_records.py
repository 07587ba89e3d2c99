"""TLS connections that move from OpenSSL to our record layer, without any difference for OpenSSL at the other
end.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbone.errors import TlsError
from hbone.settings import Role
from hbone.tls import TlsSession, TlsStream, Unmovable, sealed_bytes
from hbone.tls_context import TlsContext, TlsSettings, TlsVersion
from hbone.tls_records import RecordSession, record_state
from hbone.tls_state import KeyState, RecordState
from tests.hbone.certificates import Authority

ROOT = Authority()
LEAF = ROOT.issue("spiffe://cluster.local/ns/a/sa/b")
SETTINGS = TlsSettings(
    certificate_chain_pem=LEAF.chain_pem, private_key_pem=LEAF.key_pem, trusted_ca_pem=ROOT.pem, movable=True
)
AES_256 = replace(SETTINGS, suites=("TLS_AES_256_GCM_SHA384",))
CHACHA = replace(SETTINGS, suites=("TLS_CHACHA20_POLY1305_SHA256",))
CONTEXTS = {
    (name, role): TlsContext(role, each)
    for name, each in (("128", SETTINGS), ("256", AES_256), ("chacha", CHACHA))
    for role in Role
}
OUT = memoryview(bytearray(sealed_bytes(300_000)))
ROOM = memoryview(bytearray(400_000))
SUITES = ["128", "256", "chacha"]
ROLES = list(Role)


def sealed(stream: TlsStream, plain: bytes = b"") -> bytes:
    return bytes(OUT[: stream.seal(plain, OUT)])


def opened(stream: TlsStream, *pieces: bytes) -> bytes:
    plain = b""
    for piece in pieces:
        stream.receive(memoryview(piece))
        plain += bytes(ROOM[: stream.read_into(ROOM)])
    return plain


def shaken(suite: str = "128", half_rtt_data: bytes = b"") -> tuple[TlsSession, TlsSession]:
    """Return a client and a server after their handshake, with no ticket of the server left to deliver."""
    client = TlsSession(CONTEXTS[suite, Role.CLIENT])
    server = TlsSession(CONTEXTS[suite, Role.SERVER], half_rtt_data)
    client.handshake()
    server.receive(memoryview(sealed(client)))
    assert not server.handshake()
    client.receive(memoryview(sealed(server)))
    assert client.handshake()
    assert bytes(ROOM[: client.read_into(ROOM)]) == half_rtt_data
    server.receive(memoryview(sealed(client)))
    assert server.handshake()
    return client, server


def pair(role: Role, suite: str = "128") -> tuple[TlsSession, TlsSession]:
    """The session that moves and its peer, after a message in each direction."""
    client, server = shaken(suite)
    assert opened(client, sealed(server, b"from the server")) == b"from the server"
    assert opened(server, sealed(client, b"from the client")) == b"from the client"
    return (client, server) if role is Role.CLIENT else (server, client)


def moved(stream: TlsStream) -> RecordSession:
    """The same connection in another process: its state has been bytes."""
    data = msgspec.msgpack.encode(record_state(stream))
    return RecordSession(msgspec.msgpack.decode(data, type=RecordState))


def both_ways(here: TlsStream, there: TlsStream, times: int = 3) -> None:
    for number in range(times):
        for size in (1, 5, 300, 20_000):
            message = bytes([number]) * size
            assert opened(there, sealed(here, message)) == message
            assert opened(here, sealed(there, message)) == message


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("role", ROLES)
def test_a_connection_continues_in_the_other_record_layer(role: Role, suite: str) -> None:
    here, there = pair(role, suite)
    both_ways(here, there)
    facts = here.facts()
    here = moved(here)
    assert here.facts() == facts
    both_ways(here, there)
    here = moved(here)  # and once more
    both_ways(here, there)


@pytest.mark.parametrize("role", ROLES)
def test_both_ends_can_move(role: Role) -> None:
    here, there = pair(role)
    here, there = moved(here), moved(there)
    both_ways(here, there)


@pytest.mark.parametrize("half_rtt_data", [b"", b"settings"])
@pytest.mark.parametrize("said", [0, 1])
def test_the_first_records_are_counted(half_rtt_data: bytes, said: int) -> None:
    """Half-RTT data and session tickets have numbers, too."""
    client, server = shaken(half_rtt_data=half_rtt_data)
    with pytest.raises(Unmovable, match="nothing sent yet"):
        server.traffic_keys()
    tickets = sealed(server, b"x" * said)
    assert len(tickets) > 100
    assert opened(client, tickets) == b"x" * said
    both_ways(moved(client), moved(server))


def test_data_that_came_with_the_handshake_is_counted() -> None:
    client = TlsSession(CONTEXTS["128", Role.CLIENT])
    server = TlsSession(CONTEXTS["128", Role.SERVER])
    client.handshake()
    server.receive(memoryview(sealed(client)))
    server.handshake()
    client.receive(memoryview(sealed(server)))
    client.handshake()
    flight = sealed(client)
    server.receive(memoryview(flight + sealed(client, b"early bird") + sealed(client, b"cut")[:9]))
    assert server.handshake()
    assert bytes(ROOM[: server.read_into(ROOM)]) == b"early bird"
    sealed(server, b"answer")
    assert server.missing
    with pytest.raises(Unmovable, match="within a record"):
        server.traffic_keys()


@pytest.mark.parametrize("role", ROLES)
def test_a_move_at_every_offset_of_the_received_bytes(role: Role) -> None:
    here, there = pair(role)
    wire = b"".join(sealed(there, message) for message in (b"a", b"bc" * 40, b"12345", b""))
    ours = moved(here)
    answers = opened(ours, wire)
    assert answers == b"a" + b"bc" * 40 + b"12345"
    cut_states: list[KeyState] = []
    for cut in range(len(wire) + 1):
        copy = moved(here)
        before = opened(copy, wire[:cut])
        copy = moved(copy)
        assert before + opened(copy, wire[cut:]) == answers
        cut_states.append(copy.state().receiving)
    assert set(cut_states) == {ours.state().receiving}


def test_openssl_can_leave_at_record_boundaries_and_says_how_far_they_are() -> None:
    here, there = pair(Role.SERVER)
    wire = sealed(there, b"x" * 300) + sealed(there, b"12345")
    ends = 300 + 22
    for cut in range(len(wire) + 1):
        here, there = pair(Role.SERVER)
        wire = sealed(there, b"x" * 300) + sealed(there, b"12345")
        plain = opened(here, wire[:cut])
        position = cut
        while here.missing:
            assert position + here.missing <= len(wire)
            piece = wire[position : position + here.missing]
            position += len(piece)
            plain += opened(here, piece)
        assert position == (0 if not cut else ends if cut <= ends else len(wire))
        copy = moved(here)
        assert plain + opened(copy, wire[position:]) == b"x" * 300 + b"12345"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("request_theirs", [False, True])
def test_keys_are_updated(role: Role, suite: str, request_theirs: bool) -> None:
    openssl, there = pair(role, suite)
    here = moved(openssl)
    both_ways(here, there)
    here.update_keys(request=request_theirs)
    both_ways(here, there)  # OpenSSL answers with an update of its own
    here = moved(here)
    both_ways(here, there)
    with pytest.raises(Unmovable, match="keys were updated"):
        there.traffic_keys()


def test_an_update_by_the_peer_is_answered() -> None:
    one, other = pair(Role.CLIENT)
    here, there = moved(one), moved(other)
    for request in (True, False):
        there.update_keys(request=request)
        both_ways(here, there)
    assert sealed(here) == b""


def test_updates_requested_before_the_answer_was_sent_are_answered_once() -> None:
    """A peer can send requests without reading, so the answers must not pile up (RFC 8446, 4.6.3)."""
    one, other = pair(Role.CLIENT)
    here, there = moved(one), moved(other)
    for _ in range(10_000):
        there.update_keys(request=True)
        assert opened(here, sealed(there, b"x")) == b"x"
    answer = sealed(here)
    assert len(answer) < 100
    assert opened(there, answer) == b""
    both_ways(here, there)


def test_keys_are_updated_before_their_limit() -> None:
    one, other = pair(Role.SERVER)
    state = record_state(one)
    here = RecordSession(state)
    here.most_records = state.sending.number + 2
    for number in range(7):
        message = bytes([number]) * 100
        assert opened(other, sealed(here, message)) == message


@pytest.mark.parametrize("role", ROLES)
def test_close_notify_in_both_directions(role: Role) -> None:
    one, there = pair(role)
    here = moved(one)
    here.close()
    here.close()
    assert opened(there, sealed(here)) == b""
    assert there.peer_closed
    assert sealed(here) == b""
    both = sealed(there, b"last words")
    there.close()
    assert opened(here, both + sealed(there)) == b"last words"
    assert here.peer_closed
    assert moved(here).peer_closed
    with pytest.raises(TlsError):
        here.seal(b"after the end", OUT)


@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 30, -1])
def test_a_corrupt_record_ends_the_connection_with_an_alert(position: int) -> None:
    one, there = pair(Role.SERVER)
    here = moved(one)
    wire = bytearray(sealed(there, b"x" * 100) + sealed(there, b"y" * 20_000))
    wire[position] ^= 1
    with pytest.raises(TlsError) as caught:
        opened(here, bytes(wire))
    assert not caught.value.by_peer
    alert = sealed(here)
    with pytest.raises(TlsError, match=r"alert|bad record|overflow|unexpected") as heard:
        opened(there, alert)
    assert heard.value.by_peer


def test_a_record_twice_or_left_out_is_not_accepted() -> None:
    one, there = pair(Role.SERVER)
    wire = sealed(there, b"once")
    here = moved(one)
    assert opened(here, wire) == b"once"
    with pytest.raises(TlsError):
        opened(here, wire)
    here = moved(one)
    with pytest.raises(TlsError):
        opened(here, sealed(there, b"the second"))


def test_plain_records_oversized_records_and_foreign_messages_are_refused() -> None:
    one, there = pair(Role.SERVER)
    for wire in (
        b"\x16\x03\x03\x00\x01\x00",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x41\x01" + b"x" * 16641,
        b"\x17\x03\x03\x00\x10" + b"x" * 16,
    ):
        with pytest.raises(TlsError):
            opened(moved(one), wire)
    peer = moved(there)
    for content, kind in (
        (b"\x02\x00\x00\x00", 22),  # a ServerHello
        (b"\x18\x00\x00\x01\x02", 22),
        (b"\x18\x00\x00\x02\x00\x00", 22),
        (b"\x18\x00\x00\x01\x00\x04", 22),
        (b"\x04\x10\x00\x00", 22),
        (b"", 22),
        (b"x", 24),
        (b"\x01", 21),
        (b"\0\0", 0),
    ):
        with pytest.raises(TlsError):
            opened(moved(one), raw(moved(peer), content, kind))


def test_padding_is_removed_and_alerts_of_the_peer_are_reported() -> None:
    one, there = pair(Role.SERVER)
    peer = moved(there)
    here = moved(one)
    assert opened(here, raw(peer, b"hello\x17" + b"\0" * 50, 0)) == b"hello"
    with pytest.raises(TlsError, match="certificate expired") as caught:
        opened(here, raw(peer, b"\x02\x2d", 21))
    assert caught.value.by_peer
    here.close()
    assert sealed(here) == b""


def test_many_empty_records_are_refused() -> None:
    one, there = pair(Role.SERVER)
    here, peer = moved(one), moved(there)
    for _ in range(32):
        assert opened(here, raw(peer, b"", 23)) == b""
    assert opened(here, raw(peer, b"x", 23)) == b"x"
    with pytest.raises(TlsError, match="empty"):
        opened(here, *(raw(peer, b"", 23) for _ in range(33)))


def test_tls_1_2_and_sessions_without_secrets_stay() -> None:
    old = replace(SETTINGS, min_version=TlsVersion.TLS_1_2, max_version=TlsVersion.TLS_1_2)
    for each in (old, replace(SETTINGS, movable=False)):
        client = TlsSession(TlsContext(Role.CLIENT, each))
        server = TlsSession(TlsContext(Role.SERVER, each))
        for _ in range(4):
            for one, other in ((client, server), (server, client)):
                if not one.established:
                    one.handshake()
                if wire := sealed(one):
                    other.receive(memoryview(wire))
        client.handshake()
        with pytest.raises(Unmovable):
            client.traffic_keys()


def test_secrets_do_not_appear_in_representations() -> None:
    one, _ = pair(Role.SERVER)
    keys, state = one.traffic_keys(), record_state(one)
    for secret, _ in (keys.sending, keys.receiving):
        for text in (repr(keys), repr(state), str(state.sending)):
            assert repr(secret)[2:-1] not in text
            assert secret.hex() not in text


def raw(peer: RecordSession, content: bytes, kind: int) -> bytes:
    """A record of any content type."""
    return peer._sending.seal(content, kind)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "hear", "move", "update"]),
        st.sampled_from(["", "5", "long"]),
        st.integers(0, 400),
    ),
    max_size=30,
)


@pytest.mark.parametrize("role", ROLES)
@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_no_byte_is_lost_by_a_move_at_any_step(role: Role, steps: list[tuple[str, str, int]]) -> None:
    first, there = pair(role)
    here: TlsStream = first
    on_its_way = heard = said = b""
    answers = 0
    for step, size, number in steps:
        message = bytes([number & 0xFF]) * {"": number & 7, "5": 5, "long": 17_000}[size]
        if step == "say":
            said += message
            on_its_way += sealed(there, message)
        elif step == "hear":
            cut = number % (len(on_its_way) + 1)
            heard += opened(here, on_its_way[:cut])
            on_its_way = on_its_way[cut:]
            assert opened(there, sealed(here, message)) == message
        elif step == "move":
            while here.missing and on_its_way:
                cut = here.missing
                heard += opened(here, on_its_way[:cut])
                on_its_way = on_its_way[cut:]
            if not here.missing:
                here = moved(here)
        elif isinstance(here, RecordSession):
            answers += 1
            here.update_keys(request=bool(number & 1))
    heard += opened(here, on_its_way)
    assert heard == said
