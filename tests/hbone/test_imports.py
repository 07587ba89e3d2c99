"""No circle of imports, not even one that only type checkers see: a module can be read before its users."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_modules_import_each_other_in_one_direction() -> None:
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / "hbone").rglob("*.py")}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names.update({node.module}, (f"{node.module}.{alias.name}" for alias in node.names))
        imports[module] = names & modules.keys() - {module, "hbone", "hbone.aio"}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
    assert imports["hbone.aio.server"] >= {"hbone.aio.connection", "hbone.aio.tunnel"}
