"""Network policy in the kernel: one nftables table per node, compiled from Kubernetes' and Calico's policies."""

from ztunnel.policy.netpol.command import add_arguments

__all__ = ["add_arguments"]
