"""Where a connection of a pod goes in an Istio mesh: one decision, no input or output, readable as its tables.

Spec: what a ztunnel decides for outbound connections. The shell resolves host names, dials, and, when an attempt
fails before anything was answered, asks again with the endpoint that failed in ``avoid``.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from xds.model.address import SocketAddress
from xds.model.mesh import Mesh
from xds.model.service import Service
from xds.model.workload import Workload, WorkloadUid


@dataclass(frozen=True, slots=True)
class Named:
    """A workload without addresses: resolve ``hostname``, prefer addresses of the dialled family.

    ``families``: 4 and/or 6, those the service permits.
    """

    workload: Workload
    hostname: str
    port: int
    families: tuple[int, ...] = (4, 6)


Target = SocketAddress | Named


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """Plain TCP: passthrough (no workload), or a workload outside the mesh."""

    target: Target
    workload: Workload | None = None
    service: Service | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunnel:
    """One HBONE tunnel.

    Attributes:
        target: where the tunnel's connection goes.
        authority: of the CONNECT, ``host:port``.
        identities: SPIFFE identities the peer may show, in order (part of the pool's key).
        workload: at the tunnel's end: an application, or a waypoint.
        service: what the application dialled, if it was one.
        waypoint: the tunnel ends at a waypoint.
    """

    target: Target
    authority: str
    identities: tuple[str, ...]
    workload: Workload
    service: Service | None = None
    waypoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleTunnel:
    """A tunnel in a tunnel, through another network's gateway.

    Attributes:
        target, identities: of the outer tunnel: the gateway.
        authority: of both CONNECTs, ``hostname:port`` of the service.
        inner_identities: what the far end may show; empty: no peer can be right.
        gateway: the gateway's workload; ``workload`` the remote one, ``service`` the one dialled.
    """

    target: Target
    authority: str
    identities: tuple[str, ...]
    inner_identities: tuple[str, ...]
    gateway: Workload
    workload: Workload
    service: Service


Route = Direct | Tunnel | DoubleTunnel


class RouteRefused(Exception):
    """There is no way; the text is what the access log prints."""


class Missing(Exception):
    """On demand only: the mesh may know more if ``key`` is asked for (``network/ip``, uid or ``ns/hostname``)."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


#: Picks one index of weights, all positive; ``random.choices`` in production.
Choose = Callable[[Sequence[int]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Who dials: the pod's workload, the address its socket has, and the proxy's own network."""

    workload: Workload
    host: str
    network: str = ""


def route_for(
    client: Client,
    destination: SocketAddress,
    mesh: Mesh,
    choose: Choose,
    *,
    avoid: Collection[WorkloadUid] = (),
    known: Callable[[str], bool] | None = None,
) -> Route:
    """Decide.

    Args:
        client: who dials.
        destination: what it dialled.
        mesh: the mesh in force.
        choose: see there.
        avoid: endpoints that failed lately: others are taken while there are any.
        known: on demand: whether a key was already asked for; ``None`` when the mesh holds everything.

    Raises:
        RouteRefused: no way.
        Missing: on demand only.
    """
    raise NotImplementedError
