"""Connections between their states: policies and listeners that change during a handshake, a dial, or a join."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbone.aio.tls_socket import TlsSocket
from hbone.settings import Role
from hbone.tls_context import TlsContext, TlsSettings
from tests.hbone.odd_certificates import with_latin_subject
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    Open,
    T,
    access_log,
    application,
    ask,
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
from ztunnel.proxy.envoy import app

OTHER = "spiffe://td/ns/a/sa/other"
#: As Envoy prints details: without spaces.
POLICY_CHANGE = "connection_closed_due_to_policy_change:_rbac_access_denied_matched_policy[none]"
DRAINED = "connection_closed_due_to_connection_drain"


class AnyPort(dict[int, int]):
    """A set of tunnel ports that contains every port, so that tunnels come back to this proxy."""

    def __contains__(self, key: object) -> bool:
        return True

    def get(self, key: int, default: Any = None) -> Any:
        return key


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def inbound_for_pod(at: int, *filters: Json, log: list[Json], **more: Any) -> tuple[str, Json]:
    """A listener that ends tunnels for a pod of this node, at 127.0.0.1 and a port."""
    manager = connection_manager({"route_config": connect_route("app")})
    manager["typed_config"]["access_log"] = log
    match = {"prefix_ranges": [{"address_prefix": "127.0.0.1", "prefix_len": 32}]}
    ends = chain(*filters, manager, transport_socket=tls(SERVER, server=True), filter_chain_match=match)
    address = {"socket_address": {"address": "127.0.0.1", "port_value": at}}
    return listener(ends, name="inbound", address=address, **more)


class Tunnel:
    """Both ends of a tunnel in one proxy, joined in-process or over the network."""

    def __init__(self, harness: Harness, port: int, log: list[Json]) -> None:
        self.harness, self.port, self.log = harness, port, log
        self.at = free_port()  # the join looks for the listener by its configured port
        identities = Identities()
        self.secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]

    async def publish(self, *filters: Json, **more: Any) -> None:
        """Publish everything, with these filters and fields of the inbound listener."""
        end = inbound_for_pod(self.at, *filters, log=self.log, **more)
        if not any(each.name == "inbound" for each in self.harness.proxy.listeners.active):
            await self.harness.published(end, cluster(self.port), *self.secrets)
            await self.harness.until(lambda: self.harness.proxy.listeners.active)
        tunnelling = tcp("tunnel", tunneling_config={"hostname": f"127.0.0.1:{self.port}"}, access_log=self.log)
        await self.harness.published(
            end,
            listener(chain(tunnelling)),
            cluster(self.port),
            outbound_cluster(self.harness.port("inbound")),
            *self.secrets,
        )
        await self.harness.until(lambda: len(self.harness.proxy.listeners.active) == 2)


def play(tmp_path: Path, body: Callable[[Tunnel], Any], monkeypatch: pytest.MonkeyPatch, *, joined: bool) -> None:
    monkeypatch.setattr(app, "_SHORTCUT_PORTS", AnyPort() if joined else {})

    async def main(harness: Harness) -> None:
        async with application() as port:
            made = Tunnel(harness, port, access_log(tmp_path))
            await made.publish(rbac(CLIENT))
            await body(made)
            counters = [metric for metric in harness.proxy.stats if metric.name.endswith("node_local_shortcut")]
            assert any(metric.value for metric in counters) is joined  # type: ignore[union-attr]

    run(tmp_path, main)


WAYS = pytest.mark.parametrize("joined", [True, False], ids=["joined", "wire"])


@WAYS
@pytest.mark.parametrize(
    "more", [{}, {"per_connection_buffer_limit_bytes": 4096}], ids=["policy alone", "listener replaced"]
)
def test_a_denied_peer_loses_its_open_tunnel_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool, more: Json
) -> None:
    """Not at the end of the drain, which is a second here and 45 s in production."""

    async def body(tunnel: Tunnel) -> None:
        harness = tunnel.harness
        client = await Open.to(harness.port("l"))
        assert await client.say(b"hello") == b"hello"
        await tunnel.publish(rbac(OTHER), **more)
        assert not [each for each in harness.proxy.connections.hops if not each.reason]
        assert await client.ended()
        await client.close()
        lines = await harness.log(2)
        assert POLICY_CHANGE in [line["details"] for line in lines]
        assert await ask(harness.port("l")) == b""

    play(tmp_path, body, monkeypatch, joined=joined)


@WAYS
def test_an_open_tunnel_of_a_replaced_listener_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    async def body(tunnel: Tunnel) -> None:
        harness = tunnel.harness
        client = await Open.to(harness.port("l"))
        assert await client.say(b"hello") == b"hello"
        await tunnel.publish(rbac(CLIENT), per_connection_buffer_limit_bytes=4096)
        assert await client.say(b"on") == b"on"
        assert await client.ended()
        await client.close()
        lines = await harness.log(2)
        assert DRAINED in [line["details"] for line in lines]

    play(tmp_path, body, monkeypatch, joined=joined)


@WAYS
def test_a_listener_filter_that_has_not_arrived_closes_a_tunnel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """It is not skipped because the tunnel does not come over the wire."""
    kind = f"{T}istio.telemetry.workloadmetadata.v1.WorkloadMetadataResources"
    discovery = {"config_source": {"ads": {}, "initial_fetch_timeout": "0.2s"}, "type_urls": [kind]}
    awaited = [{"name": "meta", "config_discovery": discovery}]

    async def body(tunnel: Tunnel) -> None:
        harness = tunnel.harness
        assert await ask(harness.port("l")) == b"ping"
        await tunnel.publish(rbac(CLIENT), listener_filters=awaited)
        await harness.until(lambda: all(each.model.name != "inbound" or each.filters for each in live(harness)))
        # The tunnel connection of before takes tunnels until it has drained.
        await harness.until(lambda: not len(harness.proxy.connections))
        assert await ask(harness.port("l")) == b""
        missing = [each for each in harness.proxy.stats if each.name.endswith("extension_config_missing")]
        assert sum(each.value for each in missing) == 1  # type: ignore[union-attr]

    play(tmp_path, body, monkeypatch, joined=joined)


def live(harness: Harness) -> list[Any]:
    return list(harness.proxy.listeners.active)


def test_the_port_of_an_open_tunnel_is_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def for_port(port: int) -> Json:
        made = rbac(CLIENT)
        (policy,) = made["typed_config"]["rules"]["policies"].values()
        policy["permissions"] = [{"destination_port": port}]
        return made

    async def body(tunnel: Tunnel) -> None:
        harness = tunnel.harness
        await tunnel.publish(for_port(tunnel.port))
        client = await Open.to(harness.port("l"))
        assert await client.say(b"hello") == b"hello"
        await tunnel.publish(for_port(9))
        assert await client.ended()
        await client.close()
        assert POLICY_CHANGE in [line["details"] for line in await harness.log(2)]

    play(tmp_path, body, monkeypatch, joined=False)


@pytest.mark.parametrize("tunnels", [True, False], ids=["tunnels", "tcp"])
def test_undecodable_subject_is_read_as_latin_1(tmp_path: Path, tunnels: bool) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            identities = Identities()
            leaf = with_latin_subject(identities.authority, CLIENT)
            socket_ = tls(SERVER, server=True)
            end = chain(tcp(access_log=access_log(tmp_path)), transport_socket=socket_)
            if tunnels:
                manager = connection_manager({"route_config": connect_route("app")})
                end = chain(manager, transport_socket=socket_)
            await harness.published(listener(end), cluster(port), identities.secret(SERVER), identities.root())
            await harness.until(lambda: harness.proxy.listeners.active)
            settings = TlsSettings(
                certificate_chain_pem=leaf.chain_pem,
                private_key_pem=leaf.key_pem,
                trusted_ca_pem=identities.authority.pem,
            )
            watched = harness.proxy.poller.registered
            for _ in range(3):
                near = socket.create_connection(("127.0.0.1", harness.port("l")))
                near.setblocking(False)
                client = TlsSocket(near, TlsContext(Role.CLIENT, settings), harness.proxy.poller)
                await client.establish()
                await harness.until(lambda: any(each.info.tls for each in harness.proxy.connections))
                subjects = [each.info.tls.peer_subject for each in harness.proxy.connections if each.info.tls]
                assert subjects == ["CN=Gr\\C3\\BCn"]  # as OpenSSL writes it
                client.close()
                await harness.until(lambda: not len(harness.proxy.connections))
            assert harness.proxy.poller.registered == watched

    run(tmp_path, body)
