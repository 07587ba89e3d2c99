"""Headers added by a connection manager, created on demand; tests/interop compares them with Envoy."""

import re
from typing import Any

import pytest

from tests.ztunnel.proxy.envoy.telemetry.test_format import info
from xds.dialects.envoy.access_log import DEFAULT_FORMAT
from xds.model.format_string import parse_format
from xds.model.http import Http2Settings, HttpConnectionManager, RouteTable
from ztunnel.proxy.envoy.stream.request_headers import header_values, stream_id
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo, TlsFacts
from ztunnel.proxy.envoy.telemetry.format import renderer

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def request(*headers: tuple[str, str], tls: TlsFacts | None = None, **manager: Any) -> StreamInfo:
    table = RouteTable("", ())
    made = HttpConnectionManager(
        stat_prefix="x", routes=table, http2=Http2Settings(), allows_connect=True, **manager
    )
    return info(method="CONNECT", request_headers=headers, manager=made, tls=tls)


def test_the_default_format_has_an_id_which_is_kept_for_the_stream() -> None:
    hop = request()
    assert not hop.stream_id  # not requested yet
    line = renderer(parse_format(DEFAULT_FORMAT))
    first, second = _UUID.findall(line(hop)), _UUID.findall(line(hop))
    assert len(first) == 1
    assert first == second == [stream_id(hop)]


def test_the_id_of_a_client_is_kept() -> None:
    hop = request(("x-request-id", "mine"))
    assert list(header_values(hop, "x-request-id")) == ["mine"]
    assert stream_id(hop) == "mine"


def test_request_id_is_generated_only_if_read() -> None:
    hop = request()
    renderer(parse_format("%REQ(USER-AGENT)% %REQ(X-FORWARDED-PROTO)%"))(hop)
    assert not hop.stream_id


@pytest.mark.parametrize(("preserves", "kept"), [(False, False), (True, True)])
def test_edge_replaces_the_request_id_of_the_client(preserves: bool, kept: bool) -> None:
    hop = request(("x-request-id", "mine"), uses_remote_address=True, preserves_request_id=preserves)
    assert (stream_id(hop) == "mine") is kept


def test_request_has_no_id_if_generation_is_off() -> None:
    hop = request(generates_request_id=False)
    assert not header_values(hop, "x-request-id")
    assert stream_id(hop) is None


def test_the_scheme_is_that_of_the_connection() -> None:
    assert list(header_values(request(), "x-forwarded-proto")) == ["http"]
    assert list(header_values(request(tls=TlsFacts()), "x-forwarded-proto")) == ["https"]
    assert list(header_values(request(("x-forwarded-proto", "ftp")), "x-forwarded-proto")) == ["ftp"]


def test_a_connection_without_requests_has_no_headers() -> None:
    hop = info()
    assert not header_values(hop, "x-request-id")
    assert _UUID.fullmatch(stream_id(hop) or "")
