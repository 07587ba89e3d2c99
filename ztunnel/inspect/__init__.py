"""Commands that ask a running proxy: ``ztunnel status``, ``connections``, ``explain`` and their like."""

from ztunnel.inspect.command import add_arguments

__all__ = ["add_arguments"]
