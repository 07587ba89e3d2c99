"""Requests workload certificates from the mesh's CA, and caches and renews them."""
