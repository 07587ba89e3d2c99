"""RBAC by principals and permissions: the clients that Envoy and this proxy admit, for random policies and eight
clients.

One process of each kind has a listener per policy; all clients connect to each. A policy is a random tree over
atoms that distinguish clients, so each atom also occurs below ``not`` and in ``DENY``.
"""

from __future__ import annotations

import contextlib
import datetime
import random
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.interop.loopback import Running, application
from tests.interop.proxies import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T, cluster, tcp

_DAY = datetime.timedelta(days=1)
_NAME = x509.NameOID
SNI = "server.example"


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its certificate's subject and names, or none; ``tls`` False speaks plain text."""

    subject: tuple[tuple[x509.ObjectIdentifier, str], ...] = ()
    uris: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    certificate: bool = True
    tls: bool = True
    server_name: str | None = SNI


_CN = ((_NAME.COMMON_NAME, "web"),)
CLIENTS = {
    "uri": Client(uris=("spiffe://td/ns/a/sa/web",)),
    "uri+subject": Client(_CN, uris=("spiffe://td/ns/a/sa/web", "spiffe://td/ns/b/sa/Two")),
    "dns+subject": Client(_CN, dns=("web.example",)),
    "subject": Client(_CN),
    "long subject": Client(
        (
            (_NAME.COUNTRY_NAME, "DE"),
            (_NAME.ORGANIZATION_NAME, 'Müller, "Söhne" + Co <x>;'),
            (_NAME.SERIAL_NUMBER, "7"),
            (_NAME.ORGANIZATIONAL_UNIT_NAME, "#7"),
            (_NAME.EMAIL_ADDRESS, "a@web.example"),
            (x509.ObjectIdentifier("2.5.4.97"), "unknown"),
            (_NAME.COMMON_NAME, " web "),
        )
    ),
    "no certificate": Client(certificate=False),
    "no name": Client(certificate=False, server_name=None),
    "plain": Client(tls=False),
}
_LONG = "CN=\\ web\\ ,2.5.4.97=#0C07756E6B6E6F776E,emailAddress=a@web.example,OU=\\#7,serialNumber=7,"
_LONG += 'O=M\\C3\\BCller\\, \\"S\\C3\\B6hne\\" \\+ Co \\<x\\>\\;,C=DE'


def _name(**match: Any) -> Json:
    return {"authenticated": {"principal_name": match}}


def _regex(pattern: str) -> Json:
    return {"safe_regex": {"regex": pattern}}


def _range(prefix: str, length: int) -> Json:
    return {"address_prefix": prefix, "prefix_len": length}


PRINCIPALS: tuple[Json, ...] = (
    {"any": True},
    {"authenticated": {}},
    _name(exact=""),
    _name(exact="CN=web"),
    _name(exact=_LONG),
    _name(contains="emailAddress"),
    _name(contains="CN=web"),
    _name(prefix="spiffe://td/"),
    _name(exact="spiffe://td/ns/b/sa/two", ignore_case=True),
    _name(suffix="WEB", ignore_case=True),
    _name(contains="web.EXAMPLE", ignore_case=True),
    _name(exact="web.example"),
    _name(**_regex(".*")),
    _name(**_regex(r"spiffe://\w+/ns/[[:alpha:]]/sa/\S+")),
    _name(**_regex(r".*M\\C3.*")),
    _name(**_regex(r"(?i)CN=WEB")),
    _name(**_regex(r"[^[:upper:]\d]*|\Qweb.ex\E(ample){1}?")),
    _name(**_regex(r"(?-s:CN)=(?P<rest>[\w]{3,})$")),
    {"source_ip": _range("127.0.0.0", 8)},
    {"direct_remote_ip": _range("127.0.0.9", 31)},
    {"remote_ip": _range("::ffff:127.0.0.1", 128)},
    {"remote_ip": _range("10.0.0.0", 8)},
)
PERMISSIONS: tuple[Json, ...] = (
    {"any": True},
    {"destination_ip": _range("127.0.0.1", 8)},
    {"destination_ip": _range("0.0.0.0", 0)},
    {"destination_port": 7},
    {"destination_port_range": {"start": 1, "end": 65535}},
    {"requested_server_name": {"exact": SNI}},
    {"requested_server_name": {"exact": ""}},
    {"requested_server_name": {"suffix": ".EXAMPLE", "ignore_case": True}},
    {"requested_server_name": _regex(r"[a-z]+\.example")},
)


def _tree(chance: random.Random, atoms: tuple[Json, ...], words: tuple[str, str, str, str], depth: int) -> Json:
    all_of, any_of, inside, negation = words
    kind = chance.choice(("atom", "not", "all", "any")) if depth else "atom"
    if kind == "atom":
        return chance.choice(atoms)
    if kind == "not":
        return {negation: _tree(chance, atoms, words, depth - 1)}
    parts = [_tree(chance, atoms, words, depth - 1) for _ in range(chance.randint(1, 3))]
    return {all_of if kind == "all" else any_of: {inside: parts}}


def policies(count: int, seed: int = 7) -> list[Json]:
    """Return one policy per atom and action, and ``count`` random ones, as ``rules`` of the filter."""
    chance = random.Random(seed)
    every = {"any": True}
    found: list[Json] = []
    for action in ("DENY", "ALLOW"):
        found += [_rules(action, [every], [principal]) for principal in PRINCIPALS]
        found += [_rules(action, [permission], [every]) for permission in PERMISSIONS]
    for _ in range(count):
        permission = _tree(chance, PERMISSIONS, ("and_rules", "or_rules", "rules", "not_rule"), 2)
        principals = [
            _tree(chance, PRINCIPALS, ("and_ids", "or_ids", "ids", "not_id"), 2)
            for _ in range(chance.randint(1, 2))
        ]
        found.append(_rules(chance.choice(("DENY", "ALLOW")), [permission], principals))
    return found


def _rules(action: str, permissions: list[Json], principals: list[Json]) -> Json:
    return {"action": action, "policies": {"p": {"permissions": permissions, "principals": principals}}}


class Certificates:
    """One authority, and the files of each client and of the server."""

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issuer = x509.Name([x509.NameAttribute(_NAME.COMMON_NAME, "root")])
        self.folder = folder
        root = self._builder(self._issuer, self._key).add_extension(
            x509.BasicConstraints(True, None), critical=True
        )
        (folder / "root.pem").write_bytes(root.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        self.issue("server", Client(_CN, dns=(SNI,)))
        for name, client in CLIENTS.items():
            if client.certificate and client.tls:
                self.issue(name, client)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._issuer)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - _DAY).not_valid_after(now + _DAY)

    def issue(self, name: str, client: Client) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(oid, value, _validate=False) for oid, value in client.subject])
        builder = self._builder(subject, key)
        sans: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in client.uris]
        sans += [x509.DNSName(dns) for dns in client.dns]
        if sans:
            builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        certificate = builder.sign(self._key, hashes.SHA256())
        (self.folder / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM) + private)


def bootstrap(rules: list[Json], ports: list[int], application_port: int, folder: Path) -> Json:
    """Return a bootstrap with a TLS listener per policy, each with a chain of plain text beside it."""
    server = {"filename": str(folder / "server.pem")}
    common = {
        "tls_certificates": [{"certificate_chain": server, "private_key": server}],
        "validation_context": {"trusted_ca": {"filename": str(folder / "root.pem")}},
    }
    context = {"@type": f"{T}envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"}
    context |= {"common_tls_context": common, "require_client_certificate": False}
    listeners = []
    for number, (each, port) in enumerate(zip(rules, ports, strict=True)):
        guard: Json = {"@type": f"{T}envoy.extensions.filters.network.rbac.v3.RBAC"}
        guard |= {"stat_prefix": "r", "rules": each}
        filters = [{"name": "rbac", "typed_config": guard}, tcp()]
        secured = {
            "name": "tls",
            "filters": filters,
            "filter_chain_match": {"transport_protocol": "tls"},
            "transport_socket": {"name": "tls", "typed_config": context},
        }
        inspector = {"@type": f"{T}envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector"}
        listeners.append(
            {
                "name": f"l{number}",
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "listener_filters": [{"name": "i", "typed_config": inspector}],
                "filter_chains": [secured, {"name": "plain", "filters": filters}],
            }
        )
    static = {"listeners": listeners, "clusters": [cluster(application_port)[1]]}
    return {"node": {"id": "n", "cluster": "c"}, "static_resources": static}


def context_of(client: Client, name: str, folder: Path) -> ssl.SSLContext:
    """Return a context for all connections of a client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if client.certificate:
        context.load_cert_chain(folder / f"{name}.pem")
    return context


def lets_in(client: Client, context: ssl.SSLContext | None, port: int) -> bool:
    """Connect as a client; return whether the application's greeting arrives."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        plain = sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        if context is not None:
            sock = stack.enter_context(context.wrap_socket(plain, server_hostname=client.server_name))
        sock.sendall(b"?" * 32)  # an inspector waits for a whole record header
        return sock.recv(2) == b"in"
    return False


def _greet(sock: socket.socket) -> None:
    if sock.recv(64):
        sock.sendall(b"in")


@contextlib.contextmanager
def verdicts(kind: str, rules: list[Json]) -> Iterator[list[dict[str, bool]]]:
    """Run a proxy with a listener per policy. Yield the admitted clients of each policy."""
    with contextlib.ExitStack() as stack, Running(kind) as running:
        certificates = Certificates(running.folder)
        ports = [free_port() for _ in rules]
        running.start(bootstrap(rules, ports, application(_greet, stack), certificates.folder), ports)
        contexts = {
            name: context_of(client, name, certificates.folder) if client.tls else None
            for name, client in CLIENTS.items()
        }
        with ThreadPoolExecutor(8) as clients:
            results = [
                {
                    name: clients.submit(partial(lets_in, client, contexts[name], port))
                    for name, client in CLIENTS.items()
                }
                for port in ports
            ]
            yield [{name: result.result() for name, result in each.items()} for each in results]
