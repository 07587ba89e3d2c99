"""Commands that query a running proxy: ``ztunnel status``, ``connections``, ``explain`` and others."""

from ztunnel.ask.inspect.command import add_arguments
from ztunnel.ask.inspect.completion import candidates, names_for
from ztunnel.ask.inspect.source import ADDRESS, add_source, reaching

__all__ = ["ADDRESS", "add_arguments", "add_source", "candidates", "names_for", "reaching"]
