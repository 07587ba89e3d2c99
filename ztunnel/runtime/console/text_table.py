"""Tables of plain text, as kubectl and istioctl print them."""

from collections.abc import Iterable, Iterator, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, whose columns are as wide as their widest cell; the first row is the heading."""
    listed = list(rows)
    if not listed:
        return
    widths = [max(len(row[column]) for row in listed) for column in range(len(listed[0]))]
    for row in listed:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
