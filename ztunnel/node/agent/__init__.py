"""The node agent: enrols pods in the mesh, selected by labels in an API server or listed in a file, like
istio-cni.

It speaks istio-cni's ZDS, so any ztunnel can serve its pods. To follow a pod of a cluster, read ``enrolment.py``
(the desired state and the next step), ``enroller.py`` (takes the steps), ``node.py`` (rules, and messages to the
proxy), ``auditor.py`` (verifies the result).
"""

from ztunnel.node.agent.command import add_arguments

__all__ = ["add_arguments"]
