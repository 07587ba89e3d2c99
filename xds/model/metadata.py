"""Metadata of configuration: namespaces of structs, which filters, subsets and access logs read."""

from collections.abc import Mapping
from typing import Final

Struct = Mapping[str, object]
Metadata = Mapping[str, Struct]

_NONE: Final[Metadata] = {}


def no_metadata() -> Metadata:
    """Return the one empty object that everything without metadata shares; nothing may change it."""
    return _NONE
