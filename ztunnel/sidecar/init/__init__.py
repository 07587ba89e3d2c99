"""The init container of a pod with a sidecar: puts the rules there that capture its traffic, and ends."""

from ztunnel.sidecar.init.command import add_arguments

__all__ = ["add_arguments"]
