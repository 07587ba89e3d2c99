"""Enumerations that are keys of tables on the data path."""

from enum import Enum


class Key(Enum):
    """An enumeration whose members hash by identity, in C: Enum hashes their names, in Python, at each look-up."""

    __hash__ = object.__hash__
