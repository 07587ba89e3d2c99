"""Every operator of access logs that Envoy accepts: what it prints, beside ours, for connections of several kinds.

One goes over mTLS on both sides, one is a tunnel that ends here, one finds its first host dead and its second
alive, one goes through an internal listener, one finds no host alive; two requests are answered here, with a route
and without.
Values of the moment (ports, times) are compared by their shape.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import re
import socket
import ssl
from functools import cache
from pathlib import Path
from typing import Any

import h2.connection
import h2.events
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.interop.case import Case
from tests.interop.loopback import (
    COLUMNS,
    Running,
    Serve,
    Tunnels,
    application,
    echoes,
    tunnelled,
    until,
    waits_for_its_end,
)
from tests.interop.proxies import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.config.test_bootstrap_fields import FILE_LOG
from tests.ztunnel.proxy.envoy.harness import Json, T, connect_route, connection_manager, tcp

_NAMES = """
    ACCESS_LOG_TYPE BYTES_RECEIVED BYTES_RETRANSMITTED BYTES_SENT CLUSTER_METADATA(x)
    COMMON_DURATION(DS_RX_BEG:DS_TX_END:ms) CONNECTION_ID CONNECTION_TERMINATION_DETAILS CUSTOM_FLAGS
    DOWNSTREAM_DECOMPRESSED_HEADER_BYTES_RECEIVED DOWNSTREAM_DECOMPRESSED_HEADER_BYTES_SENT
    DOWNSTREAM_DETECTED_CLOSE_TYPE DOWNSTREAM_DIRECT_LOCAL_ADDRESS
    DOWNSTREAM_DIRECT_LOCAL_ADDRESS_WITHOUT_PORT DOWNSTREAM_DIRECT_LOCAL_PORT
    DOWNSTREAM_DIRECT_REMOTE_ADDRESS DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT
    DOWNSTREAM_DIRECT_REMOTE_PORT DOWNSTREAM_HANDSHAKE_DURATION DOWNSTREAM_HEADER_BYTES_RECEIVED
    DOWNSTREAM_HEADER_BYTES_SENT DOWNSTREAM_LOCAL_ADDRESS DOWNSTREAM_LOCAL_ADDRESS_ENDPOINT_ID
    DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT DOWNSTREAM_LOCAL_CLOSE_REASON DOWNSTREAM_LOCAL_DNS_SAN
    DOWNSTREAM_LOCAL_EMAIL_SAN DOWNSTREAM_LOCAL_IP_SAN DOWNSTREAM_LOCAL_OTHERNAME_SAN
    DOWNSTREAM_LOCAL_PORT DOWNSTREAM_LOCAL_SUBJECT DOWNSTREAM_LOCAL_URI_SAN DOWNSTREAM_PEER_CERT
    DOWNSTREAM_PEER_CERT_V_END DOWNSTREAM_PEER_CERT_V_START DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_1
    DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_256 DOWNSTREAM_PEER_CHAIN_SERIALS DOWNSTREAM_PEER_DNS_SAN
    DOWNSTREAM_PEER_EMAIL_SAN DOWNSTREAM_PEER_FINGERPRINT_1 DOWNSTREAM_PEER_FINGERPRINT_256
    DOWNSTREAM_PEER_IP_SAN DOWNSTREAM_PEER_ISSUER DOWNSTREAM_PEER_OTHERNAME_SAN DOWNSTREAM_PEER_SERIAL
    DOWNSTREAM_PEER_SUBJECT DOWNSTREAM_PEER_URI_SAN DOWNSTREAM_REMOTE_ADDRESS
    DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT DOWNSTREAM_REMOTE_PORT DOWNSTREAM_TLS_CIPHER
    DOWNSTREAM_TLS_SESSION_ID DOWNSTREAM_TLS_VERSION DOWNSTREAM_TRANSPORT_FAILURE_REASON
    DOWNSTREAM_WIRE_BYTES_RECEIVED DOWNSTREAM_WIRE_BYTES_SENT DURATION DYNAMIC_METADATA(a) EMIT_TIME
    EMIT_TIME_LOCAL ENVIRONMENT(x) FILTER_CHAIN_NAME FILTER_STATE(x) GRPC_STATUS GRPC_STATUS(NUMBER)
    GRPC_STATUS_NUMBER HOSTNAME LISTENER_NAME LOCAL_REPLY_BODY METADATA(CLUSTER:x) METADATA(DYNAMIC:x)
    METADATA(LISTENER:x) METADATA(LISTENER_FILTER_CHAIN:x) METADATA(ROUTE:x) METADATA(UPSTREAM_HOST:x)
    METADATA(VIRTUAL_HOST:x) PACKETS_RETRANSMITTED PATH PATH(WQ) PROTOCOL QUERY_PARAM(x) QUERY_PARAMS
    REQ(x) REQUESTED_SERVER_NAME REQUESTED_SERVER_NAME(SNI_ONLY:ORIG) REQUEST_DURATION REQUEST_HEADER(x)
    REQUEST_HEADERS_BYTES REQUEST_TX_DURATION RESP(x) RESPONSE_CODE RESPONSE_CODE_DETAILS
    RESPONSE_DURATION RESPONSE_FLAGS RESPONSE_FLAGS_LONG RESPONSE_HEADER(x) RESPONSE_HEADERS_BYTES
    RESPONSE_TRAILER(x) RESPONSE_TRAILERS_BYTES RESPONSE_TX_DURATION ROUNDTRIP_DURATION ROUTE_NAME
    SPAN_ID START_TIME START_TIME_LOCAL STREAM_ID TLS_JA3_FINGERPRINT TLS_JA4_FINGERPRINT TRACE_ID
    TRAILER(x) UNIQUE_ID UPSTREAM_CLUSTER UPSTREAM_CLUSTER_RAW UPSTREAM_CONNECTION_ID
    UPSTREAM_CONNECTION_IDS_ATTEMPTED UPSTREAM_CONNECTION_POOL_READY_DURATION
    UPSTREAM_DECOMPRESSED_HEADER_BYTES_RECEIVED UPSTREAM_DECOMPRESSED_HEADER_BYTES_SENT
    UPSTREAM_DETECTED_CLOSE_TYPE UPSTREAM_FILTER_STATE(x) UPSTREAM_HEADER_BYTES_RECEIVED
    UPSTREAM_HEADER_BYTES_SENT UPSTREAM_HOST UPSTREAM_HOSTS_ATTEMPTED
    UPSTREAM_HOSTS_ATTEMPTED_WITHOUT_PORT UPSTREAM_HOST_NAME UPSTREAM_HOST_NAMES_ATTEMPTED
    UPSTREAM_HOST_NAME_WITHOUT_PORT UPSTREAM_LOCAL_ADDRESS UPSTREAM_LOCAL_ADDRESS_WITHOUT_PORT
    UPSTREAM_LOCAL_CLOSE_REASON UPSTREAM_LOCAL_DNS_SAN UPSTREAM_LOCAL_IP_SAN UPSTREAM_LOCAL_PORT
    UPSTREAM_LOCAL_URI_SAN UPSTREAM_METADATA(x) UPSTREAM_PEER_CERT UPSTREAM_PEER_CERT_V_END
    UPSTREAM_PEER_CERT_V_START UPSTREAM_PEER_DNS_SAN UPSTREAM_PEER_IP_SAN UPSTREAM_PEER_ISSUER
    UPSTREAM_PEER_SUBJECT UPSTREAM_PEER_URI_SAN UPSTREAM_PROTOCOL UPSTREAM_REMOTE_ADDRESS
    UPSTREAM_REMOTE_ADDRESS_ENDPOINT_ID UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT UPSTREAM_REMOTE_PORT
    UPSTREAM_REQUEST_ATTEMPT_COUNT UPSTREAM_SERVER_NAME UPSTREAM_TLS_CIPHER UPSTREAM_TLS_SESSION_ID
    UPSTREAM_TLS_VERSION UPSTREAM_TRANSPORT_FAILURE_REASON UPSTREAM_WIRE_BYTES_RECEIVED
    UPSTREAM_WIRE_BYTES_SENT VIRTUAL_CLUSTER_NAME
"""
ENVOYS = _NAMES.split()

#: What METADATA(...:x) prints where a listener, chain, route or virtual host has it.
METADATA = {"filter_metadata": {"x": {"y": "z", "n": 1}}}
NOT_COUNTED = "not counted here"
#: Operators of Envoy that are refused here, by name.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "REQUEST_HEADERS_BYTES",
            "RESPONSE_HEADERS_BYTES",
            "UPSTREAM_CONNECTION_ID",
            "UPSTREAM_CONNECTION_IDS_ATTEMPTED",
            *(
                f"{end}_{what}_BYTES_{way}"
                for end in ("DOWNSTREAM", "UPSTREAM")
                for what in ("WIRE", "HEADER", "DECOMPRESSED_HEADER")
                for way in ("SENT", "RECEIVED")
            ),
        ),
        NOT_COUNTED,
    ),
    **dict.fromkeys(
        (
            "COMMON_DURATION(DS_RX_BEG:DS_TX_END:ms)",
            "DOWNSTREAM_HANDSHAKE_DURATION",
            "REQUEST_DURATION",
            "REQUEST_TX_DURATION",
            "RESPONSE_TX_DURATION",
        ),
        "a tunnel has no phases of a request; DURATION and RESPONSE_DURATION are measured",
    ),
    **dict.fromkeys(
        (
            "DOWNSTREAM_DETECTED_CLOSE_TYPE",
            "DOWNSTREAM_LOCAL_CLOSE_REASON",
            "UPSTREAM_DETECTED_CLOSE_TYPE",
            "UPSTREAM_LOCAL_CLOSE_REASON",
        ),
        "flags and details say it",
    ),
    **dict.fromkeys(("DOWNSTREAM_TLS_SESSION_ID", "UPSTREAM_TLS_SESSION_ID"), "sessions are never resumed"),
    "UPSTREAM_FILTER_STATE(x)": "the objects that a socket passed on are kept with the connection downstream only",
}
#: Operators whose values differ: for which connections, and the reason.
DIFFERS: dict[str, tuple[str, str]] = {
    "DOWNSTREAM_TLS_CIPHER": ("tls", "the order of suites is ours: AES-128 costs less"),
}
_OF_THE_MOMENT = re.compile("ADDRESS$|_PORT$|_HOST$|_HOSTS_|_HOST_NAME|TIME|DURATION$|(?<!ENDPOINT)_ID$")


def _issue(name: str, issuer: Any = None, key: Any = None) -> tuple[x509.Certificate, Any]:
    """A certificate with names of each kind; without an issuer its own."""
    own = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Org, Inc"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    names = [
        x509.UniformResourceIdentifier(f"spiffe://td/{name}"),
        x509.UniformResourceIdentifier(f"spiffe://td/{name}/2"),
        x509.DNSName(f"{name}.example"),
        x509.IPAddress(ipaddress.ip_address("10.0.0.9")),
        x509.RFC822Name(f"{name}@example"),
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer is not None else subject)
        .public_key(own.public_key())
        .serial_number(0x0ABC123)
        .not_valid_before(datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2044, 2, 3, 4, 5, 6, tzinfo=datetime.UTC))
    )
    if issuer is None:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key or own, hashes.SHA256()), own


@cache
def _credentials() -> tuple[str, dict[str, tuple[str, str]]]:
    """The root, and chain and key of server, client and application."""
    root, root_key = _issue("root")
    leaves = {name: _issue(name, root, root_key) for name in ("server", "client", "application")}

    def pem(certificate: x509.Certificate) -> str:
        return certificate.public_bytes(Encoding.PEM).decode()

    def key(private: Any) -> str:
        text: bytes = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return text.decode()

    return pem(root), {name: (pem(leaf), key(private)) for name, (leaf, private) in leaves.items()}


def tls_socket(kind: str, name: str, **more: Any) -> Json:
    """Return a transport socket with the certificate of server, client or application."""
    root, leaves = _credentials()
    chain, key = leaves[name]
    common = {
        "tls_certificates": [
            {"certificate_chain": {"inline_string": chain}, "private_key": {"inline_string": key}}
        ],
        "validation_context": {"trusted_ca": {"inline_string": root}},
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
    }
    kind = f"{T}envoy.extensions.transport_sockets.tls.v3.{kind}"
    return {"name": "tls", "typed_config": {"@type": kind, "common_tls_context": common, **more}}


def context(folder: Path, name: str, role: int) -> ssl.SSLContext:
    """Return a context of the interpreter's library, which loads keys from files only."""
    root, leaves = _credentials()
    path = folder / name
    path.write_text("".join(leaves[name]))
    made = ssl.SSLContext(role)
    made.check_hostname = False
    made.load_cert_chain(path)
    made.load_verify_locations(cadata=root)
    made.verify_mode = ssl.CERT_REQUIRED
    return made


class Operators(Running):
    """Both proxies, one after the other, each with both connections. ``lines[column]`` are their logged values."""

    def __init__(self, _: str) -> None:
        super().__init__("envoy")

    def _open(self) -> None:
        super()._open()
        self.lines: dict[str, dict[str, Json]] = {}
        for column in COLUMNS:
            with Pair(column) as pair:
                self.lines[column] = pair.values()


class Pair(Running):
    """One proxy with its listeners."""

    def _open(self) -> None:
        super()._open()
        self._tls, self._tunnel = free_port(), free_port()
        inspector = {"@type": T + "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector"}
        over_tls = {
            "name": "one",
            "filters": [tcp("tls", access_log=self._logger("tls"))],
            "transport_socket": tls_socket("DownstreamTlsContext", "server", require_client_certificate=True),
        }
        manager = connection_manager({"route_config": connect_route("plain")})
        manager["typed_config"]["access_log"] = self._logger("tunnel")
        tls_cluster = self._cluster("tls", _over_tls(self))
        tls_cluster["transport_socket"] = tls_socket("UpstreamTlsContext", "client", sni="application.example")
        first = self._listener("first", self._tls, over_tls)
        first["listener_filters"] = [{"name": "envoy.filters.listener.tls_inspector", "typed_config": inspector}]
        second = self._listener("second", self._tunnel, {"name": "one", "filters": [manager]})
        others, clusters = self._others()
        static = {
            "listeners": [first, second, *others],
            "clusters": [tls_cluster, self._cluster("plain", echoes), *clusters],
        }
        internal = {"@type": T + "envoy.extensions.bootstrap.internal_listener.v3.InternalListener"}
        extensions = [{"name": "internal", "typed_config": internal}]
        ports = [self._tls, self._tunnel, *self._ports.values()]
        self.start({"static_resources": static, "bootstrap_extensions": extensions}, ports)

    def _others(self) -> tuple[list[Json], list[Json]]:
        """Listeners and clusters of the connections that do not end as they should, or not here."""
        self._ports = {name: free_port() for name in ("retried", "outer", "dead", "page")}
        dead, alive = free_port(), application(echoes, self._stack)
        manager = connection_manager({"route_config": _pages()})
        manager["typed_config"]["access_log"] = self._logger("page")
        chains = {
            "retried": tcp("retried", access_log=self._logger("retried"), max_connect_attempts=3),
            "outer": tcp("inside", access_log=self._logger("outer")),
            "dead": tcp("dead", access_log=self._logger("dead")),
            "page": manager,
        }
        listeners = [
            {
                **self._listener(
                    name, self._ports[name], {"name": "one", "metadata": METADATA, "filters": [entry]}
                ),
                "metadata": METADATA,
            }
            for name, entry in chains.items()
        ]
        inner = {"name": "only", "filters": [tcp("plain", access_log=self._logger("inner"))]}
        listeners.append({"name": "inner", "internal_listener": {}, "filter_chains": [inner]})
        inside = {"envoy_internal_address": {"server_listener_name": "inner", "endpoint_id": "its id"}}
        passing = "envoy.extensions.transport_sockets.internal_upstream.v3.InternalUpstreamTransport"
        raw = {"@type": T + "envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"}
        passes = {"@type": T + passing, "transport_socket": {"name": "raw", "typed_config": raw}}
        hosts = [
            {"hostname": "dead.example", "address": on_loopback(dead)},
            {"hostname": "alive.example:80", "address": on_loopback(alive)},
        ]
        return listeners, [
            _cluster("retried", *hosts),
            _cluster("dead", {"address": on_loopback(dead)}),
            {**_cluster("inside", {"address": inside}), "transport_socket": {"name": "i", "typed_config": passes}},
        ]

    def _logger(self, name: str) -> list[Json]:
        taken = [each for each in ENVOYS if self.kind == "envoy" or each not in REFUSED]
        form = {"json_format": {each: f"%{each}%" for each in taken}}
        config = {"@type": FILE_LOG, "path": str(self.folder / name), "log_format": form}
        return [{"name": "file", "typed_config": config}]

    @staticmethod
    def _listener(name: str, port: int, chain: Json) -> Json:
        return {"name": name, "address": on_loopback(port), "filter_chains": [chain]}

    def _cluster(self, name: str, serve: Serve) -> Json:
        return _cluster(name, {"address": on_loopback(application(serve, self._stack))})

    def values(self) -> dict[str, Json]:
        """Make the connections one after the other. Return the log line of each."""
        client = context(self.folder, "client", ssl.PROTOCOL_TLS_CLIENT)
        with (
            socket.create_connection(("127.0.0.1", self._tls), WAIT_S) as plain,
            client.wrap_socket(plain, server_hostname="server.example") as secured,
        ):
            secured.sendall(b"hi")
            while secured.recv(10):
                pass
            secured.unwrap()
        with socket.create_connection(("127.0.0.1", self._tunnel), WAIT_S) as sock:
            tunnelled(ended=True, leave=waits_for_its_end)(Tunnels(sock))
        while not (lines := self._logged("retried")) or lines[-1]["UPSTREAM_REQUEST_ATTEMPT_COUNT"] != 2:
            self._ask("retried")  # one of two connections finds the dead host first
            until(lambda lines=lines: len(self._logged("retried")) > len(lines))
        self._ask("outer")
        self._ask("dead")
        for path in ("/page?q=1&r=%20x", "/other?"):
            with socket.create_connection(("127.0.0.1", self._ports["page"]), WAIT_S) as sock:
                _get(sock, path)
        found = {"retried": lines[-1]}
        for name, count in {"tls": 1, "tunnel": 1, "outer": 1, "inner": 1, "dead": 1, "page": 2}.items():
            until(lambda name=name, count=count: len(self._logged(name)) == count)
            for index, line in enumerate(sorted(self._logged(name), key=lambda line: str(line["PATH"]))):
                found[f"{name} {index}" if count > 1 else name] = line
        return found

    def _logged(self, name: str) -> list[Json]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def _ask(self, name: str) -> None:
        """Open a connection, and wait for its end."""
        with (
            socket.create_connection(("127.0.0.1", self._ports[name]), WAIT_S) as sock,
            contextlib.suppress(OSError),
        ):
            sock.sendall(b"hi")
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(10):
                pass


def on_loopback(port: int) -> Json:
    """Return an address in Envoy's configuration."""
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _cluster(name: str, *endpoints: Json) -> Json:
    hosts = [{"lb_endpoints": [{"endpoint": endpoint} for endpoint in endpoints]}]
    return {"name": name, "type": "STATIC", "load_assignment": {"cluster_name": name, "endpoints": hosts}}


def _pages() -> Json:
    """A route table with a page, metadata on both levels."""
    answer = {"status": 200, "body": {"inline_string": "a page"}}
    route = {"match": {"path": "/page"}, "metadata": METADATA, "direct_response": answer}
    return {
        "name": "pages",
        "virtual_hosts": [{"name": "all", "domains": ["*"], "metadata": METADATA, "routes": [route]}],
    }


def _get(sock: socket.socket, path: str) -> None:
    """Make one request, and wait for its answer's end."""
    client = h2.connection.H2Connection()
    client.initiate_connection()
    head = [(":method", "GET"), (":scheme", "http"), (":authority", "a.example"), (":path", path)]
    client.send_headers(1, head, end_stream=True)
    sock.sendall(client.data_to_send())
    while not any(isinstance(event, h2.events.StreamEnded) for event in client.receive_data(sock.recv(65536))):
        sock.sendall(client.data_to_send())


def _over_tls(pair: Pair) -> Serve:
    def serve(sock: socket.socket) -> None:
        secure = context(pair.folder, "application", ssl.PROTOCOL_TLS_SERVER)
        with contextlib.suppress(OSError), secure.wrap_socket(sock, server_side=True) as secured:
            secured.sendall(secured.recv(10))
            secured.unwrap()

    return serve


def beside(site: Operators, operator: str) -> str:
    """``same`` if both print the same value for every connection, else for which they do not."""
    ours, envoys = site.lines["ours"], site.lines["envoy"]
    if operator in REFUSED:
        return "refused" if operator not in ours["tls"] else "accepted"
    differ = [name for name, line in envoys.items() if _shape(operator, line) != _shape(operator, ours[name])]
    return f"differs: {', '.join(differ)}" if differ else "same"


def _shape(operator: str, line: Json) -> object:
    value = line[operator]
    if _OF_THE_MOMENT.search(operator.partition("(")[0]) is None or value is None:
        return value
    return type(value), re.sub(r"[0-9a-f-]{36}|\d+", "0", str(value)) if "ADDRESS" not in operator else ""


def _cases() -> tuple[Case[Operators], ...]:
    rows = []
    for number, operator in enumerate(ENVOYS, 1):
        where, why = DIFFERS.get(operator, ("", REFUSED.get(operator)))
        outcome = "refused" if operator in REFUSED else f"differs: {where}" if where else "same"
        rows.append(
            Case(
                number=f"o{number}",
                stimulus=f"%{operator}%" + (f" ({why})" if why else ""),
                run=lambda site, operator=operator: beside(site, operator),
                expected={"beside": outcome},
            )
        )
    return tuple(rows)


CASES = _cases()
