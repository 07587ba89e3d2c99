"""TCP and UDP sockets for a transparent proxy: foreign addresses, marks, other namespaces.

:mod:`tproxy.aio.socket_calls` has the non-blocking calls that every connection needs. This module also exports
most of those calls.
"""

import asyncio
import ctypes
import errno
import logging
import os
import socket
import struct
from collections.abc import Iterable
from ipaddress import ip_address
from typing import NamedTuple

from tproxy.aio.held_sockets import HeldSocket, held
from tproxy.aio.netns import Netns, entered
from tproxy.aio.socket_calls import (
    IP_TRANSPARENT,
    IPV6_TRANSPARENT,
    MAKING,
    SO_MARK,
    SOL_IPV6,
    STREAM,
    IpAddress,
    Keepalive,
    SocketAddress,
    SocketOption,
    accept,
    appear_as,
    canonical,
    connect_at_once,
    connects_at_once,
    dialled_address,
    foreign_port,
    local_address,
    port_is_taken,
    prepare,
    prepared,
    set_keepalive,
    set_mark,
    set_transparent,
    target_of,
    tracked_address,
    translated,
)
from tproxy.errors import ConnectFailed, ConnectTimedOut, KernelRefused, PortTaken

log = logging.getLogger(__name__)

__all__ = (
    "FOREIGN_PORTS_TRIED",
    "IP_FREEBIND",
    "IP_TRANSPARENT",
    "SO_MARK",
    "IpAddress",
    "Keepalive",
    "OriginalDestination",
    "SocketAddress",
    "SocketOption",
    "accept",
    "canonical",
    "connect",
    "connect_at_once",
    "datagrams",
    "dialled_address",
    "finish_connect",
    "is_transparent",
    "leave_to_newer",
    "leave_to_older",
    "listen",
    "local_address",
    "original_destination",
    "port_is_taken",
    "prepared",
    "set_keepalive",
    "tracked_address",
    "unbound",
)

IP_FREEBIND = 15
_SO_ATTACH_REUSEPORT_CBPF = 51
_BPF_RETURN = 0x06  # BPF_RET | BPF_K: linux/bpf_common.h
#: The number of other source ports to try if the first is taken.
FOREIGN_PORTS_TRIED = 8


class OriginalDestination(NamedTuple):
    """The address and port that a client connected to.

    ``restored`` is false if the address is the socket's local address and the socket is not transparent. The
    client has then connected to the proxy itself.
    """

    ip: IpAddress
    port: int
    restored: bool


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

    A socket on ``::`` accepts IPv4 too, with mapped addresses (see :func:`canonical`). If an earlier process has
    left a socket for this address, it is returned with its waiting connections (:mod:`tproxy.aio.held_sockets`).

    Args:
        address: the address to bind.
        port: 0 lets the kernel choose.
        transparent: accept connections to any address that the kernel delivers here (TPROXY). The option is set
            before bind, as TPROXY requires.
        mark: SO_MARK. Accepted sockets and SYN-ACKs inherit the mark.
        reuse_port: SO_REUSEPORT, so that the next process can bind the port before this one leaves.
        freebind: bind an address that the host does not have yet (IP_FREEBIND).
        socket_options: further (level, name, value), set before bind.
        netns: create the socket in this namespace instead of the thread's own.
        backlog: the number of connections that can wait to be accepted. 0 only binds the socket, and the caller
            calls ``listen`` later.

    Raises:
        PortTaken: another socket is bound to the port.
        NeedCapability: ``transparent`` or ``mark`` without CAP_NET_ADMIN.
        KernelRefused: any other refusal, such as EADDRNOTAVAIL for a foreign address, or EAFNOSUPPORT of a kernel
            without IPv6.
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
                sock.setsockopt(SOL_IPV6, socket.IPV6_V6ONLY, int(not where.is_unspecified))
        if freebind:
            sock.setsockopt(socket.SOL_IP, IP_FREEBIND, 1)
        if transparent:
            set_transparent(sock, family)
        if mark is not None:
            set_mark(sock, mark)
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
        raise translated(error, f"listen on {where} port {port}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def leave_to_newer(sock: socket.SocketType) -> bool:
    """Direct new connections of a port that two sockets share to the newer socket; idempotent.

    A process calls this when a newer process replaces it. It then accepts the connections still in its queue, and
    closes the socket. In this order, no connection is lost. If one socket is left, it gets all connections.

    Returns:
        False if the socket is not in a SO_REUSEPORT group, the kernel has no SO_ATTACH_REUSEPORT_CBPF, or it
        refuses for another reason, which is logged. Callers continue, because the alternative is to end a drain
        and all of its connections.
    """
    return _direct(sock, 1)


def leave_to_older(sock: socket.SocketType) -> bool:
    """Direct new connections of a port that two sockets share to the older socket; idempotent.

    A process that listens but cannot serve yet calls this. Once it can serve, it calls :func:`leave_to_newer`. If
    only one socket exists or remains, it gets all connections.

    Returns:
        False as for :func:`leave_to_newer`.
    """
    return _direct(sock, 0)


def _direct(sock: socket.SocketType, index: int) -> bool:
    # Without a filter the kernel hashes connections over all sockets of the group, and closing one resets the
    # connections in its accept queue. SO_ATTACH_REUSEPORT_CBPF sets a classic BPF program for the whole group. The
    # program returns the index of the socket to use, in the order of joining (reuseport_select_sock in
    # net/core/sock_reuseport.c). The program stays with the group. This is harmless when one socket is left,
    # because for an index outside the group the kernel hashes as before.
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, index))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOPROTOOPT):
            log.warning("new connections of a port go to both of its processes error=%s", error.strerror)
        return False
    return True


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
    sock = _make(family, netns, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if mark is not None:
            set_mark(sock, mark)
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
    """Return a bound, non-blocking UDP socket. Arguments and errors are the same as for :func:`listen`."""
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
        raise translated(error, f"bind UDP {where} port {port}") from error
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
        source: the source address, which can belong to another host. The source port is rarely used on this host.
            Connections to several destinations can share a port, so the 14,000 ports do not limit the number of
            connections.
        own_source: whether ``source`` is one of the host's addresses, so that no capability is needed.
        mark: SO_MARK.
        timeout_s: the time limit for the handshake.
        netns: create the socket in this namespace instead of the thread's own.
        keepalive: TCP keepalive, off if None.
        nodelay: TCP_NODELAY.
        socket_options: further (level, name, value), set before bind.

    Raises:
        ConnectTimedOut: no answer within ``timeout_s``.
        ConnectFailed: refused, unreachable, reset; ``error.errno`` says which.
        KernelRefused: an option or the source address is not usable, or no socket could be made.
        NeedCapability: a foreign ``source`` or ``mark`` without CAP_NET_ADMIN.
    """
    family, target = target_of(destination[0])
    shown = (target, destination[1])
    tries = 0 if source is None or own_source else FOREIGN_PORTS_TRIED
    while True:
        sock = _make(family, netns)
        try:
            prepare(sock, mark, keepalive, nodelay, socket_options, shown)
            if source is not None:
                port = foreign_port() if tries else 0
                appear_as(sock, family, source, port, shown, foreign=not own_source)
            if not connects_at_once(sock, shown):
                await _connected(sock, shown, timeout_s)
        except BaseException as error:
            sock.close()
            if not (tries and port_is_taken(error)):
                raise
            tries -= 1
        else:
            return sock


async def finish_connect(sock: socket.SocketType, destination: tuple[str, int], timeout_s: float) -> None:
    """Wait for the connect started by :func:`connect_at_once`.

    Raises:
        ConnectTimedOut, ConnectFailed: see :func:`connect`.
    """
    await _connected(sock, destination, timeout_s)


async def _connected(sock: socket.SocketType, address: tuple[str, int], timeout_s: float) -> None:
    """Wait for the handshake, like ``loop.sock_connect``. On return, the loop does not watch the socket.

    This is also true after a cancellation. It matters because the kernel can reuse the descriptor's number as soon
    as the caller closes the socket.

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


def original_destination(sock: socket.SocketType) -> OriginalDestination:
    """Return the address and port that the peer of an accepted socket connected to.

    ``restored`` is true if this differs from the socket's local address (REDIRECT or DNAT translated it), or if
    the socket is transparent (TPROXY).

    Raises:
        OSError: the socket is closed.
    """
    # conntrack returns a destination for every tracked connection, translated or not. So a destination equal to
    # the local address does not prove a redirect. TPROXY does not translate, so a transparent socket's local
    # address is the destination, with and without conntrack.
    own = local_address(sock)
    tracked = tracked_address(sock, own.ip.version)
    if tracked is not None and tracked != (str(own.ip), own.port):
        return OriginalDestination(ip_address(tracked[0]), tracked[1], restored=True)
    return OriginalDestination(own.ip, own.port, restored=is_transparent(sock))


def is_transparent(sock: socket.SocketType) -> bool:
    """Return whether the socket has IP_TRANSPARENT; accepted sockets inherit it from their listener."""
    # IPv6 sockets have this flag under another option number.
    if sock.family == socket.AF_INET:
        return bool(sock.getsockopt(socket.SOL_IP, IP_TRANSPARENT))
    return bool(sock.getsockopt(SOL_IPV6, IPV6_TRANSPARENT))


def _make(family: socket.AddressFamily, netns: Netns | None, kind: int = STREAM) -> socket.socket:
    try:
        if netns is None:
            return socket.socket(family, kind)
        with entered(netns):
            return socket.socket(family, kind)
    except OSError as error:  # such as EMFILE, or EAFNOSUPPORT of a kernel without IPv6
        raise KernelRefused(MAKING, error.errno or 0) from error
