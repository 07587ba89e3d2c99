"""``ztunnel stat``, ``top`` and ``edges``: the traffic of workloads and pairs within a window, without
Prometheus."""

from ztunnel.ask.stat.command import add_arguments

__all__ = ["add_arguments"]
