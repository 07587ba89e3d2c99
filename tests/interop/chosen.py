"""The certificate that a server with several presents to a client, and the effect of a filter discovered by ECDS.

Both proxies have the same listeners: one per list of certificates, and one per file with a filter.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from tests.hbone.certificates import Authority, Leaf
from tests.interop.case import Case
from tests.interop.conditions import answers
from tests.interop.loopback import COLUMNS, Running, application, until
from tests.interop.operators import on_loopback
from tests.interop.proxies import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T, cluster, rbac, tcp

NAME = "spiffe://td/ns/a/sa/b"


@cache
def leaves() -> Mapping[str, Leaf]:
    """Return the certificates by the words of the rows."""
    root = Authority()
    return {
        "elliptic": root.issue(NAME, dns=["a.example", "*.wild.example"]),
        "rsa": root.issue(NAME, dns=["a.example", "rsa.example"], rsa_key=True),
        "later": root.issue(NAME, dns=["later.example", "x.wild.example"]),
    }


@dataclass(frozen=True, slots=True)
class Shown:
    """A client's server name, whether it has RSA only, and the certificate that it is shown.

    Attributes:
        why: the reason for a difference.
    """

    certificates: tuple[str, ...]
    name: str | None
    envoy: str
    ours: str = ""
    why: str = ""
    only_rsa: bool = False


SHOWN = (
    Shown(("rsa", "elliptic"), None, "elliptic"),
    Shown(("elliptic", "rsa"), None, "elliptic"),
    Shown(("elliptic", "rsa"), None, "rsa", only_rsa=True),
    Shown(("elliptic", "later"), None, "elliptic"),
    Shown(("later", "elliptic"), None, "later"),
    Shown(("elliptic", "later", "rsa"), "later.example", "later"),
    Shown(("elliptic", "later", "rsa"), "rsa.example", "rsa"),
    Shown(("elliptic", "later", "rsa"), "a.example", "elliptic"),
    Shown(("elliptic", "later", "rsa"), "a.example", "rsa", only_rsa=True),
    Shown(("later", "elliptic", "rsa"), "y.wild.example", "elliptic"),
    Shown(("elliptic", "later", "rsa"), "x.wild.example", "later"),
    Shown(("later", "elliptic"), "x.y.wild.example", "later"),
    Shown(("rsa", "later"), "unknown.example", "rsa"),
    Shown(("later", "elliptic"), "unknown.example", "later"),
    Shown(("elliptic", "rsa"), "unknown.example", "none", only_rsa=True),
    Shown(("elliptic", "later", "rsa"), "later.example", "none", only_rsa=True),
)

ALLOW, DENY = rbac(None)["typed_config"], rbac(None, "DENY")["typed_config"]
#: Envoy and this proxy refuse a policy without permissions.
BAD: Json = {**ALLOW, "rules": {"policies": {"p": {"principals": [{"any": True}]}}}}
ABSENT: Json = {}


@dataclass(frozen=True, slots=True)
class Discovered:
    """The consecutive versions of a filter, and their effect on new connections at the end.

    Attributes:
        place: further fields of the filter's source.
        why: the reason for a difference.
    """

    versions: tuple[Json, ...]
    envoy: str
    ours: str = ""
    why: str = ""
    place: Json = field(default_factory=dict)


FILTERS = {
    "allows": Discovered((ALLOW,), "allowed"),
    "denies": Discovered((DENY,), "denied"),
    "allows, then denies": Discovered((ALLOW, DENY), "allowed, denied"),
    "denies, then allows": Discovered((DENY, ALLOW), "denied, allowed"),
    "allows, then is refused": Discovered((ALLOW, BAD), "allowed, allowed"),
    "denies, then is refused": Discovered((DENY, BAD), "denied, denied"),
    "denies, then goes away": Discovered((DENY, ABSENT), "denied, denied"),
    "is not there": Discovered((ABSENT,), "denied"),
    "is not there, the default denies": Discovered((ABSENT,), "denied", place={"default_config": DENY}),
    "is not there, the default allows": Discovered((ABSENT,), "allowed", place={"default_config": ALLOW}),
    "denies, the default allows": Discovered((DENY,), "denied", place={"default_config": ALLOW}),
    "is there for others, the default denies": Discovered(
        (
            {
                "@type": T + "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit",
                "stat_prefix": "l",
                "max_connections": 5,
            },
        ),
        "denied",
        place={"default_config": DENY},
    ),
}


#: The listener whose file is written after another one's: when it is obeyed, the other was read.
_CLOCK = "is the clock of the others"
FILTERS[_CLOCK] = Discovered((ALLOW,), "allowed")


class Chosen(Running):
    """One proxy with a listener for each list of certificates and each discovered filter."""

    def _open(self) -> None:
        super()._open()
        port = application(answers, self._stack)
        lists = sorted({row.certificates for row in SHOWN})
        self._tls = {names: free_port() for names in lists}
        self._filters = {name: free_port() for name in FILTERS}
        listeners = [self._over_tls(names) for names in lists] + [self._discovering(name) for name in FILTERS]
        static = {"listeners": listeners, "clusters": [cluster(port)[1]]}
        node = {"id": "n", "cluster": "c"}
        self.start({"node": node, "static_resources": static}, [*self._tls.values(), *self._filters.values()])

    def _over_tls(self, names: tuple[str, ...]) -> Json:
        certificates = [
            {
                "certificate_chain": {"inline_string": leaves()[name].chain_pem.decode()},
                "private_key": {"inline_string": leaves()[name].key_pem.decode()},
            }
            for name in names
        ]
        limits = {"tls_minimum_protocol_version": "TLSv1_2", "tls_maximum_protocol_version": "TLSv1_3"}
        config = {
            "@type": T + "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {"tls_certificates": certificates, "tls_params": limits},
        }
        over_tls = {"filters": [tcp()], "transport_socket": {"name": "tls", "typed_config": config}}
        return {"name": " ".join(names), "address": on_loopback(self._tls[names]), "filter_chains": [over_tls]}

    def _discovering(self, name: str) -> Json:
        row = FILTERS[name]
        self._write(name, row.versions[0])
        source = {"path_config_source": {"path": str(self._path(name))}, "initial_fetch_timeout": "0.5s"}
        kinds = [T + "envoy.extensions.filters.network.rbac.v3.RBAC"]
        discovery = {"config_source": {**source, "resource_api_version": "V3"}, "type_urls": kinds, **row.place}
        filters = [{"name": "guard", "config_discovery": discovery}, tcp()]
        return {
            "name": name,
            "address": on_loopback(self._filters[name]),
            "filter_chains": [{"filters": filters}],
        }

    def _path(self, name: str) -> Any:
        return self.folder / f"{list(FILTERS).index(name)}.json"

    def _write(self, name: str, config: Json) -> None:
        kind = T + "envoy.config.core.v3.TypedExtensionConfig"
        resources = [{"@type": kind, "name": "guard", "typed_config": config}] if config else []
        path = self._path(name)
        written = path.with_suffix(".new")
        written.write_text(json.dumps({"version_info": str(config), "resources": resources}))
        os.rename(written, path)

    def shown(self, row: Shown) -> str:
        """Return the certificate that a client is shown."""
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        if row.only_rsa:
            client.maximum_version = ssl.TLSVersion.TLSv1_2
            client.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
        with (
            contextlib.suppress(ssl.SSLError),
            socket.create_connection(("127.0.0.1", self._tls[row.certificates]), WAIT_S) as sock,
            client.wrap_socket(sock, server_hostname=row.name) as secured,
        ):
            certificate = secured.getpeercert(binary_form=True)
            return next(
                name
                for name, leaf in leaves().items()
                if leaf.certificate.public_bytes(Encoding.DER) == certificate
            )
        return "none"

    def discovered(self, name: str) -> str:
        """Let a filter's versions follow each other, and return what connections meet after each."""
        row = FILTERS[name]
        seen = [self._meets(name)]
        for version in row.versions[1:]:
            self._write(name, version)
            if version in (ALLOW, DENY):
                until(lambda: self._meets(name) != seen[-1])
            else:
                self._overtake()  # nothing changes, and what was written later has been read
            seen.append(self._meets(name))
        return ", ".join(seen)

    def _meets(self, name: str) -> str:
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self._filters[name]), WAIT_S) as sock,
        ):
            sock.sendall(b"?")
            return "allowed" if sock.recv(1) == b"!" else "denied"
        return "denied"

    def _overtake(self) -> None:
        before = self._meets(_CLOCK)
        self._write(_CLOCK, ALLOW if before == "denied" else DENY)
        until(lambda: self._meets(_CLOCK) != before)


def _cases() -> tuple[Case[Chosen], ...]:
    def shown(row: Shown) -> Callable[[Chosen], str]:
        return lambda site: site.shown(row)

    def discovered(name: str) -> Callable[[Chosen], str]:
        return lambda site: site.discovered(name)

    def words(row: Shown | Discovered) -> str:
        return f" ({row.why})" if row.why else ""

    def expected(row: Shown | Discovered) -> dict[str, str]:
        return dict(zip(COLUMNS, (row.envoy, row.ours or row.envoy), strict=True))

    certificates = [
        Case(
            number=f"k{number}",
            stimulus=f"{', '.join(row.certificates)}; client {'of RSA only ' if row.only_rsa else ''}"
            + (f"asks for {row.name}" if row.name else "names no server")
            + words(row),
            run=shown(row),
            expected=expected(row),
        )
        for number, row in enumerate(SHOWN, 1)
    ]
    filters = [
        Case(
            number=f"e{number}",
            stimulus=f"a filter {name}" + words(row),
            run=discovered(name),
            expected=expected(row),
        )
        for number, (name, row) in enumerate(FILTERS.items(), 1)
        if name != _CLOCK
    ]
    return (*certificates, *filters)


CASES = _cases()
