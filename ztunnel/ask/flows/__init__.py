"""``ztunnel flows``: the last connections that ended, of one proxy or of all, and those that end from now on."""

from ztunnel.ask.flows.command import add_arguments

__all__ = ["add_arguments"]
