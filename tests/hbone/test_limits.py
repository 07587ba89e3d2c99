"""The page of limits has every limit, with its default."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from hbone.limits import Limits

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_the_page_has_every_limit_with_its_default() -> None:
    printed: dict[str, float] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`(\w+)`", cells[0])
        if len(cells) == 5 and names:
            values = [float(value.replace(",", "")) for value in cells[1].split(";")]
            assert len(values) == len(names), line
            printed |= dict(zip(names, values, strict=True))
    limits = Limits()
    expected = {field.name: float(getattr(limits, field.name)) for field in fields(limits)}
    assert {name: value for name, value in printed.items() if name in expected} == expected
