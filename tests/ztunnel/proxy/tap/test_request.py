"""What a tap may be asked for, and which connections it then concerns."""

import pytest

from xds.model.address import SocketAddress
from ztunnel.proxy.tap.request import BadRequest, Direction, StreamFacts, TapRequest

FACTS = StreamFacts(
    direction=Direction.OUTBOUND,
    client=SocketAddress("10.0.0.1", 41000),
    server=SocketAddress("10.96.0.9", 80),
    peers=frozenset(
        {"10.96.0.9", "10.0.0.2", "web", "default/web", "web.default.svc.cluster.local", "spiffe://a/b"}
    ),
    ports=frozenset({8080}),
)


def test_all_parameters_but_the_pod_have_defaults() -> None:
    found = TapRequest.parse({"pod": "default/web"})
    assert (found.pod, found.port, found.peer) == ("default/web", 0, "")
    assert (found.for_s, found.limit_bytes) == (60.0, 64 << 20)


def test_all_parameters_are_parsed() -> None:
    given = {"pod": "::ffff:10.0.0.1", "port": "8080", "peer": "fd00:0::2", "for": "1m30s", "limit": "500KiB"}
    found = TapRequest.parse(given)
    assert (found.pod, found.port, found.peer) == ("10.0.0.1", 8080, "fd00::2")
    assert (found.for_s, found.limit_bytes) == (90.0, 512_000)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("10B", 10), ("64M", 64 << 20), ("64mib", 64 << 20), ("2kB", 2000), ("1GiB", 1 << 30)],
)
def test_size_limits_are_parsed(text: str, size: int) -> None:
    assert TapRequest.parse({"pod": "a/b", "limit": text}).limit_bytes == size


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "pod: this parameter is required"),
        ({"pod": ""}, "pod: this parameter is required"),
        ({"pod": "a/b", "ports": "1"}, "ports: no such parameter"),
        ({"pod": "a/b", "port": "0"}, "port: 0 is not a port from 1 to 65535"),
        ({"pod": "a/b", "port": "65536"}, "port: 65536 is not a port from 1 to 65535"),
        ({"pod": "a/b", "port": "http"}, "port: http is not a port from 1 to 65535"),
        ({"pod": "a/b", "for": "soon"}, "for: soon must be a duration such as 90, 10s, 500ms or 1h30m"),
        ({"pod": "a/b", "for": "0s"}, "for: 0s must be more than 0 and at most 900s"),
        ({"pod": "a/b", "for": "16m"}, "for: 16m must be more than 0 and at most 900s"),
        ({"pod": "a/b", "limit": "much"}, "limit: much is no size such as 500KiB, 64MiB or 1GiB"),
        ({"pod": "a/b", "limit": "0"}, "limit: 0 must be more than 0 and at most 1024MiB"),
        ({"pod": "a/b", "limit": "2GiB"}, "limit: 2GiB must be more than 0 and at most 1024MiB"),
        ({"pod": "a/\n"}, "pod: at most 512 printable characters"),
        ({"pod": "a/b", "peer": "x" * 513}, "peer: at most 512 printable characters"),
    ],
)
def test_invalid_tap_parameter_is_refused_by_name(given: dict[str, str], reason: str) -> None:
    with pytest.raises(BadRequest) as refused:
        TapRequest.parse(given)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    ("port", "peer", "matches"),
    [
        ("", "", True),
        ("80", "", True),
        ("8080", "", True),
        ("443", "", False),
        ("", "10.0.0.2", True),
        ("", "default/web", True),
        ("", "spiffe://a/b", True),
        ("", "10.0.0.1", False),
        ("443", "web", False),
        ("80", "db", False),
    ],
)
def test_tap_request_matches_connections(port: str, peer: str, matches: bool) -> None:
    assert TapRequest.parse({"pod": "a/b", "port": port, "peer": peer}).matches(FACTS) is matches
