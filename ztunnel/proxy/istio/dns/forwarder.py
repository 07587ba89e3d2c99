"""Forwards queries that the mesh does not answer to the name servers of ``resolv.conf``, and caches their answers.

Two servers are queried at a time, and the first NOERROR or NXDOMAIN response is used. A response with another
code, such as REFUSED, is used only if no other server answers. Each attempt has its own socket, with a random port
and a random id (RFC 5452). A response is accepted only if it comes from the queried server, with the query's id
and question. After a truncated response, the query is repeated over TCP. If TCP fails, for example because a
firewall permits port 53 for UDP only, and no server sends a whole response, the truncated one is passed on, as by
the Rust ztunnel's resolver (hickory).

The caller creates the sockets, in the pod's namespace.
"""

import asyncio
import ipaddress
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tproxy.errors import TproxyError
from ztunnel.proxy.istio.dns.message import (
    MOST_BYTES,
    Kept,
    Query,
    is_answer_to,
    is_cut,
    keep,
    passed_on,
    rcode,
    with_id,
)
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

#: A function that creates an unconnected socket in the pod's namespace, marked as the proxy's own traffic. It
#: raises OSError or TproxyError if the kernel refuses one.
OpenSocket = Callable[[socket.AddressFamily, socket.SocketKind], socket.socket]

_PORT: Final = 53
TIMEOUT_S: Final = 5.0
ATTEMPTS: Final = 3
_MOST_SERVERS: Final = 8
_CACHED: Final = 4096
_CACHED_BYTES: Final = 1 << 20
_ENTRY_BYTES: Final = 600  # approximate memory of an entry besides its message
_AT_A_TIME: Final = 2
#: The part of an attempt's time limit that TCP gets after a truncated response. Most clients wait 5 s, so after
#: the whole limit the truncated response would be too late.
_TCP_PART: Final = 0.5
_SAYS_SOMETHING: Final = frozenset((0, 3))  # NOERROR, NXDOMAIN
_REFUSAL, _CUT, _WHOLE = range(3)


#: The largest number of concurrent forwarded queries of one pod. Each query uses two sockets.
POD_QUERIES: Final = 128


class ForwardFailed(Exception):
    """No server answered. The text lists why each attempt failed."""


@dataclass(frozen=True, slots=True)
class NameServer:
    """The address of a name server."""

    host: str
    port: int = _PORT

    @property
    def family(self) -> socket.AddressFamily:
        """The address family of the server."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def name_servers(resolv_conf: str, *, ipv6: bool) -> tuple[NameServer, ...]:
    """Return the name servers in a ``resolv.conf``, in order. Addresses with a zone (``fe80::1%eth0``) are
    skipped.
    """
    found = []
    for line in resolv_conf.splitlines():
        words = line.split("#")[0].split(";")[0].split()
        if len(words) < 2 or words[0] != "nameserver":
            continue
        try:
            address = ipaddress.ip_address(words[1])
        except ValueError:
            continue
        if address.version == 4 or (ipv6 and "%" not in words[1]):
            found.append(NameServer(str(address)))
    return tuple(found[:_MOST_SERVERS])


def search_domains(resolv_conf: str) -> tuple[str, ...]:
    """Return the search list of a ``resolv.conf``: the last ``search`` or ``domain`` line, like in glibc."""
    found: tuple[str, ...] = ()
    for line in resolv_conf.splitlines():
        words = line.split()
        if words and words[0] in ("search", "domain"):
            found = tuple(word.strip(".").lower() for word in words[1:] if word.strip("."))
    return found


class Cache:
    """Name servers' answers, kept until they expire. The least recently used answer is evicted first.

    Args:
        capacity: the largest number of entries.
        budget_bytes: the most memory that all entries may use. Every pod has its own cache.
    """

    def __init__(self, capacity: int = _CACHED, budget_bytes: int = _CACHED_BYTES) -> None:
        self._capacity = capacity
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[object, ...], tuple[Kept, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, query: Query, now_s: float) -> bytes | None:
        """Return a cached answer, with its times to live lowered by its age, or None."""
        key = query.cache_key
        found = self._kept.get(key) if key is not None else None
        if key is None or found is None:
            return None
        kept, since_s = found
        if now_s - since_s >= kept.lifetime_s:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return kept.aged(query, now_s - since_s)

    def put(self, query: Query, response: bytes, now_s: float) -> None:
        """Cache a response, if caching is permitted. It replaces an older response to the same question."""
        kept = keep(query, response)
        if kept is None or query.cache_key is None:
            return
        self._drop(query.cache_key)
        self._kept[query.cache_key] = kept, now_s
        self._bytes += len(kept.wire) + _ENTRY_BYTES
        while len(self._kept) > self._capacity or self._bytes > self._budget_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[object, ...]) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._bytes -= len(found[0].wire) + _ENTRY_BYTES


class Forwarder:
    """Forwards the queries of one pod.

    Args:
        open_socket: see :data:`OpenSocket`.
        resolv_conf: the file that names the servers; read again whenever it changes.
        ipv6: whether servers with IPv6 addresses are used.
        timeout_s: time limit of one attempt.
        attempts: the number of attempts, each with two servers.
        port: the servers' port.
        places: limits the concurrent queries of all pods of a process. Queries above this limit wait. A pod's own
            limit is :data:`POD_QUERIES`, so that one pod cannot use up the limit of all.
    """

    def __init__(
        self,
        open_socket: OpenSocket,
        resolv_conf: Path = Path("/etc/resolv.conf"),
        *,
        ipv6: bool = True,
        timeout_s: float = TIMEOUT_S,
        attempts: int = ATTEMPTS,
        port: int = _PORT,
        places: asyncio.Semaphore | None = None,
    ) -> None:
        self._own_places = asyncio.Semaphore(POD_QUERIES)
        self._places = places or asyncio.Semaphore(POD_QUERIES)
        self._open_socket = open_socket
        self._path = resolv_conf
        self._ipv6 = ipv6
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._port = port
        self._state: FileState | None = None
        self._servers: tuple[NameServer, ...] = ()
        self._cache = Cache()

    async def forward(self, query: Query) -> bytes:
        """Return a name server's answer. The caller truncates it to the size that the client accepts.

        Raises:
            ForwardFailed: no server answered.
        """
        loop = asyncio.get_running_loop()
        remembered = self._cache.get(query, loop.time())
        if remembered is not None:
            return remembered
        async with self._own_places, self._places:
            return await self._forward(query)

    async def _forward(self, query: Query) -> bytes:
        loop = asyncio.get_running_loop()
        servers = self._current_servers()
        failures: dict[str, None] = {}
        refusal: bytes | None = None
        asked: set[NameServer] = set()
        for attempt in range(self._attempts):
            first = attempt * _AT_A_TIME % len(servers)
            chosen = (servers[first:] + servers[:first])[:_AT_A_TIME]
            response = await self._ask_all(query, chosen, failures)
            asked.update(chosen)
            if response is not None and _rank(response) == _WHOLE:
                self._cache.put(query, response, loop.time())
                return passed_on(query, response)
            refusal = _better(refusal, response)
            if refusal is not None and len(asked) == len(servers):
                return passed_on(query, refusal)
        if refusal is not None:
            return passed_on(query, refusal)
        raise ForwardFailed("; ".join(failures))

    def _current_servers(self) -> tuple[NameServer, ...]:
        state = file_state(self._path)
        if state != self._state or not self._servers:
            try:
                read = name_servers(self._path.read_text(errors="replace"), ipv6=self._ipv6)
            except OSError as error:
                if not self._servers:
                    raise ForwardFailed(f"cannot read {self._path}: {error.strerror}") from error
                log.warning(
                    "name servers unreadable, the old ones stay in use path=%s error=%s",
                    self._path,
                    plain_reason(error),
                )
            else:
                if not read and not self._servers:
                    raise ForwardFailed(f"no name server in {self._path}")
                self._servers = tuple(NameServer(server.host, self._port) for server in read) or self._servers
            self._state = state
        return self._servers

    async def _ask_all(
        self, query: Query, servers: tuple[NameServer, ...], failures: dict[str, None]
    ) -> bytes | None:
        """Query servers concurrently. Return the first whole NOERROR or NXDOMAIN response, else a truncated one,
        else any other response, else None.
        """
        refusal: bytes | None = None
        running: set[asyncio.Task[bytes | ForwardFailed]] = set()
        # A TaskGroup cannot be used: the first answer cancels the other attempts, and a group would raise an
        # error.
        loop = asyncio.get_running_loop()
        try:
            for server in servers:
                running.add(loop.create_task(self._ask(query, server), name=f"dns forward {server}"))
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    response = task.result()
                    if isinstance(response, ForwardFailed):
                        failures[str(response)] = None
                    elif _rank(response) == _WHOLE:
                        return response
                    else:
                        refusal = _better(refusal, response)
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
        return refusal

    async def _ask(self, query: Query, server: NameServer) -> bytes | ForwardFailed:
        cut: bytes | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._by_udp(query, server)
                if not is_cut(response):
                    return response
                cut = response
                async with asyncio.timeout(self._timeout_s * _TCP_PART):
                    return await self._by_tcp(query, server)
        except TimeoutError:
            failure = ForwardFailed(f"{server}: no answer within {self._timeout_s:g} s")
        except OSError as error:
            failure = ForwardFailed(f"{server}: {error.strerror or error}")
        except TproxyError as error:  # such as EMFILE, or an IPv6 server and a kernel without IPv6
            failure = ForwardFailed(f"{server}: {error}")
        except ForwardFailed as error:
            failure = error
        return failure if cut is None else cut

    async def _by_udp(self, query: Query, server: NameServer) -> bytes:
        if len(query.wire) > MOST_BYTES - 100:  # too long for a datagram
            return await self._by_tcp(query, server)
        loop = asyncio.get_running_loop()
        number = secrets.randbelow(0x10000)
        with self._open_socket(server.family, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            # The socket is connected, so the kernel chooses a random port and drops datagrams from other
            # addresses.
            sock.connect((server.host, server.port))
            sock.send(with_id(query.wire, number))
            while True:
                response = await loop.sock_recv(sock, MOST_BYTES)
                if is_answer_to(query, number, response):
                    return response

    async def _by_tcp(self, query: Query, server: NameServer) -> bytes:
        loop = asyncio.get_running_loop()
        number = secrets.randbelow(0x10000)
        with self._open_socket(server.family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, (server.host, server.port))
            await loop.sock_sendall(sock, len(query.wire).to_bytes(2, "big") + with_id(query.wire, number))
            length = int.from_bytes(await _exactly(sock, 2), "big")
            response = await _exactly(sock, length)
        if not is_answer_to(query, number, response):
            raise ForwardFailed(f"{server}: an answer to another query")
        return response


def _rank(response: bytes) -> int:
    """Return how useful a response is; a greater rank is better."""
    if rcode(response) not in _SAYS_SOMETHING:
        return _REFUSAL
    return _CUT if is_cut(response) else _WHOLE


def _better(one: bytes | None, other: bytes | None) -> bytes | None:
    """Return the more useful response. Of equally useful ones, the later one is returned."""
    if one is None or other is None:
        return one if other is None else other
    return other if _rank(other) >= _rank(one) else one


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(sock, count - len(data))
        if not more:
            raise ConnectionResetError(None, "closed in the middle of an answer")
        data += more
    return data
