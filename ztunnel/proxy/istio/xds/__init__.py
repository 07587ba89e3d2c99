"""Receives the mesh from istiod by delta xDS, and applies it to the mesh model."""
