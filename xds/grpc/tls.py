"""TLS settings for connections to control planes, and the check of the server's name (RFC 9525)."""

import ipaddress
from collections.abc import Callable, Sequence

from cryptography import x509

from hbone.settings import Role
from hbone.tls_context import TlsContext, TlsSettings, TlsVersion

__all__ = ["TlsContext", "client_tls", "named"]


def client_tls(
    root_pem: bytes, names: Sequence[str], *, tls_1_2: bool = True, groups: tuple[str, ...] | None = None
) -> TlsContext:
    """Return a client's TLS context that accepts only one server.

    Args:
        root_pem: one or more root certificates. The server's chain must end in one of these roots.
        names: the server's host names or IP addresses. Its certificate must be valid for at least one. If the
            first is a host name, it is sent as SNI.
        tls_1_2: whether TLS 1.2 is accepted.
        groups: key exchange groups in order of preference. None leaves the choice to OpenSSL.

    Raises:
        ValueError: no certificate in ``root_pem``, or an unknown group.
    """
    return TlsContext(
        Role.CLIENT,
        TlsSettings(
            trusted_ca_pem=root_pem,
            min_version=TlsVersion.TLS_1_2 if tls_1_2 else TlsVersion.TLS_1_3,
            groups=groups,
            alpn_required=True,
            server_name=None if _address(names[0]) is not None else names[0],
            verify=named(names),
        ),
    )


def named(names: Sequence[str]) -> Callable[[Sequence[x509.Certificate]], str | None]:
    """Return a function that checks a verified chain: the leaf must be valid for one of ``names``, host names or
    IP addresses.

    The function returns the reason for a refusal, or None. Only subject alternative names count. A wildcard stands
    for the whole first label.
    """
    addresses = {address for name in names if (address := _address(name)) is not None}
    hosts = {name.lower().removesuffix(".") for name in names if _address(name) is None}

    def check(chain: Sequence[x509.Certificate]) -> str | None:
        try:
            found = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return "the certificate has no subject alternative names"
        except ValueError as error:
            return f"malformed subject alternative names: {error}"
        of_hosts = found.get_values_for_type(x509.DNSName)
        of_addresses = found.get_values_for_type(x509.IPAddress)
        if addresses.intersection(of_addresses) or any(_stands_for(each, hosts) for each in of_hosts):
            return None
        shown = ", ".join([*of_hosts, *map(str, of_addresses)]) or "no host"
        return f"the certificate is for {shown}, not for {' or '.join(names)}"

    return check


def _stands_for(pattern: str, hosts: set[str]) -> bool:
    pattern = pattern.lower().removesuffix(".")
    if not pattern.startswith("*."):
        return pattern in hosts
    return any(host.partition(".")[2] == pattern[2:] and not host.startswith(".") for host in hosts)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
