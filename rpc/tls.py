"""TLS towards control planes, as values: what is offered, and which certificate is a server's (RFC 9525)."""

import ipaddress
from collections.abc import Callable, Sequence

from cryptography import x509

from hbone.settings import Role
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings, TlsVersion

__all__ = ["TlsContext", "client_tls", "named", "server_tls"]


def client_tls(
    root_pem: bytes, names: Sequence[str], *, tls_1_2: bool = True, groups: tuple[str, ...] | None = None
) -> TlsContext:
    """What a client asks for and believes.

    Args:
        root_pem: one or more certificates, one of which the server's must lead to.
        names: of the server, host names or IP addresses: its certificate must be for one of them. The first is
            said in the greeting (SNI) if it is a host's.
        tls_1_2: whether servers may be that old.
        groups: key exchange, in order; None: OpenSSL's choice.

    Raises:
        ValueError: no certificate in ``root_pem``, or a group that is none.
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


def server_tls(key_pem: bytes, chain_pem: bytes) -> TlsContext:
    """What a server shows: ``chain_pem``, the leaf first. Clients prove themselves otherwise.

    Raises:
        ValueError: key and certificate do not go together, or one of them is none.
    """
    return TlsContext(
        Role.SERVER,
        TlsSettings(
            certificate_chain_pem=chain_pem,
            private_key_pem=key_pem,
            client_certificate=ClientCertificate.NONE,
            min_version=TlsVersion.TLS_1_2,
            alpn_required=True,
        ),
    )


def named(names: Sequence[str]) -> Callable[[Sequence[x509.Certificate]], str | None]:
    """Return the judge of a verified chain: the leaf must be for one of ``names``, host names or IP addresses.

    What the judge returns is why it refuses, or None. Names come from the subject alternative names only; a
    wildcard stands for a whole first label.
    """
    addresses = {address for name in names if (address := _address(name)) is not None}
    hosts = {name.lower().removesuffix(".") for name in names if _address(name) is None}

    def judge(chain: Sequence[x509.Certificate]) -> str | None:
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
        shown = ", ".join([*of_hosts, *map(str, of_addresses)]) or "nobody"
        return f"the certificate is for {shown}, not for {' or '.join(names)}"

    return judge


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
