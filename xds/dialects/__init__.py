"""Compiles control planes' messages to values of ``xds.model``, with one package per kind of control plane."""
