"""The normal form of HTTP paths, for requests and rules alike (like in Calico's Dikastes since April 2026).

A proxy and its application can interpret one path differently: ``/public/..%2Fadmin`` is below ``/public`` for one
and ``/admin`` for the other. So both sides of a comparison are converted to the form of the most liberal reader,
and a path without such a form matches no rule.
"""

import re
from typing import Final
from urllib.parse import unquote_to_bytes

_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
#: Matches a dot, slash or backslash that is still escaped after decoding once, so it was encoded twice.
_ENCODED_TWICE: Final = re.compile(rb"%(?:2e|2f|5c)", re.IGNORECASE)


def normal_path(path: str) -> bytes | None:
    """Return the normal form of a path, or None if it has none.

    It has no query and fragment, is decoded once, and has slashes for backslashes. Parameters (from ``;`` to the
    segment's end), empty segments and dot segments are removed; ``..`` stops at the root. It begins with a slash
    and ends with none, except for ``/``.

    Args:
        path: the path in the request. Bytes that are not UTF-8 are surrogates.
    """
    raw = re.split(rb"[?#]", path.encode("utf-8", "surrogateescape"), maxsplit=1)[0]
    if _BAD_ESCAPE.search(raw):
        return None
    raw = unquote_to_bytes(raw)
    if _ENCODED_TWICE.search(raw) or b"\0" in raw:
        return None
    raw = raw.replace(b"\\", b"/")
    if not raw.startswith(b"/"):
        return None
    # posixpath.normpath is unsuitable, because it keeps two leading slashes.
    segments: list[bytes] = []
    for segment in raw.split(b"/"):
        name = segment.partition(b";")[0]
        if name == b"..":
            del segments[-1:]
        elif name not in (b"", b"."):
            segments.append(name)
    return b"/" + b"/".join(segments)


def is_below(path: bytes, prefix: bytes) -> bool:
    """Return whether a path is the prefix or lies below it, both in normal form."""
    return prefix == b"/" or path == prefix or path.startswith(prefix + b"/")
