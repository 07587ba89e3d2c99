"""Which files of tests try values and bytes only: the pure core, without a socket, process or event loop.

``pytest --core`` runs these: two thirds of all tests, in a quarter of the time.
"""

import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[1]
#: Top-level modules that a test of a shell imports, itself or through its helpers.
_SHELL = {"asyncio", "grpc", "multiprocessing", "signal", "socket", "subprocess", "threading", "time", "uvloop"}

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n#]*)|import[ \t]+([^\n#]*))", re.M
)
_NAME = re.compile(r"[\w.]+")


@cache
def is_core(path: Path) -> bool:
    """Return whether a file, with the helpers of tests that it imports, uses none of what shells do."""
    helpers = []
    for module in _imports(path):
        if module.partition(".")[0] in _SHELL:
            return False
        helper = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
        if module.startswith("tests.") and helper != path and helper.exists():
            helpers.append(helper)
    return all(is_core(helper) for helper in helpers)


def _imports(path: Path) -> set[str]:
    """Return the modules that a file imports. Reading lines takes a fifteenth of the time of parsing."""
    found = set()
    for module, members, names in _IMPORT.findall(path.read_text()):
        found.add(module)
        if module:
            found.update(f"{module}.{name}" for name in _NAME.findall(members))
        found.update(name for name in _NAME.findall(names) if name != "as")
    return found
