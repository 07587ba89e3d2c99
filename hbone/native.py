"""Declarations for mypyc, which compiles modules of this project (``setup.py``). They have no effect otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**settings):
        """Return a decorator that returns the class unchanged.

        mypyc recognises the decorator by its declaration above, and does not call it. So mypy_extensions is needed
        for compiling only.
        """
        return lambda declared: declared
