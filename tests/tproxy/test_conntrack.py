"""Entries of connection tracking: packets as they look after translation, and what finds the entry again."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tproxy.conntrack import delete_request, read_flow
from tproxy.wire import MalformedDump, attribute, attribute_map, nest


def direction(kind: int, source: str, destination: str, ports: tuple[int, int]) -> bytes:
    numbers = (1, 2) if ":" not in source else (3, 4)
    addresses = [
        attribute(number, ip_address(text).packed)
        for number, text in zip(numbers, (source, destination), strict=True)
    ]
    protocol = [attribute(1, b"\6")]
    protocol += [attribute(at, port.to_bytes(2, "big")) for at, port in zip((2, 3), ports, strict=True)]
    return nest(kind, nest(1, *addresses), nest(2, *protocol))


@pytest.mark.parametrize(
    ("family", "client", "service", "pod"),
    [(2, "10.0.0.1", "10.96.0.1", "10.0.0.2"), (10, "fd00::1", "fd00:96::1", "fd00::2")],
)
def test_a_service_is_judged_as_its_pod(family: int, client: str, service: str, pod: str) -> None:
    original = direction(1, client, service, (40000, 80))
    entry = original + attribute(18, b"\0\7") + attribute(12, b"abcd")
    body = bytes((family, 0, 0, 0)) + entry + direction(2, pod, client, (8080, 40000)) + attribute(3, bytes(4))
    flow = read_flow(body)
    assert (flow.source, flow.destination) == (ip_address(client), ip_address(pod))
    assert (flow.protocol, flow.source_port, flow.destination_port) == (6, 40000, 8080)
    # It is found by what it was before translation, its zone and its number.
    request = delete_request(flow)
    assert request.body[0] == family
    assert attribute_map(request.body[4:]) == attribute_map(entry)


@pytest.mark.parametrize(("family", "number", "first"), [(2, 1, 4), (10, 58, 7)])
def test_a_ping_has_its_type_and_code(family: int, number: int, first: int) -> None:
    client, pod = (ip_address("10.0.0.1" if family == 2 else f"fd00::{end}") for end in (1, 2))
    ends = [attribute(at if family == 2 else at + 2, address.packed) for at, address in ((1, client), (2, pod))]

    def tracked(kind: int, icmp: int) -> bytes:
        values = (b"\x12\x34", bytes((icmp,)), b"\5")
        fields = [attribute(first + at, value) for at, value in enumerate(values)]
        return nest(kind, nest(1, *ends), nest(2, attribute(1, bytes((number,))), *fields))

    flow = read_flow(bytes((family, 0, 0, 0)) + tracked(1, 8) + tracked(2, 0))
    assert (flow.protocol, flow.icmp) == (number, (8, 5))


@pytest.mark.parametrize(("octets", "protocol"), [(3, b"\6"), (4, b"")])
def test_addresses_and_protocols_of_odd_lengths_are_malformed(octets: int, protocol: bytes) -> None:
    ends = nest(1, attribute(1, bytes(octets)), attribute(2, bytes(octets)))
    with pytest.raises(MalformedDump):
        read_flow(bytes((2, 0, 0, 0)) + nest(1, ends, nest(2, attribute(1, protocol))))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_flow_or_malformed(body: bytes) -> None:
    try:
        read_flow(body)
    except MalformedDump:
        pass
