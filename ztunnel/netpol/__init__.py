"""Network policy in the kernel: one nftables table per node, compiled from Kubernetes' and Calico's policies."""
