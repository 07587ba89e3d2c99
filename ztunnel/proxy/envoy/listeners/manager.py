"""Manages the listeners from the bootstrap and from LDS: creates, updates, replaces and drains them."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from hbone.aio.poller import Poller
from tproxy.errors import TproxyError
from xds.dialects.envoy import (
    Surroundings,
    compile_chain_filter,
    compile_listener,
    compile_listener_filter,
    compile_route_table,
)
from xds.dialects.envoy.parts import Parts
from xds.dialects.envoy.reading import unpack
from xds.errors import ConfigError
from xds.model.access_log import AnyAccessLog, GrpcAccessLog
from xds.model.http import HttpConnectionManager, RouteTableRef
from xds.model.listener import Discovered, DiscoveredFilter, Listener, WorkloadMetadata
from xds.model.tls import ConfigSource, GrpcSource
from xds.proto import registry
from xds.proto.envoy.config.core.v3 import core_pb2
from xds.proto.envoy.config.listener.v3 import listener_pb2
from xds.proto.envoy.config.route.v3 import route_pb2
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.resource import Resource, Subscription, Update, UpdateRejected
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveConnectionManager
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveHop
from ztunnel.proxy.envoy.listeners.listener import Accepted, LiveListener, bind
from ztunnel.proxy.envoy.listeners.table import ListenerTable
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.stream.outcome import DRAINED
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.proxy.envoy.upstream.manager import Failure
from ztunnel.runtime.accepting import Gate, ListeningSocket, hand_over
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

T = TypeVar("T")

#: A listener above this size takes at least 20 ms to compile. It is compiled in a thread, so that the event loop
#: does not stall.
_BIG_BYTES = 1 << 20
_MANY_CHAINS = 300
TYPE_URL = registry.type_url(listener_pb2.Listener)
ECDS_URL = registry.type_url(core_pb2.TypedExtensionConfig)
RDS_URL = registry.type_url(route_pb2.RouteConfiguration)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The versions of a resource from ECDS or RDS, for dumps.

    ``good`` is the version in use since the time ``at``. ``failure`` is a newer version that was refused.
    """

    good: Resource | None = None
    at: float = 0.0
    failure: Failure | None = None


def wanted_sources(model: Listener) -> set[ConfigSource]:
    """Return the sources of a listener's routes and extension configurations, and the targets of its access logs.

    The sources of secrets are not included, because each filter chain subscribes to its own secrets.
    """
    sources = {
        entry.filter.source for entry in model.listener_filters if isinstance(entry.filter, DiscoveredFilter)
    }
    sources.update(_log_services(model.access_log))
    for chain in model.all_chains:
        sources.update(each.source for each in chain.discovered)
        terminal = chain.terminal
        sources.update(_log_services(terminal.access_log))
        if isinstance(terminal, HttpConnectionManager) and isinstance(terminal.routes, RouteTableRef):
            sources.add(terminal.routes.source)
    return sources


def _log_services(logs: Iterable[AnyAccessLog]) -> Iterator[ConfigSource]:
    """Yield gRPC access log services as configuration sources, because both need a static cluster."""
    return (GrpcSource(log.stream.cluster, False) for log in logs if isinstance(log, GrpcAccessLog))


def refuse_taken(model: Listener, others: Iterable[Listener]) -> None:
    """Refuse a listener at an address of another listener.

    Raises:
        ConfigError: names the address.
    """
    # Addresses with port 0 cannot collide, because the kernel selects a free port for each listener.
    wanted = {address for address in model.addresses if address.port}
    for other in others:
        if other.name != model.name and (both := wanted.intersection(other.addresses)):
            shared = next(iter(both))
            raise ConfigError(
                f"error adding listener: '{model.name}' has duplicate address '{shared}' as existing listener"
            )


class ListenerManager:
    """Creates, replaces and drains listeners by name.

    Args:
        table: the active listeners. Only this class changes it.
        accepted: called with each accepted socket.
        drain_s: the time that connections of a drained listener have to end.
    """

    def __init__(
        self,
        table: ListenerTable,
        *,
        surroundings: Surroundings,
        sources: Sources,
        secrets: SecretStore,
        stats: Stats,
        logs: AccessLogs,
        clock: Clock,
        decisions: Decisions,
        poller: Poller,
        connections: Connections,
        accepted: Accepted,
        gate: Gate,
        drain_s: float,
    ) -> None:
        self._table = table
        self._surroundings = surroundings
        self._sources = sources
        self._secrets = secrets
        self._stats = stats
        self._logs = logs
        self._clock = clock
        self._decisions = decisions
        self._poller = poller
        self._connections = connections
        self._accepted = accepted
        self._gate = gate
        self._drain_s = drain_s
        self._tasks = Tasks("listeners")
        self._warming: dict[str, LiveListener] = {}
        self._draining: list[LiveListener] = []
        self._draining_chains = 0
        self._static: set[str] = set()
        self._parts: dict[str, Parts] = {}
        self._subscriptions: dict[LiveListener, list[Subscription]] = {}
        self._warmed_one = asyncio.Event()
        self._listening = False
        self._may_listen: Callable[[LiveListener], bool] = lambda _: True
        self.failures: dict[str, Failure] = {}
        self.version = ""
        self.extensions: dict[str, Delivered] = {}
        self.route_tables: dict[str, Delivered] = {}
        scope = stats.scope("listener_manager")
        self._added = scope.counter("listener_added")
        self._modified = scope.counter("listener_modified")
        self._removed = scope.counter("listener_removed")
        self._in_place = scope.counter("listener_in_place_updated")
        self._create_success = scope.counter("listener_create_success")
        self._create_failure = scope.counter("listener_create_failure")
        self._stops = scope.counter("listener_stopped")
        scope.gauge("total_listeners_active", lambda: float(len(self._table)))
        scope.gauge("total_listeners_warming", lambda: float(len(self._warming)))
        scope.gauge("total_listeners_draining", lambda: float(len(self._draining)))
        scope.gauge("total_filter_chains_draining", lambda: float(self._draining_chains))
        scope.gauge("workers_started", lambda: float(self._listening))

    # Looking up

    @property
    def active(self) -> list[LiveListener]:
        """The active listeners, in order of addition."""
        return list(self._table)

    @property
    def warming(self) -> list[LiveListener]:
        """The listeners that wait for secrets, routes or extension configurations."""
        return list(self._warming.values())

    @property
    def draining(self) -> list[LiveListener]:
        """The listeners that were replaced or removed and still have connections."""
        return list(self._draining)

    def is_static(self, name: str) -> bool:
        """Return whether a listener comes from the bootstrap."""
        return name in self._static

    # Applying

    def add_static(self, body: AnyMessage) -> None:
        """Add a listener of ``static_resources``.

        Raises:
            ConfigError: the listener's configuration is invalid or unsupported.
        """
        model = self._compile(body)
        self._refuse_taken(model)
        self._check_sources(model)
        self._static.add(model.name)
        self._warm(self._make(model, body, ""))

    async def receive(self, update: Update) -> None:
        """Apply an LDS update.

        Raises:
            UpdateRejected: names each refused listener. All other listeners are applied.
        """
        self.version = update.version
        errors: dict[str, str] = {}
        gone = set(update.removed)
        if update.complete:
            seen = {resource.name for resource in update.resources}
            known = (*self._table, *self._warming.values(), *self.failures.values())
            gone |= {each.name for each in known if each.name not in seen}
        # Like in Envoy, removals come first, because a new listener can have the address of a removed listener.
        for name in gone - self._static:
            self._remove(name)
        for resource in update.resources:
            try:
                await self._apply(resource)
                self.failures.pop(resource.name, None)
            except (ConfigError, TproxyError, OSError) as error:
                # The text is capitalised like Envoy's, because it is sent to the control plane.
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                log.warning("listener %s refused, its last good version stays in use: %s", resource.name, reason)
                errors[resource.name] = f"{resource.name}: {reason}"
                self._failed(resource.name, resource.body, reason, resource.version)
        if errors:
            reasons = "Error adding/updating listener(s) " + "\n".join(errors.values())
            raise UpdateRejected(reasons, errors.keys())

    def _compile(self, body: AnyMessage) -> Listener:
        try:
            message = registry.unpack(body)
        except (registry.UnknownType, registry.MalformedMessage) as error:
            raise ConfigError(str(error)) from None
        if not isinstance(message, listener_pb2.Listener):
            raise ConfigError(f"not a Listener: {body.type_url}")
        parts = Parts(self._parts.get(message.name))
        model = compile_listener(message, self._surroundings, parts, body)
        self._parts[model.name] = parts
        return model

    async def _apply(self, resource: Resource) -> None:
        if resource.name in self._static:
            return
        current = self._warming.get(resource.name) or self._table.get(resource.name)
        if current is not None and current.body == resource.body:  # comparing .value would copy it
            current.body, current.version = resource.body, resource.version  # the old body kept its response alive
            return
        big = current is not None and len(current.chains) > _MANY_CHAINS
        if big or len(resource.body.value) > _BIG_BYTES:
            # The outbound listener of a big mesh takes a second to compile, so it is compiled in a thread.
            model = await asyncio.to_thread(self._compile, resource.body)
        else:
            model = self._compile(resource.body)
        if model.name in self._static:
            return
        self._refuse_taken(model)
        self._check_sources(model)
        active = self._table.get(model.name)
        self._warm(self._make(model, resource.body, resource.version))
        if active is not None and active.model.addresses != model.addresses:
            # A version that waits for nothing becomes active now, and leaves the old address to later listeners of
            # the update.
            await asyncio.sleep(0)

    def _failed(self, name: str, body: AnyMessage, reason: str, version: str) -> None:
        self._create_failure.value += 1
        self.failures[name] = Failure(name, body, reason, self._clock.wall(), version)

    def _check_sources(self, model: Listener) -> None:
        """Refuse a listener that needs a configuration source unknown to this proxy.

        Raises:
            ConfigError: see :meth:`ztunnel.proxy.envoy.config.sources.Sources.check`.
        """
        for source in wanted_sources(model):
            self._sources.check(source)
        for chain in model.all_chains:
            self._secrets.check(chain.secret_refs)

    def _refuse_taken(self, model: Listener) -> None:
        refuse_taken(model, (other.model for other in (*self._table, *self._warming.values())))

    def _make(self, model: Listener, body: AnyMessage, version: str) -> LiveListener:
        """Return a listener version with bound sockets, which does not accept connections yet.

        If only filter chains or the matcher have changed, unchanged chains are kept.
        """
        old = self._table.get(model.name)
        in_place = old is not None and old.model.content == model.content
        listener = LiveListener(
            model,
            body,
            version=version,
            stats=self._stats,
            logs=self._logs,
            secrets=self._secrets,
            clock=self._clock,
            decisions=self._decisions,
            keep=old.live_chains if old is not None and in_place else (),
            on_secret=self._secret_changed,
        )
        kept = old.sockets if old is not None and self._may_take_over(old.model, model) else []
        if kept:
            listener.sockets = list(kept)
        elif model.bind_to_port:
            try:
                for address in model.addresses:
                    listener.sockets.append(bind(model, address, self._poller, self._gate))
            except BaseException:
                listener.stop()
                raise
        return listener

    @staticmethod
    def _may_take_over(old: Listener, new: Listener) -> bool:
        frame = (
            "addresses",
            "ipv4_compat",
            "transparent",
            "freebind",
            "reuse_port",
            "socket_options",
            "bind_to_port",
        )
        return all(getattr(old, field) == getattr(new, field) for field in frame)

    # Warming

    def _warm(self, listener: LiveListener) -> None:
        name = listener.name
        # The listener's subscriptions begin before its warming task starts. So an invalid subscription rejects the
        # listener that is being applied.
        waits = self._subscribe(listener)
        superseded = self._warming.pop(name, None)
        if superseded is not None:
            self._discard(superseded)
        self._warming[name] = listener
        self._tasks.start(self._warm_up(listener, waits), f"warming {name}")

    async def _warm_up(self, listener: LiveListener, waits: list[asyncio.Event]) -> None:
        try:
            await listener.settled()
            for event in waits:
                await event.wait()
            if self._warming.get(listener.name) is listener:
                del self._warming[listener.name]
                self._promote(listener)
        except Exception as error:
            # This error is a bug of this program. The LDS response was already acknowledged, so it is too late to
            # refuse the listener. The listener is discarded, because the proxy's start waits for every warming
            # listener.
            log.exception("listener %s cannot become active", listener.name)
            reason = f"internal error: {type(error).__name__}: {error}"
            self._failed(listener.name, listener.body, reason, listener.version)
            if self._warming.get(listener.name) is listener:
                del self._warming[listener.name]
                self._discard(listener)
        finally:
            done, self._warmed_one = self._warmed_one, asyncio.Event()
            done.set()

    def _subscribe(self, listener: LiveListener) -> list[asyncio.Event]:
        """Subscribe to the listener's resources from ECDS and RDS.

        Each resource has an event, which is set when the resource arrives or its time limit passes.
        """
        events: list[asyncio.Event] = []
        subscriptions = self._subscriptions.setdefault(listener, [])
        for entry in listener.model.listener_filters:
            if isinstance(entry.filter, DiscoveredFilter):
                found = asyncio.Event()
                subscriptions.append(
                    self._sources.of(entry.filter.source).subscribe(
                        ECDS_URL,
                        [entry.filter.name],
                        partial(self._receive_extension, listener, entry.name, entry.filter, found),
                        initial_fetch_timeout_s=entry.filter.initial_fetch_timeout_s,
                        on_initial_timeout=found.set,
                    )
                )
                if not entry.filter.without_warming:
                    events.append(found)
        for chain in listener.live_chains:
            for place, wanted_filter in enumerate(chain.model.discovered):
                found = asyncio.Event()
                subscriptions.append(
                    self._sources.of(wanted_filter.source).subscribe(
                        ECDS_URL,
                        [wanted_filter.name],
                        partial(self._receive_chain_filter, listener, chain, place, found),
                        initial_fetch_timeout_s=wanted_filter.initial_fetch_timeout_s,
                        on_initial_timeout=found.set,
                    )
                )
                if chain.lacks(place) or not wanted_filter.without_warming:
                    events.append(found)
            manager = chain.manager
            wanted = manager.wanted_routes if manager is not None else None
            if manager is not None and wanted is not None:
                # A filter chain kept by an update subscribes again, because the subscriptions of the replaced
                # version end.
                found = asyncio.Event()
                if manager.routes is None:
                    events.append(found)
                subscriptions.append(
                    self._sources.of(wanted.source).subscribe(
                        RDS_URL,
                        [wanted.name],
                        partial(self._receive_routes, manager, wanted.name, found),
                        initial_fetch_timeout_s=wanted.initial_fetch_timeout_s,
                        on_initial_timeout=found.set,
                    )
                )
        return events

    async def _receive_extension(
        self, listener: LiveListener, place: str, wanted: DiscoveredFilter, found: asyncio.Event, update: Update
    ) -> None:
        for resource in update.resources:
            if resource.name != wanted.name:
                continue
            compiled = self._extension(resource, wanted, compile_listener_filter)
            listener.discover(place, compiled)
            if isinstance(compiled, WorkloadMetadata):
                log.info("workload metadata: %d addresses", len(compiled.baggage))
        if wanted.name in update.removed:
            listener.discover(place, None)
            self.extensions.pop(wanted.name, None)
        found.set()

    async def _receive_chain_filter(
        self, listener: LiveListener, chain: LiveChain, place: int, found: asyncio.Event, update: Update
    ) -> None:
        wanted = chain.model.discovered[place]
        for resource in update.resources:
            if resource.name == wanted.name:
                chain.discover(place, self._extension(resource, wanted, compile_chain_filter))
        if wanted.name in update.removed:
            chain.discover(place, None)
            self.extensions.pop(wanted.name, None)
        found.set()
        # Check open connections against the new filter configuration, too. Envoy applies it to new connections
        # only.
        self._connections.review_all(Event.POLICIES, concerned=lambda hop: hop.chain is chain)

    def _secret_changed(self, chain: LiveChain) -> None:
        """End open connections whose peer certificates were revoked. Envoy checks revocation only in new
        handshakes.
        """
        validation = chain.tls.validation if chain.tls is not None else None
        if validation is not None and validation.crl_pem is not None:
            self._connections.review_all(Event.REVOCATIONS, concerned=lambda hop: hop.chain is chain)

    def _extension(self, resource: Resource, wanted: Discovered, read: Callable[[Message, Surroundings], T]) -> T:
        """Return the content of an ECDS resource, and mark it as active.

        Raises:
            UpdateRejected: the resource cannot be used.
        """
        try:
            extension = registry.unpack(resource.body)
            if not isinstance(extension, core_pb2.TypedExtensionConfig):
                raise ConfigError(f"not a TypedExtensionConfig: {resource.body.type_url}")
            message = unpack(extension.typed_config, extension.name)
            if wanted.type_urls and message.DESCRIPTOR.full_name not in wanted.type_urls:
                raise ConfigError(f"type {message.DESCRIPTOR.full_name} is not among the listener's type_urls")
            compiled = read(message, self._surroundings)
        except (ConfigError, registry.UnknownType, registry.MalformedMessage) as error:
            self._note_failure(self.extensions, resource, error)
            raise UpdateRejected(f"{wanted.name}: {error}") from error
        self.extensions[resource.name] = Delivered(good=resource, at=self._clock.wall())
        return compiled

    async def _receive_routes(
        self, manager: LiveConnectionManager, name: str, found: asyncio.Event, update: Update
    ) -> None:
        for resource in update.resources:
            if resource.name != name:
                continue
            try:
                message = registry.unpack(resource.body)
                if not isinstance(message, route_pb2.RouteConfiguration):
                    raise ConfigError(f"not a RouteConfiguration: {resource.body.type_url}")
                manager.routes = compile_route_table(message, self._surroundings)
            except (ConfigError, registry.UnknownType, registry.MalformedMessage) as error:
                self._note_failure(self.route_tables, resource, error)
                raise UpdateRejected(f"{name}: {error}") from error
            self.route_tables[name] = Delivered(good=resource, at=self._clock.wall())
        found.set()

    def _note_failure(self, table: dict[str, Delivered], resource: Resource, error: Exception) -> None:
        failure = Failure(resource.name, resource.body, str(error), self._clock.wall(), resource.version)
        table[resource.name] = replace(table.get(resource.name, Delivered()), failure=failure)

    # Serving

    def _promote(self, listener: LiveListener) -> None:
        old = self._table.get(listener.name)
        if old is not None:
            old.successor = listener
        self._table.put(listener)
        self._create_success.value += 1
        if self._listening:
            self._start(listener)  # before the old version's sockets close, so that the port is always open
        if old is None:
            self._added.value += 1
            log.info("listener %s: %s, %d chains", listener.name, listener.address_text, len(listener.chains))
        else:
            self._replace(old, listener)

    def _replace(self, old: LiveListener, new: LiveListener) -> None:
        taken, addresses = set(map(id, new.sockets)), {sock.address for sock in new.sockets}
        left = [sock for sock in old.sockets if id(sock) not in taken]
        shared = [sock for sock in left if sock.address in addresses]
        if shared:
            self._tasks.start(self._leave(shared), f"old sockets of {old.name}")
        for sock in left:
            if sock not in shared:
                sock.accept_queued()
                sock.close()
        old.sockets = []
        self._modified.value += 1
        if old.model.content == new.model.content:
            self._in_place.value += 1
            kept = set(map(id, new.live_chains))
            changed = [chain for chain in old.live_chains if id(chain) not in kept]
            self._drain_chains(new, changed)
            self._unsubscribe(old)
            old.scope.close()
            log.info("listener %s updated in place, %d chains drain", new.name, len(changed))
        else:
            self._connections.review_all(Event.CONFIGURATION, concerned=lambda hop: hop.owner.latest is new)
            self._drain_listener(old)
            log.info("listener %s replaced, the old one drains", new.name)

    @staticmethod
    async def _leave(sockets: list[ListeningSocket]) -> None:
        """Close listening sockets without losing a connection. Other sockets of this process listen on the same
        addresses.
        """
        try:
            await hand_over(sockets)
        finally:
            for sock in sockets:
                sock.accept_queued()
                sock.close()

    def start(self) -> None:
        """Start listening on all warm listeners. Warming listeners start once they are warm."""
        self._listening = True
        for listener in self._table:
            self._start(listener)

    async def warmed(self) -> None:
        """Wait until each listener received so far has become warm, or was replaced or discarded."""
        while self._warming:
            await self._warmed_one.wait()

    def _start(self, listener: LiveListener) -> None:
        if not self._may_listen(listener):
            return
        for sock in listener.sockets:
            sock.start(partial(self._accepted, listener))

    def _remove(self, name: str) -> None:
        warming = self._warming.pop(name, None)
        if warming is not None:
            self._discard(warming)
        listener = self._table.pop(name)
        self._parts.pop(name, None)
        self.failures.pop(name, None)
        if listener is not None:
            self._removed.value += 1
            log.info("listener %s removed, its connections drain", name)
            listener.stop()
            self._drain_listener(listener)

    def _discard(self, listener: LiveListener) -> None:
        """Discard a listener version that never became active. Filter chains and sockets that it shares with the
        active version stay.
        """
        active = self._table.get(listener.name)
        shared = set(map(id, active.sockets)) if active is not None else set()
        for sock in listener.sockets:
            if id(sock) not in shared:
                sock.close()
        chains = set(map(id, active.live_chains)) if active is not None else set()
        for chain in listener.live_chains:
            if id(chain) not in chains:
                chain.close()
        self._unsubscribe(listener)
        listener.scope.close()

    def _unsubscribe(self, listener: LiveListener) -> None:
        for subscription in self._subscriptions.pop(listener, ()):
            subscription.close()

    # Draining

    def _drain_listener(self, listener: LiveListener) -> None:
        listener.draining = True
        self._draining.append(listener)
        self._tasks.start(self._drain(listener, listener.live_chains), f"draining {listener.name}")

    def _drain_chains(self, successor: LiveListener, chains: list[LiveChain]) -> None:
        """Drain the connections of changed filter chains, and end connections that the new chains deny."""
        if not chains:
            return
        leaving = set(map(id, chains))
        self._connections.review_all(Event.CONFIGURATION, concerned=lambda hop: id(hop.chain) in leaving)
        self._draining_chains += len(chains)
        self._tasks.start(self._drain(None, chains), f"draining chains of {successor.name}")

    async def _drain(self, listener: LiveListener | None, chains: Iterable[LiveChain]) -> None:
        chains = list(chains)
        leaving = set(map(id, chains))

        def concerned(hop: LiveHop) -> bool:
            return id(hop.chain) in leaving or (listener is not None and hop.owner is listener)

        connections = self._connections
        connections.review_all(Event.DRAIN, concerned=concerned)
        deadline = self._clock.monotonic() + self._drain_s
        while (left := deadline - self._clock.monotonic()) > 0:
            if not any(map(concerned, (*connections, *connections.hops))):
                break
            await asyncio.sleep(min(left, 1.0))
        connections.review_all(Event.DEADLINE, DRAINED, concerned=concerned)
        await connections.table.reviewed()
        for chain in chains:
            chain.close()
        if listener is None:
            self._draining_chains -= len(chains)
        else:
            self._draining.remove(listener)
            self._unsubscribe(listener)
            listener.scope.close()

    async def hand_over(self) -> None:
        """Leave new connections to other processes' sockets before :meth:`stop`; see
        :func:`ztunnel.runtime.accepting.hand_over`.
        """
        await hand_over([sock for listener in self._table for sock in listener.sockets])

    def stop(self, keep: Callable[[LiveListener], bool] = lambda _: False) -> None:
        """Stop accepting at once; open connections continue (``/drain_listeners``, shutdown).

        If ``keep`` returns false for a listener, this listener and its later versions never accept again.
        """
        earlier = self._may_listen
        self._may_listen = lambda listener: earlier(listener) and keep(listener)
        for listener in self._table:
            if listener.sockets and not keep(listener):
                listener.stop()
                self._stops.value += 1

    async def close(self) -> None:
        """Stop accepting and cancel all tasks; idempotent."""
        self.stop()
        await self._tasks.close()
        for listener in [*self._table, *self._warming.values(), *self._draining]:
            listener.stop()
            self._unsubscribe(listener)
            for chain in listener.live_chains:
                chain.close()
