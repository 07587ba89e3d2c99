"""Writes a JSON schema to ``docs/schemas`` for each document type that commands print (``python -m
deploy.schemas``).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ztunnel.ask.addons.listing import ADDON
from ztunnel.ask.check.rules.model import CHECK_RESULT
from ztunnel.ask.flows.model import FLOW
from ztunnel.ask.inspect.audit import POD_AUDIT
from ztunnel.ask.inspect.kinds import KINDS
from ztunnel.ask.inspect.nodes import NODE_STATUS
from ztunnel.ask.report.changes import DIFFERENCE
from ztunnel.ask.simulate.command import PAIR
from ztunnel.ask.stat.traffic import EDGE, STAT
from ztunnel.runtime.console.output import Kind, schema

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"


def kinds() -> Iterator[Kind[Any]]:
    """Yield every document type that a command prints."""
    yield from KINDS.values()
    yield from (CHECK_RESULT, DIFFERENCE, EDGE, FLOW, STAT, NODE_STATUS, POD_AUDIT, PAIR, ADDON)


def texts() -> dict[str, str]:
    """Return the text of each schema by the name of its file."""
    return {f"{kind.name}List.json": json.dumps(schema(kind), indent=2) + "\n" for kind in kinds()}


def main() -> None:
    """Replace the schemas."""
    FOLDER.mkdir(exist_ok=True)
    wanted = texts()
    for path in FOLDER.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
