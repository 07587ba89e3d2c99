"""``ztunnel limits``: prints every bound on what peers, pods and strangers can make the proxy hold or compute."""

from ztunnel.ask.limits.command import add_arguments

__all__ = ["add_arguments"]
