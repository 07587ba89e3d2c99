"""The mesh in force: workloads, services and authorization, indexed for the questions a node proxy asks.

A mutable store that values are put into; every change costs in proportion to the change, every look-up the same
however large the mesh is. Nothing here waits, reads a clock or draws a random number.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from xds.model.authorization import AuthorizationPolicy
from xds.model.identity import SpiffeId
from xds.model.policy import PolicyList
from xds.model.service import Service
from xds.model.workload import Health, NamespacedHostname, PolicyKey, ServiceKey, Workload, WorkloadUid


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One workload behind one service.

    Attributes:
        ports: service port to target port, of this endpoint's entry.
    """

    uid: WorkloadUid
    ports: Mapping[int, int]
    status: Health


@dataclass(slots=True)
class Changes:
    """What one batch changed, for those who watch."""

    workloads: set[WorkloadUid] = field(default_factory=set)
    services: set[ServiceKey] = field(default_factory=set)
    policies: set[PolicyKey] = field(default_factory=set)
    local_identities_added: set[SpiffeId] = field(default_factory=set)
    local_identities_removed: set[SpiffeId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class WorkloadPolicies:
    """Everything that judges connections to one workload.

    Attributes:
        enforced: deny policies, then allow policies, in Istio's order (spec 6.3).
        dry_run_deny, dry_run_allow: policies that are only reported.
        missing: policies the workload names that are not there: nobody is let in before they are.
    """

    enforced: PolicyList
    dry_run_deny: tuple[AuthorizationPolicy, ...] = ()
    dry_run_allow: tuple[AuthorizationPolicy, ...] = ()
    missing: tuple[PolicyKey, ...] = ()


class Mesh:
    """See the module.

    Args:
        node: name of this node; empty: every workload counts as local.
    """

    def __init__(self, *, node: str = "") -> None:
        raise NotImplementedError

    # Changes

    def apply(
        self, put: Iterable[Workload | Service | AuthorizationPolicy], removed: Iterable[str] = ()
    ) -> Changes:
        """Put values in place of their namesakes and take names away, as one batch.

        A removed name is a workload's uid, else ``namespace/hostname`` of a service; policies are removed by
        :meth:`remove_policies`, since names of services and policies may coincide.
        """
        raise NotImplementedError

    def remove_policies(self, keys: Iterable[str]) -> Changes:
        """Take policies away."""
        raise NotImplementedError

    def watch(self, changed: Callable[[Changes], None]) -> Callable[[], None]:
        """Call ``changed`` after each batch that changed anything; returns how to stop."""
        raise NotImplementedError

    # Look-ups

    def workload(self, uid: str) -> Workload | None:
        """By uid."""
        raise NotImplementedError

    def workload_at(self, network: str, host: str) -> Workload | None:
        """By address; if several share it, the most specific one (spec 9.2)."""
        raise NotImplementedError

    def local_workload(self, name: str, namespace: str, service_account: str) -> Workload | None:
        """The workload of this node that a pod is."""
        raise NotImplementedError

    def service(self, key: str) -> Service | None:
        """By ``namespace/hostname``, whoever may see it."""
        raise NotImplementedError

    def service_at(self, network: str, host: str, namespace: str | None = None) -> Service | None:
        """By virtual address, exact before CIDR, as a client of ``namespace`` sees it (spec 9.3)."""
        raise NotImplementedError

    def service_named(self, hostname: str, namespace: str | None = None, preferred: str = "") -> Service | None:
        """By host name alone, as a client of ``namespace`` sees it; exact match only, no wildcards."""
        raise NotImplementedError

    def workload_named(self, name: NamespacedHostname) -> Workload | None:
        """A workload whose host name and namespace are these."""
        raise NotImplementedError

    def endpoints(self, key: str) -> Mapping[WorkloadUid, Endpoint]:
        """The endpoints of a service, unhealthy ones left out unless it wants them."""
        raise NotImplementedError

    def policies_for(self, workload: Workload) -> WorkloadPolicies:
        """What judges connections to a workload; remembered until a policy of it changes."""
        raise NotImplementedError

    # For dumps and metrics

    def workloads(self) -> Iterator[Workload]:
        """All, in no order."""
        raise NotImplementedError

    def services(self) -> Iterator[Service]:
        """All, in no order."""
        raise NotImplementedError

    def policies(self) -> Iterator[AuthorizationPolicy]:
        """All, in no order."""
        raise NotImplementedError

    def staged(self) -> Mapping[ServiceKey, Mapping[WorkloadUid, Endpoint]]:
        """Endpoints of services that have not come."""
        raise NotImplementedError

    @property
    def local_identities(self) -> Collection[SpiffeId]:
        """Identities of tunnel-capable workloads on this node: those worth a certificate in advance."""
        raise NotImplementedError
