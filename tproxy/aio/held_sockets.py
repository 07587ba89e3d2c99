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
#: The largest size of a packet; keys are shorter.
MOST_BYTES: Final = 256
_MEMORY: Final = "memory/"
_SO_NETNS_COOKIE: Final = 71  # asm-generic/socket.h
_COOKIE: Final = struct.Struct("=Q")
#: The longest wait for an answer of the holder, which has no other work and usually answers at once.
_ANSWERS_S: Final = 5.0


class Holder:
    """The channel to the holder.

    Args:
        channel: owned by this object.
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
        """Return the channel that an environment names, or ``None``. Workers and successors do not inherit it.

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
        """Return a socket left by an earlier process, now owned by the caller. ``None`` if there is none."""
        found = self._held.pop(key, None)
        if found is not None:
            # Until the socket listens, the caller can close it without notifying the holder. A copy would then
            # keep the port in use.
            self._send(DROP, key)
        return found

    def keep(self, key: str, sock: socket.socket) -> None:
        """Have the holder keep a copy of the socket."""
        self._send(KEEP, key, sock.fileno())

    def memory(self, name: str) -> bytes | None:
        """Return sealed memory left by an earlier process, on the first call only."""
        return self._memories.pop(name, None)

    def keep_memory(self, name: str, number: int) -> None:
        """Have the holder keep the descriptor of sealed memory, in place of an older one of this name."""
        self._send(KEEP, _MEMORY + name, number)

    def drop(self, key: str) -> None:
        """Have the holder close its copy. Connections to an open copy would never be accepted."""
        self._send(DROP, key)

    def settle(self) -> None:
        """Report that this process serves, and close the unclaimed sockets."""
        for key, sock in self._held.items():
            self._send(DROP, key)
            sock.close()
        self._held.clear()
        self._send(READY)

    def close(self) -> None:
        """Close the channel, as the end of this process does; idempotent."""
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
            # The holder's end of the channel is closed, and so are its copies.
            log.error("the holder of listening sockets has gone: %s", error.strerror or error)
            self.close()


class HeldSocket(socket.socket):
    """A socket whose copy the holder keeps from :meth:`listen` (UDP: :meth:`hold`) to :meth:`close`."""

    holder: Holder
    key: str
    _kept = False

    def listen(self, *backlog: int) -> None:
        """Listen, and have the holder keep a copy from now on."""
        super().listen(*backlog)
        self.hold()

    def hold(self) -> None:
        """Have the holder keep a copy from now on."""
        self._kept = True
        self.holder.keep(self.key, self)

    def close(self) -> None:
        """Close the socket and its copy."""
        if self._kept:
            self._kept = False
            self.holder.drop(self.key)
        super().close()

    def detach(self) -> int:
        """Detach the socket; the copy stays until this process ends."""
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
    """Return a held socket in place of a new one, or the new one, and whether the result is already bound.

    Args:
        sock: the new socket, which belongs to this function from now on.
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
