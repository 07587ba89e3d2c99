"""``ztunnel authz``: answers Envoy's ``ext_authz`` checks by Calico's policies, like Calico's Dikastes."""

from ztunnel.policy.authz.command import add_arguments

__all__ = ["add_arguments"]
