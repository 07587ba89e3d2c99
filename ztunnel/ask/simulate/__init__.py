"""``ztunnel simulate``: what a change of authorization policies would have done to connections that were seen."""

from ztunnel.ask.simulate.command import add_arguments

__all__ = ["add_arguments"]
