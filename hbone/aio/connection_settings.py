"""Defines a connection's settings, and the state that moves to another process together with a connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from hbone.engine import Engine
from hbone.flow import WindowPool
from hbone.limits import HANDSHAKE_TIMEOUT_S
from hbone.settings import Http2Settings, client_settings, server_settings
from hbone.tls import TlsStream


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Timeouts and windows of a connection. Defaults are the Rust ztunnel's, except for the handshake timeout.

    ``first_request_timeout_s``: a server closes a connection without a request after this time. None: never.
    ``windows``: the window budget shared by all connections of a pod. None means no limit. ``drain_grace_s``: a
    server accepts requests for this time after its peer has acknowledged the drain. ``ping_interval_s``: None
    disables keepalive. The interval between checks of both ping times is a quarter of the shorter time. The
    default ping times differ from the Rust ztunnel's 10 and 20 s. So a peer lost without a FIN is detected within
    20 s instead of 35, and a peer that paused for 10 s stays connected.
    """

    http2: Http2Settings = field(default_factory=server_settings)
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    first_request_timeout_s: float | None = 10.0
    drain_grace_s: float = 1.0
    windows: WindowPool | None = None
    ping_interval_s: float | None = 5.0
    ping_timeout_s: float = 12.0


def default_client() -> ConnectionSettings:
    """The settings of an outbound (client) connection."""
    return ConnectionSettings(http2=client_settings())


@dataclass(slots=True, kw_only=True)
class MovedConnection:
    """The parts of a connection that another process has established, to rebuild the connection here."""

    engine: Engine
    tls: TlsStream | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a connection outside its engine, its TLS and its tunnels.

    Attributes:
        waiting: streams that wait for room, in their order.
        room: whether the waiting streams can possibly send again.
        closing: whether the connection is draining, and accepts no new streams.
        grace: whether the first GOAWAY of a drain was sent, but not yet the final one.
        unsent: encrypted bytes that the network has not accepted.
    """

    waiting: tuple[int, ...]
    room: bool
    closing: bool
    grace: bool
    unsent: bytes
