"""Commands that ask a running proxy: ``ztunnel status``, ``connections``, ``explain`` and their like."""

from ztunnel.inspect.command import ADDRESS, add_arguments
from ztunnel.inspect.completion import candidates, names_for

__all__ = ["ADDRESS", "add_arguments", "candidates", "names_for"]
