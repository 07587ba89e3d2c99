"""Compilers from control planes' messages to ``xds.model``, one for each kind of control plane."""
