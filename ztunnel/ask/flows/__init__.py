"""``ztunnel flows``: the connections that ended last, of one proxy or of all, and new ones as they end."""

from ztunnel.ask.flows.command import add_arguments

__all__ = ["add_arguments"]
