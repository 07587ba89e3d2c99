"""The node agent: enrols pods of a laptop, a test or a virtual machine in the mesh, like istio-cni in a cluster.

It speaks istio-cni's ZDS, so that any ztunnel serves its pods.
"""

from ztunnel.agent.command import add_arguments

__all__ = ["add_arguments"]
