"""Every table of cases, with its columns."""

from dataclasses import dataclass

from tests.interop import checklist, control, files, tunnels
from tests.interop.case import Case
from tests.interop.site import Pairing


@dataclass(frozen=True)
class Table:
    """One table: its cases, and the pairings that make its columns."""

    title: str
    cases: tuple[Case, ...]
    columns: tuple[Pairing, ...]
    headings: tuple[str, ...]


TABLES = (
    Table("Checklist", checklist.CASES, checklist.COLUMNS, ("envoy", "ours (compat)", "ours (native)")),
    Table("Tunnels", tunnels.CASES, tunnels.COLUMNS, tunnels.HEADINGS),
    Table("Files", files.CASES, files.COLUMNS, files.HEADINGS),
    Table("Control plane", control.CASES, control.COLUMNS, control.HEADINGS),
)
