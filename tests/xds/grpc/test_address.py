"""Hosts and ports as they are written."""

import pytest

from xds.grpc.address import host_and_port


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("istiod.istio-system.svc:15012", "istiod.istio-system.svc", 15012),
        ("127.0.0.1:65535", "127.0.0.1", 65535),
        ("[::1]:1", "::1", 1),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert host_and_port(text) == (host, port)


def test_port_0_is_allowed_only_for_listening() -> None:
    assert host_and_port("[::]:0", least_port=0) == ("::", 0)
    with pytest.raises(ValueError, match=r"'\[::\]:0' is neither"):
        host_and_port("[::]:0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":1",
        "[]:1",
        "host:",
        "host:65536",
        "host:-1",
        "host:1a",
        "host:٣",
        "host:" + "1" * 5000,
        "::1:80",
        "[::g]:80",
        "http://a:1",
    ],
)
@pytest.mark.parametrize("least_port", [0, 1])
def test_malformed_addresses_are_refused(text: str, least_port: int) -> None:
    with pytest.raises(ValueError, match=r".+"):
        host_and_port(text, least_port=least_port)
