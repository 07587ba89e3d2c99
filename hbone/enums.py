"""Enumerations that are keys of tables on the data path."""

from enum import Enum


class Key(Enum):
    """An enumeration whose members hash by identity, in C. Enum would hash their names, in Python."""

    __hash__ = object.__hash__
