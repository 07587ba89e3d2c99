"""``ztunnel bug-report``: one archive of everything that a ticket needs, from all nodes."""

from ztunnel.ask.report.command import add_arguments

__all__ = ["add_arguments"]
