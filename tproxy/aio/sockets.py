"""Sockets as a transparent proxy needs them: foreign addresses, marks, other namespaces.

Options of the kernel's headers that :mod:`socket` has no names for are here by number
(``linux/in.h``, ``linux/in6.h``, ``linux/netfilter_ipv4.h``, ``linux/netfilter_ipv6/ip6_tables.h``).
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
from random import choice
from typing import NamedTuple, TypeAlias

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
_STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
#: Where to look for ports to appear as somebody else from. Connection tracking cannot tell our connection in a
#: client's name from one that the client itself makes to the same destination from the same port, and leads the
#: second to where the first is. Linux gives its connections even ports of 32768 to 60999, odd ones only when those
#: are used up (``__inet_hash_connect``).
_FOREIGN_PORTS = range(32769, 61000, 2)
_FOREIGN_PORTS_TRIED = 8


class SocketAddress(NamedTuple):
    """An address, never an IPv4-mapped one, and a port."""

    ip: IpAddress
    port: int


class OriginalDestination(NamedTuple):
    """Where a client wanted to go; ``restored`` is false for an ordinary connection to an ordinary socket."""

    ip: IpAddress
    port: int
    restored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """TCP keepalive; the defaults are Rust ztunnel's: 180 s idle, then 9 probes 180 s apart."""

    idle_s: int = 180
    interval_s: int = 180
    probes: int = 9


@lru_cache(maxsize=16384)  # asked several times per connection, about few addresses
def canonical(address: IpAddress | str) -> IpAddress:
    """``::ffff:10.0.0.1`` as ``10.0.0.1``, and scope identifiers gone; a dual-stack listener reports both.

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
    """A listening TCP socket, non-blocking; on ``::`` it takes IPv4 too (mapped: see :func:`canonical`).

    Args:
        address: where; port 0 lets the kernel choose.
        transparent: accept connections to any address that the kernel delivers here (TPROXY). Set
            before bind, as TPROXY demands.
        mark: SO_MARK; accepted sockets and SYN-ACKs inherit it.
        socket_options: further (level, name, value), set before bind.
        netns: make it there instead of here.
        backlog: connections waiting to be accepted; 0 binds only, and the caller listens when it is ready.

    Raises:
        PortTaken: somebody else listens there.
        NeedCapability: ``transparent`` or ``mark`` without CAP_NET_ADMIN.
        KernelRefused: any other refusal, such as EADDRNOTAVAIL for a foreign address.
    """
    where = ip_address(address) if isinstance(address, str) else address
    family = socket.AF_INET if where.version == 4 else socket.AF_INET6
    sock = _make(family, netns)
    try:
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


def leave_to_newer(sock: socket.socket) -> bool:
    """Of the two sockets that listen on a shared port, give all new connections to the newer one.

    The kernel spreads them over both, and resets what the older one has not accepted when it closes. With this
    done first, and what has come accepted, nobody notices. It asks a filter which socket is to have a connection
    (``SO_ATTACH_REUSEPORT_CBPF``); this one always says the second. Where there is no second, the kernel spreads
    as before, so the filter, which stays with the port, does no harm to a socket that is alone again.

    Returns:
        Whether that can be: the port is shared (``reuse_port``), and the kernel knows how.

    Raises:
        KernelRefused: any other refusal.
    """
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 1))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOPROTOOPT):
            return False
        raise KernelRefused("leave a port to its newer socket", error.errno or 0) from error
    return True


def unbound(
    family: socket.AddressFamily,
    kind: socket.SocketKind,
    *,
    mark: int | None = None,
    netns: Netns | None = None,
) -> socket.socket:
    """A non-blocking socket that goes nowhere yet, made in ``netns`` if one is given.

    Raises:
        NeedCapability: ``mark`` without CAP_NET_ADMIN.
        KernelRefused: no such family there.
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
    """A bound UDP socket, non-blocking; arguments and errors as of :func:`listen`."""
    where = ip_address(address) if isinstance(address, str) else address
    family = socket.AF_INET if where.version == 4 else socket.AF_INET6
    sock = unbound(family, socket.SOCK_DGRAM, mark=mark, netns=netns)
    try:
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((str(where), port))
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
    mark: int | None = None,
    timeout_s: float = 10.0,
    netns: Netns | None = None,
    keepalive: Keepalive | None = None,
    nodelay: bool = True,
    socket_options: Iterable[SocketOption] = (),
) -> socket.socket:
    """Connect by TCP; the socket that is returned is non-blocking and the caller's to close.

    Args:
        destination: address and port, no names.
        source: appear as this address, which need not be ours, from a port that its owner hardly uses itself;
            the same port may serve other destinations, so that 28,000 connections from one source are no limit.
        mark: SO_MARK.
        timeout_s: for the handshake.
        netns: make the socket there instead of here.
        keepalive: if given, switched on.
        nodelay: TCP_NODELAY.
        socket_options: further (level, name, value), set before bind.

    Raises:
        ConnectTimedOut: no answer within ``timeout_s``.
        ConnectFailed: refused, unreachable, reset; ``error.errno`` says which.
        KernelRefused: an option or the source address is not usable.
        NeedCapability: ``source`` or ``mark`` without CAP_NET_ADMIN.
    """
    family, target = _target(destination[0])
    shown = (target, destination[1])
    tries = 0 if source is None else _FOREIGN_PORTS_TRIED
    while True:
        sock = _make(family, netns)
        try:
            _prepare(sock, mark, keepalive, nodelay, socket_options, shown)
            if source is not None:
                _appear_as(sock, family, source, choice(_FOREIGN_PORTS) if tries else 0, shown)
            if not _connects_at_once(sock, shown):
                await _connected(sock, shown, timeout_s)
        except BaseException as error:
            sock.close()
            if not (tries and _port_is_taken(error)):
                raise
            tries -= 1
        else:
            return sock


@lru_cache(maxsize=16384)  # once per connection, about few addresses
def _target(host: IpAddress | str) -> tuple[socket.AddressFamily, str]:
    address = canonical(host)
    return socket.AF_INET if address.version == 4 else socket.AF_INET6, str(address)


def _connects_at_once(sock: socket.socket, address: tuple[str, int]) -> bool:
    """Begin to connect; whether that was all.

    Over links inside the machine the answer has come by the time ``connect`` returns, but a non-blocking one
    says EINPROGRESS all the same. Asking a second time costs a microsecond and spares timer, watch and turn of
    the loop: 25 of 300 microseconds per connection (``bench.compare --only crr``).
    """
    code = sock.connect_ex(address)
    if code in (errno.EINPROGRESS, errno.EINTR):
        code = sock.connect_ex(address)
    if code in (errno.EALREADY, errno.EINPROGRESS, errno.EINTR):
        return False
    if code not in (0, errno.EISCONN):
        raise ConnectFailed(address, OSError(code, os.strerror(code)))
    return True


async def _connected(sock: socket.socket, address: tuple[str, int], timeout_s: float) -> None:
    """As ``loop.sock_connect``, but the descriptor is off the loop before the caller may close it.

    Cancellation arrives at the ``await``; whatever loop runs this, ``finally`` comes before ``close``.
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
    sock: socket.socket,
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
    sock: socket.socket,
    family: socket.AddressFamily,
    source: IpAddress | str,
    port: int,
    target: tuple[str, int],
) -> None:
    """Bind to an address that need not be ours; port 0: one that the kernel chooses at connect."""
    try:
        _set_transparent(sock, family)
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connect judges, by destination
        else:
            sock.setsockopt(socket.SOL_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((_target(source)[1], port))
    except OSError as error:
        raise _translated(error, f"connect to {target[0]} port {target[1]} as {source}") from error


def _port_is_taken(error: BaseException) -> bool:
    """By a listener (at bind), or by another connection to the same destination (at connect)."""
    if isinstance(error, KernelRefused):
        return error.code == errno.EADDRINUSE
    return (
        isinstance(error, ConnectFailed) and error.error is not None and error.error.errno == errno.EADDRNOTAVAIL
    )


def set_keepalive(sock: socket.socket, keepalive: Keepalive) -> None:
    """Switch TCP keepalive on."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.probes)


def original_destination(sock: socket.socket) -> OriginalDestination:
    """Where the peer of an accepted socket wanted to go.

    SO_ORIGINAL_DST answers when the connection was translated (REDIRECT, DNAT) and, because conntrack
    knows it as well, when it was only tracked; it is asked for IPv4 first, which is the one that answers
    for a mapped address. Without conntrack a transparent socket's own name is the destination.

    ``restored`` is true if the destination differs from the socket's own name (translated) or the
    socket is transparent (TPROXY).
    """
    own = local_address(sock)
    asked = conntrack_destination(sock, own.ip.version)
    if asked is not None and asked != own:
        return OriginalDestination(asked.ip, asked.port, restored=True)
    return OriginalDestination(own.ip, own.port, restored=is_transparent(sock))


def conntrack_destination(sock: socket.socket, version: int) -> SocketAddress | None:
    """Where connection tracking saw the peer go, which is the socket's own name unless that was translated.

    Args:
        sock: accepted.
        version: 4 or 6, of the socket's own address once unmapped.
    """
    try:
        if version == 4:
            data = sock.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
            port, packed = struct.unpack_from("!2xH4s", data)
        else:
            data = sock.getsockopt(_SOL_IPV6, SO_ORIGINAL_DST, 28)
            port, packed = struct.unpack_from("!2xH4x16s", data)
    except OSError:
        return None  # ENOENT: not tracked; ENOPROTOOPT: no conntrack in this kernel
    return SocketAddress(_unpacked(packed), port)


@lru_cache(maxsize=16384)  # once per connection, about few addresses
def _unpacked(packed: bytes) -> IpAddress:
    return canonical(ip_address(packed))


def is_transparent(sock: socket.socket) -> bool:
    """Whether the socket has IP_TRANSPARENT; accepted ones inherit it from their listener."""
    # Accepted sockets inherit it; an IPv6 socket has the same flag under its own number.
    if sock.family == socket.AF_INET:
        return bool(sock.getsockopt(socket.SOL_IP, IP_TRANSPARENT))
    return bool(sock.getsockopt(_SOL_IPV6, IPV6_TRANSPARENT))


def local_address(sock: socket.socket) -> SocketAddress:
    """The socket's own address and port."""
    name = sock.getsockname()
    return SocketAddress(canonical(name[0]), name[1])


def peer_address(sock: socket.socket) -> SocketAddress:
    """The peer's address and port.

    Raises:
        OSError: ENOTCONN, the peer is already gone.
    """
    name = sock.getpeername()
    return SocketAddress(canonical(name[0]), name[1])


def _make(family: socket.AddressFamily, netns: Netns | None) -> socket.socket:
    if netns is None:
        return socket.socket(family, _STREAM)
    with entered(netns):
        return socket.socket(family, _STREAM)


def _set_transparent(sock: socket.socket, family: socket.AddressFamily) -> None:
    try:
        if family is socket.AF_INET:
            sock.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
        else:
            sock.setsockopt(_SOL_IPV6, IPV6_TRANSPARENT, 1)
    except PermissionError as error:
        raise NeedCapability("CAP_NET_ADMIN", "use foreign addresses (IP_TRANSPARENT)") from error


def _set_mark(sock: socket.socket, mark: int) -> None:
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
