"""Requests workload certificates from the mesh's CA, caches and renews them."""
