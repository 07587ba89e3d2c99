"""The embedded control plane: serves a mesh from one YAML file, like the control plane of a cluster.

It is for laptops, tests and virtual machines. A cluster uses istiod.
"""

from ztunnel.control_plane.command import add_arguments

__all__ = ["add_arguments"]
