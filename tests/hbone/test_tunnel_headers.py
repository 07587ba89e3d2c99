"""Header values: what is written, what is read, what is refused."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.errors import InvalidHeader
from hbone.tunnel_headers import (
    Authority,
    Baggage,
    format_baggage,
    format_forwarded,
    format_traceparent,
    forwarded_host,
    parse_authority,
    parse_baggage,
)


@pytest.mark.parametrize(
    ("value", "host", "port"),
    [
        (b"10.0.0.2:8080", ip_address("10.0.0.2"), 8080),
        (b"[::1]:80", ip_address("::1"), 80),
        (b"[2001:DB8::1]:65535", ip_address("2001:db8::1"), 65535),
        (b"[::ffff:10.0.0.2]:80", ip_address("10.0.0.2"), 80),
        (b"Cart.shop.svc.cluster.local:80", "cart.shop.svc.cluster.local", 80),
        (b"a:1", "a", 1),
    ],
)
def test_authorities_are_split_into_host_and_port(value: bytes, host: object, port: int) -> None:
    assert parse_authority(value) == Authority(host, port)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"10.0.0.2",
        b":80",
        b"10.0.0.2:",
        b"10.0.0.2:0",
        b"10.0.0.2:65536",
        b"10.0.0.2:+80",
        b"10.0.0.2: 80",
        b"10.0.0.2:\xc2\xb2",
        b"10.0.0.2:000080",
        b"user@10.0.0.2:80",
        b"10.0.0.2/x:80",
        b"::1:80",
        b"[::1]",
        b"[::1%eth0]:80",
        b"[10.0.0.2]:80",
        b"cart.:80",
        b".cart:80",
        b"ca rt:80",
        b"cart\x00:80",
        b"10.0.2:80",
        b"167772162:80",
        b"0x0a000002:80",
        b"010.0.0.2:80",
        b"x" * 254 + b":80",
    ],
)
def test_malformed_authorities_are_refused(value: bytes | None) -> None:
    with pytest.raises(InvalidHeader):
        parse_authority(value)


@given(st.binary(max_size=30))
def test_any_authority_is_read_or_refused(value: bytes) -> None:
    try:
        authority = parse_authority(value)
    except InvalidHeader:
        return
    assert parse_authority(authority.encode()) == authority


@given(st.ip_addresses(), st.integers(1, 65535))
def test_addresses_round_trip(address: object, port: int) -> None:
    authority = Authority(address, port)  # type: ignore[arg-type]
    read = parse_authority(authority.encode())
    assert read.port == port
    assert read.host in (address, getattr(address, "ipv4_mapped", None))


FULL = Baggage(
    cluster_id="Kubernetes",
    namespace="shop",
    workload_type="deployment",
    workload_name="cart",
    service_name="cart-svc",
    revision="v1",
    region="eu",
    zone="eu-1",
)
TEXT = (
    b"k8s.cluster.name=Kubernetes,k8s.namespace.name=shop,k8s.deployment.name=cart,"
    b"service.name=cart-svc,service.version=v1,cloud.region=eu,cloud.availability_zone=eu-1"
)


def test_baggage_is_written_and_read_back() -> None:
    assert format_baggage(FULL) == TEXT
    assert parse_baggage(((b"baggage", TEXT),)) == FULL
    assert format_baggage(Baggage(namespace="x")) == b"k8s.namespace.name=x"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b""], Baggage()),
        ([b"k8s.namespace.name=a,k8s.namespace.name=b"], Baggage(namespace="b")),
        ([b"k8s.namespace.name=a", b"service.name=b"], Baggage(namespace="a", service_name="b")),
        ([b"service.name=a=b"], Baggage(service_name="a")),
        ([b"service.name"], Baggage()),
        ([b"unknown=1, service.name=x"], Baggage()),
        ([b"k8s.job.name=j"], Baggage(workload_type="job", workload_name="j")),
        ([b"k8s.pod.name=p,k8s.cronjob.name=c"], Baggage(workload_type="cronjob", workload_name="c")),
        ([b"service.name=a", b"\xc3\xa4"], Baggage()),
    ],
)
def test_baggage_is_parsed_like_the_rust_proxys(values: list[bytes], expected: Baggage) -> None:
    assert parse_baggage(tuple((b"baggage", value) for value in values)) == expected


def test_forwarded() -> None:
    assert format_forwarded("10.1.0.5:41234") == b'for="10.1.0.5:41234"'
    value = format_forwarded("[::1]:80", "cart.shop")
    assert value == b'for="[::1]:80";host=cart.shop'
    assert forwarded_host(((b"forwarded", value),)) == "cart.shop"


@pytest.mark.parametrize(
    ("value", "host"),
    [
        (b'for="[::1]:80";host=cart.shop', "cart.shop"),
        (b'for=x; host="quoted"', "quoted"),
        (b"host=", None),
        (b'host=""', None),
        (b"for=x", None),
        (b"host=\xff", None),
    ],
)
def test_forwarded_hosts(value: bytes, host: str | None) -> None:
    assert forwarded_host(((b"forwarded", value),)) == host
    assert forwarded_host(()) is None


def test_traceparent() -> None:
    noise = int.from_bytes(bytes(range(16)) + bytes(range(8)))
    value = b"00-000102030405060708090a0b0c0d0e0f-0001020304050607-"
    assert format_traceparent(noise) == value + b"00"
    assert format_traceparent(noise, 0x090A0B0C0D0E0F) == value + b"00"
    assert format_traceparent(noise, 0x090A0B0C0D0E10) == value + b"01"
