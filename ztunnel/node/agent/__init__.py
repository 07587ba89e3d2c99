"""The node agent: enrols pods in the mesh, those that an API server labels or those of a file, as istio-cni does.

It speaks istio-cni's ZDS, so that any ztunnel serves its pods. To follow a pod of a cluster, read
``enrolment.py`` (what is wanted, and the next step), ``enroller.py`` (takes the steps), ``node.py`` (rules, and
what the proxy is told), ``auditor.py`` (what has come of it).
"""

from ztunnel.node.agent.command import add_arguments

__all__ = ["add_arguments"]
