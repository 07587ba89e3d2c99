"""The node agent for laptops, VMs and tests: announces pods over ZDS and writes their in-pod rules."""
