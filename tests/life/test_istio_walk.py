"""Walks the life table in an Istio mesh: each state of each kind of connection, met by each event.

A connection is held in a state by something that its next step waits for. The event happens, the hold is released,
and what becomes of the connection is compared with the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest

from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import default_client
from hbone.aio.requests import Request
from hbone.errors import HboneError
from tests.life.copying import both_ways
from tests.life.outcome import Outcome, expected
from tests.ztunnel.proxy.istio.inbound_case import ALLOW, APP, DENY, GATED, NEAR, POD, TunnelClient, fields
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    OTHER,
    ROOT,
    SERVER,
    Cluster,
    End,
    Peer,
    WorkloadCertificate,
    certificate,
    identity,
    pair,
    play,
    workload,
)
from xds.model.address import SocketAddress
from ztunnel.addons import Addon, Facts
from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.dataplane.life_table import Event, State
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import DRAINED, POLICY_CHANGE, REJECTED, REVOKED
from ztunnel.proxy.istio.path.addons import PodAddons
from ztunnel.proxy.istio.path.planned import PlannedConnection
from ztunnel.proxy.istio.settings.config import HBONE_PORT

GRACE_S = 3.0
FAR = workload("far", OTHER, node=ELSEWHERE)


class Held(ABC):
    """One connection, held in a state.

    Attributes:
        pod: the pod of its proxy, to which policies apply.
        direction: the direction in its access line.
        client: an application's end; ``None`` if there never was one.
        shown: the certificate of a tunnel's other end; ``None``: plain text.
    """

    pod = "server"
    direction = "inbound"

    def __init__(self, cluster: Cluster, state: State) -> None:
        self.cluster = cluster
        self.state = state
        self.client: End | None = None
        self.shown: WorkloadCertificate | None = None
        self._gate = asyncio.Event()

    @abstractmethod
    async def hold(self) -> None:
        """Bring it into its state."""

    async def release(self) -> None:
        """Let the connection continue, and wait for its application's end if one is expected."""
        if self.state is State.IDENTIFIED and self.cluster.mesh.policy(DENY.key) is None:
            self.cluster.mesh.apply([ALLOW])
        self._gate.set()

    async def finish(self) -> None:  # noqa: B027  most kinds open nothing else
        """Close what the test has opened besides the client."""

    async def works(self) -> bool:
        """Return whether bytes get through and back."""
        if self.client is None:
            return False
        with contextlib.suppress(OSError):
            await self.client.send(b"ping")
            return await self.client.read(4) == b"ping"
        return False

    @property
    def is_held(self) -> bool:
        """Return whether a life is in the state."""
        return any(life.state is self.state for life in self.cluster.node.live)

    async def prepare(self) -> None:
        """Start what every kind needs: pods, an application that is slow to accept, a policy that is missing."""
        cluster, state = self.cluster, self.state
        await cluster.start(GATED if state is State.IDENTIFIED else POD, NEAR)
        cluster.application(SERVER)
        if state is State.DIALING:
            cluster.wire.gates[APP] = self._gate
        if state is State.HELD:
            self.held_by_addon()

    def held_by_addon(self) -> None:
        """Have an addon whose answer waits for the release."""
        gate = self._gate

        async def wait(addon: Addon, facts: Facts) -> None:
            await gate.wait()

        hook = "accepting" if self.direction == "inbound" else "connecting"
        waits = type("Waits", (Addon,), {"time_limit_s": 60.0, hook: wait})
        self.cluster.node.addons = PodAddons(AddonHost([load_class(waits, {})]))

    # Events

    async def meet(self, event: Event) -> None:
        """Cause an event. An event that can deny does deny."""
        cluster, proxy = self.cluster, self.cluster.pods[self.pod]
        match event:
            case Event.POLICIES:
                cluster.mesh.apply([GATED, DENY])
            case Event.REVOCATIONS:
                revoked = self.shown or certificate(identity("another"))
                cluster.revoke(RevocationLists.parse(ROOT.revoke(revoked.issued.chain[0])))
            case Event.CERTIFICATE:
                cluster.certificates.put(identity(self.pod))
            case Event.WORKLOAD_REMOVED:
                cluster.mesh.apply((), [POD.uid])
            case Event.WORKLOAD_RESTORED:
                cluster.mesh.apply((), [POD.uid])
                cluster.mesh.apply([GATED, DENY])
            case Event.DRAIN:
                proxy.send_goaway()
            case Event.DEADLINE:
                await proxy.drain(GRACE_S)
            case Event.STOP:
                await proxy.stop()
            case _:
                raise AssertionError(event)

    # What became of it

    async def outcome(self) -> Outcome:
        """Return it, once it is decided."""
        if await self.works():
            assert self.client is not None
            assert await self.client.ask() == b"ping"
            await self.cluster.until(lambda: self._lines())
            assert "error" not in self._lines()[0]
            return Outcome.WORKS
        reset = await self.client.is_reset() if self.client is not None else None
        if self.client is not None:
            self.client.close()  # a relay whose other side has ended waits for its application
        await self.finish()
        await self.cluster.until(lambda: not len(self.cluster.node.live))
        return self._said(reset=reset)

    def _said(self, *, reset: bool | None) -> Outcome:
        early = [text for text in self.cluster.texts() if "warn" in text.lower() or "error" in text.lower()]
        errors = [line.get("error", "") for line in self._lines()]
        if any("failed to fetch information about local workload" in text for text in early):
            return Outcome.UNKNOWN
        if any("revoked during the handshake" in text for text in early):
            return Outcome.REFUSED
        match errors:
            case [error] if error.startswith(REJECTED):
                return Outcome.REFUSED
            case [error] if error == POLICY_CHANGE:
                return Outcome.DENIED
            case [error] if error == REVOKED:
                return Outcome.REVOKED
            case [error] if error == DRAINED:
                return Outcome.FINISHED if reset is False else Outcome.CLOSED
            case []:
                return Outcome.CLOSED
        raise AssertionError(errors)

    def _lines(self) -> list[dict[str, str]]:
        return [line for line in self.cluster.lines() if line["direction"] == self.direction]


class Wire(Held):
    """A tunnel from another node: the connection up to its handshake, then a request on it."""

    async def hold(self) -> None:
        await self.prepare()
        self._connection: Connection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.shown = certificate(identity("client"))
        near, far = pair(CLIENT, SERVER)
        arrives = self.cluster.sockets["server"]
        arrives.accepted[HBONE_PORT](far, (CLIENT, near.getsockname()[1]))
        self._near = near
        if self.state is State.ACCEPTED:
            return
        if self.state is State.HANDSHAKE:
            self._near, middle = pair("127.0.6.1", "127.0.6.2")
            self._start(both_ways(middle, near, held_by=self._gate, after_first=True))
        self._start(self._open())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(self.cluster.tasks.create_task(work))

    async def _open(self) -> None:
        shown = self.shown
        assert shown is not None
        with contextlib.suppress(HboneError, OSError):
            context = shown.client_context((identity("server"),))
            self._connection = await connect(self._near, context, default_client(), self.cluster.node.poller)
            self.client = TunnelClient(self.cluster, await self._connection.open(fields())).end

    async def release(self) -> None:
        await super().release()
        if self.state is State.ACCEPTED:
            self._start(self._open())
        await self._tasks[-1]

    async def finish(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Plain(Held):
    """A captured plain connection to a pod."""

    async def hold(self) -> None:
        await self.prepare()
        self.client = self.cluster.plain(f"{SERVER}:{APP_PORT}")


class JoinedInbound(Held):
    """A tunnel within the node. Its inbound half is examined."""

    async def hold(self) -> None:
        await self.prepare()
        self.shown = self.cluster.certificates.put(identity("client"))
        self.client = self.cluster.dial(f"{SERVER}:{APP_PORT}")


class Outbound(Held):
    """A connection that a pod opens to another node. Policies of the mesh do not judge it; revocation does."""

    pod = "client"
    direction = "outbound"

    async def hold(self) -> None:
        cluster = self.cluster
        await cluster.start(NEAR)
        cluster.mesh.apply([FAR])
        self.shown = certificate(identity("far"))
        peer = cluster.peer("far", OTHER, shown=self.shown)
        if self.state is State.HELD:
            self.held_by_addon()
        if self.state is State.HANDSHAKE:
            cluster.wire.handlers[SocketAddress(OTHER, HBONE_PORT)] = self._slow(peer)
        if self.state is State.DIALING:
            cluster.wire.gates[SocketAddress(OTHER, HBONE_PORT)] = self._gate
        self.client = cluster.dial(f"{OTHER}:{APP_PORT}")

    def _slow(self, peer: Peer) -> Callable[[socket.socket, tuple[str, int]], None]:
        """Hold back the peer's answer to the ClientHello."""

        def accepted(sock: socket.socket, address: tuple[str, int]) -> None:
            near, far = pair("127.0.6.1", OTHER)
            self.cluster.tasks.create_task(both_ways(near, sock, held_by=self._gate))
            peer.accepted(far, address)

        return accepted


class Warm(Outbound):
    """The same, with a tunnel connection to its peer open already: it is carried by steps."""

    async def hold(self) -> None:
        cluster = self.cluster
        await cluster.start(NEAR)
        cluster.mesh.apply([FAR])
        self.shown = certificate(identity("far"))
        peer = cluster.peer("far", OTHER, shown=self.shown)
        first = cluster.dial(f"{OTHER}:{APP_PORT}")
        assert await first.ask() == b"ping"
        await cluster.until(lambda: len(cluster.lines()) == 1)
        self._before = len(cluster.lines())
        if self.state is State.DIALING:
            peer.answer = partial(self._answered_late, peer)
        self.client = cluster.dial(f"{OTHER}:{APP_PORT}")
        await cluster.until(lambda: len(peer.requests) > 1)
        assert [type(life) for life in cluster.pods["client"].connections.outbound] == [PlannedConnection]

    async def _answered_late(self, peer: Peer, request: Request) -> None:
        await self._gate.wait()
        await peer.echo(request)

    @property
    def is_held(self) -> bool:
        return any(life.state is self.state for life in self.cluster.pods["client"].connections.outbound)

    def _lines(self) -> list[dict[str, str]]:
        return super()._lines()[self._before :]


EVERY = [event for event in Event if event is not Event.CONFIGURATION]  # which is Envoy's dialect alone
KINDS: dict[type[Held], list[State]] = {
    Wire: [State.ACCEPTED, State.HANDSHAKE, State.IDENTIFIED, State.HELD, State.DIALING, State.OPEN],
    Plain: [State.IDENTIFIED, State.HELD, State.DIALING, State.OPEN],
    JoinedInbound: [State.IDENTIFIED, State.HELD, State.DIALING, State.JOINED],
    Outbound: [State.HELD, State.HANDSHAKE, State.DIALING, State.OPEN],
    Warm: [State.DIALING, State.OPEN],
}


def promised(kind: type[Held], state: State, event: Event) -> Outcome:
    """Return the table's outcome for this kind of connection, which an event can be unable to deny or which can
    lack the state.
    """
    outcome = expected(state, event)
    if event is Event.REVOCATIONS:
        if kind is Plain:
            return Outcome.WORKS  # nothing was proven that could be revoked
        if state is State.IDENTIFIED:
            return Outcome.REVOKED  # on the wire its connection is open, and ends what it carries
        if kind is Outbound and state in (State.HELD, State.DIALING):
            return Outcome.REFUSED  # the peer is unknown until its handshake
    if event in (Event.POLICIES, Event.WORKLOAD_REMOVED, Event.WORKLOAD_RESTORED) and issubclass(kind, Outbound):
        return Outcome.WORKS
    if event is Event.WORKLOAD_REMOVED and outcome is Outcome.REFUSED:
        # Before its facts are complete a connection is a new one.
        return Outcome.WORKS if state is State.IDENTIFIED else Outcome.UNKNOWN
    return outcome


CELLS = [(kind, state, event) for kind, states in KINDS.items() for state in states for event in EVERY]


@pytest.mark.parametrize(
    ("kind", "state", "event"),
    CELLS,
    ids=lambda each: each.__name__ if isinstance(each, type) else each.value,
)
def test_each_row_of_the_life_table_holds_in_an_istio_mesh(
    tmp_path: Path, kind: type[Held], state: State, event: Event
) -> None:
    async def body(cluster: Cluster) -> None:
        held = kind(cluster, state)
        await held.hold()
        await cluster.until(lambda: held.is_held)
        if state in (State.OPEN, State.JOINED):
            await cluster.until(lambda: held.client is not None)
            assert await held.works()
        await held.meet(event)
        await held.release()
        outcome, wanted = await held.outcome(), promised(kind, state, event)
        if wanted is Outcome.CLOSED and outcome is Outcome.FINISHED:
            outcome = Outcome.CLOSED  # at once may be in order, too
        assert outcome is wanted
        await held.finish()

    play(tmp_path, body)
