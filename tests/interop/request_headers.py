"""Headers that a connection manager gives each request of its own: what logs and routes see of them, beside Envoy.

Each row is a request to one listener; the log says which headers it has, and the route that matches one of them
answers with another status. Whose address a manager at the edge adds to ``x-forwarded-for`` is not compared: for a
client on loopback Envoy takes one of its own interfaces.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

import h2.connection
import h2.events

from tests.interop.case import Case
from tests.interop.loopback import Running, text_log, until
from tests.interop.operators import on_loopback
from tests.interop.proxies import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, connection_manager

_LOGGED = ("x-request-id", "x-forwarded-proto", "x-forwarded-for", "x-envoy-internal", "x-envoy-external-address")
_FORMAT = "%RESPONSE_CODE%|%STREAM_ID%|" + "|".join(f"%REQ({name})%" for name in _LOGGED) + "\n"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
#: The last address, which is not one of those that clients here claim.
_ADDED = re.compile(r"(?<![\d.])(?!10\.1\.2\.3$)[\d.:a-f]+$")
OWN = "0a1b2c3d-1111-4222-8333-444455556666"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, and the manager that receives it. ``matched`` is a header that its first route requires."""

    name: str
    expected: str
    manager: Json = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()
    connect: bool = False
    matched: str = ""


_ID = (("x-request-id", OWN),)
_NEW = "stream=a new id x-request-id=a new id"
_KEPT = "stream=the client's x-request-id=the client's"
_FROM = "x-forwarded-for=an address x-envoy-external-address=127.0.0.1"
_EDGE: Json = {"use_remote_address": True}
REQUESTS = (
    Request(name="without an id", expected=f"200 {_NEW} x-forwarded-proto=http"),
    Request(name="CONNECT without an id", expected=f"200 {_NEW} x-forwarded-proto=http", connect=True),
    Request(name="with an id", expected=f"200 {_KEPT} x-forwarded-proto=http", headers=_ID),
    Request(
        name="with an id that is none",
        expected="200 stream=mine x-request-id=mine x-forwarded-proto=http",
        headers=(("x-request-id", "mine"),),
    ),
    Request(
        name="with an empty id", expected=f"200 {_NEW} x-forwarded-proto=http", headers=(("x-request-id", ""),)
    ),
    Request(
        name="with two ids",
        expected=f"200 stream={OWN},mine x-request-id={OWN},mine x-forwarded-proto=http",
        headers=(*_ID, ("x-request-id", "mine")),
    ),
    Request(name="at the edge", expected=f"200 {_NEW} x-forwarded-proto=http {_FROM}", manager=_EDGE),
    Request(
        name="at the edge, with an id",
        expected=f"200 {_NEW} x-forwarded-proto=http {_FROM}",
        manager=_EDGE,
        headers=_ID,
    ),
    Request(
        name="at the edge, ids preserved, with an id",
        expected=f"200 {_KEPT} x-forwarded-proto=http {_FROM}",
        manager={**_EDGE, "preserve_external_request_id": True},
        headers=_ID,
    ),
    Request(
        name="at the edge, ids preserved, without an id",
        expected=f"200 {_NEW} x-forwarded-proto=http {_FROM}",
        manager={**_EDGE, "preserve_external_request_id": True},
    ),
    Request(
        name="ids are not generated", expected="200 x-forwarded-proto=http", manager={"generate_request_id": False}
    ),
    Request(
        name="ids are not generated, with an id",
        expected=f"200 {_KEPT} x-forwarded-proto=http",
        manager={"generate_request_id": False},
        headers=_ID,
    ),
    Request(
        name="at the edge, ids are not generated, with an id",
        expected=f"200 {_KEPT} x-forwarded-proto=http {_FROM}",
        manager={**_EDGE, "generate_request_id": False},
        headers=_ID,
    ),
    Request(name="a route asks for an id", expected=f"299 {_NEW} x-forwarded-proto=http", matched="x-request-id"),
    Request(
        name="a route asks for a scheme",
        expected=f"299 {_NEW} x-forwarded-proto=http",
        matched="x-forwarded-proto",
    ),
    Request(
        name="with a scheme",
        expected=f"200 {_NEW} x-forwarded-proto=https",
        headers=(("x-forwarded-proto", "https"),),
    ),
    Request(
        name="with a scheme that is none",
        expected=f"200 {_NEW} x-forwarded-proto=gopher",
        headers=(("x-forwarded-proto", "gopher"),),
    ),
    Request(
        name="at the edge, with a scheme",
        expected=f"200 {_NEW} x-forwarded-proto=http {_FROM}",
        manager=_EDGE,
        headers=(("x-forwarded-proto", "https"),),
    ),
    Request(
        name="with a forwarded-for",
        expected=f"200 {_NEW} x-forwarded-proto=http x-forwarded-for=10.1.2.3",
        headers=(("x-forwarded-for", "10.1.2.3"),),
    ),
    Request(
        name="at the edge, with a forwarded-for",
        expected=f"200 {_NEW} x-forwarded-proto=http {_FROM}".replace("=an", "=10.1.2.3,an"),
        manager=_EDGE,
        headers=(("x-forwarded-for", "10.1.2.3"),),
    ),
    Request(
        name="claims to be internal",
        expected=f"200 {_NEW} x-forwarded-proto=http",
        headers=(("x-envoy-internal", "true"),),
    ),
)


class Requests(Running):
    """One proxy with a listener per request; all requests are answered and logged."""

    def _open(self) -> None:
        super()._open()
        ports = [free_port() for _ in REQUESTS]
        listeners = [self._listener(index, port) for index, port in enumerate(ports)]
        self.start({"static_resources": {"listeners": listeners}}, ports)
        for request, port in zip(REQUESTS, ports, strict=True):
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
                _ask(sock, request)
        until(lambda: all(self._line(index) for index in range(len(REQUESTS))))

    def _listener(self, index: int, port: int) -> Json:
        request = REQUESTS[index]
        routes = [{"match": _match(request), "direct_response": {"status": 200}}]
        if request.matched:
            present = {"headers": [{"name": request.matched, "present_match": True}]}
            routes.insert(0, {"match": {**_match(request), **present}, "direct_response": {"status": 299}})
        table = {"name": "r", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]}
        manager = connection_manager({"route_config": table})
        manager["typed_config"] |= {**request.manager, "access_log": text_log(self._log(index), _FORMAT)}
        return {"name": f"l{index}", "address": on_loopback(port), "filter_chains": [{"filters": [manager]}]}

    def _log(self, index: int) -> Path:
        return self.folder / f"log {index}"

    def _line(self, index: int) -> str:
        log = self._log(index)
        return log.read_text().strip() if log.exists() else ""

    def seen(self, index: int) -> str:
        """Return the logged status, and the request's headers in the log."""
        status, stream, *headers = self._line(index).split("|")
        made = {value: "a new id" for value in _UUID.findall(" ".join((stream, *headers))) if value != OWN}
        made[OWN] = "the client's"
        values = {"stream": stream, **dict(zip(_LOGGED, headers, strict=True))}
        values["x-forwarded-for"] = re.sub(_ADDED, "an address", values["x-forwarded-for"])
        return " ".join(
            [status, *(f"{name}={made.get(value, value)}" for name, value in values.items() if value != "-")]
        )


def _match(request: Request) -> Json:
    return {"connect_matcher": {}} if request.connect else {"prefix": "/"}


def _ask(sock: socket.socket, request: Request) -> None:
    """Make the request, and wait for its answer's end."""
    head = [(":method", "CONNECT"), (":authority", "a.example:80")]
    if not request.connect:
        head = [(":method", "GET"), (":scheme", "http"), (":authority", "a.example"), (":path", "/")]
    answer(sock, [*head, *request.headers], ended=not request.connect)


def answer(sock: socket.socket, headers: list[tuple[str, str]], *, ended: bool = True) -> str:
    """Make a request, and return its status, the server's name and the body once it has ended, or ``reset``."""
    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.send_headers(1, headers, end_stream=ended)
    sock.sendall(client.data_to_send())
    words, body = [], b""
    while data := sock.recv(65536):
        for event in client.receive_data(data):
            match event:
                case h2.events.ResponseReceived():
                    found = dict(event.headers)
                    words += [found[b":status"].decode(), found.get(b"server", b"-").decode()]
                case h2.events.DataReceived():
                    body += event.data
                case h2.events.StreamReset():
                    return " ".join([*words, "reset"])
                case h2.events.StreamEnded():
                    return " ".join([*words, body.decode()])
        sock.sendall(client.data_to_send())
    return " ".join([*words, "closed"])


CASES = tuple(
    Case(
        number=f"h{number}",
        stimulus=request.name,
        run=lambda site, index=number - 1: site.seen(index),
        expected=dict.fromkeys(("envoy", "ours"), request.expected),
    )
    for number, request in enumerate(REQUESTS, 1)
)
