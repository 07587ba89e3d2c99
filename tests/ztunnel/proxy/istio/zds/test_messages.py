"""Messages as bytes: recorded ones, every value in both directions, and invalid bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.proto.istio.zds.zds_pb2 import AddWorkload, WorkloadRequest
from ztunnel.proxy.istio.zds.messages import (
    PACKET_BYTES,
    AddPod,
    DeletePod,
    KeepPod,
    Request,
    SnapshotSent,
    Unexpected,
    Unreadable,
    ZdsError,
    answer_bytes,
    hello_bytes,
    read_answer,
    read_hello,
    read_request,
    request_bytes,
)
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

UID = PodUid("uid-b")
INFO = PodInfo(name="b", namespace="default", service_account="sa-b")
WIRE = {
    AddPod(UID, INFO): "0a1b 0a05 7569642d62 1212 0a0162 120764656661756c74 1a0473612d62",
    DeletePod(UID): "1207 1205 7569642d62",
    KeepPod(UID): "2a07 0a05 7569642d62",
    SnapshotSent(): "1a00",
}
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
requests = st.one_of(
    st.builds(AddPod, names.map(PodUid), st.builds(PodInfo, name=names, namespace=names, service_account=names)),
    st.builds(DeletePod, names.map(PodUid)),
    st.builds(KeepPod, names.map(PodUid)),
    st.just(SnapshotSent()),
)


def descriptors_of(request: Request) -> int:
    return int(isinstance(request, AddPod))


def test_hello_and_success_are_the_bytes_of_the_real_proxy() -> None:
    assert hello_bytes().hex() == "0801"
    assert answer_bytes().hex() == "0a00"


@pytest.mark.parametrize(("request_", "wire"), WIRE.items(), ids=lambda value: type(value).__name__)
def test_requests_are_the_bytes_of_the_real_agent(request_: Request, wire: str) -> None:
    assert request_bytes(request_) == bytes.fromhex(wire)


@given(requests)
def test_request_survives_encoding(request: Request) -> None:
    assert read_request(request_bytes(request), descriptors_of(request)) == request


@pytest.mark.parametrize("request_", WIRE, ids=lambda value: type(value).__name__)
def test_truncated_request_is_refused(request_: Request) -> None:
    wire = request_bytes(request_)
    for cut in range(len(wire)):
        with pytest.raises(Unreadable):
            read_request(wire[:cut], descriptors_of(request_))


@given(st.binary(max_size=80), st.integers(0, 3))
def test_any_bytes_are_a_request_or_refused(data: bytes, descriptors: int) -> None:
    try:
        request = read_request(data, descriptors)
    except ZdsError:
        return
    assert descriptors == descriptors_of(request)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_hello_and_an_answer_or_refused(data: bytes) -> None:
    for reader in (read_hello, read_answer):
        try:
            reader(data)
        except Unreadable:
            pass


def test_a_hello_of_another_version_is_refused() -> None:
    read_hello(hello_bytes())
    for wire in (b"", b"\x08\x02"):
        with pytest.raises(Unreadable, match="version"):
            read_hello(wire)


@pytest.mark.parametrize(
    ("request_", "descriptors", "text"),
    [
        (AddPod(UID, INFO), 0, "failure to read message : No control message"),
        (AddPod(UID, INFO), 2, "failure to read message : Expected 1 FD, got 2"),
        (DeletePod(UID), 1, "failure to read message : Unexpected control message"),
        (SnapshotSent(), 1, "failure to read message : Unexpected control message"),
    ],
)
def test_each_message_has_its_number_of_descriptors(request_: Request, descriptors: int, text: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_request(request_bytes(request_), descriptors)
    assert str(caught.value) == text


def test_a_pod_without_identity_is_refused() -> None:
    wire = WorkloadRequest(add=AddWorkload(uid="uid-b")).SerializeToString()
    with pytest.raises(Unexpected, match=r"failure to process message : no workload_info for 'uid-b'"):
        read_request(wire, 1)


def test_unknown_payload_is_refused() -> None:
    with pytest.raises(Unreadable, match="no payload"):
        read_request(bytes.fromhex("3200"), 0)


@given(st.text(max_size=2000))
def test_long_answer_is_cut_to_a_packet(text: str) -> None:
    wire = answer_bytes(text)
    assert len(wire) <= PACKET_BYTES
    read = read_answer(wire)
    whole = text.encode(errors="replace").decode()
    assert read == whole or whole.startswith(read.removesuffix("..."))
    assert bool(read) == bool(text)


@pytest.mark.parametrize("character", ["x", "ü", "\U0001f600"])
def test_a_long_answer_is_cut_between_characters(character: str) -> None:
    for length in range(1018 // len(character.encode()) - 1, 1300):
        wire = answer_bytes(character * length)
        assert len(wire) <= PACKET_BYTES
        assert set(read_answer(wire)) <= {character, "."}


def test_names_longer_than_a_packet_are_refused_before_they_are_sent() -> None:
    with pytest.raises(ValueError, match="ZDS takes 1024"):
        request_bytes(AddPod(UID, PodInfo(name="n" * 1100, namespace="", service_account="")))
