"""Bearer tokens of nodes, for a control plane that other hosts can reach. Pure.

A token names one node and its expiry, and is signed with a secret that only the control plane has. Its holder gets
certificates for the identities of pods on that node, and no others.
"""

import base64
import hashlib
import hmac
import json
from typing import Final

_VERSION: Final = "ztunnel-node-v1"


class TokenError(Exception):
    """A token is invalid or expired. The error's text does not contain the token."""


def node_token(secret: bytes, node: str, expires_s: float) -> str:
    """Return a token for a node, valid until ``expires_s`` (seconds since the epoch)."""
    claims = json.dumps({"node": node, "exp": int(expires_s)}, separators=(",", ":")).encode()
    body = base64.urlsafe_b64encode(claims).decode().rstrip("=")
    return f"{_VERSION}.{body}.{_signature(secret, body)}"


def is_node_token(token: str) -> bool:
    """Return whether a token has the form of a node token. Its signature is not verified."""
    return token.startswith(f"{_VERSION}.")


def node_of_token(secret: bytes, token: str, now_s: float) -> str:
    """Return the node that a token was issued for.

    Raises:
        TokenError: the token is forged, damaged or expired.
    """
    version, _, rest = token.partition(".")
    body, _, signature = rest.partition(".")
    if version != _VERSION or not hmac.compare_digest(signature.encode(), _signature(secret, body).encode()):
        raise TokenError("the bearer token is not one of this control plane")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))  # signed by us, so well-formed
    if claims["exp"] <= now_s:
        raise TokenError(f"the bearer token of node {claims['node']} has expired")
    return str(claims["node"])


def _signature(secret: bytes, body: str) -> str:
    return hmac.new(secret, f"{_VERSION}.{body}".encode(), hashlib.sha256).hexdigest()
