"""``ztunnel check``: is the cluster fit for the mesh, before and after installation."""

from ztunnel.ask.check.command import add_arguments

__all__ = ["add_arguments"]
