"""Hostile addons in a proxy: each has a clear line in the log, opens nothing that policy denies, and its bystander
is served.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.ports import free_port

_WAIT_S = 30.0
_PINGS = 300

ADDONS = """
import asyncio, time
from dataclasses import dataclass
from ztunnel.addons import Addon, Deny, Prefer

class Hostile(Addon):
    on_error = "ignore"
    time_limit_s = 0.2

    @dataclass(frozen=True)
    class Options:
        port: int

    def configured(self, options):
        self.port = options.port

class Raises(Hostile):
    def connecting(self, facts):
        if facts.destination_port == self.port:
            raise ValueError("hostile")

class Blocks(Hostile):
    def connecting(self, facts):
        if facts.destination_port == self.port:
            time.sleep(1)

class Nonsense(Hostile):
    def connecting(self, facts):
        return "open it" if facts.destination_port == self.port else None

class NeverEnds(Hostile):
    async def connecting(self, facts):
        while facts.destination_port == self.port:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

class Changes(Hostile):
    def connecting(self, facts):
        if facts.destination_port == self.port:
            facts.source_identity = "spiffe://cluster.local/ns/default/sa/admin"

class Tricks(Hostile):
    def connecting(self, facts):
        if facts.destination_port == self.port:
            asyncio.get_event_loop_policy().get_event_loop().stop()
            asyncio.get_running_loop().stop()

class Quits(Hostile):
    async def connecting(self, facts):
        if facts.destination_port == self.port:
            raise SystemExit(0)
"""
LINES = {
    "raises": "addon raises is suspended: its hook connecting raised",
    "blocks": "it blocked the loop for more than 0.1 s and was interrupted",
    "nonsense": "addon nonsense is suspended: its hook connecting returned a value of type str",
    "never-ends": "addon never-ends is suspended: its hook connecting did not end within 1 s of its cancellation",
    "changes": "addon changes is suspended: its hook connecting raised",
    "tricks": "addon tricks is suspended: its hook connecting raised",
    "quits": "addon quits is suspended: its hook connecting raised",
}


def listener(name: str, port: int, *, denied: bool = False) -> dict[str, object]:
    kind = "type.googleapis.com/envoy.extensions.filters.network."
    deny = {"action": "DENY", "policies": {"all": {"permissions": [{"any": True}], "principals": [{"any": True}]}}}
    rbac = {"@type": f"{kind}rbac.v3.RBAC", "stat_prefix": name, "rules": deny}
    proxy = {"@type": f"{kind}tcp_proxy.v3.TcpProxy", "stat_prefix": name, "cluster": "app"}
    filters = [{"name": "rbac", "typed_config": rbac}] if denied else []
    return {
        "name": name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [*filters, {"name": "tcp", "typed_config": proxy}]}],
    }


class Echo:
    """An application that echoes, in threads."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    @staticmethod
    def _serve(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            while data := sock.recv(65536):
                sock.sendall(data)

    def close(self) -> None:
        self._server.close()


def ask(port: int) -> bytes:
    """Open a connection, send a request, and return the answer. Empty if the connection is refused."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(b"ping")
            return sock.recv(4)
    except OSError:
        return b""


def p99_s(port: int) -> float:
    """Return the p99 of pings: on one connection, and every tenth on a new one."""
    times = []
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(_PINGS):
            began_s = time.perf_counter()
            if number % 10:
                sock.sendall(b"ping")
                assert sock.recv(4) == b"ping"
            else:
                assert ask(port) == b"ping"
            times.append(time.perf_counter() - began_s)
            time.sleep(0.002)
    return statistics.quantiles(times, n=100)[-1]


@contextmanager
def proxy(folder: Path, listeners: list[dict[str, object]], app: int, flags: list[str]) -> Iterator[Path]:
    """Run a proxy; yield its log."""
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": app}}}}
    cluster = {
        "name": "app",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "app", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    bootstrap = folder / "bootstrap.yaml"
    bootstrap.write_text(json.dumps({"static_resources": {"listeners": listeners, "clusters": [cluster]}}))
    log = folder / "log"
    command = [sys.executable, "-m", "ztunnel", "proxy", "--bootstrap", str(bootstrap), "--admin", "off"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--readiness", "off", "--metrics", "off", *flags], stdout=out, stderr=out
        )
        try:
            until_s = time.monotonic() + _WAIT_S
            while "live after" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until_s
                time.sleep(0.05)
            yield log
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(timeout=20)


def test_a_bystander_is_served_and_policy_holds_beside_hostile_addons(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(ADDONS)
    attacked = {name: free_port() for name in LINES}
    innocent, denied = free_port(), free_port()
    listeners = [
        *(listener(name, port) for name, port in attacked.items()),
        listener("innocent", innocent),
        listener("denied", denied, denied=True),
    ]
    flags = []
    for name, port in attacked.items():
        cls = "".join(word.capitalize() for word in name.split("-"))
        flags += ["--addon", f"{tmp_path}/hostile.py:{cls}", "--addon-option", f"{name}.port={port}"]
    with closing(Echo()) as app, proxy(tmp_path, listeners, app.port, flags) as log:
        alone_s = p99_s(innocent)
        attack = threading.Thread(target=lambda: [ask(port) for _ in range(5) for port in attacked.values()])
        attack.start()
        during_s = p99_s(innocent)
        attack.join()
        assert ask(denied) == b""
        until_s = time.monotonic() + _WAIT_S
        while not all(line in log.read_text() for line in LINES.values()):
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.1)
        text = log.read_text()
        for name in LINES:
            assert text.count(f"addon {name} is suspended") == 1
        # What is suspended is ignored, as these addons say, and everything is served again.
        assert [ask(port) for port in attacked.values()] == [b"ping"] * len(attacked)
        assert ask(denied) == b""
        settled_s = p99_s(innocent)
    if min(during_s, settled_s) > 3 * max(alone_s, 0.005):
        pytest.fail(f"p99 alone {alone_s:.4f} s, during {during_s:.4f} s, after {settled_s:.4f} s")
