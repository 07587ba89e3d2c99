"""Netlink over plain sockets: requests, transactions, dumps and notifications.

The calls block. They are short, because the kernel handles a request inside ``sendmsg``, and the answer is queued
when ``sendmsg`` returns (netlink_rcv_skb in net/netlink/af_netlink.c). A socket must be used by one thread only.
"""

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from tproxy.aio.netns import Netns, entered
from tproxy.errors import KernelRefused, MissingFeature, NeedCapability, TproxyError
from tproxy.wire import Message

NETLINK_ROUTE, NETLINK_NETFILTER = 0, 12
_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _NETLINK_CAP_ACK, _NETLINK_GET_STRICT_CHK = 270, 1, 10, 12
_NLMSG_NOOP, _NLMSG_ERROR, _NLMSG_DONE = 1, 2, 3
_NLM_F_MULTI, _NLM_F_ACK, _NLM_F_DUMP_INTR = 0x2, 0x4, 0x10
_BATCH_BEGIN, _BATCH_END = 16, 17
_HEADER = struct.Struct("=IHHII")
_RECEIVE_BYTES = 1 << 20
# The size of the send buffer, because a transaction is sent by one sendmsg. The default (net.core.wmem_default,
# 208 KiB) would allow about 1,500 set members.
_SEND_BUFFER_BYTES = 8 << 20
_SO_SNDBUFFORCE = 32
_ANSWER_TIMEOUT_S = 5.0
_DUMP_ATTEMPTS = 10


class DumpInterrupted(KernelRefused):
    """A dump failed: the kernel's state changed during every attempt."""


class NetlinkSocket:
    """One netlink socket, bound to the network namespace where it was created."""

    def __init__(self, protocol: int, netns: Netns | None = None) -> None:
        self.protocol = protocol
        with entered(netns):
            try:
                self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
            except OSError as error:
                if error.errno == errno.EPROTONOSUPPORT:
                    raise MissingFeature("netlink", "nfnetlink, nf_tables") from error
                raise KernelRefused("a netlink socket", error.errno or 0) from error
        self._socket.bind((0, 0))
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        # Make the kernel filter dumps by the fields of the request. Kernels before Linux 4.20 ignore these fields.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
        self._room = self._set_buffer(_SEND_BUFFER_BYTES)
        self._sequence = 0

    @property
    def port(self) -> int:
        """The port number that identifies this socket in the kernel's notifications."""
        return int(self._socket.getsockname()[0])

    def request(self, message: Message) -> None:
        """Send one message and wait for its acknowledgement.

        Raises:
            NeedCapability: EPERM or EACCES.
            KernelRefused: any other errno, ETIMEDOUT if no answer came.
        """
        self._send([message], flags=_NLM_F_ACK)
        self._await_acks([message])

    def batch(self, messages: Sequence[Message]) -> None:
        """Send an nftables transaction in one piece. If the kernel refuses one message, it undoes the whole
        transaction.

        Raises:
            NeedCapability: EPERM or EACCES.
            KernelRefused: for the first refused message, named by ``about``.
        """
        # Only the last message requests an acknowledgement, which arrives when the whole transaction was
        # committed. Thousands of acknowledgements would not fit into the receive buffer, and refusals are always
        # reported.
        last = max((at for at, message in enumerate(messages) if not _is_frame(message)), default=-1)
        if last < 0:
            return
        self._send(messages, flags=_NLM_F_ACK, only=last)
        self._await_acks(messages, only=last)

    def dump(self, message: Message) -> list[bytes]:
        """Return the bodies of one consistent dump.

        Raises:
            DumpInterrupted: the dumped table changed during each of ``_DUMP_ATTEMPTS`` attempts.
            NeedCapability: EPERM or EACCES.
            KernelRefused: any other errno, also if the dump failed after some bodies.
        """
        # A dump is delivered in several reads, and the kernel holds no lock between them. It flags a dump during
        # which the table changed (NLM_F_DUMP_INTR). Such a dump can lack objects, so it is repeated.
        for _ in range(_DUMP_ATTEMPTS):
            self._send([message], flags=0)
            bodies, interrupted = self._collect(message)
            if not interrupted:
                return bodies
        raise DumpInterrupted("a consistent dump", errno.EINTR)

    def _send(self, messages: Sequence[Message], flags: int, only: int | None = None) -> None:
        parts = []
        for position, message in enumerate(messages):
            self._sequence += 1
            wanted = flags if only is None or position == only else 0
            length = _HEADER.size + len(message.body)
            parts.append(_HEADER.pack(length, message.kind, message.flags | wanted, self._sequence, 0))
            parts.append(message.body + bytes(-length % 4))
        data = b"".join(parts)
        self._make_room(len(data))
        try:
            self._socket.send(data)
        except OSError as error:
            raise _refusal(messages[0], error.errno or 0) from error

    def _await_acks(self, messages: Sequence[Message], only: int | None = None) -> None:
        first = self._sequence - len(messages) + 1
        missing = set(range(first, first + len(messages))) if only is None else {first + only}
        # nfnetlink_rcv_batch (net/netfilter/nfnetlink.c) answers a committed transaction with the requested
        # acknowledgements. If a message is refused, it rolls back and sends errors for the refused messages and,
        # for a fault of the batch as a whole, one with the sequence number of its begin. Whether it acknowledges
        # further messages depends on the kernel. So after a failure, read all queued answers instead of counting
        # them. All answers were queued before sendmsg returned.
        failure: TproxyError | None = None
        while missing:
            try:
                answers = list(self._receive())
            except KernelRefused as error:
                # The receive buffer has overflowed, because a thousand messages were refused. It still contains
                # the first errors.
                if error.code == errno.ENOBUFS and self._pending():
                    continue
                raise
            for kind, _, sequence, body in answers:
                if kind != _NLMSG_ERROR or sequence < first:
                    continue
                code = -struct.unpack_from("=i", body)[0]
                missing.discard(sequence)
                if code and failure is None:
                    failure = _refusal(messages[sequence - first], code)
                    if _is_frame(messages[sequence - first]):
                        raise failure
            if failure is not None and not self._pending():
                break
        if failure is not None:
            raise failure

    def _make_room(self, octets: int) -> None:
        """Enlarge the send buffer for one message of this size. The kernel refuses messages that exceed the buffer
        (EMSGSIZE).
        """
        if octets * 2 > self._room:
            self._room = self._set_buffer(octets * 2)

    def _set_buffer(self, octets: int) -> int:
        # SO_SNDBUFFORCE needs CAP_NET_ADMIN in the initial user namespace. SO_SNDBUF does not, but is limited to
        # wmem_max.
        for option in (_SO_SNDBUFFORCE, socket.SO_SNDBUF):
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, option, octets)
                break
            except PermissionError:
                continue
        return octets

    def _pending(self) -> bool:
        """Return whether more answers are queued."""
        # Use poll(2), because MSG_DONTWAIT has no effect here: a Python socket with a timeout always waits first.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _collect(self, message: Message) -> tuple[list[bytes], bool]:
        bodies: list[bytes] = []
        interrupted = False
        while True:
            for kind, flags, sequence, body in self._receive():
                if sequence != self._sequence:
                    continue
                interrupted |= bool(flags & _NLM_F_DUMP_INTR)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    # If a dump fails after its start, objects are missing, and its NLMSG_DONE contains the error
                    # (netlink_dump_done in net/netlink/af_netlink.c).
                    code = -struct.unpack_from("=i", body)[0]
                    if kind == _NLMSG_DONE and not code:
                        return bodies, interrupted
                    if code == errno.EINTR:
                        return bodies, True
                    raise _refusal(message, code)
                if kind != _NLMSG_NOOP:
                    bodies.append(body)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError as error:
            raise KernelRefused("an answer on netlink", errno.ETIMEDOUT) from error
        except OSError as error:
            raise KernelRefused("an answer on netlink", error.errno or 0) from error
        offset = 0
        while offset + _HEADER.size <= len(data):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(data, offset)
            if length < _HEADER.size:
                break
            yield kind, flags, sequence, data[offset + _HEADER.size : offset + length]
            offset += (length + 3) & ~3

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def monitor_socket(protocol: int, groups: Sequence[int], netns: Netns | None = None) -> socket.socket:
    """Return a non-blocking socket that becomes readable when the kernel's state changes.

    The notifications are only hints. Callers drain them and then read the state. The caller closes the socket.

    Raises:
        NeedCapability: no CAP_NET_ADMIN.
        KernelRefused: the kernel has no such group.
    """
    with entered(netns):
        sock = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol
        )
    try:
        sock.bind((0, 0))
        for group in groups:
            sock.setsockopt(_SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, group)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EPERM, errno.EACCES):
            raise NeedCapability("CAP_NET_ADMIN", "watch nftables and routes") from error
        raise KernelRefused("watch nftables and routes", error.errno or 0) from error
    return sock


def drain(sock: socket.socket) -> None:
    """Discard the notifications of a monitor socket.

    ENOBUFS means that the kernel dropped some notifications because the queue was full. This makes no difference,
    because the caller reads the whole state anyway.
    """
    while True:
        try:
            sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise KernelRefused("watch nftables and routes", error.errno or 0) from error


def _is_frame(message: Message) -> bool:
    """Return whether a message begins or ends a transaction. Only recent kernels acknowledge such messages."""
    return message.kind in (_BATCH_BEGIN, _BATCH_END)


def _refusal(message: Message, code: int) -> TproxyError:
    doing = message.about or f"netlink message {message.kind}"
    if code in (errno.EPERM, errno.EACCES):
        return NeedCapability("CAP_NET_ADMIN", doing)
    return KernelRefused(doing, code)
