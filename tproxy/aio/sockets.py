"""TCP and UDP sockets for a transparent proxy: foreign addresses, marks, other namespaces.

Socket options that :mod:`socket` does not name have their numbers here (``linux/in.h``, ``linux/in6.h``,
``linux/netfilter_ipv4.h``, ``linux/netfilter_ipv6/ip6_tables.h``).
"""

import asyncio
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from random import random
from typing import NamedTuple, TypeAlias

from tproxy.aio.held_sockets import HeldSocket, held
from tproxy.aio.netns import Netns, entered
from tproxy.errors import ConnectFailed, ConnectTimedOut, KernelRefused, NeedCapability, PortTaken, TproxyError

IpAddress: TypeAlias = IPv4Address | IPv6Address
SocketOption: TypeAlias = tuple[int, int, int | bytes]

IP_FREEBIND = 15
IP_TRANSPARENT = 19
IPV6_TRANSPARENT = 75
IP_BIND_ADDRESS_NO_PORT = 24
SO_MARK = 36
SO_ORIGINAL_DST = 80
_SO_ATTACH_REUSEPORT_CBPF = 51
_BPF_RETURN = 0x06  # BPF_RET | BPF_K: linux/bpf_common.h
_SOL_IPV6 = socket.IPPROTO_IPV6
_TYPE = int(socket.SOCK_STREAM)
_STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
#: Source ports for connections in a client's name. The client itself can open a connection to the same destination
#: from the same port. Connection tracking cannot distinguish the two, and delivers the packets of the second
#: connection to the first. Linux gives outgoing connections even ports of 32768 to 60999, and odd ones only when
#: those are used up (``__inet_hash_connect`` in net/ipv4/inet_hashtables.c), so odd ones rarely collide.
_FOREIGN_PORTS = range(32769, 61000, 2)
_FOREIGN_PORT_COUNT = len(_FOREIGN_PORTS)
#: The number of further ports to try if one is taken.
FOREIGN_PORTS_TRIED = 8
#: The port and the address in ``sockaddr_in`` and ``sockaddr_in6``.
_NAME4 = struct.Struct("!2xH4s8x")
_NAME6 = struct.Struct("!2xH4x16s4x")


class SocketAddress(NamedTuple):
    """An address and a port. An IPv4-mapped address is stored as IPv4."""

    ip: IpAddress
    port: int


class OriginalDestination(NamedTuple):
    """The destination that a client addressed.

    ``restored`` is false if that is the socket's own name and the socket is not transparent: the client addressed
    the proxy itself.
    """

    ip: IpAddress
    port: int
    restored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Settings of TCP keepalive; the defaults are Rust ztunnel's: 180 s idle, then 9 probes 180 s apart."""

    idle_s: int = 180
    interval_s: int = 180
    probes: int = 9


@lru_cache(maxsize=16384)  # called several times per connection, for few addresses
def canonical(address: IpAddress | str) -> IpAddress:
    """Return the address without IPv4 mapping (``::ffff:10.0.0.1``) and scope identifier (``%eth0``).

    A dual-stack listener reports its IPv4 peers as mapped, and link-local ones with their scope.

    Raises:
        ValueError: not an IP address.
    """
    parsed = ip_address(address.partition("%")[0]) if isinstance(address, str) else address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped
    return parsed


def listen(
    address: IpAddress | str,
    port: int,
    *,
    transparent: bool = False,
    mark: int | None = None,
    reuse_port: bool = False,
    freebind: bool = False,
    socket_options: Iterable[SocketOption] = (),
    netns: Netns | None = None,
    backlog: int = 1024,
) -> socket.socket:
    """Return a listening, non-blocking TCP socket; the caller closes it.

    On ``::`` it accepts IPv4 too, with mapped addresses (see :func:`canonical`). If an earlier process has left a
    socket for this address, it is returned with its waiting connections (:mod:`tproxy.aio.held_sockets`).

    Args:
        address: the address to bind.
        port: 0 lets the kernel choose.
        transparent: accept connections to any address that the kernel delivers here (TPROXY). Set
            before bind, as TPROXY demands.
        mark: SO_MARK; accepted sockets and SYN-ACKs inherit it.
        reuse_port: SO_REUSEPORT, so that the next process can bind the port before this one leaves.
        freebind: bind an address that the host does not have yet (IP_FREEBIND).
        socket_options: further (level, name, value), set before bind.
        netns: make the socket in this namespace instead of the thread's own.
        backlog: connections waiting to be accepted; 0 binds only, and the caller listens when it is ready.

    Raises:
        PortTaken: another socket is bound to the port.
        NeedCapability: ``transparent`` or ``mark`` without CAP_NET_ADMIN.
        KernelRefused: any other refusal, such as EADDRNOTAVAIL for a foreign address.
    """
    where = ip_address(address) if isinstance(address, str) else address
    family = socket.AF_INET if where.version == 4 else socket.AF_INET6
    sock, is_bound = held(_make(family, netns), str(where), port)
    try:
        if not is_bound:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(_SOL_IPV6, socket.IPV6_V6ONLY, int(not where.is_unspecified))
        if freebind:
            sock.setsockopt(socket.SOL_IP, IP_FREEBIND, 1)
        if transparent:
            _set_transparent(sock, family)
        if mark is not None:
            _set_mark(sock, mark)
        if not is_bound:
            for level, name, value in socket_options:
                sock.setsockopt(level, name, value)
            sock.bind((str(where), port))
        if backlog:
            sock.listen(backlog)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(str(where), port) from error
        raise _translated(error, f"listen on {where} port {port}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def leave_to_newer(sock: socket.SocketType) -> bool:
    """Direct new connections of a port that two sockets share to the newer socket; idempotent.

    A process that leaves calls this, accepts what its queue still holds, and closes. Then no connection is lost.

    Returns:
        False if the socket is not in a SO_REUSEPORT group, or the kernel has no such filters.

    Raises:
        KernelRefused: any other refusal.
    """
    # Without a filter the kernel hashes connections over all sockets of the group, and closing one resets the
    # connections in its accept queue. SO_ATTACH_REUSEPORT_CBPF sets a classic BPF program for the whole group. It
    # returns the index of the socket to use, in the order of joining (reuseport_select_sock in
    # net/core/sock_reuseport.c). This program always returns 1, the second socket. For an index outside the group
    # the kernel hashes as before, so the filter, which stays with the group, is harmless when one socket is left.
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 1))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOPROTOOPT):
            return False
        raise KernelRefused("leave a port to its newer socket", error.errno or 0) from error
    return True


def accept(listener: socket.socket, family: int) -> tuple[socket.SocketType, tuple[str, int]]:
    """Accept a connection by TCP; the caller owns the socket, and has to make it non-blocking.

    Args:
        listener: the listening socket.
        family: its family, as a number.

    The socket is of C's base class. Python's subclass, which :meth:`socket.socket.accept` returns, wraps every
    method and converts the family, type and protocol to enumerations, which took an eighth of a connection's
    calls.

    Raises:
        OSError: see accept(2).
    """
    number, peer = listener._accept()  # type: ignore[attr-defined]  # what socket.accept itself calls
    return socket.SocketType(family, _TYPE, 0, fileno=number), peer


def unbound(
    family: socket.AddressFamily,
    kind: socket.SocketKind,
    *,
    mark: int | None = None,
    netns: Netns | None = None,
) -> socket.socket:
    """Return a non-blocking socket that is neither bound nor connected, made in ``netns`` if one is given.

    Raises:
        NeedCapability: ``mark`` without CAP_NET_ADMIN.
        KernelRefused: any other refusal, such as EMFILE, or EAFNOSUPPORT of a kernel without IPv6.
    """
    try:
        with entered(netns):
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise KernelRefused("make a socket", error.errno or 0) from error
    try:
        if mark is not None:
            _set_mark(sock, mark)
    except BaseException:
        sock.close()
        raise
    return sock


def datagrams(
    address: IpAddress | str,
    port: int,
    *,
    mark: int | None = None,
    reuse_port: bool = False,
    netns: Netns | None = None,
) -> socket.socket:
    """Return a bound, non-blocking UDP socket; arguments and errors as of :func:`listen`."""
    where = ip_address(address) if isinstance(address, str) else address
    family = socket.AF_INET if where.version == 4 else socket.AF_INET6
    sock, is_bound = held(unbound(family, socket.SOCK_DGRAM, mark=mark, netns=netns), str(where), port)
    try:
        if not is_bound:
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind((str(where), port))
        if isinstance(sock, HeldSocket):
            sock.hold()
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(str(where), port) from error
        raise _translated(error, f"bind UDP {where} port {port}") from error
    return sock


async def connect(
    destination: tuple[IpAddress | str, int],
    *,
    source: IpAddress | str | None = None,
    own_source: bool = False,
    mark: int | None = None,
    timeout_s: float = 10.0,
    netns: Netns | None = None,
    keepalive: Keepalive | None = None,
    nodelay: bool = True,
    socket_options: Iterable[SocketOption] = (),
) -> socket.socket:
    """Connect by TCP and return the non-blocking socket; the caller closes it.

    Args:
        destination: address and port; names are not resolved.
        source: send from this address, which need not be the host's, and from a port that its owner hardly uses
            itself. One port may serve several destinations, so the 14,000 ports are no limit on connections.
        own_source: ``source`` is one of the host's addresses; no capability is needed then.
        mark: SO_MARK.
        timeout_s: for the handshake.
        netns: make the socket in this namespace instead of the thread's own.
        keepalive: TCP keepalive, off if None.
        nodelay: TCP_NODELAY.
        socket_options: further (level, name, value), set before bind.

    Raises:
        ConnectTimedOut: no answer within ``timeout_s``.
        ConnectFailed: refused, unreachable, reset; ``error.errno`` says which.
        KernelRefused: an option or the source address is not usable.
        NeedCapability: a foreign ``source`` or ``mark`` without CAP_NET_ADMIN.
    """
    family, target = _target(destination[0])
    shown = (target, destination[1])
    tries = 0 if source is None or own_source else FOREIGN_PORTS_TRIED
    while True:
        sock = _make(family, netns)
        try:
            _prepare(sock, mark, keepalive, nodelay, socket_options, shown)
            if source is not None:
                port = _foreign_port() if tries else 0
                _appear_as(sock, family, source, port, shown, foreign=not own_source)
            if not _connects_at_once(sock, shown):
                await _connected(sock, shown, timeout_s)
        except BaseException as error:
            sock.close()
            if not (tries and port_is_taken(error)):
                raise
            tries -= 1
        else:
            return sock


def connect_at_once(
    sock: socket.SocketType,
    destination: tuple[str, int],
    *,
    source: str | None = None,
    own_source: bool = False,
) -> bool:
    """Connect an unconnected socket by TCP, and return whether that is done; otherwise :func:`finish_connect`
    completes it. The caller closes the socket, also after an error.

    Args:
        sock: see :func:`prepared`.
        destination: address and port, of the socket's family.
        source: see :func:`connect`.
        own_source: see :func:`connect`.

    Raises:
        ConnectFailed, KernelRefused, NeedCapability: see :func:`connect`. A port in use at the source is an error,
            too: the next socket gets another port.
    """
    if source is not None:
        port = 0 if own_source else _foreign_port()
        _appear_as(sock, _target(source)[0], source, port, destination, foreign=not own_source)
    return _connects_at_once(sock, destination)


async def finish_connect(sock: socket.SocketType, destination: tuple[str, int], timeout_s: float) -> None:
    """Wait for the connect started by :func:`connect_at_once`.

    Raises:
        ConnectTimedOut, ConnectFailed: see :func:`connect`.
    """
    await _connected(sock, destination, timeout_s)


def prepared(
    count: int,
    version: int,
    *,
    mark: int | None = None,
    netns: Netns | None = None,
    keepalive: Keepalive | None = None,
    socket_options: Iterable[SocketOption] = (),
) -> list[socket.SocketType]:
    """Return sockets for :func:`connect_at_once`, with TCP_NODELAY; all are made within a single pair of setns(2)
    calls.

    Args:
        count: how many.
        version: 4 or 6, of the addresses to dial.
        mark: SO_MARK.
        netns: make them in this namespace instead of the thread's own.
        keepalive: TCP keepalive, off if None.
        socket_options: further (level, name, value).

    Raises:
        OSError: no descriptors, or no such namespace.
        KernelRefused, NeedCapability: see :func:`connect`.
    """
    family = int(socket.AF_INET if version == 4 else socket.AF_INET6)
    made: list[socket.SocketType] = []
    try:
        if netns is None and count == 1:
            made.append(socket.SocketType(family, _STREAM))
        else:
            with entered(netns):
                made.extend([socket.SocketType(family, _STREAM) for _ in range(count)])
        for sock in made:
            _prepare(sock, mark, keepalive, True, socket_options, ("", 0))
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


@lru_cache(maxsize=16384)  # called once per connection, for few addresses
def _target(host: IpAddress | str) -> tuple[socket.AddressFamily, str]:
    address = canonical(host)
    return socket.AF_INET if address.version == 4 else socket.AF_INET6, str(address)


def _connects_at_once(sock: socket.SocketType, address: tuple[str, int]) -> bool:
    """Begin to connect, and return whether the handshake is complete already.

    Raises:
        ConnectFailed: refused, unreachable or reset at once.
    """
    # Over links inside the machine the SYN-ACK has arrived by the time connect(2) returns, but a non-blocking call
    # returns EINPROGRESS all the same. A second call costs a microsecond and saves the timer, the watch and a turn
    # of the loop: 25 of 300 microseconds per connection (``bench.compare --only crr``).
    code = sock.connect_ex(address)
    if code in (errno.EINPROGRESS, errno.EINTR):
        code = sock.connect_ex(address)
    if code in (errno.EALREADY, errno.EINPROGRESS, errno.EINTR):
        return False
    if code not in (0, errno.EISCONN):
        raise ConnectFailed(address, OSError(code, os.strerror(code)))
    return True


async def _connected(sock: socket.SocketType, address: tuple[str, int], timeout_s: float) -> None:
    """Wait for the handshake, as ``loop.sock_connect`` does; on return the loop does not watch the socket.

    That also holds after a cancellation, on any loop: ``finally`` runs before the caller closes the socket, whose
    number the kernel may reuse at once.

    Raises:
        ConnectTimedOut: no answer within ``timeout_s``.
        ConnectFailed: refused, unreachable or reset.
    """
    loop = asyncio.get_running_loop()
    writable: asyncio.Future[None] = loop.create_future()

    def done() -> None:
        if not writable.done():
            writable.set_result(None)

    loop.add_writer(sock.fileno(), done)
    try:
        async with asyncio.timeout(timeout_s):
            await writable
    except TimeoutError as error:
        raise ConnectTimedOut(address, timeout_s) from error
    finally:
        loop.remove_writer(sock.fileno())
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise ConnectFailed(address, OSError(code, os.strerror(code)))


def _prepare(
    sock: socket.SocketType,
    mark: int | None,
    keepalive: Keepalive | None,
    nodelay: bool,
    socket_options: Iterable[SocketOption],
    target: tuple[str, int],
) -> None:
    try:
        if mark is not None:
            _set_mark(sock, mark)
        for level, name, value in socket_options:
            sock.setsockopt(level, name, value)
        if keepalive is not None:
            set_keepalive(sock, keepalive)
        if nodelay:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise _translated(error, f"connect to {target[0]} port {target[1]}") from error


def _appear_as(
    sock: socket.SocketType,
    family: socket.AddressFamily,
    source: IpAddress | str,
    port: int,
    target: tuple[str, int],
    *,
    foreign: bool,
) -> None:
    """Bind to an address, of another host if ``foreign``; with port 0 the kernel chooses one at connect."""
    try:
        if foreign:
            _set_transparent(sock, family)
        if port:
            # With SO_REUSEADDR several sockets may bind the port. connect(2) refuses only an equal 4-tuple.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            sock.setsockopt(socket.SOL_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((_target(source)[1], port))
    except OSError as error:
        raise _translated(error, f"connect to {target[0]} port {target[1]} as {source}") from error


def _foreign_port() -> int:
    # Like random.choice, with one call instead of six; each connection needs a port.
    return _FOREIGN_PORTS[int(random() * _FOREIGN_PORT_COUNT)]


def port_is_taken(error: BaseException) -> bool:
    """Return whether a listener (at bind) or a connection to the same destination (at connect) has the port."""
    if isinstance(error, KernelRefused):
        return error.code == errno.EADDRINUSE
    return (
        isinstance(error, ConnectFailed) and error.error is not None and error.error.errno == errno.EADDRNOTAVAIL
    )


def set_keepalive(sock: socket.SocketType, keepalive: Keepalive) -> None:
    """Switch TCP keepalive on.

    Raises:
        OSError: EINVAL, a value is outside the kernel's limits (32,767 s, 127 probes).
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.probes)


def original_destination(sock: socket.SocketType) -> OriginalDestination:
    """Return the destination that the peer of an accepted socket addressed.

    ``restored`` is true if it differs from the socket's own name (REDIRECT or DNAT translated it), or if the
    socket is transparent (TPROXY).

    Raises:
        OSError: the socket is closed.
    """
    # conntrack answers for every tracked connection, translated or not, so an answer that equals the socket's own
    # name is no proof. TPROXY does not translate, so there the socket's own name is the destination, with and
    # without conntrack.
    own = local_address(sock)
    tracked = tracked_address(sock, own.ip.version)
    if tracked is not None and tracked != (str(own.ip), own.port):
        return OriginalDestination(ip_address(tracked[0]), tracked[1], restored=True)
    return OriginalDestination(own.ip, own.port, restored=is_transparent(sock))


def dialled_address(sock: socket.SocketType, version: int) -> tuple[str, int]:
    """Return the address that the peer of an accepted socket dialled, like :func:`original_destination`, without
    further system calls.

    Args:
        sock: an accepted socket.
        version: as of :func:`tracked_address`; the peer's address has the same.

    Raises:
        OSError: the socket is closed.
    """
    tracked = tracked_address(sock, version)
    if tracked is not None:
        return tracked
    own = local_address(sock)
    return str(own.ip), own.port


def tracked_address(sock: socket.SocketType, version: int) -> tuple[str, int] | None:
    """Return the destination before translation (SO_ORIGINAL_DST), or None if the connection is not tracked.

    For a connection that was not translated it equals the socket's own name.

    Args:
        sock: an accepted socket.
        version: 4 or 6, of the socket's own address without IPv4 mapping. The IPv4 option also answers for mapped
            addresses on an IPv6 socket, the IPv6 option does not.
    """
    try:
        if version == 4:
            return _named4(sock.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, _NAME4.size))
        return _named6(sock.getsockopt(_SOL_IPV6, SO_ORIGINAL_DST, _NAME6.size))
    except OSError:
        return None  # ENOENT: not tracked; ENOPROTOOPT: no conntrack in this kernel


@lru_cache(maxsize=16384)  # called once per connection, for few destinations
def _named4(raw: bytes) -> tuple[str, int]:
    port, packed = _NAME4.unpack(raw)
    return str(_unpacked(packed)), port


@lru_cache(maxsize=16384)
def _named6(raw: bytes) -> tuple[str, int]:
    port, packed = _NAME6.unpack(raw)
    return str(_unpacked(packed)), port


def _unpacked(packed: bytes) -> IpAddress:
    return canonical(ip_address(packed))


def is_transparent(sock: socket.SocketType) -> bool:
    """Return whether the socket has IP_TRANSPARENT; accepted sockets inherit it from their listener."""
    # An IPv6 socket has the same flag under another number.
    if sock.family == socket.AF_INET:
        return bool(sock.getsockopt(socket.SOL_IP, IP_TRANSPARENT))
    return bool(sock.getsockopt(_SOL_IPV6, IPV6_TRANSPARENT))


def local_address(sock: socket.SocketType) -> SocketAddress:
    """Return the socket's own address and port."""
    name = sock.getsockname()
    return SocketAddress(canonical(name[0]), name[1])


def _make(family: socket.AddressFamily, netns: Netns | None) -> socket.socket:
    if netns is None:
        return socket.socket(family, _STREAM)
    with entered(netns):
        return socket.socket(family, _STREAM)


def _set_transparent(sock: socket.SocketType, family: socket.AddressFamily) -> None:
    try:
        if family is socket.AF_INET:
            sock.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
        else:
            sock.setsockopt(_SOL_IPV6, IPV6_TRANSPARENT, 1)
    except PermissionError as error:
        raise NeedCapability("CAP_NET_ADMIN", "use foreign addresses (IP_TRANSPARENT)") from error


def _set_mark(sock: socket.SocketType, mark: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_MARK, mark)
    except PermissionError as error:
        raise NeedCapability("CAP_NET_ADMIN", "mark packets (SO_MARK)") from error


def _translated(error: OSError, doing: str) -> TproxyError:
    if error.errno == errno.EACCES:
        return NeedCapability("CAP_NET_BIND_SERVICE", doing)
    if error.errno == errno.EPERM:
        return NeedCapability("CAP_NET_ADMIN", doing)
    return KernelRefused(doing, error.errno or 0)
