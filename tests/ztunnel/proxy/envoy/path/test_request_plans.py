"""Requests decided with a kept plan against equal ones decided anew, while the configuration changes.

Requests with different heads come on one tunnel connection, which keeps a plan for each head. Between them routes,
policies, clusters, listeners and certificates change over xDS. Each request is sent twice, with the kept plan and
with a fresh one: answer, bytes, counters and access lines must be equal.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import default_client
from hbone.errors import ConnectRefused
from hbone.events import RequestHead
from tests.generated import examples
from tests.life.test_envoy_walk import through
from tests.limits import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    KINDS,
    SERVER,
    Harness,
    Identities,
    Json,
    T,
    access_log,
    application,
    chain,
    cluster,
    connect_route,
    connection_manager,
    listener,
    rbac,
    run,
    tcp,
    tls,
)
from tests.ztunnel.proxy.envoy.path.test_planned import one
from tests.ztunnel.proxy.envoy.test_attacks import context
from xds.proto import registry
from ztunnel.proxy.envoy.path import terminate
from ztunnel.proxy.envoy.path.terminate import RequestPlan
from ztunnel.proxy.envoy.path.tunnel_server import Served

ADS = {"ads": {}, "resource_api_version": "V3"}
OTHER = "spiffe://td/ns/a/sa/other"
RBAC = "envoy.extensions.filters.network.rbac.v3.RBAC"
ORIGINAL_DST: Json = {
    "name": "original",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-envoy-original-dst-host"},
}


@dataclass(frozen=True)
class Wanted:
    """The configuration that changes.

    Attributes:
        route: the kind of the route table, see :func:`routes`.
        guard: the kind of the chain's policy, see :func:`guard`.
        hosts: the application that the cluster ``app`` leads to, by place. ``None``: it has no host.
        secured: whether its hosts are dialled with TLS, which the applications do not speak.
        owned: whether a listener has the port that the last head names.
        certificates: the number of the server's certificate.
    """

    route: str = "app"
    guard: str = "client"
    hosts: int | None = 0
    secured: bool = False
    owned: bool = False
    certificates: int = 0


def routes(kind: str) -> Json:
    if kind == "by header":
        found = connect_route("app")
        (host,) = found["virtual_hosts"]
        other = {**host["routes"][0], "route": {**host["routes"][0]["route"], "cluster": "original"}}
        other["match"] = {"connect_matcher": {}, "headers": [{"name": "x-a", "present_match": True}]}
        host["routes"].insert(0, other)
        return found
    found = connect_route(kind)
    if kind == "none":
        found["virtual_hosts"][0]["domains"] = ["elsewhere"]
    return found


def guard(kind: str, port: int) -> Json:
    if kind in ("deny port", "allow port"):
        made = rbac(CLIENT, kind.partition(" ")[0].upper())
        (policy,) = made["typed_config"]["rules"]["policies"].values()
        policy["permissions"] = [{"destination_port": port}]
        return made
    return rbac({"client": CLIENT, "other": OTHER}[kind])


#: The number of heads: three authorities, each without and with a header.
HEADS = 6
#: A head whose authority is another host than the connection's.
OTHER_HOST = 2
#: A head whose authority can have the port of a listener of this proxy.
OWN_PORT = 4


class Node:
    """A proxy that ends tunnels, one connection to it, and two applications."""

    def __init__(self, harness: Harness, ports: tuple[int, int], kept: list[bool]) -> None:
        self.harness = harness
        self.ports = ports
        self.wanted = Wanted()
        self._kept = kept
        self._owned = free_port()
        self._identities = Identities()
        self._servers = [self._identities.secret(SERVER) for _ in range(2)]
        self._others = [self._identities.secret(CLIENT), self._identities.root()]
        authority = self._identities.authority
        self._credentials = context(authority, authority.issue(CLIENT), alpn=(b"h2",))
        self._connection: Connection | None = None
        self.heads = [
            (f"127.0.0.{host}:{port}", headers)
            for host, port in ((1, ports[0]), (2, ports[0]), (1, self._owned))
            for headers in ((), (("x-a", "1"),))
        ]

    async def publish(self, wanted: Wanted) -> None:
        """Apply a configuration, and wait until the proxy has answered each part."""
        harness, before = self.harness, self._versions()
        self.wanted = wanted
        discovery = {"config_source": ADS, "type_urls": [T + RBAC]}
        manager = connection_manager({"rds": {"route_config_name": "routes", "config_source": ADS}})
        manager["typed_config"]["access_log"] = access_log(harness.folder)
        own: Json = {"transport_socket": tls(CLIENT, server=False)} if wanted.secured else {}
        ports = () if wanted.hosts is None else (self.ports[wanted.hosts],)
        resources = [
            listener(
                chain(
                    {"name": "guard", "config_discovery": discovery},
                    manager,
                    transport_socket=tls(SERVER, server=True),
                ),
                name="inbound",
            ),
            ("route", {**routes(wanted.route), "name": "routes"}),
            ("extension", {"name": "guard", "typed_config": guard(wanted.guard, self.ports[0])["typed_config"]}),
            cluster(*ports, **own),
            ("cluster", ORIGINAL_DST),
            self._servers[wanted.certificates],
            *self._others,
        ]
        if wanted.owned:
            kind, document = listener(chain(tcp()))
            document["address"]["socket_address"]["port_value"] = self._owned
            resources.append((kind, document))
        answered = len(harness.answered)
        harness.publish(*resources)
        changed = [versions for kind, versions in self._versions().items() if versions != before.get(kind)]
        await harness.until(
            lambda: all(versions & {each.version for each in harness.answered[answered:]} for versions in changed)
        )
        assert not [each.error for each in harness.answered[answered:] if each.error]
        await harness.until(lambda: any(each.name == "inbound" for each in harness.proxy.listeners.active))
        if wanted.guard == "other" and self._connection is not None:
            async with asyncio.timeout(WAIT_S):
                await self._connection.wait_closed()  # the new policy ends it
            self._connection = None

    def _versions(self) -> dict[str, set[str]]:
        """Return the versions of each type by what the proxy can have requested: all, or those in use."""
        snapshot = self.harness.snapshot
        return {
            kind: {snapshot.version(kind), snapshot.version(kind, snapshot.of_type(kind).keys() - {CLIENT})}
            for kind in map(registry.type_url, KINDS.values())
            if snapshot.of_type(kind)
        }

    async def _connected(self) -> Connection | None:
        """Return the tunnel connection. ``None``: the policy does not admit the client."""
        harness, connection = self.harness, self._connection
        if self.wanted.guard == "other":
            return None
        if connection is not None and connection.accepts_streams:
            return connection
        sock = socket.create_connection(("127.0.0.1", harness.port("inbound")))
        sock.setblocking(False)
        self._connection = await connect(sock, self._credentials, default_client(), harness.proxy.poller)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def request(self, head: int) -> tuple[int, bytes] | None:
        """Compare a request with its kept plan to an equal one with a fresh plan.

        Returns:
            The status and the application's bytes. ``None``: the policy does not admit the client.
        """
        connection = await self._connected()
        if connection is None:
            return None
        authority, headers = self.heads[head]
        fields = [(b":method", b"CONNECT"), (b":authority", authority.encode())]
        fields += [(name.encode(), value.encode()) for name, value in headers]

        async def work() -> tuple[int, bytes]:
            try:
                tunnel = await connection.open(fields)
            except ConnectRefused as error:
                return error.status, b""
            client = await through(tunnel)
            try:
                return 200, await client.say(b"hello")
            finally:
                await client.close()

        found = []
        for kept in (True, False):
            self._kept[0] = kept
            answer, changed, lines = await one(self.harness, work)
            # The first request to an address makes the address a host of the cluster "original".
            counted = {name: value for name, value in changed.items() if ".membership_" not in name}
            found.append((answer, counted, lines))
        assert found[0] == found[1], (self.wanted, authority, headers)
        decided: tuple[int, bytes] = found[0][0]
        return decided


Step = Callable[[Node], Awaitable[object]]


def steps() -> st.SearchStrategy[Step]:
    def changed(field: str, value: object) -> Step:
        async def change(node: Node) -> None:
            await node.publish(replace(node.wanted, **{field: value}))  # type: ignore[arg-type]

        return change

    kinds: dict[str, tuple[object, ...]] = {
        "route": ("app", "original", "by header", "gone", "none"),
        "guard": ("client", "deny port", "allow port", "other"),
        "hosts": (0, 1, None),
        "secured": (False, True),
        "owned": (False, True),
        "certificates": (0, 1),
    }
    changes = [st.builds(changed, st.just(field), st.sampled_from(values)) for field, values in kinds.items()]
    request = st.builds(lambda head: lambda node: node.request(head), st.integers(0, HEADS - 1))
    return st.one_of(request, request, *changes)


def play(body: Callable[[Node], Awaitable[None]]) -> None:
    """Run ``body`` with a proxy, its plans under the control of a :class:`Node`."""
    kept, plan = [True], Served.plan

    def fresh_or_kept(served: Served, head: RequestHead) -> RequestPlan:
        return plan(served, head) if kept[0] else RequestPlan(head)

    async def main(harness: Harness) -> None:
        async with application() as first, application() as second:
            node = Node(harness, (first, second), kept)
            try:
                await node.publish(Wanted())
                await body(node)
            finally:
                node.close()

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(Served, "plan", fresh_or_kept)
        # The applications are on loopback, where a tunnel would lead back to the proxy of a node.
        patch.setattr(terminate, "is_loopback", lambda host: False)
        run(Path(folder), main)


@settings(max_examples=examples(60))
@given(st.lists(steps(), min_size=6, max_size=24))
def test_a_request_with_a_plan_is_decided_like_one_without(drawn: list[Step]) -> None:
    async def body(node: Node) -> None:
        for step in drawn:
            await step(node)

    play(body)


def test_an_equal_request_keeps_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    choose = terminate.tunnel_route

    def counted(model: Any, table: Any, info: Any) -> Any:
        chosen.append(info.authority)
        return choose(model, table, info)

    monkeypatch.setattr(terminate, "tunnel_route", counted)

    async def body(node: Node) -> None:
        assert await node.request(0) == (200, b"hello")
        assert len(chosen) == 2  # one for the plan, and one without
        assert await node.request(0) == (200, b"hello")
        assert len(chosen) == 3
        await node.publish(replace(node.wanted, route="none"))
        assert await node.request(0) == (404, b"")
        assert len(chosen) == 5

    play(body)


CHANGES: list[tuple[Wanted, Wanted, int, int, int]] = [
    (Wanted(), Wanted(route="none"), 0, 200, 404),
    (Wanted(), Wanted(guard="deny port"), 0, 200, 403),
    (Wanted(), Wanted(hosts=None), 0, 200, 503),
    (Wanted(), Wanted(secured=True), 0, 200, 503),
    (Wanted(route="original"), Wanted(route="original", guard="deny port"), 0, 200, 403),
    (Wanted(route="original"), Wanted(), OTHER_HOST, 400, 200),
    (Wanted(), Wanted(certificates=1), 0, 200, 200),
    (Wanted(route="original"), Wanted(route="original", owned=True), OWN_PORT, 503, 503),
]


@pytest.mark.parametrize(("before", "after", "head", "first", "second"), CHANGES)
def test_a_kept_plan_meets_each_change(before: Wanted, after: Wanted, head: int, first: int, second: int) -> None:
    async def body(node: Node) -> None:
        for wanted, status in ((before, first), (after, second)):
            await node.publish(wanted)
            for _ in range(2):
                found = await node.request(head)
                assert found is not None
                assert found[0] == status

    play(body)
