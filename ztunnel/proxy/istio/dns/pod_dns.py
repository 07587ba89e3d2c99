"""The DNS proxy of one pod: binds sockets on the pod's loopback, and counts and logs queries.

The sockets are bound to loopback addresses, because the kernel redirects queries to these. A socket bound to all
addresses would answer from the pod's address, and conntrack would not match this answer to the query.
"""

from __future__ import annotations

import logging
import socket
from functools import partial
from pathlib import Path
from typing import TypedDict

from tproxy.aio import sockets
from tproxy.aio.netns import Netns
from tproxy.errors import KernelRefused
from xds.model.workload import Workload
from ztunnel.proxy.istio.accounting.outcome import EarlyDeny
from ztunnel.proxy.istio.dns.answer import DnsSettings
from ztunnel.proxy.istio.dns.forwarder import Forwarder, search_domains
from ztunnel.proxy.istio.dns.hosts import Hosts
from ztunnel.proxy.istio.dns.server import DnsServer, QueryReport
from ztunnel.proxy.istio.path.local_workload import LocalWorkload
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.settings.config import PodName, ProxyMode
from ztunnel.runtime.durations import DNS_BUCKETS, Durations

log = logging.getLogger(__name__)

_DEBUG = 10
_RESOLV_CONF = Path("/etc/resolv.conf")
_BACKLOG = 128
_LOOPBACK = ("127.0.0.1", "::1")


class _Options(TypedDict):
    mark: int | None
    reuse_port: bool
    netns: Netns | None


class PodDns:
    """Answers one pod's DNS queries from construction until :meth:`close`.

    Args:
        node: the state shared by the pods.
        name: the pod.
        netns: the namespace for sockets. None: this process's own namespace.

    Raises:
        TproxyError: a port is taken.
    """

    def __init__(self, node: Node, name: PodName, netns: Netns | None) -> None:
        self._node = node
        self._netns = netns
        self._local = LocalWorkload(node, name)
        config = node.config
        dedicated = config.proxy_mode is ProxyMode.DEDICATED
        self._server = DnsServer(
            node.mesh,
            self._client,
            DnsSettings(
                cluster_domain=config.cluster_domain,
                # A node proxy's own search list differs from the pod's.
                search=search_domains(_RESOLV_CONF.read_text()) if dedicated else None,
                ipv6=config.ipv6,
                preferred_namespace=config.preferred_service_namespace,
            ),
            Hosts(),
            Forwarder(self._upstream_socket, _RESOLV_CONF, ipv6=config.ipv6, places=node.dns_places),
            self._report,
            dropped=node.metrics.dns_dropped,
            rng=node.rng,
        )
        if node.names_answered is not None:
            # This hook runs before the pod receives the answer, so that the name is known when the pod connects.
            self._server.answered = partial(node.names_answered, (name.namespace, name.name))
        udp: list[socket.socket] = []
        tcp: list[socket.socket] = []
        try:
            hosts = (config.dns_host,) if config.dns_host else _LOOPBACK if config.ipv6 else _LOOPBACK[:1]
            for host in hosts:
                try:
                    options = self._options()
                    udp.append(sockets.datagrams(host, config.dns_port, **options))
                    tcp.append(sockets.listen(host, config.dns_port, backlog=_BACKLOG, **options))
                except KernelRefused:
                    if host == hosts[0]:
                        raise
                    # A pod's loopback interface often lacks IPv6, which is not an error. Missing IPv4 is one.
        except BaseException:
            for sock in (*udp, *tcp):
                sock.close()
            self._local.close()
            raise
        self._server.start(udp, tcp)

    def _options(self) -> _Options:
        config = self._node.config
        shared = self._netns is not None
        return {
            "mark": config.packet_mark if shared else None,
            "reuse_port": shared and config.inpod_port_reuse,
            "netns": self._netns,
        }

    def _upstream_socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        """Return a socket for querying a name server from the pod, marked so that it is not captured again."""
        return sockets.unbound(family, kind, mark=self._node.config.packet_mark, netns=self._netns)

    async def resolve(self, name: str, *, ipv6: bool) -> str | None:
        """Return the first address of a name in the answer that the pod would get, or ``None``."""
        return await self._server.resolve(name, ipv6=ipv6)

    def leave(self) -> None:
        """Let a successor on the same ports, if there is one, receive new queries. Idempotent."""
        self._server.leave()

    async def finish(self, limit_s: float) -> None:
        """Answer the queries that have already arrived, for at most ``limit_s`` seconds."""
        await self._server.finish(limit_s)

    async def close(self) -> None:
        """Stop serving. Idempotent."""
        self._local.close()
        await self._server.close()

    # Queries

    async def _client(self) -> Workload | None:
        try:
            return (await self._local.get()).workload
        except EarlyDeny:
            return None

    def _report(self, report: QueryReport) -> None:
        node, client = self._node, report.client
        labels = (
            report.query_type.lower(),
            report.protocol,
            (client.canonical_name if client is not None else "") or "unknown",
            (client.canonical_revision if client is not None else "") or "unknown",
        )
        metrics = node.metrics
        metrics.dns_requests.count(labels)
        if report.forwarded:
            metrics.dns_forwarded.count(labels)
            durations = metrics.dns_durations.get(labels)
            if durations is None:
                durations = metrics.dns_durations[labels] = Durations(DNS_BUCKETS)
            durations.observe(report.duration_s)
        if report.failed:
            metrics.dns_failures[labels] = metrics.dns_failures.get(labels, 0) + 1
        if node.logs.dns_level <= _DEBUG:
            fields: list[tuple[str, str | int]] = []
            if client is not None:
                fields += (("src.workload", client.name), ("src.namespace", client.namespace))
            fields += (("query", report.query_type), ("domain", report.name), ("result", report.result))
            fields.append(("endpoints", report.endpoints))
            node.logs.write(node.clock.wall(), "debug", "dns", "", fields)
