"""The control plane's addresses, tokens and trusted roots.

Files are read for each request, because tokens and roots are rotated while the process runs. If a file is missing,
the request fails with an error that contains the path. The next request reads the file again.
"""

import ipaddress
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from xds.errors import XdsError
from ztunnel.proxy.identity.roots import read_roots

log = logging.getLogger(__name__)

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_DEFAULT_TOKEN: Final = Path("./var/run/secrets/tokens/istio-token")
_SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
_MANY_BYTES: Final = 1 << 20  # a larger file is neither a token nor a root bundle


class CredentialsError(XdsError):
    """A token or root certificate is unusable. The text says which one and why, and never contains a secret."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address of the control plane.

    Attributes:
        target: gRPC's target, ``host:port`` or ``unix:/path``.
        tls: whether TLS is used. False only for Unix sockets and loopback addresses.
    """

    target: str
    tls: bool

    @property
    def host(self) -> str:
        """The name or address that the server's certificate must contain. Empty for Unix sockets."""
        return "" if self.target.startswith("unix:") else self.target.rpartition(":")[0].strip("[]")

    @classmethod
    def parse(cls, address: str) -> "Endpoint":
        """Parse ``https://host:port``, ``host:port`` or ``unix:/path``. ``http://`` is allowed for loopback
        addresses.

        Raises:
            ValueError: the text has another form, or asks for plain text to a remote host, which would expose the
                token on the network.
        """
        if address.startswith("unix:"):
            if len(address) == len("unix:"):
                raise ValueError(f"{address}: a Unix socket needs a path")
            return cls(address, tls=False)
        parts = urlsplit(address if "://" in address else f"https://{address}")
        if parts.scheme not in ("https", "http"):
            raise ValueError(f"{address}: must be https://host:port or unix:/path")
        host, port = parts.hostname, parts.port  # may raise ValueError for a port out of range
        if not host or parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError(f"{address}: must be https://host:port, and nothing else")
        if parts.scheme == "http" and not _is_loopback(host):
            raise ValueError(f"{address}: http:// would show the token to the network; use https://")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{shown}:{port or (443 if parts.scheme == 'https' else 80)}", tls=parts.scheme == "https")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token (``AUTH_TOKEN``): a file, a literal, or by default a file that can be missing.

    A value that looks like a path is treated as a path even if the file does not exist: the file can be mounted
    later, and the path must not be sent as the token.
    """

    value: str | None = None
    default: Path = _DEFAULT_TOKEN

    def __repr__(self) -> str:
        return f"Token({'default' if self.value is None else self.value if self._is_path() else 'literal'})"

    def _is_path(self) -> bool:
        # Unlike Path.exists, os.path.exists returns False for a text that is too long for a file name.
        value = self.value or ""
        return value.startswith(("/", "./", "../")) or os.path.exists(value)

    def read(self) -> str | None:
        """Return the current token without its newline, or None if only the default file is missing.

        Raises:
            CredentialsError: the file is missing, unreadable or empty, or contains no token.
        """
        if self.value is None:
            if not self.default.exists():
                return None
            return _token(_content(self.default, "token"), f"token file {self.default}")
        if self._is_path():
            return _token(_content(Path(self.value), "token"), f"token file {self.value}")
        return _token(self.value.encode(), "AUTH_TOKEN")


def _token(data: bytes, place: str) -> str:
    token = data.strip()
    if not token:
        raise CredentialsError(f"{place} is empty")
    if not token.isascii() or any(byte <= 32 or byte == 127 for byte in token):
        raise CredentialsError(f"{place} holds no bearer token: blanks or control characters inside")
    return token.decode()


def _content(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MANY_BYTES + 1)
    except OSError as error:
        raise CredentialsError(f"cannot read {what} file {path}: {error.strerror}") from error
    if len(data) > _MANY_BYTES:
        raise CredentialsError(f"{what} file {path} is larger than {_MANY_BYTES} bytes: the wrong file?")
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The metadata of every request to the control plane.

    Attributes:
        token: identifies this node. Without a token, no ``clusterid`` is sent either, as in the Rust ztunnel.
        cluster_id: the cluster where istiod looks up the node of an impersonated pod.
        headers: further headers, names in lower case (``XDS_HEADER_*``, ``CA_HEADER_*``).
    """

    token: Token
    cluster_id: str = "Kubernetes"
    headers: Metadata = ()

    def metadata(self) -> Metadata:
        """Return the metadata of one call.

        Raises:
            CredentialsError: the token is unusable now.
        """
        token = self.token.read()
        if token is None:
            return self.headers
        return (("authorization", f"Bearer {token}"), ("clusterid", self.cluster_id), *self.headers)


@dataclass(frozen=True, slots=True)
class Roots:
    """The roots that verify the control plane's certificate (``XDS_ROOT_CA``, ``CA_ROOT_CA``).

    Attributes:
        value: a path, ``SYSTEM`` for the host's store, or the certificates themselves in PEM.
    """

    value: str

    @property
    def kind(self) -> str:
        """The kind of source, as shown in config dumps: ``File``, ``Default`` or ``Static``."""
        if self.value == "SYSTEM":
            return "Default"
        return "Static" if "-----BEGIN" in self.value else "File"

    def read(self) -> bytes:
        """Return the current roots, in PEM.

        Raises:
            CredentialsError: the roots are unreadable or contain no certificate. Otherwise every handshake would
                fail against an empty store, with a misleading error.
        """
        match self.kind:
            case "Static":
                data = self.value.encode()
            case "File":
                data = _content(Path(self.value), "root certificate")
            case _:
                data = _content(_system_bundle(), "root certificate")
        found = read_roots(data)
        for fault in found.faults:
            log.warning("%s: %s", self.place, fault)
        if not found.certificates:
            raise CredentialsError(f"no certificate in {self.place}")
        return data if found.plain else found.pem

    @property
    def place(self) -> str:
        """The source of the roots, for error messages."""
        match self.kind:
            case "Static":
                return "inline root certificates"
            case "File":
                return f"root certificate file {self.value}"
            case _:
                return f"certificate store of this host {_system_bundle()}"


def _system_bundle() -> Path:
    import ssl  # loads the interpreter's OpenSSL, which no other mode of a proxy needs

    paths = [ssl.get_default_verify_paths().cafile, *_SYSTEM_BUNDLES]
    for path in paths:
        if path is not None and Path(path).exists():
            return Path(path)
    raise CredentialsError(f"this host has no certificate store (looked for {', '.join(_SYSTEM_BUNDLES)})")
