"""The embedded control plane: serves the mesh in one YAML file like a cluster's control plane.

It is for laptops, tests and virtual machines. A cluster uses istiod.
"""

from ztunnel.control_plane.command import add_arguments

__all__ = ["add_arguments"]
