"""The injector's list of an application's probes: read, or refused with the place."""

import json
from typing import Any

import pytest

from ztunnel.proxy.istio.settings.app_probes import AppProbe, BadProbers, parse_probers

READY = "/app-health/web/readyz"


def one(value: Any) -> AppProbe:
    return parse_probers(json.dumps({READY: value}))[READY]


def test_every_kind_of_probe_is_parsed() -> None:
    assert one({"tcpSocket": {"port": 5}, "timeoutSeconds": 3}) == AppProbe(kind="tcp", port=5, timeout_s=3.0)
    assert one({"grpc": {"port": 5, "service": "a.B"}}) == AppProbe(kind="grpc", port=5, service="a.B")
    assert one({"grpc": {"port": 5, "service": None}}) == AppProbe(kind="grpc", port=5)
    headers = [{"name": "Host", "value": "shop"}, {"name": "X", "value": ""}]
    http = {"path": "ready?x=1", "port": 8080, "scheme": "https", "host": "10.0.0.1", "httpHeaders": headers}
    assert one({"httpGet": http}) == AppProbe(
        kind="https", port=8080, host="10.0.0.1", path="/ready?x=1", headers=(("Host", "shop"), ("X", ""))
    )
    assert one({"httpGet": {"port": 80}, "tcpSocket": None}) == AppProbe(kind="http", port=80)
    assert parse_probers(" ") == {}


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/a b?c=d e", "/a%20b?c=d%20e"),
        ("größe", "/gr%C3%B6%C3%9Fe"),
        ("/a%20b/%2F+~;=,(x)", "/a%20b/%2F+~;=,(x)"),
        ("/a\r\nX: y", "/a%0D%0AX:%20y"),
    ],
)
def test_path_is_escaped_like_by_kubelet(path: str, sent: str) -> None:
    """Kubernetes accepts any path, and a proxy that refused one at its start would keep the pod from running."""
    assert one({"httpGet": {"port": 1, "path": path}}).path == sent


def test_header_of_any_text_is_sent_as_it_is() -> None:
    headers = [{"name": "X-Team", "value": "Köln"}, {"name": "X", "value": None}]
    assert one({"httpGet": {"port": 1, "httpHeaders": headers}}).headers == (("X-Team", "Köln"), ("X", ""))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object of paths"),
        ('{"/metrics": {}}', "'/metrics' is not /app-health/CONTAINER/readyz"),
        ('{"/app-health/web/readyz/x": {}}', "is not /app-health/"),
        (f'{{"{READY}": 3}}', f"{READY}: must be an object"),
        (f'{{"{READY}": {{}}}}', "must have one of httpGet, tcpSocket, grpc, not 0"),
        (f'{{"{READY}": {{"httpGet": {{}}, "grpc": {{}}}}}}', "not 2"),
        (f'{{"{READY}": {{"httpGet": 3}}}}', "httpGet: must be an object"),
        (f'{{"{READY}": {{"tcpSocket": {{"port": "http"}}}}}}', "tcpSocket.port: 'http' is no port"),
        (f'{{"{READY}": {{"grpc": {{"port": true}}}}}}', "grpc.port: True is no port"),
        (f'{{"{READY}": {{"grpc": {{"port": 1}}, "timeoutSeconds": -1}}}}', "timeoutSeconds: -1 is no number"),
        (f'{{"{READY}": {{"httpGet": {{"port": 1, "scheme": "FTP"}}}}}}', "scheme: must be HTTP or HTTPS"),
        (
            f'{{"{READY}": {{"httpGet": {{"port": 1, "httpHeaders": [{{"name": "a b", "value": ""}}]}}}}}}',
            "is no header",
        ),
        (
            f'{{"{READY}": {{"httpGet": {{"port": 1, "httpHeaders": [{{"name": "a", "value": "x\\r\\ny"}}]}}}}}}',
            "is no header",
        ),
        ("[" * 100_000, "not JSON"),
        *(
            (f'{{"{READY}": {{"grpc": {{"port": 1}}, "timeoutSeconds": {seconds}}}}}', "is no number of seconds")
            for seconds in ("NaN", "1e999", "1" + 400 * "0")
        ),
        *(
            (
                f'{{"{READY}": {{"httpGet": {{"port": 1, "httpHeaders": {headers}}}}}}}',
                "httpHeaders: must be a list",
            )
            for headers in ("5", '{"name": "a"}', '"name"')
        ),
        *(
            (f'{{"{READY}": {probe}}}', "not Unicode")
            for probe in (
                r'{"httpGet": {"port": 1, "path": "/\ud800"}}',
                r'{"httpGet": {"port": 1, "host": "\ud800"}}',
                r'{"grpc": {"port": 1, "service": "\ud800"}}',
            )
        ),
    ],
)
def test_invalid_probe_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(BadProbers, match=said.replace("(", r"\(")):
        parse_probers(text)
