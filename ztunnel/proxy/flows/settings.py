"""Settings of Hubble's gRPC service, for both dialects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from xds.grpc.address import host_and_port
from xds.model.address import is_loopback

ADDRESS: Final = "ZTUNNEL_HUBBLE"
TLS: Final = "ZTUNNEL_HUBBLE_TLS"
PEERS: Final = "ZTUNNEL_HUBBLE_PEERS"
VARIABLES: Final = frozenset((ADDRESS, TLS, PEERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A node as Hubble Relay discovers it.

    Attributes:
        name: ``CLUSTER/NODE``, the same name as in the node's flows.
        address: ``HOST:PORT`` of its Hubble server.
    """

    name: str
    address: str

    @property
    def server_name(self) -> str:
        """The DNS name that a node's certificate must have, by Cilium's convention."""
        cluster, _, node = self.name.partition("/")
        return ".".join((node.replace(".", "-"), cluster.replace(".", "-"), "hubble-grpc.cilium.io"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubbleSettings:
    """The settings of Hubble's API.

    Attributes:
        address: ``unix:/path`` or ``HOST:PORT``.
        tls: a folder with ``tls.crt``, ``tls.key`` and ``ca.crt``. Clients need certificates of that root.
            Empty disables TLS.
        peers: the peers that this node announces to Hubble Relay, in addition to itself.
    """

    address: str
    tls: str = ""
    peers: tuple[Peer, ...] = ()

    @property
    def port(self) -> int:
        """The TCP port that other nodes can reach. 0 if the address is a Unix socket or loopback."""
        if self.address.startswith("unix:"):
            return 0
        host, port = host_and_port(self.address, least_port=0)
        return 0 if _is_loopback(host) else port


def hubble_settings(env: Mapping[str, str]) -> tuple[HubbleSettings | None, list[str]]:
    """Return the settings of the service, None if it is off, and the faults in them."""
    address, tls = env.get(ADDRESS, ""), env.get(TLS, "")
    faults: list[str] = []
    if not address:
        faults += [f"{name} needs {ADDRESS}, the address to serve" for name in (TLS, PEERS) if env.get(name)]
        return None, faults
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").startswith("/"):
            faults.append(f"{ADDRESS}={address}: needs an absolute path after unix:")
    else:
        try:
            host, _ = host_and_port(address, least_port=0)
        except ValueError as error:
            faults.append(f"{ADDRESS}={address}: {error}")
        else:
            if not tls and not _is_loopback(host):
                faults.append(
                    f"{ADDRESS}={address}: flows tell who talks to whom, so that other hosts than loopback need "
                    f"{TLS}, a folder with tls.crt, tls.key and ca.crt"
                )
    peers = []
    for entry in filter(None, env.get(PEERS, "").split(",")):
        name, _, place = entry.strip().partition("=")
        try:
            host_and_port(place)
            if name.count("/") != 1 or not all(name.split("/")):
                raise ValueError("the name is CLUSTER/NODE")
        except ValueError as error:
            faults.append(f"{PEERS}={entry}: CLUSTER/NODE=HOST:PORT is expected: {error}")
        else:
            peers.append(Peer(name=name, address=place))
    return HubbleSettings(address=address, tls=tls, peers=tuple(peers)), faults


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False  # a name
