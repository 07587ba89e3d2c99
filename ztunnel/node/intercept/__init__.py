"""``ztunnel intercept``: applies the kernel's part of a node in Envoy's dialect from a description of the node."""

from ztunnel.node.intercept.command import add_arguments

__all__ = ["add_arguments"]
