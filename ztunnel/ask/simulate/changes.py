"""Finds the effect of a policy change: evaluates connections before and after the change with the proxy's engine.
Pure.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from xds.dialects.istio.local_file import LocalMesh
from xds.model.address import SocketAddress
from xds.model.facts import PeerCertificate
from xds.model.mesh import Mesh
from xds.model.workload import Workload
from ztunnel.ask.simulate.seen import Seen
from ztunnel.proxy.istio.path.inbound_target import inbound_facts
from ztunnel.proxy.istio.path.judgement import judgement


class Change(Enum):
    """How a policy change affects the connections of a pair."""

    NEWLY_REFUSED = "newly refused"
    NEWLY_ALLOWED = "newly allowed"
    STILL_ALLOWED = "allowed as before"
    STILL_REFUSED = "refused as before"


class Row(NamedTuple):
    """Connections between one pair of workloads.

    Attributes:
        source: ``NAME.NAMESPACE`` of the workload, or its address if the mesh does not know one.
        identity: the proven identity. Empty for plain text.
        destination: ``NAME.NAMESPACE:PORT``.
        times: number of connections.
        because: the deciding policy after the change. For connections that were refused before, the deciding
            policy before the change.
    """

    change: Change
    source: str
    identity: str
    destination: str
    times: int
    because: str


class Simulation(NamedTuple):
    """The result of a simulation.

    Attributes:
        rows: one per pair of workloads, changed ones first.
        unknown: number of connections to addresses that are not a workload of the mesh.
    """

    rows: list[Row]
    unknown: int

    def total(self, change: Change) -> int:
        """Return the number of connections with this change."""
        return sum(row.times for row in self.rows if row.change is change)


class Judge:
    """Evaluates connections by one state of a mesh, like the proxies of their destinations would."""

    def __init__(self, local: LocalMesh) -> None:
        self.mesh = Mesh()
        self.mesh.apply([*local.policies, *local.workloads])
        self._at: dict[str, Workload] = {
            address: workload for workload in local.workloads for address in workload.addresses
        }

    def workload(self, host: str) -> Workload | None:
        """Return the workload that has an address, in any network."""
        return self._at.get(host)

    def refusal(self, workload: Workload, seen: Seen) -> tuple[str, str]:
        """Return the reason why a connection would be refused (empty if it is allowed), and the policy that allows
        it.
        """
        source = SocketAddress(seen.source, 0)
        peer = PeerCertificate(uri_sans=(seen.identity,)) if seen.identity else None
        facts = inbound_facts(source, seen.destination, peer)
        policy, refusal, _ = judgement(self.mesh.policies_for(workload), facts)
        return refusal, "" if refusal else policy


def simulate(before: LocalMesh, after: LocalMesh, seen: Mapping[Seen, int]) -> Simulation:
    """Evaluate each connection in both states of the mesh, and sum the results by pair of workloads."""
    then, now = Judge(before), Judge(after)
    found: dict[tuple[Change, str, str, str, str], int] = {}
    unknown = 0
    for connection, times in seen.items():
        old, new = (each.workload(connection.destination.host) for each in (then, now))
        if old is None or new is None:
            unknown += times
            continue
        (was, _), (is_, allowing) = then.refusal(old, connection), now.refusal(new, connection)
        if is_:
            change, because = (Change.STILL_REFUSED if was else Change.NEWLY_REFUSED), is_
        elif was:
            change, because = Change.NEWLY_ALLOWED, f"before: {was}"
        else:
            change, because = Change.STILL_ALLOWED, allowing or "no policy denies it, and none allows only some"
        pair = (_called(then.workload(connection.source)) or connection.source, connection.identity)
        key = (change, *pair, f"{_called(new)}:{connection.destination.port}", because)
        found[key] = found.get(key, 0) + times
    order = {change: place for place, change in enumerate(Change)}
    rows = [Row(*key[:4], times, key[4]) for key, times in found.items()]
    rows.sort(key=lambda row: (order[row.change], -row.times, row.source, row.destination))
    return Simulation(rows, unknown)


def allowed(local: LocalMesh, seen: Iterable[Seen]) -> Iterable[tuple[Workload, Seen]]:
    """Yield the connections that a mesh allows, each with its destination workload."""
    judged = Judge(local)
    for connection in seen:
        workload = judged.workload(connection.destination.host)
        if workload is not None and not judged.refusal(workload, connection)[0]:
            yield workload, connection


def _called(workload: Workload | None) -> str:
    return f"{workload.name}.{workload.namespace}" if workload is not None else ""
