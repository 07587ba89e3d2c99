"""``ztunnel flows``: prints recently ended connections of one or all proxies, and further ones as they end."""

from ztunnel.ask.flows.command import add_arguments

__all__ = ["add_arguments"]
