"""``make demo``: two nodes and their pods on one machine, from kernel to control plane."""
