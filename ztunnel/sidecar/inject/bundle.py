"""Makes the patch that puts the CA of the webhook's certificate into a webhook configuration. Pure."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from hbone.x509_errors import UNREADABLE
from ztunnel.kube.objects import Object
from ztunnel.sidecar.inject.patch import Operation, pointer


class BadBundle(ValueError):
    """A CA file has no certificates. The API server would accept it as a bundle, and fail at every call."""


def certificates(bundle: bytes) -> frozenset[bytes]:
    """Return the certificates of a PEM text in DER. Their order and the text around them do not matter.

    Raises:
        BadBundle: the file has no certificate, or one cannot be read.
    """
    try:
        return frozenset(each.public_bytes(Encoding.DER) for each in x509.load_pem_x509_certificates(bundle))
    except UNREADABLE as error:
        raise BadBundle(f"holds no certificates in PEM ({error})") from error


def operations(configuration: Object, bundle: bytes) -> list[Operation]:
    """Return the patch of a MutatingWebhookConfiguration. It is empty if every entry already has these
    certificates.

    Each change is preceded by a test of the entry's name: if another client has meanwhile inserted an earlier
    entry, the whole patch fails instead of changing the wrong entry.

    Raises:
        BadBundle: see :func:`certificates`.
    """
    wanted = certificates(bundle)
    encoded = base64.b64encode(bundle).decode()
    patch: list[Operation] = []
    entries = configuration.get("webhooks")
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        client = entry.get("clientConfig") if isinstance(entry, Mapping) else None
        if not isinstance(client, Mapping) or _found(client) == wanted:
            continue
        patch.append({"op": "test", "path": pointer("webhooks", number, "name"), "value": entry.get("name")})
        # This ``add`` also replaces an existing member (RFC 6902, 4.1).
        patch.append(
            {"op": "add", "path": pointer("webhooks", number, "clientConfig", "caBundle"), "value": encoded}
        )
    return patch


def _found(client: Mapping[str, Any]) -> frozenset[bytes] | None:
    try:
        return certificates(base64.b64decode(str(client.get("caBundle") or ""), validate=True))
    except (BadBundle, binascii.Error, ValueError):
        return None
