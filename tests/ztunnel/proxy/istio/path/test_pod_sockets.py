"""Binding a pod's ports: the meaning of each refusal by the kernel. ``listen`` is replaced to force its errors."""

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hbone.aio.socket import LASTING_S
from tests.hbone import virtual_time
from tests.ztunnel.proxy.istio.nodes import LOCAL, a_node
from tproxy.aio import sockets
from tproxy.errors import KernelRefused, NeedCapability, PortTaken, TproxyError
from tproxy.sidecar import PASSTHROUGH
from xds.model.address import SocketAddress
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.path.node import Node, log_pressure
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.path.pod_sockets import PASSTHROUGH4, PASSTHROUGH6, PodSockets, bind, ports
from ztunnel.proxy.istio.settings.config import PodName
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.log_pressure import LogPressure
from ztunnel.runtime.log_writer import LogWriter

NAME = PodName(name=LOCAL.name, namespace=LOCAL.namespace, service_account=LOCAL.service_account)
Refuse = Callable[[str, int, bool], Exception | None]


class Kernel:
    """Replaces ``sockets.listen``: returns sockets on free ports, or raises the errors in ``refuse``."""

    def __init__(self, refuse: Refuse) -> None:
        self.made: list[socket.socket] = []
        self.asked: list[tuple[str, int, bool]] = []
        self._refuse = refuse

    def listen(self, host: str, port: int, *, transparent: bool, **more: Any) -> socket.socket:
        self.asked.append((host, port, transparent))
        error = self._refuse(host, port, transparent)
        if error is not None:
            raise error
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.made.append(sock)
        return sock

    @property
    def is_closed(self) -> bool:
        """Return whether every given socket is closed."""
        return all(sock.fileno() < 0 for sock in self.made)


def binding(folder: Path, refuse: Refuse, check: Callable[[Node, Kernel], None], **env: str) -> None:
    kernel = Kernel(refuse)

    async def main() -> None:
        with a_node(folder, env) as (node, _, _), mock.patch.object(sockets, "listen", kernel.listen):
            check(node, kernel)

    asyncio.run(main())


def test_sidecar_source_addresses_match_its_rules() -> None:
    assert {version: str(address) for version, address in PASSTHROUGH.items()} == {
        4: PASSTHROUGH4,
        6: PASSTHROUGH6,
    }


def test_every_port_is_bound_on_every_address(tmp_path: Path) -> None:
    def check(node: Node, kernel: Kernel) -> None:
        found = bind(node, None)
        assert [(each.address, each.transparent) for each in found] == [
            (SocketAddress("::", 15008), True),
            (SocketAddress("::", 15006), True),
            (SocketAddress("::", 15001), True),
            (SocketAddress("127.0.0.1", 15080), True),
        ]
        for each in found:
            each.sock.close()

    binding(tmp_path, lambda *_: None, check, UNSTABLE_ENABLE_SOCKS5="true")


def test_the_proxys_own_pod_takes_tunnels_only(tmp_path: Path) -> None:
    def check(node: Node, kernel: Kernel) -> None:
        (found,) = bind(node, None, only_tunnels=True)
        assert (found.address.port, found.transparent) == (15008, False)
        found.sock.close()

    binding(tmp_path, lambda *_: None, check)


def test_source_is_not_preserved_without_the_capability(tmp_path: Path) -> None:
    def check(node: Node, kernel: Kernel) -> None:
        found = bind(node, None)
        assert not any(each.transparent for each in found)
        for each in found:
            each.sock.close()

    binding(
        tmp_path,
        lambda host, port, transparent: NeedCapability("CAP_NET_ADMIN", "bind") if transparent else None,
        check,
    )


def test_missing_required_capability_is_an_error(tmp_path: Path) -> None:
    def check(node: Node, kernel: Kernel) -> None:
        with pytest.raises(TproxyError, match=r"failed to bind to port 15008 \(inbound\)"):
            bind(node, None)

    binding(
        tmp_path,
        lambda host, port, transparent: NeedCapability("CAP_NET_ADMIN", "bind") if transparent else None,
        check,
        ENABLE_ORIG_SRC="true",
    )


def test_a_pod_without_ipv6(tmp_path: Path) -> None:
    def check(node: Node, kernel: Kernel) -> None:
        found = bind(node, None)
        assert {each.address.host for each in found} == {"0.0.0.0"}
        for each in found:
            each.sock.close()

    def refuse(host: str, port: int, transparent: bool) -> Exception | None:
        return KernelRefused("bind", errno.EAFNOSUPPORT) if host == "::" else None

    binding(tmp_path, refuse, check)


@pytest.mark.parametrize("error", [PortTaken("0.0.0.0", 15006), KernelRefused("bind", errno.EACCES)])
def test_failed_bind_closes_earlier_sockets(tmp_path: Path, error: Exception) -> None:
    def check(node: Node, kernel: Kernel) -> None:
        with pytest.raises(TproxyError, match=r"failed to bind to port 15006 \(inbound plaintext\)"):
            bind(node, None)
        assert len(kernel.made) == 1
        assert kernel.is_closed

    binding(tmp_path, lambda host, port, transparent: error if port == 15006 else None, check)


def test_a_pod_that_cannot_start_stops(tmp_path: Path) -> None:
    kernel = Kernel(lambda host, port, transparent: PortTaken("::", 15001) if port == 15001 else None)

    async def main() -> None:
        with a_node(tmp_path) as (node, _, _), mock.patch.object(sockets, "listen", kernel.listen):
            pod = PodProxy(node, NAME, PodSockets(node, None))
            with pytest.raises(TproxyError):
                await pod.start()
            assert kernel.is_closed
            assert not node.pods

    asyncio.run(main())


def test_a_pod_that_starts_and_stops(tmp_path: Path) -> None:
    kernel = Kernel(lambda *_: None)

    async def main() -> None:
        with a_node(tmp_path) as (node, _, _), mock.patch.object(sockets, "listen", kernel.listen):
            wired = PodSockets(node, None)
            pod = PodProxy(node, NAME, wired)
            await pod.start()
            assert len(node.pods) == 1
            assert wired.preserves_source == {15008: True, 15006: True}
            await pod.stop()
            await pod.stop()
            assert kernel.is_closed
            assert not node.pods

    asyncio.run(main())


class Watched(LogPressure):
    """Counts what was accepted while the log was behind, and afterwards."""

    def __init__(self) -> None:
        self.behind = True
        self.count = 0
        super().__init__(lambda: self.behind, 60.0, lambda: 0.0)

    def accepted(self, number: int) -> None:
        self.count += 1


def test_every_port_of_a_pod_waits_for_a_log_that_is_behind(tmp_path: Path) -> None:
    kernel = Kernel(lambda *_: None)

    async def main() -> None:
        with a_node(tmp_path) as (node, _, _), mock.patch.object(sockets, "listen", kernel.listen):
            watched = node.log_pressure = Watched()
            pod = PodProxy(node, NAME, PodSockets(node, None))
            await pod.start()
            for sock in kernel.made:
                sock.setblocking(False)  # as the real ones are
            clients = [socket.create_connection(sock.getsockname()) for sock in kernel.made]
            await asyncio.sleep(0.2)
            assert watched.count == 0
            watched.behind = False
            async with asyncio.timeout(20):
                while watched.count < len(clients):
                    await asyncio.sleep(0.01)
            for client in clients:
                client.close()
            await pod.stop()

    asyncio.run(main())


def test_connections_wait_for_the_log_only_if_configured(tmp_path: Path) -> None:
    writer = LogWriter()
    clock = SystemClock()
    for value, limited in ((None, False), ("0", False), ("5s", True)):
        config = config_from(
            {} if value is None else {"ZTUNNEL_LOG_WAIT": value}, cpus=1, read_file=lambda path: None
        )
        assert (log_pressure(config, writer, clock) is not None) == limited
    writer.close()


def test_disabled_proxy_binds_no_port(tmp_path: Path) -> None:
    def check(node: Node, kernel: Kernel) -> None:
        assert ports(node.config) == {}
        assert bind(node, None) == []

    binding(tmp_path, lambda *_: None, check, ENABLE_PROXY="false", ISTIO_META_DNS_CAPTURE="true")


@pytest.mark.parametrize(("idle", "at_once"), [("180s", False), ("5s", True)])
def test_keepalive_begins_before_its_first_probe_is_due(tmp_path: Path, idle: str, at_once: bool) -> None:
    """Not before, because most connections end until then."""

    async def main() -> None:
        with (
            a_node(tmp_path, {"KEEPALIVE_TIME": idle}) as (node, _, _),
            socket.create_server(("127.0.0.1", 0)) as server,
        ):
            wired = PodSockets(node, None, only_tunnels=True)
            end = await wired.dial(SocketAddress("127.0.0.1", server.getsockname()[1]))
            try:
                assert end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == at_once
                await asyncio.sleep(2 * LASTING_S)
                assert end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert f"{end.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)}s" == idle
            finally:
                end.close()

    virtual_time.run(main)
