"""What every end of a relay has in common.

Two ends, ``a`` and ``b``, are each other's ``peer``. Each is a source (what its network sends goes into the
peer) and a sink (what the peer gives goes out to its network). Data moves by direct calls:

- An end that *pulls* from a socket asks ``peer.reserve(limit)`` for room, reads straight into it, and calls
  ``peer.commit(n)``. No room (None): it stops reading until ``peer`` calls ``resume()``.
- An end that is *pushed* to (a tunnel: its bytes arrive with those of other streams) calls
  ``peer.write(chunks, size)``, then ``peer.flush()`` before the chunks' buffer is used again; the peer copies
  only what its network does not take, and calls ``delivered(n)`` as bytes leave, which returns credit.

``write_eof`` passes a half-close on, ``write_reset`` an abortive close, which ends both directions. A sink
whose network is gone swallows what it is given until the relay is over, so that the other direction can still
end in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hbone.aio.poller import Poller
    from hbone.aio.relay import Relay

CHUNK_BYTES = 256 * 1024


class End(ABC):
    """One end; owned and closed by whoever made it, also after a relay."""

    __slots__ = ("peer", "poller", "read_bytes", "relay")

    poller: Poller
    peer: End | None
    relay: Relay | None
    read_bytes: int
    """Bytes that came from this end's network and went into a relay, live."""

    # Called by Relay

    def join_relay(self, relay: Relay, peer: End) -> None:
        """Become part of a relay; nothing moves before :meth:`start`."""
        self.relay = relay
        self.peer = peer

    @abstractmethod
    def start(self) -> None:
        """Begin to read; what was pushed back or came early goes first."""

    def leave_relay(self) -> None:
        """The relay is over; breaks the reference cycle."""
        self.relay = None
        self.peer = None

    @abstractmethod
    def close(self, error: Exception | None = None) -> None:
        """Release everything, at once; ``error`` is what tells a peer why where the protocol can."""

    # Called by the peer

    @abstractmethod
    def reserve(self, limit: int) -> memoryview | None:
        """Room for at most ``limit`` bytes; None: wait for ``resume`` of the asking end."""

    @property
    def scatters(self) -> bool:
        """:meth:`reserve_many` gives more room than :meth:`reserve`."""
        return False

    def reserve_many(self, limit: int) -> list[memoryview] | None:
        """As :meth:`reserve`, in several pieces to be filled in order."""
        room = self.reserve(limit)
        return None if room is None else [room]

    @abstractmethod
    def commit(self, size: int) -> None:
        """``size`` bytes, at least 1, were put into the room."""

    @abstractmethod
    def write(self, chunks: list[memoryview], size: int) -> None:
        """Take all ``size`` bytes; the views are valid until ``flush`` returned."""

    @abstractmethod
    def flush(self) -> None:
        """Send what ``write`` gave, copy the rest."""

    @abstractmethod
    def write_eof(self) -> None:
        """No more will be written; the network learns it after what is pending."""

    @abstractmethod
    def write_reset(self) -> None:
        """The source was cut short: what is pending goes out, then the network learns that this is no orderly end.

        RFC 9113, 8.5: a reset of TCP becomes CONNECT_ERROR, and an error of the stream or of its connection a
        reset of TCP. An end would make a truncated answer look complete.
        """

    @abstractmethod
    def resume(self) -> None:
        """The peer has room again."""

    @abstractmethod
    def delivered(self, size: int) -> None:
        """``size`` bytes given by ``write`` have left."""

    def __enter__(self) -> End:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error if isinstance(error, Exception) else None)
