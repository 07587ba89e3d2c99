"""Tables of plain text, in the form that kubectl and istioctl print."""

from collections.abc import Iterable, Iterator, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table. Each column is as wide as its widest cell. The first row is the heading."""
    listed = list(rows)
    if not listed:
        return
    widths = [max(len(row[column]) for row in listed) for column in range(len(listed[0]))]
    for row in listed:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
