"""The node agent: pods of a laptop, a test or a virtual machine come into the mesh as in a cluster.

Talks ZDS like istio-cni, so that any ztunnel serves its pods.
"""

from ztunnel.agent.command import add_arguments

__all__ = ["add_arguments"]
