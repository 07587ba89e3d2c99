"""Makes ``/certs``: the certificates of every TLS context in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509

from xds.proto.dump import format_json
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.secrets.contexts import LiveContext
from ztunnel.proxy.envoy.secrets.verify import subject_alt_names
from ztunnel.runtime.http.page import JSON, Page, text

_KINDS = {"uri": "uri", "dns": "dns", "ip": "ip_address"}


def page(proxy: InspectedProxy) -> Page:
    """Return the page."""
    now = datetime.fromtimestamp(proxy.clock.wall(), UTC)
    shown = [_context(context, now) for context in contexts_in_use(proxy)]
    return text(format_json({"certificates": shown}), content_type=JSON)


def contexts_in_use(proxy: InspectedProxy) -> Iterator[LiveContext]:
    """Yield the TLS contexts whose secrets have arrived: first the contexts of clusters, then the contexts of
    filter chains.
    """
    for cluster in proxy.clusters.active:
        yield from (context for context in cluster.contexts if context.current is not None)
    for listener in proxy.listeners.active:
        for chain in listener.live_chains:
            if chain.tls is not None and chain.tls.current is not None:
                yield chain.tls


def certificates_in_use(proxy: InspectedProxy) -> tuple[list[x509.Certificate], list[x509.Certificate]]:
    """Return the certificates presented by TLS contexts, and the trusted roots, without duplicates."""
    chains: set[bytes] = set()
    roots: set[bytes | None] = set()
    for context in contexts_in_use(proxy):
        chains.update([own.chain_pem for own in context.certificates])
        roots.add(_roots_pem(context))
    return [_parsed(chain)[0] for chain in chains], [root for pem in roots for root in _parsed(pem)]


def certificates_shown(proxy: InspectedProxy) -> Iterator[tuple[x509.Certificate, list[str]]]:
    """Yield the certificates that each TLS context presents, with their URI SANs. A certificate can occur
    repeatedly.
    """
    for context in contexts_in_use(proxy):
        for leaf in _own(context):
            yield leaf, uri_names(leaf)


def uri_names(certificate: x509.Certificate) -> list[str]:
    """Return the URI SANs of a certificate."""
    return [name["uri"] for name in _names(certificate) if "uri" in name]


def _roots_pem(context: LiveContext) -> bytes | None:
    validation = context.validation
    return validation.trusted_ca_pem if validation is not None else None


def _roots(context: LiveContext) -> list[x509.Certificate]:
    return _parsed(_roots_pem(context))


def _own(context: LiveContext) -> list[x509.Certificate]:
    """Return the leaf certificates that a TLS context presents."""
    return [_parsed(own.chain_pem)[0] for own in context.certificates]


@lru_cache(maxsize=1024)  # contexts share chains; keyed by the text, so no entry becomes outdated
def _parsed(pem: bytes | None) -> list[x509.Certificate]:
    return [] if pem is None else x509.load_pem_x509_certificates(pem)


def _context(context: LiveContext, now: datetime) -> dict[str, object]:
    # Only the leaf of our own chain is shown, like in Envoy. All roots are shown, while Envoy shows only the
    # first.
    return {"ca_cert": details(_roots(context), now), "cert_chain": details(_own(context), now)}


def details(certificates: Iterable[x509.Certificate], now: datetime) -> list[dict[str, object]]:
    """Return the page's entries for certificates.

    Args:
        certificates: a certificate chain, or trusted roots.
        now: the time for ``days_until_expiration``.
    """
    return [
        {
            "path": "<inline>",
            "serial_number": _serial(certificate.serial_number),
            "subject_alt_names": _names(certificate),
            "days_until_expiration": str(max(0, (certificate.not_valid_after_utc - now).days)),
            "valid_from": _time(certificate.not_valid_before_utc),
            "expiration_time": _time(certificate.not_valid_after_utc),
        }
        for certificate in certificates
    ]


def _names(certificate: x509.Certificate) -> list[dict[str, str]]:
    try:
        names = subject_alt_names(certificate)
    except ValueError:
        return []
    return [{_KINDS[kind]: name} for kind, name in names if kind in _KINDS]


def _serial(number: int) -> str:
    """Return a serial number in hexadecimal with two digits per byte, like OpenSSL's BN_bn2hex."""
    digits = f"{number:x}"
    return digits if len(digits) % 2 == 0 else f"0{digits}"


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
