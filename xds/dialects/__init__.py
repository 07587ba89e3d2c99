"""Compilers from the messages of each kind of control plane to ``xds.model``."""
