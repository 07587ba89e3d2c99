"""Today's Istio: workloads instead of listeners, pods announced over ZDS, certificates by impersonation."""
