"""``ztunnel simulate``: the effect of a change of authorization policies on connections that were observed."""

from ztunnel.ask.simulate.command import add_arguments

__all__ = ["add_arguments"]
