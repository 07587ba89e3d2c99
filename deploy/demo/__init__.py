"""``make demo``: runs two nodes and their pods on one machine, from kernel to control plane."""
