"""``ztunnel simulate``: predicts the effect of changed authorization policies on observed connections."""

from ztunnel.ask.simulate.command import add_arguments

__all__ = ["add_arguments"]
