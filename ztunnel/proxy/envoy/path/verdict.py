"""Summarizes an explanation in Envoy's dialect: whether the connection is allowed on all its possible routes.
Pure.

This module is separate from :mod:`ztunnel.proxy.envoy.path.explain`, so that a command which adds the far node's
answer can compute the verdict again without importing the data path.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

Answer = Mapping[str, Any]

_ALLOWED: Final = ""
_FAR: Final = "far"


def verdict_of(hop: Answer) -> str:
    """Return ``allowed ...``, or ``refused: ...`` with the reason of the first refused route."""
    ends = list(_ends(hop))
    closed = [end for end in ends if end not in (_ALLOWED, _FAR)]
    if len(closed) == len(ends):
        return f"refused: {closed[0]}" if closed else "refused: closed: no endpoint"
    if closed:
        return f"allowed, but not by {len(closed)} of {len(ends)} endpoints: {closed[0]}"
    if _FAR in ends:
        return "allowed here; the proxy at the tunnel's far end also decides"
    return "allowed"


def _ends(hop: Answer) -> Iterator[str]:
    """Yield the result for each route through a hop: why the route is refused, or the text ``allowed ...``."""
    reason = _closed(hop)
    if reason is not None:
        yield reason
        return
    for cluster in hop.get("clusters") or ():
        if "verdict" in cluster:
            yield str(cluster["verdict"])
            continue
        for endpoint in cluster.get("endpoints") or ():
            reason = _closed(endpoint)
            if reason is not None:
                yield reason
            elif "hop" in endpoint:
                yield from _ends(endpoint["hop"])
            elif "inbound" in endpoint:
                yield from _ends(endpoint["inbound"])
            else:
                yield _FAR if "tunnel" in endpoint else _ALLOWED


def _closed(place: Answer) -> str | None:
    found = place.get("verdict") or (place.get("tls") or {}).get("verdict")
    return str(found) if found is not None else None
