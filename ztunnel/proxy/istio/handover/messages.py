"""What the two processes of a hand-over say to each other. Pure.

The *giver* has connections, and the *taker* continues them::

    taker                             giver
    Greeting, perhaps TakeNow  --->
                               <---   Greeting, or Busy
                               <---   Offer (state and descriptors of one unit)
    Taken, or Declined         --->
                               <---   Go, or Keep
                               ...
                               <---   Finished

A unit does nothing between its offer and the giver's next word about it. After :class:`Go` it is the taker's.
Without an answer in time the giver keeps it and says so. A taker that hears neither, because the giver is gone,
discards it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from hbone.aio.handover import UnitState
from xds.model.address import SocketAddress
from xds.model.calico import Flow
from xds.model.identity import SpiffeId
from ztunnel.proxy.istio.accounting.metrics import PeerLabels

SCHEMA: Final = 1
"""Of all messages. It grows when a process of the version before would misread a message."""
OLDEST_SCHEMA: Final = 1
"""The oldest that this version reads."""

PodKey: TypeAlias = tuple[str, str, str]
"""Namespace, name and service account."""


class Greeting(Struct, frozen=True, kw_only=True, tag=True):
    """The first message of each side.

    Attributes:
        version: of the program, for logs.
        schema, oldest: the newest schema of the side's offers, and the oldest that it reads.
        pods: of the taker: how many it carries.
    """

    version: str
    schema: int
    oldest: int
    pods: int = 0


class TakeNow(Struct, frozen=True, tag=True):
    """The taker replaces the giver now: hand over, and end."""


class Busy(Struct, frozen=True, kw_only=True, tag=True):
    """The giver has another taker, or cannot hand over to this one; the connection ends."""

    reason: str


class FactsValue(Struct, frozen=True, kw_only=True):
    """What policies judge of an inbound connection; ``names``: ``None`` for plain text."""

    source: SocketAddress
    destination: SocketAddress
    names: tuple[str, ...] | None


class PeerValue(Struct, frozen=True, kw_only=True):
    """The certificate at the other end of a node-local tunnel, in DER, without its key."""

    identity: SpiffeId
    chain: tuple[bytes, ...]
    roots: tuple[bytes, ...]


class RecordValue(Struct, frozen=True, kw_only=True):
    """The account of a connection (:class:`ztunnel.proxy.istio.accounting.record.Record`) without its bytes."""

    direction: str
    source: SocketAddress
    destination: SocketAddress
    age_s: float
    hbone_authority: str = ""
    source_workload: str = ""
    destination_workload: str = ""
    source_labels: PeerLabels = PeerLabels()
    destination_labels: PeerLabels = PeerLabels()
    source_identity: SpiffeId | None = None
    destination_identity: SpiffeId | None = None
    service: str = ""
    secured: bool = False
    dry_run: str = ""
    http_left: str = ""
    trace: bytes = b""


class EntryValue(Struct, frozen=True, kw_only=True):
    """A connection of a pod (:class:`ztunnel.proxy.istio.path.connections.PodConnection`)."""

    pod: PodKey
    record: RecordValue
    original: str | None = None
    actual: SocketAddress | None = None
    protocol: str = "TCP"
    facts: FactsValue | None = None
    flow: Flow | None = None
    peer: PeerValue | None = None


class CarrierValue(Struct, frozen=True, kw_only=True):
    """A pod's tunnel connection.

    Attributes:
        pod: whose.
        dialled: address and accepted identities of one that the pod has dialled. ``None``: it was accepted.
        idle_s: for how many seconds a dialled one has had no tunnels. If that began anew, frequent replacements
            would keep every connection that was ever dialled.
        source, local: of an accepted one, the peer's address and ours.
    """

    pod: PodKey
    dialled: tuple[SocketAddress, tuple[str, ...]] | None = None
    idle_s: float = 0.0
    source: SocketAddress | None = None
    local: SocketAddress | None = None


class Offer(Struct, frozen=True, kw_only=True, tag=True):
    """One unit, with its descriptors beside the message.

    Attributes:
        number: by which the following messages name it.
        unit: its engine, TLS and sockets.
        carrier: about its tunnel connection, if it has one.
        entries: for each relay its entries: one, or of a node-local tunnel the outbound and the inbound half.
    """

    number: int
    unit: UnitState
    carrier: CarrierValue | None
    entries: tuple[tuple[EntryValue, ...], ...]


class Taken(Struct, frozen=True, tag=True):
    """The taker can continue a unit, and waits for :class:`Go`."""

    number: int


class Declined(Struct, frozen=True, tag=True):
    """The taker cannot continue a unit."""

    number: int
    reason: str


class Go(Struct, frozen=True, tag=True):
    """The unit is the taker's."""

    number: int


class Keep(Struct, frozen=True, tag=True):
    """The giver keeps the unit."""

    number: int


class Finished(Struct, frozen=True, kw_only=True, tag=True):
    """The giver has offered everything that can move; ``left``: connections that stay, for logs."""

    given: int
    left: int


FromGiver: TypeAlias = Greeting | Busy | Offer | Go | Keep | Finished
FromTaker: TypeAlias = Greeting | TakeNow | Taken | Declined

_encoder: Final = msgspec.msgpack.Encoder()
_from_giver: Final[msgspec.msgpack.Decoder[FromGiver]] = msgspec.msgpack.Decoder(FromGiver)
_from_taker: Final[msgspec.msgpack.Decoder[FromTaker]] = msgspec.msgpack.Decoder(FromTaker)


class Unreadable(Exception):
    """The bytes are no message of that side."""


def encode(message: FromGiver | FromTaker) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def from_giver(data: bytes) -> FromGiver:
    """Read a message of the giver.

    Raises:
        Unreadable: it is none.
    """
    try:
        return _from_giver.decode(data)
    except msgspec.MsgspecError as error:
        raise Unreadable(str(error)) from error


def from_taker(data: bytes) -> FromTaker:
    """Read a message of the taker.

    Raises:
        Unreadable: it is none.
    """
    try:
        return _from_taker.decode(data)
    except msgspec.MsgspecError as error:
        raise Unreadable(str(error)) from error
