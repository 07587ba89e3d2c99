"""The messages between the two processes of a hand-over, in both dialects. Pure.

The *giver* is the old process, which has connections. The *taker* is the new process, which continues them::

    taker                             giver
    Greeting, perhaps TakeNow  --->
                               <---   Greeting, or Busy
                               <---   SliceBegins
    Ready                      --->
                               <---   Offer (state and descriptors of one unit), for each unit of the slice
    Taken, or Declined         --->
                               <---   Go, or Keep
                               <---   SliceEnds
                               ...
                               <---   Finished

A unit (a tunnel connection with its relays, or a single relay) is paused between its offer and the giver's
:class:`Go` or :class:`Keep`. After :class:`Go` the taker owns the unit. If the taker does not answer in time, the
giver keeps the unit and sends :class:`Keep`. If the giver ends before sending either message, the taker discards
the unit. During a slice neither process serves other connections, so that their traffic does not delay the offers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from hbone.aio.handover import UnitState

SCHEMA: Final = 1
"""The schema version of all messages. It is increased when the previous version would misread a message."""
OLDEST_SCHEMA: Final = 1
"""The oldest schema version that this version can read."""
SLICE_S: Final = 0.1
"""The longest time, in seconds, that a slice can keep a process from serving its other connections."""


class Greeting(Struct, frozen=True, kw_only=True, tag=True):
    """The first message of each side, giver and taker.

    Attributes:
        version: the program's version, for logs.
        schema, oldest: the schema version of the sender's messages, and the oldest version that the sender can
            read.
        pods: the number of pods that the sender serves. In Envoy's dialect, the number of listeners.
        dialect: the dialect of the sender's configuration, Istio or Envoy.
        slices: whether the sender can read :class:`SliceBegins` and :class:`SliceEnds`. The giver does not send
            these to a taker that cannot read them.
    """

    version: str
    schema: int
    oldest: int
    pods: int = 0
    dialect: str = "istio"
    slices: bool = False


class TakeNow(Struct, frozen=True, tag=True):
    """Asks the giver to hand over its connections and exit, because the taker replaces it now."""


class Busy(Struct, frozen=True, kw_only=True, tag=True):
    """The giver already serves another taker, or cannot hand over to this one. The channel closes after this
    message.
    """

    reason: str


class Offer(Struct, frozen=True, kw_only=True):
    """Offers one unit. Its file descriptors are sent along with the message. Each dialect adds further fields.

    Attributes:
        number: the unit's number in the following messages.
        unit: the state of the unit's HTTP/2 engine, TLS and sockets.
    """

    number: int
    unit: UnitState

    @property
    def connections(self) -> int:
        """The number of pod connections, or 1 for a tunnel connection without tunnels."""
        return max(1, len(self.unit.relays))


class SliceBegins(Struct, frozen=True, tag=True):
    """Begins a slice. The taker answers :class:`Ready`, and reads only offers until :class:`SliceEnds`, but at
    most for :data:`SLICE_S`.
    """


class Ready(Struct, frozen=True, tag=True):
    """The taker has stopped serving other connections, and reads the offers of a slice."""


class SliceEnds(Struct, frozen=True, tag=True):
    """Ends a slice: both processes serve their other connections again."""


class Taken(Struct, frozen=True, tag=True):
    """The taker has rebuilt a unit, and waits for :class:`Go` before continuing the unit."""

    number: int


class Declined(Struct, frozen=True, tag=True):
    """The taker cannot continue a unit."""

    number: int
    reason: str


class Go(Struct, frozen=True, tag=True):
    """The unit now belongs to the taker."""

    number: int


class Keep(Struct, frozen=True, tag=True):
    """The giver keeps the unit."""

    number: int


class Finished(Struct, frozen=True, kw_only=True, tag=True):
    """The giver has offered all units that can move. ``left`` is the number of connections that stay, for logs."""

    given: int
    left: int


FromGiver: TypeAlias = Greeting | Busy | SliceBegins | Offer | Go | Keep | SliceEnds | Finished
FromTaker: TypeAlias = Greeting | TakeNow | Ready | Taken | Declined

#: Parses a message from the giver; raises :class:`Unreadable` if the bytes are not a valid message.
ReadGiver: TypeAlias = Callable[[bytes], FromGiver]

_encoder: Final = msgspec.msgpack.Encoder()
_from_taker: Final[msgspec.msgpack.Decoder[FromTaker]] = msgspec.msgpack.Decoder(FromTaker)


class Unreadable(Exception):
    """The bytes are not a valid message from the other side (giver or taker)."""


def encode(message: FromGiver | FromTaker) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def reader_of(offer: type[Offer]) -> ReadGiver:
    """Return a parser for messages from a giver. ``offer`` is the front end's type of :class:`Offer`."""
    decoder = msgspec.msgpack.Decoder(Greeting | Busy | SliceBegins | offer | Go | Keep | SliceEnds | Finished)

    def read(data: bytes) -> FromGiver:
        try:
            found: FromGiver = decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise Unreadable(str(error)) from error
        return found

    return read


def from_taker(data: bytes) -> FromTaker:
    """Parse a message from the taker.

    Raises:
        Unreadable: the bytes are not a message from the taker.
    """
    try:
        return _from_taker.decode(data)
    except msgspec.MsgspecError as error:
        raise Unreadable(str(error)) from error
