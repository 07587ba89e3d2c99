"""Limits of a chain's connections: the same bootstrap, and the same clients, for Envoy and for ours."""

import contextlib
import json
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from tests.interop.loopback import application, echoes, listening, serving, text_log, until
from tests.interop.proxies import ENVOY
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T, chain, cluster, listener, tcp

pytestmark = pytest.mark.interop
_FILTERS = f"{T}envoy.extensions.filters.network"


def connection_limit(**more: object) -> Json:
    kind = f"{_FILTERS}.connection_limit.v3.ConnectionLimit"
    return {"name": "limit", "typed_config": {"@type": kind, "stat_prefix": "p", "max_connections": 2, **more}}


def rate_limit(**more: object) -> Json:
    kind = f"{_FILTERS}.local_ratelimit.v3.LocalRateLimit"
    bucket = {"max_tokens": 2, "tokens_per_fill": 1, "fill_interval": "60s"}
    return {"name": "rate", "typed_config": {"@type": kind, "stat_prefix": "p", "token_bucket": bucket, **more}}


class Site:
    """A proxy of one kind with one listener that has a limit."""

    def __init__(self, kind: str, limit: Json, folder: Path, stack: contextlib.ExitStack) -> None:
        self.log, self.port, self.admin = folder / "log", free_port(), free_port()
        proxy = tcp(access_log=text_log(self.log, "%RESPONSE_FLAGS% in=%BYTES_RECEIVED% out=%BYTES_SENT%\n"))
        _, served = listener(chain(limit, proxy))
        served["address"]["socket_address"]["port_value"] = self.port
        document = {
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": self.admin}}},
            "static_resources": {"listeners": [served], "clusters": [cluster(application(echoes, stack))[1]]},
        }
        path = folder / "bootstrap.json"
        path.write_text(json.dumps(document))
        stack.enter_context(serving(kind, path, admin=True))
        until(lambda: listening(self.port) and listening(self.admin))

    def connect(self) -> "socket.socket":
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def counts(self, *names: str) -> list[int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/stats", timeout=10) as page:
            lines = dict(line.rpartition(": ")[::2] for line in page.read().decode().splitlines())
        return [int(lines.get(name, 0)) for name in names]


def serves(sock: socket.socket) -> bool:
    """Return whether a connection echoes, and keep it open. A refused connection ends without a byte."""
    with contextlib.suppress(OSError):
        sock.sendall(b"x")
        return sock.recv(1) == b"x"
    return False


both = pytest.mark.parametrize("kind", ["envoy", "ours"])
here = pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")


@here
@both
def test_connections_at_once(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        site = Site(kind, connection_limit(), tmp_path, stack)
        first, second, third = (stack.enter_context(site.connect()) for _ in range(3))
        assert [serves(first), serves(second), serves(third)] == [True, True, False]
        names = ("connection_limit.p.active_connections", "connection_limit.p.limited_connections")
        assert site.counts(*names) == [2, 1]
        assert [serves(first), serves(second)] == [True, True]
        second.close()
        until(lambda: site.counts(names[0]) == [1])
        assert serves(stack.enter_context(site.connect()))
        first.close()
        until(lambda: site.log.exists() and site.log.read_text().count("\n") >= 3)
        assert sorted(site.log.read_text().splitlines()) == ["- in=0 out=0", "- in=2 out=2", "- in=2 out=2"]


@here
@both
def test_a_connection_over_the_limit_is_closed_after_its_delay(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        site = Site(kind, connection_limit(max_connections=1, delay="0.6s"), tmp_path, stack)
        first = stack.enter_context(site.connect())
        assert serves(first)
        began = time.monotonic()
        assert not serves(stack.enter_context(site.connect()))
        assert time.monotonic() - began > 0.5
        until(lambda: site.counts("connection_limit.p.active_connections") == [1])


@here
@both
def test_connections_in_a_time(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        site = Site(kind, rate_limit(), tmp_path, stack)
        served = [serves(stack.enter_context(site.connect())) for _ in range(4)]
        assert served == [True, True, False, False]
        assert site.counts("local_rate_limit.p.rate_limited") == [2]


@here
@both
@pytest.mark.parametrize("limit", [connection_limit, rate_limit])
def test_a_disabled_connection_limit_has_no_effect(kind: str, limit: object, tmp_path: Path) -> None:
    off = {"runtime_enabled": {"default_value": False, "runtime_key": "limits"}}
    with contextlib.ExitStack() as stack:
        site = Site(kind, limit(**off), tmp_path, stack)  # type: ignore[operator]
        assert all(serves(stack.enter_context(site.connect())) for _ in range(4))
