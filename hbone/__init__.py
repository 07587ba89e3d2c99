"""The tunnel protocol of ambient meshes: TCP in HTTP/2 CONNECT streams over mutual TLS (HBONE).

:mod:`hbone.engine` is one HTTP/2 connection as a state machine, :mod:`hbone.tls` TLS as bytes in and bytes
out, :mod:`hbone.pool` the choice of a connection for the next tunnel; none of them does I/O or reads a
clock. :mod:`hbone.aio` runs them on sockets. Nothing here knows Kubernetes, xDS or packet filters: what is
needed from outside (a ``dial`` callable, a verify hook) arrives as an argument.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec


def build() -> str:
    """``compiled`` when the engine is the one that ``make compiled`` built, else ``pure``."""
    found = find_spec("hbone.engine")
    origin = found.origin if found is not None else None
    return "compiled" if origin is not None and origin.endswith(tuple(EXTENSION_SUFFIXES)) else "pure"
