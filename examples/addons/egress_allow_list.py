"""Pods of chosen namespaces can leave the mesh to named hosts only.

    ztunnel proxy --addon egress_allow_list.py --addon-option egress-allow-list.hosts=api.example.com,*.pypi.org

A connection to an address outside the mesh is allowed if the pod got the address for an allowed name from the
proxy's DNS, or if its TLS names an allowed server. Both kinds of evidence come from the pod. So this keeps honest
software to its list, but not a hostile pod that controls an address outside. It does not replace a firewall.
"""

from dataclasses import dataclass

from ztunnel.addons import Addon, Deny, Facts, Verdict


class EgressAllowList(Addon):
    """Denies connections that leave the mesh to unlisted hosts."""

    name = "egress-allow-list"
    needs = frozenset({"server_name"})

    @dataclass(frozen=True)
    class Options:
        """The allowed names (``*.`` covers all names below), and the namespaces whose pods are limited. No
        namespaces means all.
        """

        hosts: tuple[str, ...]
        namespaces: tuple[str, ...] = ()

    def configured(self, options: Options) -> None:
        hosts = [host.lower() for host in options.hosts]
        self.exact = {host for host in hosts if not host.startswith("*.")}
        self.below = tuple(host[1:] for host in hosts if host.startswith("*."))
        self.namespaces = options.namespaces

    def connecting(self, facts: Facts) -> Verdict | None:
        inside = bool(facts.service or facts.destination.name)
        if inside or (self.namespaces and facts.source.namespace not in self.namespaces):
            return None
        if facts.server_name:  # the name in TLS has precedence over names resolved by DNS
            return None if self.allows(facts.server_name) else Deny(f"{facts.server_name} is not allowed")
        if any(map(self.allows, facts.names)):
            return None
        known = f" ({', '.join(facts.names)})" if facts.names else ""
        return Deny(f"{facts.destination_address}{known} has no allowed name")

    def allows(self, name: str) -> bool:
        """Return whether a name is on the list."""
        return name in self.exact or name.endswith(self.below)
