"""Injection: the parts that the mesh adds to pods when they are created, by a webhook of the API server or in
files.
"""

from ztunnel.sidecar.inject.command import add_arguments

__all__ = ["add_arguments"]
