"""Which files of tests try values and bytes only: the pure core, without a socket, process or event loop.

``pytest --core`` runs these: two thirds of all tests, in a quarter of the time.
"""

import ast
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
#: Top-level modules that a test of a shell imports, itself or through its helpers.
_SHELL = {"asyncio", "grpc", "multiprocessing", "signal", "socket", "subprocess", "threading", "time", "uvloop"}


@cache
def is_core(path: Path) -> bool:
    """Return whether a file, with the helpers of tests that it imports, uses none of what shells do.

    Raises:
        SyntaxError: a file is no Python; so says the collection of it, too.
    """
    helpers = []
    for module in _imports(path):
        if module.partition(".")[0] in _SHELL:
            return False
        helper = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if module.startswith("tests.") and helper != path and helper.exists():
            helpers.append(helper)
    return all(is_core(helper) for helper in helpers)


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found
