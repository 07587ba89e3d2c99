"""The init container of a pod with a sidecar: installs the rules that capture the pod's traffic, and exits."""

from ztunnel.sidecar.init.command import add_arguments

__all__ = ["add_arguments"]
