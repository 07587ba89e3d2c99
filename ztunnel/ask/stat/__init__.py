"""``ztunnel stat``, ``top`` and ``edges``: what workloads and pairs did within a window, without Prometheus."""

from ztunnel.ask.stat.command import add_arguments

__all__ = ["add_arguments"]
