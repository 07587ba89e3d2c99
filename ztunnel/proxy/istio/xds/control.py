"""Feeds the mesh from the control plane: over xDS, from a local file, or both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from xds.aio.channel import Channel, Keepalive
from xds.aio.client import AdsClient, Connect, connect_to
from xds.dialects.istio.local_file import parse_local_file
from xds.errors import XdsError
from xds.grpc.tls import client_tls
from xds.model.mesh import Mesh
from xds.protocol.backoff import DoublingBackoff
from xds.protocol.client_state import ISTIO
from xds.protocol.resource import Receive, Update, UpdateRejected
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.certificates.credentials import Credentials, CredentialsError, Endpoint, Roots, Token
from ztunnel.proxy.istio.settings.config import IstioConfig
from ztunnel.proxy.istio.xds import mesh_dump
from ztunnel.proxy.istio.xds.mesh_feed import LocalFile, MeshFeed
from ztunnel.proxy.istio.xds.node_id import node_message

if TYPE_CHECKING:
    from ztunnel.proxy.istio.xds.last_configuration import LastConfiguration  # only under a holder

log = logging.getLogger(__name__)

ADDRESS = "type.googleapis.com/istio.workload.Address"
AUTHORIZATION = "type.googleapis.com/istio.security.Authorization"


class ControlPlane:
    """A context manager that feeds one mesh from its configuration sources.

    Args:
        config: names the control plane and the local file.
        mesh: receives the resources.
        metrics: receives ``istio_xds_*``.
        last: an earlier process's configuration, which this process applies and then keeps up to date. ``None``
            disables this.

    Attributes:
        ready: set once every wildcard type has been received, by this or an earlier process. Set at once if no
            control plane is configured.
    """

    def __init__(
        self, config: IstioConfig, mesh: Mesh, metrics: Metrics, last: LastConfiguration | None = None
    ) -> None:
        self.ready = asyncio.Event()
        self._config = config
        self._metrics = metrics
        self._feed = MeshFeed(mesh)
        self._last = last
        self._stack = AsyncExitStack()
        self._client = self._ads() if config.xds_address else None
        self._pending = {AUTHORIZATION} if config.xds_on_demand else {ADDRESS, AUTHORIZATION}
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._began_s = asyncio.get_running_loop().time()
        metrics.xds_terminations = self.terminations

    def _ads(self) -> AdsClient:
        config = self._config
        credentials = Credentials(
            token=Token(config.auth_token), cluster_id=config.cluster_id, headers=config.xds_headers
        )

        def metadata() -> tuple[tuple[str, str], ...]:
            try:
                return credentials.metadata()
            except CredentialsError as error:
                raise XdsError(str(error)) from error

        dialect = replace(ISTIO, on_demand=frozenset({ADDRESS}) if config.xds_on_demand else frozenset())
        endpoint = Endpoint.parse(config.xds_address)
        return AdsClient(
            endpoint.target,
            node_message(config),
            delta=True,
            metadata=metadata,
            backoff=DoublingBackoff(),
            dialect=dialect,
            connect=self._connects(endpoint),
        )

    def _connects(self, endpoint: Endpoint) -> Connect:
        """Return a function that connects to the control plane. It reads the root certificates at each call."""
        config = self._config
        limit = ISTIO.response_limit_bytes
        if not endpoint.tls:
            return connect_to(endpoint.target, response_limit_bytes=limit)
        roots, policy = Roots(config.xds_root_ca), config.tls_policy
        names = [endpoint.host, *filter(None, [config.alt_xds_hostname])]
        keepalive = Keepalive()

        def connect() -> Channel:
            try:
                tls = client_tls(roots.read(), names, tls_1_2=policy.tls_1_2, groups=policy.groups)
            except CredentialsError as error:
                raise XdsError(str(error)) from error
            except ValueError as error:
                raise XdsError(f"unusable {roots.place}: {error}") from error
            return Channel(endpoint.target, tls=tls, message_limit_bytes=limit, keepalive=keepalive)

        return connect

    # Start and end

    async def __aenter__(self) -> Self:
        """Read the local file and subscribe to the control plane.

        Raises:
            ConfigError: the local file is unusable.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            if config.local_xds:
                self._feed.apply_local(parse_local_file(config.local_xds))
            elif config.local_xds_path:
                await stack.enter_async_context(LocalFile(config.local_xds_path, self._feed))
            if self._client is None:
                self.ready.set()
            else:
                types = (
                    (ADDRESS, self._feed.receive_addresses),
                    (AUTHORIZATION, self._feed.receive_authorizations),
                )
                if self._last is not None:
                    await self._resume(self._client, self._last, types)
                await stack.enter_async_context(self._client)
                for type_url, receive in types:
                    # There is no time limit for the first answer: the proxy becomes ready only when it has
                    # arrived.
                    self._client.subscribe(
                        type_url, None, self._counted(type_url, receive), initial_fetch_timeout_s=0
                    )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def _resume(
        self, client: AdsClient, last: LastConfiguration, types: Sequence[tuple[str, Receive]]
    ) -> None:
        """Apply the configuration that an earlier process received."""
        for type_url, receive in types:
            update = last.update(type_url)
            if update is None:
                continue
            versions = {each.name: each.version for each in update.resources}
            try:
                await receive(update)
            except UpdateRejected as error:
                # The process before, perhaps of another version, refused them, too, or accepted them. Empty
                # versions are reported for them, so that the control plane sends them again, or reports their
                # removal.
                log.warning("the crashed process's resources cannot be read error=%s", error)
                for name in error.rejected or ():
                    versions[name] = ""
            client.resume(type_url, versions)
            self._pending.discard(type_url)
        if not self._pending:
            log.warning("the crashed process's configuration is used until the control plane answers")
            self.ready.set()

    def _counted(self, type_url: str, receive: Receive) -> Receive:
        metrics, last = self._metrics, self._last

        async def received(update: Update) -> None:
            size = sum(len(resource.body.value) for resource in update.resources)
            metrics.xds_messages[type_url] = metrics.xds_messages.get(type_url, 0) + 1
            metrics.xds_bytes[type_url] = metrics.xds_bytes.get(type_url, 0) + size
            try:
                await receive(update)  # raises UpdateRejected for a NACK, which does not make this proxy ready
                if last is not None:
                    last.note(update)
            except UpdateRejected as error:
                if last is not None and error.rejected is not None:
                    last.note(update, error.rejected)
                raise
            finally:
                self._answered(update)
            self._pending.discard(type_url)
            if not self._pending:
                self.ready.set()

        return received

    # On demand

    @property
    def on_demand(self) -> bool:
        """Whether on-demand xDS is on. Then the mesh holds only resources that were requested by name."""
        return self._config.xds_on_demand and self._client is not None

    async def ask(self, key: str) -> None:
        """Request ``network/ip``, a uid or ``namespace/hostname``, and wait for the answer.

        Concurrent calls for one key share a request.

        Raises:
            TimeoutError: no answer arrived within ``_ANSWER_S``. A later answer is still applied.
        """
        assert self._client is not None
        waiting = self._answers.get(key)
        if waiting is None:
            waiting = self._answers[key] = asyncio.get_running_loop().create_future()
            self._client.ask(ADDRESS, [key])
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.shield(waiting)

    def _answered(self, update: Update) -> None:
        if not self._answers:
            return
        names = [name for resource in update.resources for name in (resource.name, *resource.aliases)]
        for name in (*names, *update.removed):
            waiting = self._answers.pop(name, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    # State

    @property
    def staleness_s(self) -> float:
        """The number of seconds without a working stream to the control plane. 0 while a stream works, or without
        a control plane.

        A stream works once the control plane has responded on it. istiod answers the first request of every
        stream, even if it has no news, or refuses the stream.
        """
        client = self._client
        if client is None or client.stats.working:
            return 0.0
        lost_at_s = client.stats.lost_at_s
        return asyncio.get_running_loop().time() - (self._began_s if lost_at_s is None else lost_at_s)

    @property
    def updated_ago_s(self) -> float | None:
        """Seconds since the control plane's last message. None before the first."""
        received_at_s = self._client.stats.received_at_s if self._client is not None else None
        return None if received_at_s is None else asyncio.get_running_loop().time() - received_at_s

    def refused(self) -> Iterator[tuple[str, str, str]]:
        """Yield (type, name, reason) for each resource whose latest version could not be read."""
        for kind, refused in (
            ("address", self._feed.refused_addresses),
            ("policy", self._feed.refused_policies),
        ):
            yield from ((kind, name, reason) for name, reason in refused.items())

    def refused_counts(self) -> dict[str, int]:
        """Return the numbers of resources in :meth:`refused`, by type."""
        return {"address": len(self._feed.refused_addresses), "policy": len(self._feed.refused_policies)}

    def terminations(self) -> dict[str, int]:
        """Return the numbers of ended streams, by reason."""
        if self._client is None:
            return {}
        return {str(end): count for end, count in self._client.stats.ended.items() if count}

    def static_config(self) -> object:
        """Return the local file's content for the dump."""
        return mesh_dump.static_config(self._feed.local)


#: How long a connection waits for a resource that it has requested with on-demand xDS. The Rust ztunnel waits
#: without limit.
_ANSWER_S = 10.0
