"""Which route a request takes, and which headers a tunnel's request gets; no sockets."""

from types import SimpleNamespace

import pytest

from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.http import HeaderMatch, Http2Settings, HttpConnectionManager, Route, RouteTable, VirtualHost
from xds.model.listener import AppendAction
from xds.model.string_match import StringMatch
from ztunnel.proxy.envoy.listeners.chains import LiveHeader
from ztunnel.proxy.envoy.path.terminate import RequestRefused, tunnel_route
from ztunnel.proxy.envoy.path.tunnel_request import tunnel_request
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo

MANAGER = HttpConnectionManager(
    stat_prefix="", routes=RouteTable("t", ()), http2=Http2Settings(), allows_connect=True
)


def info(*headers: tuple[str, str]) -> StreamInfo:
    here = SocketAddress("127.0.0.1", 1)
    facts = ConnectionFacts(source=here, direct_source=here, destination=here)
    made = StreamInfo(connection_id=1, facts=facts, started=0.0, started_at=0.0)
    made.method, made.authority, made.request_headers = "CONNECT", "a.example:80", headers
    return made


@pytest.mark.parametrize("match", [StringMatch("exact", "b"), StringMatch("regex", "b"), None])
@pytest.mark.parametrize("invert", [False, True])
def test_an_inverted_value_matches_no_request_without_the_header(match: StringMatch | None, invert: bool) -> None:
    route = Route(name="r", path=None, headers=(HeaderMatch("x-a", match, invert),), direct_status=200)
    table = RouteTable("t", (VirtualHost("v", ("*",), (route,)),))
    taken = []
    for headers in ((), (("x-a", "b"),), (("x-a", "c"),)):
        with pytest.raises(RequestRefused) as refused:
            tunnel_route(MANAGER, table, info(*headers))
        taken.append(refused.value.answer.status)
    absent = match is None and invert
    assert taken == [200 if each else 404 for each in (absent, not invert, (match is None) is not invert)]


def matched(match: HeaderMatch, *headers: tuple[str, str]) -> bool:
    """Return whether a route with this condition is chosen for a tunnel's request."""
    route = Route(name="r", path=None, headers=(match,), direct_status=200)
    table = RouteTable("t", (VirtualHost("v", ("*",), (route,)),))
    with pytest.raises(RequestRefused) as refused:
        tunnel_route(MANAGER, table, info(*headers))
    return refused.value.answer.status == 200


@pytest.mark.parametrize(
    ("name", "value"), [(":authority", "a.example:80"), ("host", "a.example:80"), (":method", "CONNECT")]
)
def test_routes_match_the_pseudo_headers_of_a_request(name: str, value: str) -> None:
    assert matched(HeaderMatch(name, StringMatch("exact", value)))
    assert matched(HeaderMatch(name, None))
    assert not matched(HeaderMatch(name, StringMatch("exact", "x")))
    assert not matched(HeaderMatch(name, StringMatch("exact", value), invert=True))
    assert matched(HeaderMatch(name, StringMatch("exact", "x"), invert=True))


def test_a_connect_has_no_path_to_match() -> None:
    assert not matched(HeaderMatch(":path", None))


def test_a_header_matches_if_one_of_its_values_does() -> None:
    sent = (("x-a", "ab"), ("x-a", "c"))
    for text in ("ab", "c"):
        assert matched(HeaderMatch("x-a", StringMatch("exact", text)), *sent)
        assert not matched(HeaderMatch("x-a", StringMatch("exact", text), invert=True), *sent)
    assert not matched(HeaderMatch("x-a", StringMatch("exact", "ab,c")), *sent)


def test_headers_are_overwritten_before_others_are_appended() -> None:
    """Both evaluate the request without any of the added headers, in Envoy's order."""
    wanted = [
        ("x-a", "1", AppendAction.APPEND_IF_EXISTS_OR_ADD),
        ("x-a", "2", AppendAction.ADD_IF_ABSENT),
        ("x-a", "3", AppendAction.OVERWRITE_IF_EXISTS),
        ("x-a", "4", AppendAction.OVERWRITE_IF_EXISTS_OR_ADD),
        ("x-a", "5", AppendAction.OVERWRITE_IF_EXISTS_OR_ADD),
        ("x-b", "", AppendAction.ADD_IF_ABSENT),
    ]
    headers = [LiveHeader(name, lambda _, value=value: value, action, False) for name, value, action in wanted]  # type: ignore[misc]
    proxy = SimpleNamespace(hostname=lambda _: "a:1", headers=headers)
    found = tunnel_request(proxy, info())  # type: ignore[arg-type]
    assert found == ("a:1", [("x-a", "5"), ("x-a", "1"), ("x-a", "2")])
