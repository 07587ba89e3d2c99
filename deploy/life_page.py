"""Writes the table of ``docs/life.md`` from the module that both front ends use: ``python -m
deploy.life_page``.
"""

from pathlib import Path

from ztunnel.proxy.dataplane.life_table import markdown

PAGE = Path(__file__).parents[1] / "docs" / "life.md"


def main() -> None:
    """Replace the table in the page, and print it."""
    table = markdown()
    before, first, rest = PAGE.read_text().partition("| state | ")
    _, _, after = (first + rest).partition("\n\n")
    PAGE.write_text(f"{before}{table}\n\n{after}")
    print(table)


if __name__ == "__main__":
    main()
