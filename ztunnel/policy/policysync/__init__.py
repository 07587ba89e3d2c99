"""``ztunnel policy``: checks and explains Calico's policies, and serves them to policy servers by PolicySync."""

from ztunnel.policy.policysync.command import add_arguments

__all__ = ["add_arguments"]
