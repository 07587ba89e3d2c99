"""Filters of access logs: which of three ends of connections they let through, beside Envoy.

A plain connection that echoes (response code 0, no flags), one whose application is not there (UF and URX), and a
tunnel that is refused (response code 404, NR).
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from tests.interop.case import Case
from tests.interop.loopback import COLUMNS, Running, Tunnels, application, echoes, text_log, until
from tests.interop.proxies import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, connect_route, connection_manager, tcp


def compares(kind: str, op: str, value: int) -> Json:
    """A filter by status code or duration."""
    return {kind: {"comparison": {"op": op, "value": {"default_value": value, "runtime_key": "x"}}}}


def flags(*names: str) -> Json:
    """A filter by response flags."""
    return {"response_flag_filter": {"flags": list(names)}}


STATUS, DURATION = "status_code_filter", "duration_filter"
_ERRORS, _LONG = compares(STATUS, "GE", 400), compares(DURATION, "GE", 60_000)
FILTERS: dict[str, tuple[Json, str]] = {
    "none": ({}, "echo unreachable refused"),
    "status at least 400": (_ERRORS, "refused"),
    "status 0": (compares(STATUS, "EQ", 0), "echo unreachable"),
    "status at most 404": (compares(STATUS, "LE", 404), "echo unreachable refused"),
    "status not 0": (compares(STATUS, "NE", 0), "refused"),
    "a minute or longer": (_LONG, ""),
    "a minute or shorter": (compares(DURATION, "LE", 60_000), "echo unreachable refused"),
    "any flag": (flags(), "unreachable refused"),
    "UF": (flags("UF"), "unreachable"),
    "NR or UH": (flags("NR", "UH"), "refused"),
    "a flag that nothing here sets": (flags("RLSE"), ""),
    "no health check": ({"not_health_check_filter": {}}, "echo unreachable refused"),
    "all of two": ({"and_filter": {"filters": [flags(), _ERRORS]}}, "refused"),
    "one of two": ({"or_filter": {"filters": [flags("UF"), _LONG]}}, "unreachable"),
    "nested": (
        {"or_filter": {"filters": [{"and_filter": {"filters": [flags("UF"), _LONG]}}, _ERRORS]}},
        "refused",
    ),
}
KINDS = ("echo", "unreachable", "refused")


class Filters(Running):
    """One proxy with a listener per end, each with a log per filter; all ends have happened."""

    def _open(self) -> None:
        super()._open()
        ports = {kind: free_port() for kind in KINDS}
        listeners = []
        for kind in KINDS:
            logs = [
                {
                    **text_log(self.log(kind, name), "%CONNECTION_ID%\n")[0],
                    **({"filter": chosen} if chosen else {}),
                }
                for name, (chosen, _) in FILTERS.items()
            ]
            if kind == "refused":
                filters = connection_manager({"route_config": connect_route("echo")})
                filters["typed_config"]["route_config"]["virtual_hosts"][0]["domains"] = ["elsewhere"]
                filters["typed_config"]["access_log"] = logs
            else:
                filters = tcp(kind, access_log=logs)
            address = {"socket_address": {"address": "127.0.0.1", "port_value": ports[kind]}}
            listeners.append({"name": kind, "address": address, "filter_chains": [{"filters": [filters]}]})
        targets = {"echo": application(echoes, self._stack), "unreachable": free_port()}
        clusters = []
        for name, port in targets.items():
            address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
            load = {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
            clusters.append({"name": name, "type": "STATIC", "load_assignment": load})
        self.start({"static_resources": {"listeners": listeners, "clusters": clusters}}, list(ports.values()))
        for kind in KINDS:
            with socket.create_connection(("127.0.0.1", ports[kind])) as sock:
                sock.settimeout(WAIT_S)
                _client(kind, sock)
        until(lambda: all(self._has(kind, "none") for kind in KINDS))

    def log(self, kind: str, name: str) -> Path:
        """The log behind a filter."""
        return self.folder / f"{kind} {list(FILTERS).index(name)}"

    def _has(self, kind: str, name: str) -> bool:
        log = self.log(kind, name)
        return log.exists() and bool(log.read_text())

    def through(self, name: str) -> str:
        """Return the ends of connections that a filter let through."""
        # All loggers of a connection write at the same time, and each file is flushed equally often. A line that
        # is missing one interval after the unfiltered line will not be written.
        if not FILTERS[name][1]:
            until(lambda: all(self._has(kind, "no health check") for kind in KINDS))
        else:
            with contextlib.suppress(AssertionError):
                until(lambda: all(self._has(kind, name) for kind in FILTERS[name][1].split()))
        return " ".join(kind for kind in KINDS if self._has(kind, name))


def _client(kind: str, sock: socket.socket) -> None:
    if kind == "refused":
        tunnels = Tunnels(sock)
        tunnels.connect(1)
        tunnels.until("1:end", "1:reset")
        return
    with contextlib.suppress(OSError):
        sock.sendall(b"hi")
        sock.recv(10)


CASES = tuple(
    Case(
        number=str(number),
        stimulus=name,
        run=lambda site, name=name: site.through(name),  # type: ignore[misc]
        expected=dict.fromkeys(COLUMNS, expected),
    )
    for number, (name, (_, expected)) in enumerate(FILTERS.items(), 1)
)
