"""Checks certificates and roots in each proxy's dump. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from hbone.x509_errors import UNREADABLE
from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, error, warning
from ztunnel.ask.check.rules.objects import seconds_of

#: The audience of the tokens that istiod accepts.
_AUDIENCE: Final = "istio-ca"
#: A proxy renews a certificate after half its lifetime. Below this remaining fraction, renewal has failed
#: repeatedly.
_LEFT: Final = 0.4
_ROOT_WARN_S: Final = 60 * 86400.0
_ROOT_S: Final = 7 * 86400.0


def certificates(facts: Facts) -> Iterator[Finding]:
    """Check the state of each identity's certificate, and how much of its lifetime remains."""
    for node, dump in facts.dumps():
        for each in dump.get("certificates") or ():
            identity, state = str(each.get("identity")), str(each.get("state"))
            if state.startswith("Unavailable"):
                yield error(f"no certificate: {state.partition(':')[2].strip() or state}", identity, node)
            for leaf in (each.get("certChain") or ())[:1]:
                left = _share_left(leaf, facts.now_s)
                if left is not None and left <= 0:
                    yield error(f"its certificate ended at {leaf.get('expirationTime')}", identity, node)
                elif left is not None and left < _LEFT:
                    yield warning(
                        f"{left:.0%} of its certificate's life is left, until {leaf.get('expirationTime')}",
                        identity,
                        node,
                    )


def _share_left(entry: Mapping[str, Any], now_s: float) -> float | None:
    begin, end = seconds_of(entry.get("validFrom")), seconds_of(entry.get("expirationTime"))
    return None if begin is None or end is None or end <= begin else (end - now_s) / (end - begin)


def authorities(facts: Facts) -> Iterator[Finding]:
    """Check each intermediate and root certificate of the mesh once."""
    # Serial numbers alone do not identify certificates: authorities can use the same one, commonly 0 or 1.
    seen: dict[tuple[str, str, str], list[str]] = {}
    for node, dump in facts.dumps():
        for each in dump.get("certificates") or ():
            for kind, entries in (
                ("intermediate", (each.get("certChain") or ())[1:]),
                ("root", each.get("rootCerts") or ()),
            ):
                for entry in entries:
                    nodes = seen.setdefault(
                        (kind, str(entry.get("serialNumber")), str(entry.get("expirationTime"))), []
                    )
                    if node not in nodes:
                        nodes.append(node)
    for (kind, serial, ends), nodes in seen.items():
        end = seconds_of(ends)
        if end is not None and end - facts.now_s < _ROOT_WARN_S:
            make = error if end - facts.now_s < _ROOT_S else warning
            yield make(f"the {kind} {serial} ends at {ends}; {len(nodes)} nodes have it", f"{kind} {serial}")


def trust(facts: Facts) -> Iterator[Finding]:
    """Check whether other nodes trust each node's leaf certificate, and whether all nodes have the same roots."""
    roots: dict[str, dict[bytes, x509.Certificate]] = {}
    chains: dict[str, list[x509.Certificate]] = {}
    for node, dump in facts.dumps():
        for each in dump.get("certificates") or ():
            held = [found for entry in each.get("rootCerts") or () if (found := _certificate(entry)) is not None]
            roots.setdefault(node, {}).update({root.public_bytes(Encoding.DER): root for root in held})
            chain = [found for entry in each.get("certChain") or () if (found := _certificate(entry)) is not None]
            if chain:
                chains.setdefault(node, chain)
    if len(roots) < 2:
        raise NotGathered("fewer than two nodes have certificates")
    for node, chain in chains.items():
        refusing = [
            other for other, held in roots.items() if other != node and not _verifies(chain, held.values())
        ]
        if refusing:
            yield error(
                f"its certificates are not trusted on {_few(refusing)}: no root there has issued them", node=node
            )
    sets: dict[frozenset[bytes], list[str]] = {}
    for node, of_node in roots.items():
        sets.setdefault(frozenset(of_node), []).append(node)
    if len(sets) > 1:
        parts = (f"{len(each)} roots on {_few(nodes)}" for each, nodes in sets.items())
        yield warning(f"nodes have {len(sets)} different sets of roots: {'; '.join(parts)}")


def tokens(facts: Facts) -> Iterator[Finding]:
    """Check the token that each proxy sends with requests for certificates and configuration."""
    found = False
    for node, check in facts.checks():
        token = check.get("token")
        if not isinstance(token, Mapping):
            continue
        found = True
        if token.get("error"):
            yield error(str(token["error"]), node=node)
            continue
        expires, audiences = token.get("expires"), token.get("audiences")
        if isinstance(expires, int | float) and expires < facts.now_s:
            yield error(f"its token has expired {int(facts.now_s - expires)} s ago", node=node)
        if audiences and _AUDIENCE not in audiences:
            yield warning(f"its token's audience is {', '.join(map(str, audiences))}, not {_AUDIENCE}", node=node)
    if not found:
        raise NotGathered(facts.no_nodes or "no proxy reports its token")


def _certificate(entry: Mapping[str, Any]) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(base64.b64decode(str(entry.get("pem") or "")))
    except UNREADABLE:
        return None


def _verifies(chain: list[x509.Certificate], roots: Any) -> bool:
    """Return whether a root has issued the last certificate of a chain, or is itself that certificate."""
    top = chain[-1]
    for root in roots:
        if root == top:
            return True
        try:
            top.verify_directly_issued_by(root)
        except (InvalidSignature, *UNREADABLE):
            continue
        return True
    return False


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


CHECKS: Final = (
    Check(
        id="IDN1", asks="each identity has a certificate that is renewed", judge=certificates,
        remedy="`ztunnel certificates` has the last error; see the token and the CA's address.",
    ),
    Check(
        id="IDN2", asks="how long intermediates and roots last", judge=authorities,
        remedy="Add the new root everywhere, then change the issuer.",
    ),
    Check(
        id="IDN3", asks="nodes trust each other's certificates", judge=trust,
        remedy="Roll the proxies that have the old set of roots.",
    ),
    Check(
        id="IDN4", asks="tokens for the CA and the control plane", judge=tokens,
        remedy="Mount a token of the audience istio-ca that kubelet renews (serviceAccountToken volume).",
    ),
)  # fmt: skip
