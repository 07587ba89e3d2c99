"""The tunnel protocol of ambient meshes: TCP in HTTP/2 CONNECT streams over mutual TLS (HBONE).

:mod:`hbone.engine` is the state machine of an HTTP/2 connection, :mod:`hbone.tls` runs TLS on bytes, without a
socket, and :mod:`hbone.pool` chooses a connection for the next tunnel. Modules outside :mod:`hbone.aio` do no I/O
and read no clock. :mod:`hbone.aio` runs these modules on sockets. This package does not depend on Kubernetes, xDS
or packet filters: external functions (a ``dial`` callable, a verify hook) are passed as arguments.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec


def build() -> str:
    """Return ``compiled`` if the HTTP/2 engine was built by ``make compiled``, otherwise ``pure``."""
    found = find_spec("hbone.engine")
    origin = found.origin if found is not None else None
    return "compiled" if origin is not None and origin.endswith(tuple(EXTENSION_SUFFIXES)) else "pure"
