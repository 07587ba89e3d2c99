"""Declarations for mypyc, which compiles some modules of this project (``setup.py``). In uncompiled modules they
have no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**settings):
        """Return a decorator that returns the class unchanged.

        This stands in for ``mypy_extensions.mypyc_attr``, which is needed only for compiling: mypyc recognises the
        decorator by its declaration above.
        """
        return lambda declared: declared
