"""A whole proxy in this process, configured over a real ADS stream, with real sockets on loopback."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.message import Message

from tests.hbone.certificates import Authority
from tests.limits import WAIT_S
from xds.aio.server import SnapshotServer
from xds.proto import registry
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import TypedExtensionConfig
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.config.route.v3.route_pb2 import RouteConfiguration
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.json import parse_value
from xds.protocol.snapshot import Answered, Snapshot
from ztunnel.policy.calico.settings import PolicySettings
from ztunnel.proxy.envoy.admin.commands import answer
from ztunnel.proxy.envoy.app import Proxy
from ztunnel.proxy.envoy.config.bootstrap import bootstrap_for, read_bootstrap
from ztunnel.proxy.envoy.config.settings import Settings, Switches
from ztunnel.proxy.envoy.config.state import State
from ztunnel.runtime import accepting
from ztunnel.runtime.http.page import Page, PageRequest, Query

T = "type.googleapis.com/"
KINDS: dict[str, type[Message]] = {
    "listener": Listener,
    "cluster": Cluster,
    "endpoints": ClusterLoadAssignment,
    "route": RouteConfiguration,
    "secret": Secret,
    "extension": TypedExtensionConfig,
}
LISTENERS, CLUSTERS = registry.type_url(Listener), registry.type_url(Cluster)
Json = dict[str, Any]
CLIENT, SERVER = "spiffe://td/ns/a/sa/client", "spiffe://td/ns/a/sa/server"


class Harness:
    """One proxy and its control plane.

    Attributes:
        answered: the proxy's verdicts on all responses so far.
        resources: (kind, document), published by :meth:`publish`.
    """

    def __init__(
        self,
        folder: Path,
        switches: Switches,
        extend: Callable[[Bootstrap], None] | None,
        policies: PolicySettings | None = None,
        tap_socket: str = "",
        handover_dir: str = "",
    ) -> None:
        self.folder = folder
        self.answered: list[Answered] = []
        self.snapshot = Snapshot()
        self.resources: list[tuple[str, Json]] = []
        self.server = SnapshotServer(
            [f"unix:{folder}/xds"],
            key_of=lambda node: "it",
            on_answer=lambda _, answered: self.answered.append(answered),
        )
        bootstrap = bootstrap_for(f"unix:{folder}/xds", "n", delta=False, admin=None)
        if extend is not None:
            extend(bootstrap)
        settings = Settings(
            control_plane="x",
            node="n",
            admin=None,
            readiness=None,
            metrics=None,
            drain_s=1.0,
            shutdown_s=1.0,
            log_flush_s=0.05,
            policies=policies,
            switches=switches,
            tap_socket=tap_socket,
            handover_dir=handover_dir,
        )
        self.proxy = Proxy(settings, read_bootstrap(bootstrap))

    @property
    def answers(self) -> list[tuple[str, str | None]]:
        """Return the kind and the error of every answer so far."""
        return [(answered.type_url.rpartition(".")[2], answered.error) for answered in self.answered]

    def publish(self, *resources: tuple[str, Json]) -> None:
        """Replace what the proxy should have."""
        self.resources = list(resources)
        messages = [parse_value(document, KINDS[kind]).message for kind, document in resources]
        self.snapshot = Snapshot.of(messages)
        self.server.publish("it", self.snapshot)

    async def published(self, *resources: tuple[str, Json]) -> str | None:
        """Publish, and wait for the answer about the listeners. Return its error.

        Changed clusters are answered once they are warm, so later connections find them. An answer to an earlier
        version can still arrive, and does not count.
        """
        before = len(self.answered)
        awaited = [LISTENERS]
        if self._clusters(resources) != self._clusters(self.resources):
            awaited.append(CLUSTERS)
        self.publish(*resources)
        versions = [(type_url, self.snapshot.version(type_url)) for type_url in awaited]

        def answers() -> dict[tuple[str, str], str | None]:
            return {(each.type_url, each.version): each.error for each in self.answered[before:]}

        await self.until(lambda: answers().keys() >= set(versions))
        return answers()[versions[0]]

    @staticmethod
    def _clusters(resources: Iterable[tuple[str, Json]]) -> list[Json]:
        return [document for kind, document in resources if kind == "cluster"]

    async def live(self) -> None:
        """Wait until the proxy listens."""
        await self.until(lambda: self.proxy.state is State.LIVE)

    async def until(self, ready: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(WAIT_S):
            while not ready():
                await asyncio.sleep(0.01)

    def port(self, name: str) -> int:
        """Return the port on which a listener really listens."""
        listener = next(found for found in self.proxy.listeners.active if found.name == name)
        return listener.sockets[0].address.port

    def count(self, name: str) -> float:
        """Return the value of a metric; 0 when there is none."""
        return next((metric.value for metric in self.proxy.stats if metric.name == name), 0)  # type: ignore[union-attr]

    async def log(self, lines: int = 1) -> list[Json]:
        """The access log, once it has so many lines."""
        path = self.folder / "log"
        await self.until(lambda: path.exists() and path.read_text().count("\n") >= lines)
        return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def run(
    folder: Path,
    body: Callable[[Harness], Awaitable[None]],
    *resources: tuple[str, Json],
    switches: Switches = Switches(),  # noqa: B008  frozen
    extend: Callable[[Bootstrap], None] | None = None,
    policies: PolicySettings | None = None,
    tap_socket: str = "",
    live: bool = True,
) -> None:
    """Run ``body`` against a proxy that has ``resources``. ``live``: wait for its start first."""

    async def main() -> None:
        harness = Harness(folder, switches, extend, policies, tap_socket)
        harness.publish(*resources)
        async with harness.server, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(harness.proxy.run())
            try:
                if live:
                    await harness.live()
                await body(harness)
            finally:
                with mock.patch.object(accepting, "_HANDOVER_S", 0.0):  # there is no successor
                    harness.proxy.shut_down()
                    await running

    asyncio.run(main())


# Peers


@contextlib.asynccontextmanager
async def application(reply: bytes = b"", *, echo: bool = True) -> AsyncIterator[int]:
    """A server on loopback: says ``reply`` first, then echoes until the client ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(reply)
            while echo and (data := await reader.read(65536)):
                writer.write(data)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ask(port: int, data: bytes = b"ping") -> bytes:
    """Send, half-close, and read to the end. Return nothing if the connection was reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), WAIT_S)
    except OSError:  # also "not connected": reset before the half-close
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Open:
    """A connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> "Open":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def say(self, data: bytes) -> bytes:
        """Send and read as much back; empty at the end."""
        self._writer.write(data)
        return await self.read(len(data))

    def write(self, data: bytes) -> None:
        """Send, and wait for nothing."""
        self._writer.write(data)

    async def read(self, size: int) -> bytes:
        """Read so many bytes; empty at an earlier end."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            return await asyncio.wait_for(self._reader.readexactly(size), WAIT_S)
        return b""

    async def was_reset(self) -> bool:
        """Wait for the other side's end. Return whether it is a reset."""
        try:
            while await asyncio.wait_for(self._reader.read(65536), WAIT_S):
                pass
        except ConnectionError:
            return True
        return False

    async def ended(self) -> bool:
        """Wait for the other side's end."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self._reader.read(1), WAIT_S) == b""
        return True

    def reset(self) -> None:
        """Close with a RST."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


# Documents


def tcp(cluster: str = "app", **more: Any) -> Json:
    """A tcp_proxy filter."""
    kind = "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy"
    return {"name": "tcp", "typed_config": {"@type": T + kind, "stat_prefix": "p", "cluster": cluster, **more}}


def rbac(principal: str | None, action: str = "ALLOW") -> Json:
    """An RBAC filter: one principal, or anybody."""
    kind = "envoy.extensions.filters.network.rbac.v3.RBAC"
    who: Json = {"any": True}
    if principal is not None:
        who = {"authenticated": {"principal_name": {"exact": principal}}}
    policy = {"permissions": [{"any": True}], "principals": [who]}
    rules = {"action": action, "policies": {"rule": policy}}
    return {"name": "rbac", "typed_config": {"@type": T + kind, "stat_prefix": "tcp.", "rules": rules}}


def access_log(folder: Path) -> list[Json]:
    """JSON lines into the harness's folder."""
    fields = {
        "flags": "%RESPONSE_FLAGS%",
        "cluster": "%UPSTREAM_CLUSTER%",
        "chain": "%FILTER_CHAIN_NAME%",
        "received": "%BYTES_RECEIVED%",
        "sent": "%BYTES_SENT%",
        "details": "%CONNECTION_TERMINATION_DETAILS%",
        "failure": "%UPSTREAM_TRANSPORT_FAILURE_REASON%",
        "peer": "%DOWNSTREAM_PEER_URI_SAN%",
        "code": "%RESPONSE_CODE%",
        "upstream": "%UPSTREAM_HOST%",
    }
    kind = "envoy.extensions.access_loggers.file.v3.FileAccessLog"
    config = {"@type": T + kind, "path": str(folder / "log"), "log_format": {"json_format": fields}}
    return [{"name": "file", "typed_config": config}]


def chain(*filters: Json, **more: Any) -> Json:
    """A filter chain."""
    return {"name": "one", "filters": list(filters) or [tcp()], **more}


def listener(*chains: Json, name: str = "l", **more: Any) -> tuple[str, Json]:
    """A listener on a free port of loopback."""
    document = {
        "name": name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": list(chains) or [chain()],
        **more,
    }
    return "listener", document


def endpoint(port: int, **more: Any) -> Json:
    """A load-balanced endpoint on loopback."""
    return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}, **more}


def cluster(*ports: int, name: str = "app", **more: Any) -> tuple[str, Json]:
    """A STATIC cluster of ports on loopback."""
    endpoints = [endpoint(port) for port in ports]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return "cluster", {"name": name, "type": "STATIC", "load_assignment": assignment, **more}


class Identities:
    """Certificates of one trust domain as SDS resources."""

    def __init__(self) -> None:
        self.authority = Authority()

    def secret(self, identity: str) -> tuple[str, Json]:
        """A fresh certificate for an identity, under its name."""
        leaf = self.authority.issue(identity)
        return "secret", {
            "name": identity,
            "tls_certificate": {
                "certificate_chain": {"inline_string": leaf.chain_pem.decode()},
                "private_key": {"inline_string": leaf.key_pem.decode()},
            },
        }

    def root(self) -> tuple[str, Json]:
        """The root, as ROOTCA."""
        return "secret", {
            "name": "ROOTCA",
            "validation_context": {"trusted_ca": {"inline_string": self.authority.pem.decode()}},
        }


def tls(identity: str, *, server: bool, source: Json | None = None) -> Json:
    """A transport socket with certificates by SDS."""
    sds = source or {"ads": {}}
    common = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
        "tls_certificate_sds_secret_configs": [{"name": identity, "sds_config": sds}],
        "combined_validation_context": {
            "default_validation_context": {
                "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"prefix": "spiffe://td/"}}]
            },
            "validation_context_sds_secret_config": {"name": "ROOTCA", "sds_config": sds},
        },
    }
    kind = "DownstreamTlsContext" if server else "UpstreamTlsContext"
    config: Json = {"@type": f"{T}envoy.extensions.transport_sockets.tls.v3.{kind}", "common_tls_context": common}
    if server:
        config["require_client_certificate"] = True
    return {"name": "tls", "typed_config": config}


def connection_manager(routes: Json) -> Json:
    """An HTTP connection manager that ends tunnels."""
    kind = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    router = {"@type": T + "envoy.extensions.filters.http.router.v3.Router"}
    return {
        "name": "hcm",
        "typed_config": {
            "@type": T + kind,
            "stat_prefix": "inbound",
            **routes,
            "http_filters": [{"name": "router", "typed_config": router}],
            "http2_protocol_options": {"allow_connect": True},
            "upgrade_configs": [{"upgrade_type": "CONNECT"}],
        },
    }


def connect_route(target: str, **more: Any) -> Json:
    """A route table that carries every CONNECT to a cluster."""
    route = {"cluster": target, "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}], **more}
    hosts = [{"name": "all", "domains": ["*"], "routes": [{"match": {"connect_matcher": {}}, "route": route}]}]
    return {"name": "routes", "virtual_hosts": hosts}


def http2(**more: Any) -> Json:
    """Protocol options of a cluster that speaks HTTP/2."""
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    explicit = {"http2_protocol_options": {"allow_connect": True}}
    return {name: {"@type": T + name, "explicit_http_config": explicit, **more}}


def inbound(target: Json, *filters: Json) -> tuple[str, Json]:
    """A listener that ends tunnels for identity SERVER."""
    return listener(
        chain(*filters, connection_manager(target), transport_socket=tls(SERVER, server=True)), name="inbound"
    )


def outbound_cluster(port: int) -> tuple[str, Json]:
    more: dict[str, Any] = {
        "transport_socket": tls(CLIENT, server=False),
        "typed_extension_protocol_options": http2(),
    }
    return cluster(port, name="tunnel", **more)


async def tunnel(
    harness: Harness, port: int, identities: Identities, *filters: Json, **log: Any
) -> list[tuple[str, Json]]:
    """Publish both ends of a tunnel in one proxy, with SERVER's policy ``filters``."""
    secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
    end = inbound({"route_config": connect_route("app")}, *filters)
    await harness.published(end, cluster(port), *secrets)
    await harness.until(lambda: harness.proxy.listeners.active)
    tunnelling = tcp("tunnel", **{"tunneling_config": {"hostname": "app:80"}, **log})
    everything = [
        end,
        listener(chain(tunnelling)),
        cluster(port),
        outbound_cluster(harness.port("inbound")),
        *secrets,
    ]
    await harness.published(*everything)
    await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
    return everything


def page(harness: Harness, path: str, query: str = "") -> str:
    """A page of the admin server."""
    request = PageRequest(method="GET", path=path, query=Query.parse(query), target=f"{path}?{query}")
    answered = answer(harness.proxy, mock.Mock(), mock.Mock(), request)
    assert isinstance(answered, Page)
    pieces = []
    for piece in answered.body:
        assert isinstance(piece, str)
        pieces.append(piece)
    return "".join(pieces)


def unpacked(body: Any) -> Message:
    """The message inside a dump's Any."""
    return registry.unpack(body)
