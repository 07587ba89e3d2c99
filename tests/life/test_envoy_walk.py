"""Walks the life table in Envoy's dialect: each kind of connection, in each state, gets each event.

Like in an Istio mesh, a connection is held in a state, the event happens over xDS, the hold is released, and the
outcome for the connection is compared with the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import default_client
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import HboneError
from hbone.settings import Role
from hbone.tls_context import TlsContext, TlsSettings
from tests.life.copying import both_ways
from tests.life.outcome import Outcome, expected
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    Open,
    access_log,
    application,
    chain,
    cluster,
    connect_route,
    connection_manager,
    listener,
    outbound_cluster,
    rbac,
    run,
    tcp,
    tls,
)
from tests.ztunnel.proxy.envoy.test_lives import AnyPort, free_port
from tproxy.aio import sockets
from ztunnel.addons import Addon, Facts
from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.dataplane.life_table import Event, State
from ztunnel.proxy.envoy import app
from ztunnel.proxy.envoy.path import dial
from ztunnel.proxy.envoy.path.addons import StreamAddons
from ztunnel.proxy.envoy.path.dial import Dialler

OTHER = "spiffe://td/ns/a/sa/other"
RBAC = "type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC"
PROXY_PROTOCOL = "type.googleapis.com/envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"


@dataclass
class Wanted:
    """The configuration that is published, as far as events change it."""

    principal: str | None = None
    inline: list[Json] = field(default_factory=list)
    more: Json = field(default_factory=dict)
    crl: bytes = b""


class Held(ABC):
    """One connection, held in a state."""

    secured = False

    def __init__(
        self, harness: Harness, port: int, state: State, monkeypatch: pytest.MonkeyPatch, folder: Path
    ) -> None:
        self.harness, self.port, self.state = harness, port, state
        self.wanted = Wanted(principal=CLIENT if self.secured else None)
        self.log = access_log(folder)
        self.client: Open | None = None
        self.identities = Identities()
        self._own = [self.identities.secret(CLIENT), self.identities.secret(SERVER)]
        self._at = free_port()
        self._gate = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        if state is State.DIALING:
            connecting, gate = Dialler.connect, self._gate

            async def slow(self: Dialler, cluster: Any, address: Any, options: Any) -> socket.socket:
                if address.port == port:
                    await gate.wait()
                return await connecting(self, cluster, address, options)

            monkeypatch.setattr(Dialler, "connect", slow)
            connecting_now, finishing = dial._connect_now, sockets.finish_connect

            def not_yet(cluster: Any, address: Any, options: Any) -> tuple[socket.SocketType, bool]:
                sock, connected = connecting_now(cluster, address, options)
                return sock, connected and address.port != port

            async def finish_late(sock: socket.SocketType, address: tuple[str, int], timeout_s: float) -> None:
                if address[1] == port:
                    await gate.wait()
                await finishing(sock, address, timeout_s)

            monkeypatch.setattr(dial, "_connect_now", not_yet)
            monkeypatch.setattr(sockets, "finish_connect", finish_late)
        if state is State.HELD:
            self._hold_by_addon()

    def _hold_by_addon(self) -> None:
        """Have an addon whose answer waits for the release. Of a tunnel it holds the inbound half."""
        gate, proxy = self._gate, self.harness.proxy

        async def wait(addon: Addon, facts: Facts) -> None:
            await gate.wait()

        hook = "accepting" if self.secured else "connecting"
        waits = type("Waits", (Addon,), {"time_limit_s": 60.0, hook: wait})
        host = AddonHost([load_class(waits, {})])
        proxy.connections.addons = StreamAddons(host, proxy.decisions)

    # Configuration

    def documents(self) -> list[tuple[str, Json]]:
        """Return the configuration that the proxy should have."""
        wanted = self.wanted
        discovery = {"config_source": {"ads": {}}, "type_urls": [RBAC]}
        filters = [{"name": "guard", "config_discovery": discovery}, *wanted.inline]
        _, root = self.identities.root()
        if wanted.crl:
            root["validation_context"]["crl"] = {"inline_string": wanted.crl.decode()}
        extension = {"name": "guard", "typed_config": rbac(wanted.principal)["typed_config"]}
        return [
            *self.listeners(filters, wanted.more),
            cluster(self.port),
            *self._own,
            ("secret", root),
            ("extension", extension),
        ]

    @abstractmethod
    def listeners(self, filters: list[Json], more: Json) -> list[tuple[str, Json]]:
        """The listeners, with these filters before their last one."""

    async def publish(self) -> None:
        """Publish it, and wait until all of it is active."""
        await self.harness.published(*self.documents())
        await self.harness.until(
            lambda: self.harness.proxy.listeners.active and not self.harness.proxy.listeners.warming
        )

    def inbound(self, filters: list[Json], more: Json) -> tuple[str, Json]:
        """A listener that ends tunnels for a pod at 127.0.0.1."""
        manager = connection_manager({"route_config": connect_route("app")})
        manager["typed_config"]["access_log"] = self.log
        match = {"prefix_ranges": [{"address_prefix": "127.0.0.1", "prefix_len": 32}]}
        ends = chain(*filters, manager, transport_socket=tls(SERVER, server=True), filter_chain_match=match)
        address = {"socket_address": {"address": "127.0.0.1", "port_value": self._at}}
        return listener(ends, name="inbound", address=address, **more)

    # Its way

    @abstractmethod
    async def hold(self) -> None:
        """Bring it into its state."""

    async def release(self) -> None:
        """Let it go on."""
        self._gate.set()

    @property
    def is_held(self) -> bool:
        """Return whether a life is in the state."""
        return any(life.state is self.state for life in self.harness.proxy.connections.table)

    async def works(self) -> bool:
        """Return whether bytes get through and back."""
        return self.client is not None and await self.client.say(b"ping") == b"ping"

    async def meet(self, event: Event, how: str) -> None:
        """Cause an event over xDS. An event that can deny does deny."""
        wanted = self.wanted
        match event:
            case Event.POLICIES:
                wanted.principal = OTHER
                before = self.harness.proxy.listeners.extensions["guard"].good
                self.harness.publish(*self.documents())
                await self.harness.until(
                    lambda: self.harness.proxy.listeners.extensions["guard"].good is not before
                )
            case Event.REVOCATIONS:
                leaf = self.leaf()
                wanted.crl = self.identities.authority.revoke(leaf)
                before_count = self._updates()
                self.harness.publish(*self.documents())
                if self.secured:
                    await self.harness.until(lambda: self._updates() > before_count)
            case Event.CERTIFICATE:
                self._own[1] = self.identities.secret(SERVER)
                before_count = self._updates()
                self.harness.publish(*self.documents())
                if self.secured:
                    await self.harness.until(lambda: self._updates() > before_count)
            case Event.CONFIGURATION:
                wanted.inline = [rbac(OTHER)]
                wanted.more = {} if how == "in place" else {"per_connection_buffer_limit_bytes": 4096}
                await self.publish()
            case Event.DRAIN | Event.DEADLINE:
                wanted.more = {"per_connection_buffer_limit_bytes": 4096}
                await self.publish()
                if event is Event.DEADLINE:
                    await self.harness.until(lambda: not self.harness.proxy.listeners.draining)
            case Event.STOP:
                await self.harness.proxy.datapath.close()
            case _:
                raise AssertionError(event)
        # A review ends lives in the same step. Their fibers need a little longer.
        await asyncio.sleep(0.02)

    def leaf(self) -> Any:
        """The client's certificate."""
        _, secret = self._own[0]
        pem = secret["tls_certificate"]["certificate_chain"]["inline_string"].encode()
        return x509.load_pem_x509_certificate(pem)

    def _updates(self) -> float:
        return sum(
            metric.value  # type: ignore[union-attr]
            for metric in self.harness.proxy.stats
            if metric.name.endswith("ssl_context_update_by_sds")
        )

    async def outcome(self) -> Outcome:
        """Return what became of it, once that is decided."""
        if await self.works():
            assert self.client is not None
            await self.client.close()
            await self.finish()
            return Outcome.WORKS
        reset = None
        if self.client is not None:
            reset = await self.client.was_reset()
            await self.client.close()
        await self.finish()
        connections = self.harness.proxy.connections
        await self.harness.until(lambda: not len(connections.table))
        path = self.harness.folder / "log"
        self.harness.proxy.logs.writer.drain()
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        details = [line["details"] or "" for line in lines]
        if any("policy_change" in each for each in details):
            return Outcome.DENIED
        if any("revoked" in each for each in details):
            return Outcome.REVOKED
        if any("the_proxy_stops" in each for each in details):
            return Outcome.CLOSED
        if any("drain" in each for each in details):
            return Outcome.CLOSED if reset else Outcome.FINISHED
        return Outcome.REFUSED

    async def finish(self) -> None:  # noqa: B027  most kinds open nothing else
        """Close what the test has opened besides the client."""


class Plain(Held):
    """A connection that a TCP proxy takes to the application; a filter waits for its first bytes."""

    def listeners(self, filters: list[Json], more: Json) -> list[tuple[str, Json]]:
        proxied = [{"name": "pp", "typed_config": {"@type": PROXY_PROTOCOL}}]
        return [listener(chain(*filters, tcp(access_log=self.log)), listener_filters=proxied, **more)]

    async def hold(self) -> None:
        self.client = await Open.to(self.harness.port("l"))
        if self.state is not State.ACCEPTED:
            self._speak()

    def _speak(self) -> None:
        assert self.client is not None
        self.client.write(b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n")

    async def release(self) -> None:
        await super().release()
        if self.state is State.ACCEPTED:
            with contextlib.suppress(OSError):
                self._speak()


class Wire(Held):
    """A tunnel from another node; the connection in its handshake, then a request on it."""

    secured = True

    def listeners(self, filters: list[Json], more: Json) -> list[tuple[str, Json]]:
        return [self.inbound(filters, more)]

    async def hold(self) -> None:
        self._connection: Connection | None = None
        near = socket.create_connection(("127.0.0.1", self._at))
        near.setblocking(False)
        if self.state is State.HANDSHAKE:
            with socket.create_server(("127.0.0.1", 0)) as server:
                sock = socket.create_connection(server.getsockname())
                middle, _ = server.accept()
            for each in (sock, middle):
                each.setblocking(False)
            self._copying = asyncio.ensure_future(  # noqa: TID251  awaited in finish()
                both_ways(middle, near, held_by=self._gate, after_first=True)
            )
            near = sock
        self._opening = asyncio.ensure_future(self._open(near))  # noqa: TID251  awaited in release()
        if self.state is State.OPEN:
            await self._opening

    async def _open(self, sock: socket.socket) -> None:
        _, secret = self._own[0]
        shown = secret["tls_certificate"]
        settings = TlsSettings(
            certificate_chain_pem=shown["certificate_chain"]["inline_string"].encode(),
            private_key_pem=shown["private_key"]["inline_string"].encode(),
            trusted_ca_pem=self.identities.authority.pem,
            alpn=(b"h2",),
        )
        with contextlib.suppress(HboneError, OSError):
            poller = self.harness.proxy.poller
            self._connection = await connect(sock, TlsContext(Role.CLIENT, settings), default_client(), poller)
            tunnel = await self._connection.open(
                ((b":method", b"CONNECT"), (b":authority", f"127.0.0.1:{self.port}".encode()))
            )
            self.client = await through(tunnel)

    async def release(self) -> None:
        await super().release()
        await self._opening

    async def finish(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self.state is State.HANDSHAKE:
            await self._copying


class Joined(Held):
    """A tunnel within the node. Its inbound half is examined."""

    secured = True

    def listeners(self, filters: list[Json], more: Json) -> list[tuple[str, Json]]:
        tunnelling = tcp("tunnel", tunneling_config={"hostname": f"127.0.0.1:{self.port}"}, access_log=self.log)
        return [self.inbound(filters, more), listener(chain(tunnelling)), outbound_cluster(self._at)]

    async def hold(self) -> None:
        await self.harness.until(lambda: len(self.harness.proxy.listeners.active) == 2)
        self.client = await Open.to(self.harness.port("l"))

    @property
    def is_held(self) -> bool:
        return any(life.state is self.state for life in self.harness.proxy.connections.hops)


async def through(tunnel: Tunnel) -> Open:
    """An application at the client's end of a tunnel."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    end = PlainSocket(far, tunnel.poller)

    async def carry() -> None:
        try:
            await relay(end, tunnel, ByteCounts())
        finally:
            end.close()
            tunnel.close()

    carrying.add(asyncio.ensure_future(carry()))  # noqa: TID251  ends with the tunnel
    return Open(*await asyncio.open_unix_connection(sock=near))


carrying: set[asyncio.Future[None]] = set()

KINDS: dict[type[Held], list[State]] = {
    Plain: [State.ACCEPTED, State.HELD, State.DIALING, State.OPEN],
    Wire: [State.HANDSHAKE, State.HELD, State.DIALING, State.OPEN],
    Joined: [State.HELD, State.DIALING, State.JOINED],
}
EVENTS = [
    (Event.POLICIES, ""),
    (Event.REVOCATIONS, ""),
    (Event.CERTIFICATE, ""),
    (Event.CONFIGURATION, "in place"),
    (Event.CONFIGURATION, "replaced"),
    (Event.DRAIN, ""),
    (Event.DEADLINE, ""),
    (Event.STOP, ""),
]
CELLS = [(kind, state, *event) for kind, states in KINDS.items() for state in states for event in EVENTS]


def promised(kind: type[Held], state: State, event: Event) -> Outcome:
    """Return the table's outcome. A plain connection has proven nothing that could be revoked.

    A stopped connection has a line with the reason, unless none of its loggers is known yet: those of a plain
    connection are its filter chain's, and those of a tunnel connection belong to its requests.
    """
    if state in (State.ACCEPTED, State.HANDSHAKE) and event is Event.STOP:
        return Outcome.REFUSED
    if kind is Plain and event is Event.REVOCATIONS:
        return Outcome.WORKS
    return expected(state, event)


@pytest.mark.parametrize(
    ("kind", "state", "event", "how"),
    CELLS,
    ids=lambda each: each.__name__ if isinstance(each, type) else getattr(each, "value", each),
)
def test_each_row_of_the_life_table_holds_in_envoys_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Held], state: State, event: Event, how: str
) -> None:
    monkeypatch.setattr(app, "_SHORTCUT_PORTS", AnyPort() if kind is Joined else {})

    async def body(harness: Harness) -> None:
        async with application() as port:
            held = kind(harness, port, state, monkeypatch, tmp_path)
            await held.publish()
            await held.hold()
            await harness.until(lambda: held.is_held)
            if state in (State.OPEN, State.JOINED):
                assert await held.works()
            await held.meet(event, how)
            await held.release()
            outcome, wanted = await held.outcome(), promised(kind, state, event)
            reported = wanted is not Outcome.CLOSED or event is Event.STOP
            if not reported and outcome in (Outcome.FINISHED, Outcome.REFUSED):
                outcome = Outcome.CLOSED  # at once may be in order, and nothing need have been logged
            assert outcome is wanted

    run(tmp_path, body)
