"""Provides a faster base class for enumerations that are keys of tables on the data path."""

from enum import Enum


class Key(Enum):
    """An enumeration whose members are hashed by identity, in C. The standard Enum hashes their
    names, in Python.
    """

    __hash__ = object.__hash__
