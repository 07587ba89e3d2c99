"""Makes ``docs/formats.md`` from the modules that read the described formats: ``python -m deploy.formats``.

A reader's docstring starts with a sentence and an annotated example of the whole format. The page contains both,
so that a change of the reader changes the page. A test compares its keys with the accepted ones.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "formats.md"
_HEAD = """# Formats

This page describes the YAML files that operators write. `python -m deploy.formats` generates it from the modules
that read these files.
Every module reports all faults of a file together, each with its place, and refuses unknown keys.
`examples/` has a file of each format, which the tests load.
"""
#: The methods of readers whose arguments include the accepted keys.
_READING = frozenset({"document", "mapping", "part"})


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its name, the command-line option for a file of this format, and the module that reads it."""

    title: str
    option: str
    module: str

    @property
    def tree(self) -> ast.Module:
        """The module's syntax."""
        return ast.parse((ROOT / self.module).read_text())

    @property
    def docstring(self) -> str:
        """The module's docstring."""
        return ast.get_docstring(self.tree) or ""

    @property
    def summary(self) -> str:
        """The first paragraph of the module's docstring, in Markdown."""
        return self.docstring.partition("\n\n")[0].replace("``", "`").replace("\n", " ")

    @property
    def example(self) -> str:
        """The literal block of the module's docstring, without its indentation."""
        lines = self.docstring.partition("::\n\n")[2].splitlines()
        block = []
        for line in lines:
            if line and not line.startswith("    "):
                break
            block.append(line.removeprefix("    "))
        return "\n".join(block).strip()

    def keys(self) -> set[str]:
        """Return every key that the reader accepts."""
        return set(_keys(self.tree))

    def shown(self) -> set[str]:
        """Return every key in the example."""
        return set(re.findall(r"([A-Za-z_]\w*):(?= |$)", self.example, re.MULTILINE))


FORMATS = (
    Format("Mesh", "ztunnel control-plane MESH.YAML", "ztunnel/control_plane/mesh.py"),
    Format("Pods of a node", "ztunnel agent --state FILE", "ztunnel/node/agent/description.py"),
    Format("Node", "ztunnel intercept apply -f FILE", "ztunnel/node/intercept/description.py"),
    Format("Injector", "ztunnel inject --config FILE", "ztunnel/sidecar/inject/config.py"),
)


def _keys(tree: ast.Module) -> Iterator[str]:
    """Yield the keys in tuples that are passed to the methods of :data:`_READING`, directly or by name."""
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READING
        ):
            continue
        for argument in node.args:
            given = named.get(argument.id) if isinstance(argument, ast.Name) else argument
            if isinstance(given, ast.Tuple):
                for item in given.elts:
                    if isinstance(item, ast.Constant) and isinstance(item.value, str):
                        yield item.value


def text() -> str:
    """Return the reference."""
    sections = [
        f"## {each.title}\n\n{each.summary} (`{each.option}`)\n\n```yaml\n{each.example}\n```\n"
        for each in FORMATS
    ]
    return "\n".join([_HEAD, *sections])


if __name__ == "__main__":
    REFERENCE.write_text(text())
