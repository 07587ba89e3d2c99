"""The name server of one pod: answers queries by UDP and TCP on sockets in the pod's namespace.

Every query ends in one :class:`QueryReport`, which the caller counts and logs. The numbers of open queries and TCP
connections are limited, and so is the rate of queries. If a pod exceeds its rate, the server briefly stops
reading. Meanwhile the kernel drops datagrams that do not fit into the socket's buffer, and clients retry. A
datagram from one of the server's own addresses is dropped, because it must be forged, and answering it would cause
a loop.
"""

import asyncio
import contextlib
import errno
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

from hbone.flow import Budget
from tproxy.aio.sockets import leave_to_newer
from xds.model.mesh import Mesh
from xds.model.workload import Workload
from ztunnel.proxy.istio.dns.answer import DnsSettings, answer
from ztunnel.proxy.istio.dns.forwarder import Forwarder, ForwardFailed
from ztunnel.proxy.istio.dns.hosts import Hosts
from ztunnel.proxy.istio.dns.message import (
    MOST_BYTES,
    Malformed,
    Query,
    address_query,
    addresses_in,
    answer_count,
    bad_version,
    first_address,
    fitting,
    local_answer,
    rcode,
    read_query,
    server_failure,
)
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

QUERIES: Final = 1000
CONNECTIONS: Final = 100
_IDLE_S: Final = 5.0
_MOST_ADDRESSES: Final = 1000  # in one answer; about half of the largest message
#: The number of datagrams read per event loop iteration. Each datagram takes 0.1 ms, which delays all pods'
#: connections.
_DATAGRAMS: Final = 16
#: One pod's largest burst of queries, and its largest rate per second, which takes a fifth of a core. These are
#: guesses: three times the queries of a busy pod that tries its whole search list for each name.
QUERY_BURST: Final = 4000
QUERY_RATE: Final = 2000.0
_PAUSE_S: Final = 0.02
_DATAGRAM_BYTES: Final = 65_000  # the largest payload, below 64 KiB minus headers
_FD_PAUSE_S: Final = 1.0
_NO_ERROR: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryReport:
    """The outcome of a query.

    Attributes:
        client: the workload that sent the query, if known.
        query_type: ``A``, ``AAAA``, ``TXT``, ...
        protocol: ``udp`` or ``tcp``.
        name: the name with its final dot.
        result: the result for the log: ``success``, ``no records``, ``hosts file``, ``forwarded``,
            ``forwarding failed (...)``.
        endpoints: number of addresses in our own answer, or of records in a forwarded answer.
        forwarded: whether the answer comes from name servers, the cache of their answers, or the hosts file.
        failed: whether a forwarded query got no response, or a response with an error.
        duration_s: time until the answer was made.
    """

    client: Workload | None
    query_type: str
    protocol: str
    name: str
    result: str
    endpoints: int
    forwarded: bool
    failed: bool
    duration_s: float


class Drop(StrEnum):
    """Why a datagram was not answered. Used as a metric label."""

    RATE = "rate"
    """The pod has exceeded its query rate. Counted once per pause in reading. During a pause, the kernel keeps the
    datagrams that fit into the socket's buffer.
    """
    OWN_ADDRESS = "own-address"
    UNDER_WAY = "under-way"


class DnsServer:
    """Serves one pod between :meth:`start` and :meth:`close`.

    Args:
        mesh: the mesh with the services to answer for.
        client: returns the pod's workload, or None if it is not known in time.
        settings: the DNS proxy's settings.
        hosts: the names of a hosts file, which are not forwarded.
        forwarder: answers all other queries.
        on_query: called once per query, when it is answered.
        idle_s: time limit for each query and each answer on a TCP connection.
        connections: the largest number of open TCP connections.
        queries: the largest number of concurrent UDP queries.
        query_burst, query_rate: the largest burst of queries, and queries per second, of both protocols together.
        dropped: counts unanswered datagrams by :class:`Drop`. Other servers can share it.
        rng: shuffles addresses, and chooses among more addresses than fit into an answer.
    """

    def __init__(
        self,
        mesh: Mesh,
        client: Callable[[], Awaitable[Workload | None]],
        settings: DnsSettings,
        hosts: Hosts,
        forwarder: Forwarder,
        on_query: Callable[[QueryReport], None],
        *,
        idle_s: float = _IDLE_S,
        connections: int = CONNECTIONS,
        queries: int = QUERIES,
        query_burst: int = QUERY_BURST,
        query_rate: float = QUERY_RATE,
        dropped: MutableMapping[str, int] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._mesh = mesh
        self._client = client
        self._settings = settings
        self._hosts = hosts
        self._forwarder = forwarder
        self._on_query = on_query
        self._idle_s = idle_s
        self._most_connections = connections
        self._most_queries = queries
        self._rng = rng or random.Random()
        self._tasks = Tasks("dns")
        self._sockets: list[socket.socket] = []
        self._connections = 0
        self._queries = 0
        self._answering = 0
        self._quiet = asyncio.Event()
        self._rate = Budget(burst=query_burst, rate=query_rate)
        self._own: set[Any] = set()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._dropped: MutableMapping[str, int] = dropped if dropped is not None else {}

        self.answered: Callable[[str, Sequence[str]], None] | None = None

    def start(self, udp: Sequence[socket.socket], tcp: Sequence[socket.socket]) -> None:
        """Serve bound datagram sockets and listening stream sockets; :meth:`close` closes them."""
        loop = asyncio.get_running_loop()
        for sock in (*udp, *tcp):
            sock.setblocking(False)
            self._sockets.append(sock)
        for sock in udp:
            self._own.add(sock.getsockname()[:2])
            loop.add_reader(sock, self._datagrams, sock)
        for sock in tcp:
            self._tasks.keep(partial(self._accept, sock), "accept")

    def leave(self) -> None:
        """Let a successor on the same ports, if there is one, receive new queries. Queries that still arrive here
        are answered. Idempotent.
        """
        for sock in self._sockets:
            leave_to_newer(sock)

    async def finish(self, limit_s: float) -> None:
        """Answer the queries that have already arrived, for at most ``limit_s`` seconds. Call :meth:`leave`
        before, and :meth:`close` afterwards.

        Closing at once would lose queries, and clients repeat a query over UDP only after five seconds.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._answering or any(map(_has_datagram, self._sockets)):
                    self._quiet.clear()
                    if self._answering:
                        await self._quiet.wait()
                    else:
                        await asyncio.sleep(_PAUSE_S)  # the loop reads the datagrams

    async def close(self) -> None:
        """Stop at once and close the sockets; idempotent."""
        loop = asyncio.get_running_loop()
        for timer in self._paused.values():
            timer.cancel()
        self._paused.clear()
        for sock in self._sockets:
            if sock.type == socket.SOCK_DGRAM:
                loop.remove_reader(sock)
        await self._tasks.close()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    async def resolve(self, name: str, *, ipv6: bool) -> str | None:
        """Return the first address in the answer that the pod would get for a name, or None. No
        query is reported.
        """
        try:
            query = read_query(address_query(name, ipv6=ipv6, number=0))
        except (ValueError, Malformed):
            return None
        response, _ = await self._answer(query, MOST_BYTES)
        self._note(query, response)
        return first_address(response)

    # UDP

    def _datagrams(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_DATAGRAMS):
            if not self._rate.affords(loop.time()):
                self._drop(Drop.RATE)
                loop.remove_reader(sock)
                self._paused[sock] = loop.call_later(_PAUSE_S, self._resume, sock)
                return
            try:
                wire, address = sock.recvfrom(MOST_BYTES)
            except BlockingIOError:
                self._rate.refund(1.0)
                return
            except OSError as error:  # an ICMP error for an earlier answer; the socket stays usable
                log.debug("dns datagram error=%s", error)
                continue
            if address[:2] in self._own:
                self._drop(Drop.OWN_ADDRESS)
                continue
            if self._queries >= self._most_queries:
                self._drop(Drop.UNDER_WAY)
                continue
            self._queries += 1
            self._tasks.start(self._datagram(sock, wire, address), "query")

    def _drop(self, reason: Drop) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def _resume(self, sock: socket.socket) -> None:
        del self._paused[sock]
        asyncio.get_running_loop().add_reader(sock, self._datagrams, sock)

    async def _datagram(self, sock: socket.socket, wire: bytes, address: Any) -> None:
        try:
            with self._query():
                response = await self._respond(wire, "udp")
                if response is not None:
                    sock.sendto(response, address)
        except OSError as error:
            log.debug("dns answer not sent error=%s", error)
        finally:
            self._queries -= 1

    # TCP

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # With EMFILE or ENFILE no connection can be accepted until others end. The listener stays
                # readable, so without a pause this would loop at full speed.
                if error.errno != errno.ECONNABORTED:
                    log.warning("dns accept paused error=%s", plain_reason(error))
                    await asyncio.sleep(_FD_PAUSE_S)
                continue
            if self._connections >= self._most_connections:
                log.debug("dns connection refused: %d are open", self._connections)
                sock.close()
                continue
            self._connections += 1
            self._tasks.start(self._serve_connection(sock), "connection")

    async def _serve_connection(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            with sock:
                sock.setblocking(False)
                while True:
                    async with asyncio.timeout(self._idle_s):
                        length = int.from_bytes(await self._read(sock, 2), "big")
                        wire = await self._read(sock, length)
                    with self._query():
                        if not self._rate.spend(loop.time()):
                            await asyncio.sleep(self._rate.overdrawn_s)
                        response = await self._respond(wire, "tcp")
                        if response is None:
                            return
                        async with asyncio.timeout(self._idle_s):
                            await loop.sock_sendall(sock, len(response).to_bytes(2, "big") + response)
        except (TimeoutError, OSError, EOFError) as error:
            log.debug("dns connection ended reason=%r", error)
        finally:
            self._connections -= 1

    @staticmethod
    async def _read(sock: socket.socket, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < count:
            more = await loop.sock_recv(sock, count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    # UDP and TCP

    @contextlib.contextmanager
    def _query(self) -> Iterator[None]:
        """A context manager around one query, from its arrival until its answer has been sent."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._quiet.set()

    async def _respond(self, wire: bytes, protocol: str) -> bytes | None:
        started_s = asyncio.get_running_loop().time()
        try:
            query = read_query(wire)
        except Malformed as error:
            log.debug("dns query malformed reason=%s", error)
            return error.response
        limit = min(query.udp_bytes, _DATAGRAM_BYTES) if protocol == "udp" else MOST_BYTES
        response, outcome = await self._answer(query, limit)
        self._note(query, response)
        self._on_query(
            QueryReport(
                client=outcome.client,
                query_type=query.type_name,
                protocol=protocol,
                name=query.name,
                result=outcome.result,
                endpoints=outcome.endpoints,
                forwarded=outcome.forwarded,
                failed=outcome.failed,
                duration_s=asyncio.get_running_loop().time() - started_s,
            )
        )
        return response

    def _note(self, query: Query, response: bytes) -> None:
        if self.answered is not None and query.wants_address:
            addresses = addresses_in(response)
            if addresses:
                self.answered(query.name, addresses)

    async def _answer(self, query: Query, limit: int) -> tuple[bytes, "_Outcome"]:
        client = await self._client()
        if client is None:
            return server_failure(query), _Outcome(None, "unknown client")
        if query.edns_version > 0:
            return bad_version(query), _Outcome(client, f"EDNS version {query.edns_version} is not supported")
        if query.wants_address:
            ipv6 = query.type_name == "AAAA"
            name = query.name.removesuffix(".")
            local = answer(name, ipv6=ipv6, client=client, mesh=self._mesh, settings=self._settings)
            if local is not None:
                addresses = local.addresses
                if len(addresses) > 1:
                    addresses = tuple(self._rng.sample(addresses, min(len(addresses), _MOST_ADDRESSES)))
                wire = local_answer(query, addresses, local.canonical, self._settings.ttl_s, limit)
                result = "success" if addresses else "no records"
                return wire, _Outcome(client, result, len(addresses))
            known = self._hosts.addresses(name, ipv6=ipv6)
            if known:
                wire = local_answer(query, known, None, self._settings.ttl_s, limit, authoritative=False)
                return wire, _Outcome(client, "hosts file", len(known), forwarded=True)
        try:
            response = await self._forwarder.forward(query)
        except ForwardFailed as error:
            result = f"forwarding failed ({error})"
            return server_failure(query), _Outcome(client, result, forwarded=True, failed=True)
        # Any code other than NOERROR counts as failed, even NXDOMAIN, as in the Rust ztunnel.
        failed = rcode(response) != _NO_ERROR
        outcome = _Outcome(client, "forwarded", answer_count(response), forwarded=True, failed=failed)
        return fitting(query, response, limit), outcome


def _has_datagram(sock: socket.socket) -> bool:
    if sock.type != socket.SOCK_DGRAM:
        return False
    try:
        sock.recv(1, socket.MSG_PEEK)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Outcome:
    client: Workload | None
    result: str
    endpoints: int = 0
    forwarded: bool = False
    failed: bool = False
