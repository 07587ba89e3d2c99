"""Workload certificates: requested from the mesh's CA, cached and renewed."""
