"""The messages between the main process and its workers, and their bytes. Pure.

A frame is its length (4 bytes), the number of accompanying file descriptors (1 byte) and one message in
MessagePack. Messages are typed and tagged (msgspec): a frame that is not a message of its direction is a
:class:`ProtocolViolation`. Both ends run the same files, so there is no negotiation.

**Trust.** A worker parses untrusted bytes and can be compromised. The main process has the node's token. So
messages from a worker are limited to the small types below: texts, numbers, identities, counts. The other
direction also carries values of the mesh model, whose unions of plain dataclasses have no typed wire form. They
are sent as a pickle inside the frame (:class:`MeshChange`, :class:`Begin`). Only a worker reads it, and a worker
must trust its main process anyway.

Descriptors travel beside the bytes and in order: on a Unix stream socket they cannot overtake their frame.
"""

import pickle
import struct
from collections.abc import Iterator
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from xds.model.authorization import AuthorizationPolicy
from xds.model.identity import SpiffeId
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.proxy.istio.accounting.metrics import Counts
from ztunnel.proxy.istio.settings.config import IstioConfig, PodName
from ztunnel.proxy.tap.request import TapRequest, Totals

Resource = Workload | Service | AuthorizationPolicy

_HEADER = struct.Struct("!IB")
#: Longest frame to a worker: far beyond one batch of :data:`ztunnel.proxy.istio.workers.mesh_replica.BATCH`.
MAX_BYTES: Final = 64 * 1024 * 1024
#: Longest frame of a worker, which sends its pages in parts.
MAX_WORKER_BYTES: Final = 4 * 1024 * 1024
#: Most descriptors of one frame: a network namespace and its listeners.
MAX_DESCRIPTORS: Final = 8


class ProtocolViolation(Exception):
    """The other process sent no valid frame, or a message of the wrong direction. Later data cannot be trusted."""


# Notifications to a worker, without an answer


class Begin(Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a worker, accompanied by the shared memory of :class:`ConnectionCounts`.

    Attributes:
        pickled_config: see :meth:`config`. Without tokens and headers, which only the main process needs.
        index: the worker's index.
        workers: the number of workers.
        log_filter: the current log filter. The configuration has the filter at the start.
    """

    pickled_config: bytes
    index: int
    workers: int
    log_filter: str

    @property
    def config(self) -> IstioConfig:
        """The configuration. Only a worker reads it."""
        loaded = pickle.loads(self.pickled_config)
        assert isinstance(loaded, IstioConfig)
        return loaded


class MeshChange(Struct, frozen=True, kw_only=True, tag=True):
    """A batch of changes, or part of a batch. It is applied once the last part has arrived.

    Attributes:
        pickled: see :meth:`put`.
        removed: uids of workloads and keys of services.
        removed_policies: keys of policies, separate because services can have the same keys.
        more: further parts follow.
    """

    pickled: bytes = b""
    removed: tuple[str, ...] = ()
    removed_policies: tuple[str, ...] = ()
    more: bool = False

    @property
    def put(self) -> tuple[Resource, ...]:
        """New and changed resources. Only a worker reads them."""
        loaded = pickle.loads(self.pickled) if self.pickled else ()
        assert isinstance(loaded, tuple)
        return loaded


def pickled(value: IstioConfig | tuple[Resource, ...]) -> bytes:
    """Return the bytes of a configuration or of resources, for the messages above."""
    return pickle.dumps(value, protocol=5)


class CertificateIssued(Struct, frozen=True, kw_only=True, tag=True):
    """A new or renewed certificate with its key, in PEM."""

    wanted: SpiffeId
    identity: SpiffeId
    chain_pem: bytes
    roots_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        return f"CertificateIssued(wanted={self.wanted})"  # the key belongs in no log


class RevocationsChanged(Struct, frozen=True, tag=True):
    """The current revocation lists, in DER."""

    lists: tuple[bytes, ...]


class LogFilterChanged(Struct, frozen=True, tag=True):
    """The whole current log filter."""

    text: str


class NamesGiven(Struct, frozen=True, kw_only=True, tag=True):
    """The main process's DNS has answered a pod's query for a name. Sent only if addons are loaded."""

    namespace: str
    pod: str
    name: str
    addresses: tuple[str, ...]


Notification = NamesGiven | Begin | MeshChange | CertificateIssued | RevocationsChanged | LogFilterChanged


# Requests to a worker


class Barrier(Struct, frozen=True, tag=True):
    """Answered once all earlier notifications are applied. No value."""


class Turn(Struct, frozen=True, tag=True):
    """Answered by the worker's poller, which proves that it is not hanging. No value."""


class Listening(Struct, frozen=True, kw_only=True):
    """A listening socket passed as a descriptor, with its parameters."""

    port: int
    host: str
    transparent: bool


class StartPod(Struct, frozen=True, kw_only=True, tag=True):
    """Carry the connections of a pod. No value.

    Descriptors: the pod's network namespace, if ``has_namespace``, then the sockets of ``listening``.
    """

    number: int
    name: PodName
    has_namespace: bool
    listening: tuple[Listening, ...]


class StopPod(Struct, frozen=True, tag=True):
    """End a pod's proxy at once. No value."""

    number: int


class DrainPod(Struct, frozen=True, tag=True):
    """Drain a pod's connections within a time. No value. The response comes after the last one has ended."""

    number: int
    timeout_s: float


class MeetSuccessor(Struct, frozen=True, tag=True):
    """Take open connections from the worker of the same index in the predecessor, then wait for the successor's.

    No value.
    """


class HandOver(Struct, frozen=True, tag=True):
    """Leave the pods' ports to the successor, and give it open connections within some seconds. No value."""

    seconds: float


class GetCounts(Struct, frozen=True, tag=True):
    """Everything counted so far, in parts (:class:`CountsPart`)."""


class GetConnections(Struct, frozen=True, tag=True):
    """Live connections, in parts (:class:`ConnectionsPart`), several per pod."""


class GetFlows(Struct, frozen=True, kw_only=True, tag=True):
    """Requests the last ended connections, in parts (:class:`FlowsPart`).

    Attributes:
        after_ns: only entries that ended later.
        last: at most this number of the newest entries.
    """

    after_ns: int
    last: int


class TapPod(Struct, frozen=True, tag=True):
    """Capture a pod's new connections until the socket's other end sends EOF: :class:`TapTotals`.

    Descriptors: the socket that packets go to.
    """

    wanted: TapRequest


RequestToWorker = (
    Barrier
    | Turn
    | StartPod
    | StopPod
    | DrainPod
    | MeetSuccessor
    | HandOver
    | GetCounts
    | GetConnections
    | GetFlows
    | TapPod
)


# Requests to the main process


class GetCertificate(Struct, frozen=True, tag=True):
    """Request a certificate. No value: the certificate is notified before the response."""

    identity: SpiffeId


class FetchResource(Struct, frozen=True, tag=True):
    """On demand: request a resource from the control plane. Whether it answered in time; changes come before."""

    key: str


class ResolveName(Struct, frozen=True, kw_only=True, tag=True):
    """Look a name up as the pod's DNS proxy would: an address or ``None``."""

    number: int
    name: str
    ipv6: bool


RequestToMain = GetCertificate | FetchResource | ResolveName


# Responses


class CountsPart(Struct, frozen=True, tag=True):
    """A part of a worker's counters."""

    counts: Counts


class ConnectionsPart(Struct, frozen=True, kw_only=True, tag=True):
    """Entries of one pod in the dump."""

    number: int
    direction: Literal["inbound", "outbound"]
    entries: tuple[dict[str, str | int | float | None], ...]


class FlowsPart(Struct, frozen=True, tag=True):
    """Connections that ended: time in nanoseconds, and a line of JSON."""

    lines: tuple[tuple[int, str], ...]


class TapTotals(Struct, frozen=True, tag=True):
    """A tap's totals in a worker."""

    totals: Totals


Value = CountsPart | ConnectionsPart | FlowsPart | TapTotals | bool | str | None
BodyT = TypeVar("BodyT")


class Request(Struct, Generic[BodyT], frozen=True, tag=True):
    """A request; its number is the sender's."""

    number: int
    body: BodyT


class Response(Struct, frozen=True, kw_only=True, tag=True):
    """A part of the answer to a request.

    Attributes:
        refused: why the request has no value.
        more: further parts follow.
    """

    number: int
    value: Value = None
    refused: str | None = None
    more: bool = False


FromMain = (
    Begin
    | MeshChange
    | CertificateIssued
    | RevocationsChanged
    | LogFilterChanged
    | NamesGiven
    | Request[RequestToWorker]
    | Response
)
FromWorker = Request[RequestToMain] | Response
Message = FromMain | FromWorker

_encoder: Final = msgspec.msgpack.Encoder()


def encode(message: Message, descriptors: int = 0) -> bytes:
    """Return one frame that ``descriptors`` descriptors accompany.

    Raises:
        ValueError: it is more than a frame may hold.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES or descriptors > MAX_DESCRIPTORS:
        raise ValueError(f"{type(message).__name__} is too much for one frame: {len(body)} bytes")
    return _HEADER.pack(len(body), descriptors) + body


class FrameDecoder:
    """Splits a stream of bytes into messages.

    Args:
        from_main: whether the bytes come from the main process. A worker is allowed fewer messages.
    """

    def __init__(self, *, from_main: bool) -> None:
        self._buffer = bytearray()
        self._limit = MAX_BYTES if from_main else MAX_WORKER_BYTES
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            FromMain if from_main else FromWorker
        )

    def receive(self, data: bytes) -> None:
        """Append received bytes."""
        self._buffer += data

    def __iter__(self) -> Iterator[tuple[Message, int]]:
        """Remove and yield the complete messages, each with the number of its descriptors.

        Raises:
            ProtocolViolation: no more can be read from here on.
        """
        while len(self._buffer) >= _HEADER.size:
            length, descriptors = _HEADER.unpack_from(self._buffer)
            if length > self._limit or descriptors > MAX_DESCRIPTORS:
                raise ProtocolViolation(f"a frame of {length} bytes and {descriptors} descriptors")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            try:
                with memoryview(self._buffer)[_HEADER.size : end] as body:
                    message: Message = self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
                raise ProtocolViolation(f"a frame that is no message: {error}") from error
            del self._buffer[:end]
            yield message, descriptors
