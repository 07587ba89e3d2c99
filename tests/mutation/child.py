"""``python -m tests.mutation.child MODULE NUMBER TEST...``: pytest with one mutant in place of a module."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import CodeType

import pytest

from tests.mutation.mutants import mutant


def main(module: str, number: int, tests: list[str]) -> int:
    """Return pytest's exit status."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    path = spec.origin

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType | None:
            return compile(mutant(self.get_source(fullname) or "", number), path, "exec")

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, *args: object) -> importlib.machinery.ModuleSpec | None:
            if fullname != module:
                return None
            return importlib.util.spec_from_loader(fullname, Loader(fullname, path), origin=path)

    if number >= 0:
        sys.modules.pop(module, None)
        sys.meta_path.insert(0, Finder)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", *tests]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
