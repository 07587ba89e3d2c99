"""The messages between the main process and its workers, and their encoding. Pure.

A frame is its length (4 bytes), the number of accompanying file descriptors (1 byte) and one message in
MessagePack. Messages are typed and tagged (msgspec). A frame that is not a message for its direction is a
:class:`ProtocolViolation`. Both processes run the same files, so they need no version negotiation.

**Trust.** A worker parses untrusted bytes and can be compromised. The main process has the node's token. So
messages from a worker are limited to the small types below: texts, numbers, identities, counts. The main process
also sends values of the mesh model, which msgspec cannot encode, because they are unions of plain dataclasses.
These values are sent as a pickle inside the frame (:class:`MeshChange`, :class:`Begin`). Only a worker reads
pickles, and a worker must trust its main process anyway.

File descriptors are sent as ancillary data. On a Unix stream socket they arrive in order with their frame.
"""

import pickle
import struct
from collections.abc import Iterator
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from xds.model.authorization import AuthorizationPolicy
from xds.model.identity import SpiffeId
from xds.model.refused import RefusedResource
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.proxy.flows.ring import RingCounts
from ztunnel.proxy.istio.accounting.metrics import Counts
from ztunnel.proxy.istio.settings.config import IstioConfig, PodName
from ztunnel.proxy.tap.request import TapRequest, Totals

Resource = Workload | Service | AuthorizationPolicy | RefusedResource

_HEADER = struct.Struct("!IB")
#: The longest frame sent to a worker, in bytes. It holds far more than
#: :data:`ztunnel.proxy.istio.workers.mesh_replica.BATCH` resources.
MAX_BYTES: Final = 64 * 1024 * 1024
#: The longest frame sent by a worker, in bytes. Workers split long answers into parts.
MAX_WORKER_BYTES: Final = 4 * 1024 * 1024
#: The most file descriptors in one frame: a network namespace and its listening sockets.
MAX_DESCRIPTORS: Final = 8


class ProtocolViolation(Exception):
    """The other process sent an invalid frame, or a message that it is not allowed to send. The channel cannot be
    used any more.
    """


# Notifications to a worker, which it does not answer


class Begin(Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a worker, accompanied by the shared memory of :class:`ConnectionCounts`.

    Attributes:
        pickled_config: see :meth:`config`. Tokens and headers are removed, because only the main process needs
            them.
        index: the worker's index.
        workers: the number of workers.
        log_filter: the current log filter. The one in the configuration was used at the start.
    """

    pickled_config: bytes
    index: int
    workers: int
    log_filter: str

    @property
    def config(self) -> IstioConfig:
        """The configuration, unpickled. Only a worker may read this, because a pickle must come from a trusted
        process.
        """
        loaded = pickle.loads(self.pickled_config)
        assert isinstance(loaded, IstioConfig)
        return loaded


class MeshChange(Struct, frozen=True, kw_only=True, tag=True):
    """A batch of mesh changes, or part of one. A batch is applied once its last part has arrived.

    Attributes:
        pickled: see :meth:`put`.
        removed: uids of workloads, keys of services and names of refused resources.
        removed_policies: keys of policies. They are not in ``removed``, because a service can have the same key.
        more: whether further parts follow.
    """

    pickled: bytes = b""
    removed: tuple[str, ...] = ()
    removed_policies: tuple[str, ...] = ()
    more: bool = False

    @property
    def put(self) -> tuple[Resource, ...]:
        """The new and changed resources, unpickled. Only a worker may read this, because a pickle must come from a
        trusted process.
        """
        loaded = pickle.loads(self.pickled) if self.pickled else ()
        assert isinstance(loaded, tuple)
        return loaded


def pickled(value: IstioConfig | tuple[Resource, ...]) -> bytes:
    """Pickle a configuration or resources, for the messages above."""
    return pickle.dumps(value, protocol=5)


class CertificateIssued(Struct, frozen=True, kw_only=True, tag=True):
    """A new or renewed certificate was issued. Certificate and private key are in PEM."""

    wanted: SpiffeId
    identity: SpiffeId
    chain_pem: bytes
    roots_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        return f"CertificateIssued(wanted={self.wanted})"  # a private key must not be logged


class RevocationsChanged(Struct, frozen=True, tag=True):
    """The revocation lists have changed. ``lists`` are the current ones, in DER."""

    lists: tuple[bytes, ...]


class LogFilterChanged(Struct, frozen=True, tag=True):
    """The log filter has changed. ``text`` is the complete current filter."""

    text: str


class NamesGiven(Struct, frozen=True, kw_only=True, tag=True):
    """The main process's DNS proxy has answered a pod's query for a name. Sent only if addons are loaded."""

    namespace: str
    pod: str
    name: str
    addresses: tuple[str, ...]


Notification = NamesGiven | Begin | MeshChange | CertificateIssued | RevocationsChanged | LogFilterChanged


# Requests to a worker


class Barrier(Struct, frozen=True, tag=True):
    """Wait until the worker has applied all earlier notifications. The answer has no value."""


class Turn(Struct, frozen=True, tag=True):
    """Check that the worker's event loop is not hanging. The answer has no value."""


class Listening(Struct, frozen=True, kw_only=True):
    """The parameters of a listening socket, whose descriptor is sent along."""

    port: int
    host: str
    transparent: bool


class StartPod(Struct, frozen=True, kw_only=True, tag=True):
    """Start carrying the connections of a pod. The answer has no value.

    Descriptors: the pod's network namespace, if ``has_namespace``, then the sockets of ``listening``.
    """

    number: int
    name: PodName
    has_namespace: bool
    listening: tuple[Listening, ...]


class StopPod(Struct, frozen=True, tag=True):
    """End a pod's proxy at once. The answer has no value."""

    number: int


class DrainPod(Struct, frozen=True, tag=True):
    """Drain a pod's connections within a time limit. The answer has no value, and is sent after the last
    connection has ended.
    """

    number: int
    timeout_s: float


class MeetSuccessor(Struct, frozen=True, tag=True):
    """Take over open connections from the predecessor's worker with the same index, then wait for the successor's
    worker.

    The answer has no value.
    """


class HandOver(Struct, frozen=True, tag=True):
    """Stop accepting connections, because a successor accepts them, and hand over open connections to it within
    some seconds. The answer has no value.
    """

    seconds: float


class GetCounts(Struct, frozen=True, tag=True):
    """Return all counters of the worker, in parts (:class:`CountsPart`)."""


class GetConnections(Struct, frozen=True, tag=True):
    """Return the worker's open connections. The answer has several parts per pod (:class:`ConnectionsPart`)."""


class GetFlows(Struct, frozen=True, kw_only=True, tag=True):
    """Return the worker's last ended connections, in parts (:class:`FlowsPart`).

    Attributes:
        after_ns: return only entries that ended after this time.
        last: return at most this number of the newest entries.
    """

    after_ns: int
    last: int


class TapPod(Struct, frozen=True, tag=True):
    """Capture a pod's new connections until the other end of the socket sends EOF. Answered by :class:`TapTotals`.

    Descriptors: the socket that receives the packets.
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
    """Request a certificate. The answer has no value: :class:`CertificateIssued` is sent first."""

    identity: SpiffeId


class FetchResource(Struct, frozen=True, tag=True):
    """Request a resource from the control plane, with on-demand xDS. The answer is whether the control plane
    responded in time. The resulting mesh changes are sent before the answer.
    """

    key: str


class ResolveName(Struct, frozen=True, kw_only=True, tag=True):
    """Resolve a name like the pod's DNS proxy. The answer is an address or ``None``."""

    number: int
    name: str
    ipv6: bool


RequestToMain = GetCertificate | FetchResource | ResolveName


# Responses


class CountsPart(Struct, frozen=True, tag=True):
    """An answer part with some of a worker's counters."""

    counts: Counts


class ConnectionsPart(Struct, frozen=True, kw_only=True, tag=True):
    """An answer part with some open connections of one pod, as entries of the config dump."""

    number: int
    direction: Literal["inbound", "outbound"]
    entries: tuple[dict[str, str | int | float | None], ...]


class FlowsPart(Struct, frozen=True, tag=True):
    """An answer part with some ended connections, each as a time in nanoseconds and a line of JSON.

    Attributes:
        ring: the counts of the worker's flight recorder. Only in the first part, which has no lines.
    """

    lines: tuple[tuple[int, str], ...] = ()
    ring: RingCounts = RingCounts()


class TapTotals(Struct, frozen=True, tag=True):
    """The totals of a finished packet capture in a worker."""

    totals: Totals


Value = CountsPart | ConnectionsPart | FlowsPart | TapTotals | bool | str | None
BodyT = TypeVar("BodyT")


class Request(Struct, Generic[BodyT], frozen=True, tag=True):
    """A request. The sender chooses its number, and the response repeats this number."""

    number: int
    body: BodyT


class Response(Struct, frozen=True, kw_only=True, tag=True):
    """A part of the answer to a request.

    Attributes:
        refused: why the request was refused. ``None`` if it succeeded.
        more: whether further parts follow.
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


def encode(message: Message, descriptors: int = 0, most_bytes: int = MAX_BYTES) -> bytes:
    """Return the frame of a message that is sent with ``descriptors`` file descriptors.

    Raises:
        ValueError: the message is longer than ``most_bytes``, the limit of the process that reads it.
    """
    body = _encoder.encode(message)
    if len(body) > most_bytes or descriptors > MAX_DESCRIPTORS:
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
        """Remove and yield the complete messages, each with its number of descriptors.

        Raises:
            ProtocolViolation: the bytes are invalid, and no more messages can be read.
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
