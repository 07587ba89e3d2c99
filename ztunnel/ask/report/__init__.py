"""``ztunnel bug-report`` writes an archive for a ticket, ``changes`` compares one with the current state."""

from typing import Any

from ztunnel.ask.report import changes, command


def add_arguments(subparsers: Any) -> None:
    """Add the commands to ``argparse``'s sub-commands."""
    command.add_arguments(subparsers)
    changes.add_arguments(subparsers)


__all__ = ["add_arguments"]
