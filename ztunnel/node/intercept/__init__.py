"""``ztunnel intercept``: applies interception in a node's kernel, for Envoy's dialect, from a description of the
node.
"""

from ztunnel.node.intercept.command import add_arguments

__all__ = ["add_arguments"]
