"""Pods of this node, as istio-cni (or ``ztunnel agent``) announces them over ZDS."""
