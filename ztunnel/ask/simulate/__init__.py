"""``ztunnel simulate``: the effect that a change of authorization policies would have had on
observed connections.
"""

from ztunnel.ask.simulate.command import add_arguments

__all__ = ["add_arguments"]
