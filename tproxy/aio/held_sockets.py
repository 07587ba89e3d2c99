"""Listening sockets that outlive this process. A holder process keeps a copy of each and passes them to the next
process.

After this process has ended, its ports stay open, so connections wait in the sockets' queues instead of being
refused. The holder (:mod:`ztunnel.runtime.holder`) is the parent of this process. ``ZTUNNEL_HOLDER_FD`` names the
descriptor of this process's end of the channel. Each packet on the channel (``SOCK_SEQPACKET``) consists of a
letter and a key:

======  ================  ===============================================================
letter  sent by           meaning
======  ================  ===============================================================
``T``   this process      send everything that you hold; the answer is one ``H`` for each, then ``E``
``H``   the holder        a held socket, with its descriptor
``E``   the holder        that was all
``K``   this process      hold a copy of this socket, in place of an older one of this key
``D``   this process      close your copy
``R``   this process      ready: from now on an end by an error or signal is a crash
======  ================  ===============================================================

The key of a socket names the network namespace (SO_NETNS_COOKIE, never used twice by a running kernel), protocol,
address and port. ``memory/NAME`` is sealed memory (memfd_create(2)) instead, which the next process reads.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
from collections.abc import Mapping
from typing import Final, Self

log = logging.getLogger(__name__)

VARIABLE: Final = "ZTUNNEL_HOLDER_FD"
CRASHES_VARIABLE: Final = "ZTUNNEL_HOLDER_CRASHES"
TAKE, HELD, END, KEEP, DROP, READY = b"T", b"H", b"E", b"K", b"D", b"R"
#: No packet on the channel is longer than this, because keys are shorter.
MOST_BYTES: Final = 256
_MEMORY: Final = "memory/"
_SO_NETNS_COOKIE: Final = 71  # asm-generic/socket.h
_COOKIE: Final = struct.Struct("=Q")
#: The longest wait for an answer from the holder process, which usually answers at once, because it has no other
#: work.
_ANSWERS_S: Final = 5.0


class Holder:
    """The channel to the holder process, which keeps copies of our sockets.

    Args:
        channel: the socket of the channel. This object closes it.
        crashes: how often the holder has restarted the process after a crash.
    """

    def __init__(self, channel: socket.socket, crashes: int = 0) -> None:
        self.crashes = crashes
        self._channel: socket.socket | None = channel
        channel.settimeout(_ANSWERS_S)
        self._held: dict[str, socket.socket] = {}
        self._memories: dict[str, bytes] = {}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the holder's channel named by an environment variable, or ``None``. Workers and successors do not
        inherit it.

        Raises:
            ValueError: the variable is not a descriptor.
        """
        text = environment.get(VARIABLE, "")
        if not text:
            return None
        try:
            os.set_inheritable(int(text), False)
            return cls(socket.socket(fileno=int(text)), int(environment.get(CRASHES_VARIABLE, "0")))
        except (OSError, ValueError) as error:
            raise ValueError(f"{VARIABLE}={text}: no descriptor of a holder: {error}") from error

    def take(self) -> int:
        """Take over the sockets and memory left by earlier processes, and return the number of sockets.

        Raises:
            OSError: the holder does not answer.
        """
        assert self._channel is not None
        self._channel.send(TAKE)
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self._channel, MOST_BYTES, 1)
            if packet[:1] != HELD:
                break
            key = packet[1:].decode()
            for number in descriptors:
                if key.startswith(_MEMORY):
                    with open(number, "rb") as memory:
                        memory.seek(0)  # the file offset is shared with the writer
                        self._memories[key.removeprefix(_MEMORY)] = memory.read()
                else:
                    self._held[key] = socket.socket(fileno=number)
        if packet != END:
            raise ConnectionError("the holder has gone")
        return len(self._held)

    def claim(self, key: str) -> socket.socket | None:
        """Return a socket left by an earlier process, or ``None`` if there is none. The caller owns the socket."""
        found = self._held.pop(key, None)
        if found is not None:
            # The holder drops its copy until the socket listens again. The caller can close the socket before that
            # without notifying the holder, and a copy would then keep the port in use.
            self._send(DROP, key)
        return found

    def keep(self, key: str, sock: socket.socket) -> None:
        """Send the holder a copy of a socket, which it keeps."""
        self._send(KEEP, key, sock.fileno())

    def memory(self, name: str) -> bytes | None:
        """Return the content of sealed memory left by an earlier process. Later calls for the name return
        ``None``.
        """
        return self._memories.pop(name, None)

    def keep_memory(self, name: str, number: int) -> None:
        """Send the holder the descriptor of sealed memory. It replaces an older one with the same name."""
        self._send(KEEP, _MEMORY + name, number)

    def drop(self, key: str) -> None:
        """Make the holder close its copy of a socket. While a copy is open, it gets connections that are never
        accepted.
        """
        self._send(DROP, key)

    def settle(self) -> None:
        """Report to the holder that this process serves, and close all unclaimed sockets."""
        for key, sock in self._held.items():
            self._send(DROP, key)
            sock.close()
        self._held.clear()
        self._send(READY)

    def close(self) -> None:
        """Close the channel to the holder, as the end of this process would. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _send(self, letter: bytes, key: str = "", number: int | None = None) -> None:
        if self._channel is None:
            return
        rights = []
        if number is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [number]))]
        try:
            self._channel.sendmsg([letter + key.encode()], rights)
        except OSError as error:
            # The holder has closed its end of the channel, so its copies of our sockets are closed, too.
            log.error("the process that holds the listening sockets has ended: %s", error.strerror or error)
            self.close()


class HeldSocket(socket.socket):
    """A socket that the holder keeps a copy of, from :meth:`listen` (UDP: :meth:`hold`) to :meth:`close`."""

    holder: Holder
    key: str
    _kept = False

    def listen(self, *backlog: int) -> None:
        """Listen, and send the holder a copy of the socket."""
        super().listen(*backlog)
        self.hold()

    def hold(self) -> None:
        """Send the holder a copy of the socket, which it keeps until :meth:`close`."""
        self._kept = True
        self.holder.keep(self.key, self)

    def close(self) -> None:
        """Close the socket and the holder's copy."""
        if self._kept:
            self._kept = False
            self.holder.drop(self.key)
        super().close()

    def detach(self) -> int:
        """Detach the socket from this object. The holder's copy stays open until this process ends."""
        self._kept = False
        return super().detach()


_holder: Holder | None = None


def use(holder: Holder | None) -> None:
    """Set the holder that keeps copies of this process's sockets; ``None`` for no holder."""
    global _holder
    _holder = holder


def holder() -> Holder | None:
    """Return the holder of this process's sockets, if any."""
    return _holder


def held(sock: socket.socket, host: str, port: int) -> tuple[socket.socket, bool]:
    """Return a socket for an address, and whether it is already bound: a socket left by an earlier process, or
    else ``sock``.

    Args:
        sock: a new, unbound socket. This function closes it if it returns another socket.
        host: the address to bind.
        port: the port to bind. For 0 there is no held socket.
    """
    if _holder is None or not port:
        return sock, False
    try:
        cookie = _COOKIE.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, _COOKIE.size))[0]
    except OSError:
        return sock, False  # Linux before 5.14
    kind = "udp" if sock.type & socket.SOCK_DGRAM else "tcp"
    key = f"{cookie:x}/{kind}/{host}/{port}"
    found = _holder.claim(key)
    if found is not None:
        sock.close()
    made = HeldSocket(fileno=(sock if found is None else found).detach())
    made.setblocking(False)
    made.holder, made.key = _holder, key
    return made, found is not None
