"""The embedded control plane: a mesh in one YAML file, served as a cluster's control plane would serve it.

For laptops, tests and virtual machines. A cluster uses istiod.
"""

from ztunnel.control_plane.command import add_arguments

__all__ = ["add_arguments"]
