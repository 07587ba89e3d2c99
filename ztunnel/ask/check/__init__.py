"""``ztunnel check``: checks whether the cluster is fit for the mesh, before and after installation."""

from ztunnel.ask.check.command import add_arguments

__all__ = ["add_arguments"]
