"""``ztunnel authz``: answers Envoy's ``ext_authz`` checks by Calico's policies, as Calico's Dikastes does."""

from ztunnel.policy.authz.command import add_arguments

__all__ = ["add_arguments"]
