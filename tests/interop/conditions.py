"""CEL conditions of the RBAC filter: the decisions of Envoy and this proxy about the same connections.

Each row is one expression, the condition of a policy. Two connections test it, one over mTLS with a server name
and one of plain TCP. Envoy takes expressions as trees, which the compiler of the evaluator's package makes from
text here.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf import json_format

from tests.interop import refusals
from tests.interop.case import Case
from tests.interop.loopback import COLUMNS, Running, application
from tests.interop.operators import context, on_loopback, tls_socket
from tests.interop.proxies import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T, cluster, tcp
from xds.proto.google.api.expr.v1alpha1 import syntax_pb2 as syntax
from xds.proto.well_known import Any as AnyMessage


@dataclass(frozen=True, slots=True)
class Row:
    """An expression, and the connections that each proxy admits: ``tls``, ``plain``, ``tls plain`` or ``none``.

    Attributes:
        envoy, ours: or ``refused``, if the configuration is refused. Ours is Envoy's if empty.
        why: the reason for a difference.
        action: the policy's action.
        field: the policy's field with the expression.
        ids: number the nodes of the tree, as compilers do and people do not.
    """

    text: str
    envoy: str
    ours: str = ""
    why: str = ""
    action: str = "ALLOW"
    field: str = "condition"
    ids: bool = True

    def policy(self) -> Json:
        """Return the RBAC filter."""
        policy = {"permissions": [{"any": True}], "principals": [{"any": True}], self.field: self._expression()}
        kind = T + "envoy.extensions.filters.network.rbac.v3.RBAC"
        rules = {"action": self.action, "policies": {"p": policy}}
        return {"name": "rbac", "typed_config": {"@type": kind, "stat_prefix": "r", "rules": rules}}

    def _expression(self) -> Json:
        found: Json = tree(self.text)
        if not self.ids:
            found = _without_ids(found)
        return {"expr": found} if self.field == "checked_condition" else found


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(each) for name, each in value.items() if name != "id"}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


@cache
def tree(text: str) -> Any:
    """Return an expression as Envoy's configuration has it."""
    from cel_expr_python import cel

    packed = AnyMessage.FromString(cel.NewEnv().compile(text, disable_check=True).serialize())
    parsed = syntax.ParsedExpr.FromString(packed.value)
    return json_format.MessageToDict(parsed.expr, preserving_proto_field_name=True)


_SERVER = "connection.requested_server_name"
_URI = "connection.uri_san_peer_certificate"
_NOT_HERE = "in Envoy it is never there: a policy that denies by it would deny nobody"
_NOT_KEPT = "not supported here"
ROWS = (
    Row("true", "tls plain"),
    Row("false", "none"),
    Row("1", "none"),
    Row("'true'", "none"),
    Row("source.port", "none"),
    Row("connection.mtls", "tls"),
    Row("connection.mtls == true", "tls"),
    Row("connection.mtls == true", "tls", ids=False),
    Row("!connection.mtls", "plain"),
    Row("!connection.mtls", "tls", action="DENY"),
    Row("connection.mtls == 1", "none"),
    Row("connection.mtls != 1", "tls plain"),
    Row(f"{_SERVER} == 'server.example'", "tls"),
    Row(f"{_SERVER} == ''", "plain"),
    Row(f"has({_SERVER})", "tls plain"),
    Row(f"size({_SERVER}) > 0", "tls"),
    Row(f"{_SERVER}.size() > 0", "tls"),
    Row(f"{_SERVER}.endsWith('.example')", "tls"),
    Row(f"{_SERVER}.matches('^server[.].*$')", "tls"),
    Row(f"{_SERVER}.matches('erver')", "tls"),
    Row(f"{_SERVER}.matches('(')", "refused"),
    Row(f"{_SERVER}.matches('(?=s)')", "refused"),
    Row(f"{_SERVER}.matches('[a-z]{{500}}|server.*')", "refused", "tls", "Envoy limits a program to 100 steps"),
    Row(f"{_SERVER} < 'z'", "tls plain"),
    Row(f"{_URI} == 'spiffe://td/client'", "tls"),
    Row(f"{_URI}.startsWith('spiffe://td/')", "tls"),
    Row(f"{_URI} == 'spiffe://td/client/2'", "none"),
    Row(f"{_URI} != 'x'", "tls"),
    Row(f"{_URI} != 'x'", "plain", action="DENY"),
    Row(f"has({_URI})", "tls"),
    Row(f"!has({_URI})", "plain"),
    Row(f"{_URI} == 'x' || source.port > 0", "tls plain"),
    Row(f"source.port > 0 || {_URI} == 'x'", "tls plain"),
    Row(f"{_URI} == 'x' && source.port < 0", "none"),
    Row("connection.dns_san_peer_certificate == 'client.example'", "tls"),
    Row("connection.subject_peer_certificate.contains('client')", "tls"),
    Row(r"connection.subject_peer_certificate == 'CN=client,O=Org\\, Inc'", "tls"),
    Row("source.address.startsWith('127.0.0.1:')", "tls plain"),
    Row("source.address == '127.0.0.1'", "none"),
    Row("source.port > 0", "tls plain"),
    Row("source.port > 0u", "tls plain"),
    Row("source.port < 0", "none"),
    Row("source.port == '5'", "none"),
    Row("true == (source.port > 0)", "tls plain"),
    Row("destination.address.startsWith('127.0.0.1:')", "tls plain"),
    Row("destination.port > 1024 && destination.port < 65536", "tls plain"),
    Row("destination.port in [1, 2, 3]", "none"),
    Row("!(destination.port in [1, 2, 3])", "tls plain"),
    Row("destination.port in ['a']", "none"),
    Row("connection.mtls ? source.port > 0 : false", "tls"),
    Row("connection.mtls ? false : true", "plain"),
    Row("b'a' == b'a'", "tls plain"),
    Row("1.5 > 1.0", "tls plain"),
    Row("connection.nosuch == 'x'", "none", "refused", _NOT_HERE),
    Row("connection.nosuch == 'x'", "tls plain", "refused", _NOT_HERE, action="DENY"),
    Row("has(connection.nosuch)", "none", "refused", _NOT_HERE),
    Row("request.path == '/'", "none", "refused", _NOT_HERE),
    Row("upstream.port == 1", "none", "refused", _NOT_HERE),
    Row("unknown_thing == 1", "none", "refused", _NOT_HERE),
    Row("source == 'x'", "none", "refused", _NOT_HERE),
    Row("connection.tls_version == 'TLSv1.3'", "tls", "refused", _NOT_KEPT),
    Row("connection['mtls'] == true", "tls", "refused", _NOT_KEPT),
    Row("1 + 1 == 2", "tls plain", "refused", _NOT_KEPT),
    Row("int('1') == 1", "tls plain", "refused", _NOT_KEPT),
    Row("['a', 'b'].exists(x, x == 'a')", "refused"),
    Row("string(source.port) != ''", "refused"),
    Row("false", "tls plain", "refused", "Envoy does not evaluate it", field="checked_condition"),
)


class Conditions(Running):
    """One proxy with two listeners for each row that it accepts."""

    def _open(self) -> None:
        super()._open()
        port = application(answers, self._stack)
        self._ports: dict[Row, tuple[int, int]] = {}
        listeners = []
        for number, row in enumerate(ROWS):
            if self.expected(row) == "refused":
                continue
            self._ports[row] = free_port(), free_port()
            listeners += self._listeners(number, row)
        static = {"listeners": listeners, "clusters": [cluster(port)[1]]}
        self.start({"static_resources": static}, [port for pair in self._ports.values() for port in pair])
        self._client = context(self.folder, "client", ssl.PROTOCOL_TLS_CLIENT)

    def expected(self, row: Row) -> str:
        """Return the expected result of this proxy for a row."""
        return row.envoy if self.kind == "envoy" else row.ours or row.envoy

    def _listeners(self, number: int, row: Row) -> list[Json]:
        inspector = {"@type": T + "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector"}
        filters = {"filters": [row.policy(), tcp()]}
        socket_over_tls = tls_socket("DownstreamTlsContext", "server", require_client_certificate=True)
        over_tls, plain = self._ports[row]
        return [
            {
                "name": f"tls-{number}",
                "address": on_loopback(over_tls),
                "listener_filters": [{"name": "envoy.filters.listener.tls_inspector", "typed_config": inspector}],
                "filter_chains": [{**filters, "transport_socket": socket_over_tls}],
            },
            {"name": f"plain-{number}", "address": on_loopback(plain), "filter_chains": [filters]},
        ]

    def allowed(self, row: Row) -> str:
        """Return the connections that are let through."""
        if row not in self._ports:
            refused = refusals.Row(lambda: refusals.on_listener(row.policy()), False, False)
            return refusals.accepted(refused, self.kind, self.folder)
        over_tls, plain = self._ports[row]
        through = [name for name, port in (("tls", over_tls), ("plain", plain)) if self._reaches(port, name)]
        return " ".join(through) or "none"

    def _reaches(self, port: int, name: str) -> bool:
        with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError, ssl.SSLError):
            sock: socket.socket = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            if name == "tls":
                sock = stack.enter_context(self._client.wrap_socket(sock, server_hostname="server.example"))
            sock.sendall(b"?")
            return sock.recv(1) == b"!"
        return False


def answers(sock: socket.socket) -> None:
    """Answer a byte with another one."""
    if sock.recv(1):
        sock.sendall(b"!")


def _cases() -> tuple[Case[Conditions], ...]:
    def run(row: Row) -> Callable[[Conditions], str]:
        return lambda site: site.allowed(row)

    return tuple(
        Case(
            number=f"c{number}",
            stimulus=f"{row.action} `{row.text}`"
            + ("" if row.field == "condition" else f" as {row.field}")
            + ("" if row.ids else ", nodes without numbers")
            + (f" ({row.why})" if row.why else ""),
            run=run(row),
            expected=dict(zip(COLUMNS, (row.envoy, row.ours or row.envoy), strict=True)),
        )
        for number, row in enumerate(ROWS, 1)
    )


CASES = _cases()
