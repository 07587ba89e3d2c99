"""The non-blocking socket calls that a transparent proxy needs for every connection.

Socket options that :mod:`socket` does not name have their numbers here (``linux/in.h``, ``linux/in6.h``,
``linux/netfilter_ipv4.h``, ``linux/netfilter_ipv6/ip6_tables.h``).
"""

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

from tproxy.aio.netns import Netns, entered
from tproxy.errors import ConnectFailed, KernelRefused, NeedCapability, TproxyError

IpAddress: TypeAlias = IPv4Address | IPv6Address
SocketOption: TypeAlias = tuple[int, int, int | bytes]
IP_TRANSPARENT = 19
IPV6_TRANSPARENT = 75
IP_BIND_ADDRESS_NO_PORT = 24
SO_MARK = 36
SO_ORIGINAL_DST = 80
SOL_IPV6 = socket.IPPROTO_IPV6
_TYPE = int(socket.SOCK_STREAM)
MAKING = "make a socket"
STREAM = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
#: Source ports for connections that we open with a client's address. If the client itself connects to the same
#: destination from the same port, connection tracking cannot distinguish the two connections, and delivers packets
#: of the second to the first. Linux gives outgoing connections even ports of 32768 to 60999, and odd ones only
#: when those are used up (``__inet_hash_connect`` in net/ipv4/inet_hashtables.c), so odd ones rarely collide.
_FOREIGN_PORTS = range(32769, 61000, 2)
_FOREIGN_PORT_COUNT = len(_FOREIGN_PORTS)
#: The layouts that read port and address from ``sockaddr_in`` and ``sockaddr_in6``.
_NAME4 = struct.Struct("!2xH4s8x")
_NAME6 = struct.Struct("!2xH4x16s4x")


class SocketAddress(NamedTuple):
    """An address and a port. An IPv4-mapped address is stored as IPv4."""

    ip: IpAddress
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Settings of TCP keepalive. The defaults are the same as in the Rust ztunnel: 180 s idle, then 9 probes 180 s
    apart.
    """

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


def accept(listener: socket.socket, family: int) -> tuple[socket.SocketType, tuple[str, int]]:
    """Accept a TCP connection. The caller owns the socket, and must make it non-blocking.

    Args:
        listener: the listening socket.
        family: its family, as a number.

    The result is an instance of the base class written in C. :meth:`socket.socket.accept` returns its Python
    subclass, which wraps every method and converts the family, type and protocol to enumerations. This took an
    eighth of a connection's function calls.

    Raises:
        OSError: see accept(2).
    """
    number, peer = listener._accept()  # type: ignore[attr-defined]  # what socket.accept itself calls
    return socket.SocketType(family, _TYPE, 0, fileno=number), peer[:2]  # an IPv6 name has four elements


def connect_at_once(
    sock: socket.SocketType,
    destination: tuple[str, int],
    *,
    source: str | None = None,
    own_source: bool = False,
    kernel_port: bool = False,
) -> bool:
    """Begin to connect a TCP socket, and return whether it is already connected. If not, :func:`finish_connect`
    completes it. The caller closes the socket, also after an error.

    Args:
        sock: see :func:`prepared`.
        destination: address and port, of the socket's family.
        source: see :func:`connect`.
        own_source: see :func:`connect`.
        kernel_port: whether the kernel chooses the source port, for the last attempt after ports in use.

    Raises:
        ConnectFailed, KernelRefused, NeedCapability: see :func:`connect`. A source port in use is an error, too;
            the caller can retry with a new socket, which gets another port.
    """
    if source is not None:
        port = 0 if own_source or kernel_port else foreign_port()
        appear_as(sock, target_of(source)[0], source, port, destination, foreign=not own_source)
    return connects_at_once(sock, destination)


def prepared(
    count: int,
    version: int,
    *,
    mark: int | None = None,
    netns: Netns | None = None,
    keepalive: Keepalive | None = None,
    socket_options: Iterable[SocketOption] = (),
) -> list[socket.SocketType]:
    """Return sockets for :func:`connect_at_once`, with TCP_NODELAY. All are created within one pair of setns(2)
    calls.

    Args:
        count: how many.
        version: 4 or 6, of the addresses to dial.
        mark: SO_MARK.
        netns: create them in this namespace instead of the thread's own.
        keepalive: TCP keepalive, off if None.
        socket_options: further (level, name, value).

    Raises:
        KernelRefused: for example EMFILE, or EAFNOSUPPORT of a kernel without IPv6.
        NeedCapability: see :func:`connect`.
    """
    family = int(socket.AF_INET if version == 4 else socket.AF_INET6)
    made: list[socket.SocketType] = []
    try:
        if netns is None and count == 1:
            made.append(socket.SocketType(family, STREAM))
        else:
            with entered(netns):
                made.extend([socket.SocketType(family, STREAM) for _ in range(count)])
        for sock in made:
            prepare(sock, mark, keepalive, True, socket_options, ("", 0))
    except BaseException as error:
        for sock in made:
            sock.close()
        if isinstance(error, OSError):
            raise KernelRefused(MAKING, error.errno or 0) from error
        raise
    return made


@lru_cache(maxsize=16384)  # called once per connection, for few addresses
def target_of(host: IpAddress | str) -> tuple[socket.AddressFamily, str]:
    """Return the address family and the canonical text of an IP address."""
    address = canonical(host)
    return socket.AF_INET if address.version == 4 else socket.AF_INET6, str(address)


def connects_at_once(sock: socket.SocketType, address: tuple[str, int]) -> bool:
    """Begin to connect a socket, and return whether the TCP handshake is already complete.

    Raises:
        ConnectFailed: refused, unreachable or reset at once.
    """
    # On links inside the machine, the SYN-ACK has arrived when connect(2) returns, but a non-blocking call still
    # returns EINPROGRESS. So connect(2) is called again. The second call takes a microsecond and saves the timer,
    # the watch and a loop iteration: 25 of 300 microseconds per connection (``bench.compare --only crr``).
    code = sock.connect_ex(address)
    if code in (errno.EINPROGRESS, errno.EINTR):
        code = sock.connect_ex(address)
    if code in (errno.EALREADY, errno.EINPROGRESS, errno.EINTR):
        return False
    if code not in (0, errno.EISCONN):
        raise ConnectFailed(address, OSError(code, os.strerror(code)))
    return True


def prepare(
    sock: socket.SocketType,
    mark: int | None,
    keepalive: Keepalive | None,
    nodelay: bool,
    socket_options: Iterable[SocketOption],
    target: tuple[str, int],
) -> None:
    """Set the options of a socket that will connect to ``target``.

    Raises:
        KernelRefused, NeedCapability: an option is not usable.
    """
    try:
        if mark is not None:
            set_mark(sock, mark)
        for level, name, value in socket_options:
            sock.setsockopt(level, name, value)
        if keepalive is not None:
            set_keepalive(sock, keepalive)
        if nodelay:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise translated(error, f"connect to {target[0]} port {target[1]}") from error


def appear_as(
    sock: socket.SocketType,
    family: socket.AddressFamily,
    source: IpAddress | str,
    port: int,
    target: tuple[str, int],
    *,
    foreign: bool,
) -> None:
    """Bind a socket to a source address. ``foreign``: it belongs to another host. Port 0: the kernel chooses the
    port at connect(2).
    """
    try:
        if foreign:
            set_transparent(sock, family)
        if port:
            # With SO_REUSEADDR, several sockets can bind the port. connect(2) then refuses only an equal 4-tuple.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            sock.setsockopt(socket.SOL_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((target_of(source)[1], port))
    except OSError as error:
        raise translated(error, f"connect to {target[0]} port {target[1]} as {source}") from error


def foreign_port() -> int:
    """Return a random source port for a connection from a client's address."""
    # This is random.choice with one function call instead of six, because each connection needs a port.
    return _FOREIGN_PORTS[int(random() * _FOREIGN_PORT_COUNT)]


def port_is_taken(error: BaseException) -> bool:
    """Return whether the error means that the source port is in use: at bind by a listener, or at connect by a
    connection to the same destination.
    """
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


def dialled_address(sock: socket.SocketType, version: int) -> tuple[str, int]:
    """Return the address that the peer of an accepted socket connected to. Unlike :func:`original_destination`,
    this needs no further system calls.

    Args:
        sock: an accepted socket.
        version: see :func:`tracked_address`. The peer's address has the same version.

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

    For a connection that was not translated, it equals the socket's local address.

    Args:
        sock: an accepted socket.
        version: 4 or 6, the IP version of the local address without IPv4 mapping. For mapped addresses on an IPv6
            socket, only the IPv4 option works.
    """
    try:
        if version == 4:
            return _named4(sock.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, _NAME4.size))
        return _named6(sock.getsockopt(SOL_IPV6, SO_ORIGINAL_DST, _NAME6.size))
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


def local_address(sock: socket.SocketType) -> SocketAddress:
    """Return the local address and port of a socket."""
    name = sock.getsockname()
    return SocketAddress(canonical(name[0]), name[1])


def set_transparent(sock: socket.SocketType, family: socket.AddressFamily) -> None:
    """Allow a socket to use addresses of other hosts (IP_TRANSPARENT).

    Raises:
        NeedCapability: no CAP_NET_ADMIN.
    """
    try:
        if family is socket.AF_INET:
            sock.setsockopt(socket.SOL_IP, IP_TRANSPARENT, 1)
        else:
            sock.setsockopt(SOL_IPV6, IPV6_TRANSPARENT, 1)
    except PermissionError as error:
        raise NeedCapability("CAP_NET_ADMIN", "use foreign addresses (IP_TRANSPARENT)") from error


def set_mark(sock: socket.SocketType, mark: int) -> None:
    """Set the mark of all packets that a socket sends (SO_MARK).

    Raises:
        NeedCapability: no CAP_NET_ADMIN.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_MARK, mark)
    except PermissionError as error:
        raise NeedCapability("CAP_NET_ADMIN", "mark packets (SO_MARK)") from error


def translated(error: OSError, doing: str) -> TproxyError:
    """Convert the error of a system call to an error of this package. ``doing`` describes the call."""
    if error.errno == errno.EACCES:
        return NeedCapability("CAP_NET_BIND_SERVICE", doing)
    if error.errno == errno.EPERM:
        return NeedCapability("CAP_NET_ADMIN", doing)
    return KernelRefused(doing, error.errno or 0)
