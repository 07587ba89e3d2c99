"""The verdict of an answer of Envoy's dialect, by what becomes of each way."""

from typing import Any

import pytest

from ztunnel.proxy.envoy.path.verdict import verdict_of


def through(*endpoints: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"clusters": [{"cluster": "c", "endpoints": list(endpoints), **more}]}


GOES = {"address": "10.0.0.1:80", "tls": None}
TUNNEL = {"address": "10.0.0.2:15008", "tunnel": {"authority": "10.0.0.2:80"}, "tls": {"identity": ["a"]}}
CLOSED = {"verdict": "closed: no"}
NO_SECRET = {"tls": {"verdict": "closed: secrets are missing", "awaits": ["a"]}}


@pytest.mark.parametrize(
    ("hop", "verdict"),
    [
        (through(GOES), "allowed"),
        (CLOSED, "refused: closed: no"),
        (through(GOES) | NO_SECRET, "refused: closed: secrets are missing"),
        (through(TUNNEL), "allowed here; the proxy at the tunnel's far end also decides"),
        (through(TUNNEL | {"inbound": through(GOES)}), "allowed"),
        (through(TUNNEL | {"inbound": CLOSED}), "refused: closed: no"),
        (through(TUNNEL | NO_SECRET), "refused: closed: secrets are missing"),
        (through({"hop": through(GOES)}), "allowed"),
        (through({"hop": through(TUNNEL | CLOSED), "tls": None}), "refused: closed: no"),
        (through(GOES, GOES | CLOSED), "allowed, but not by 1 of 2 endpoints: closed: no"),
        (through(verdict="closed: no endpoint (UH)"), "refused: closed: no endpoint (UH)"),
        (through(), "refused: closed: no endpoint"),
    ],
)
def test_explain_verdict_combines_all_ways(hop: dict[str, Any], verdict: str) -> None:
    assert verdict_of(hop) == verdict
