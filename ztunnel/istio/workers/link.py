"""What the main process and its workers say to each other, and how it reads as bytes. Pure.

A frame is its length, the number of descriptors that come with it, and one pickled value. Both ends are of one
version, for a worker is started by the main process from the same files; so values go as they are, and nothing is
negotiated. What arrives is made of the classes named here, of the model and of the configuration, and of nothing
else: a worker that somebody has taken over does not get to choose what the main process, which holds the token of
the node, constructs.

Descriptors travel beside the bytes, in order: of a Unix socket they cannot overtake the frame that they belong to.
"""

import io
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from xds.model.authorization import AuthorizationPolicy
from xds.model.identity import SpiffeId
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.istio.config import AmbientConfig, PodName

Resource = Workload | Service | AuthorizationPolicy

_HEADER = struct.Struct("!IB")
#: Far beyond what is sent in one piece; a length like that is a sign of lost step.
MOST_BYTES: Final = 64 * 1024 * 1024
#: As many descriptors as one frame can have: a namespace and four listeners.
MOST_DESCRIPTORS: Final = 8

_MODULES: Final = (
    "xds.model.",
    "ztunnel.istio.config",
    "ztunnel.istio.metrics",
    "ztunnel.istio.workers.link",
)
_OTHERS: Final = frozenset(
    {("ipaddress", f"IPv{version}{kind}") for version in (4, 6) for kind in ("Address", "Network")}
)


class Corrupt(Exception):
    """The other process sent what is no frame, or values it may not send; nothing after it can be trusted."""


# What is told, and needs no answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The first words to a worker. With them comes the memory where workers count their connections.

    Attributes:
        config: without what only the main process needs: tokens and headers.
        index, workers: which worker of how many.
        log_filter: in force now; ``config`` has the one of the start.
    """

    config: AmbientConfig
    index: int
    workers: int
    log_filter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChange:
    """One batch, or a part of it: nothing is put in force before its last part is there.

    Attributes:
        removed: uids of workloads and keys of services.
        removed_policies: apart, for names of services and policies may coincide.
        more: further parts follow.
    """

    put: tuple[Resource, ...] = ()
    removed: tuple[str, ...] = ()
    removed_policies: tuple[str, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateIssued:
    """A certificate with its key, in PEM: new, or renewed."""

    wanted: SpiffeId
    identity: SpiffeId
    chain_pem: bytes
    roots_pem: bytes
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RevocationsChanged:
    """The revocation lists in force, in DER."""

    lists: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LogFilterChanged:
    """The whole filter in force."""

    text: str


# What a worker is asked


@dataclass(frozen=True, slots=True)
class Caught:
    """Whether everything told before is in force. No value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A listening socket that comes as a descriptor, and how it was made."""

    port: int
    host: str
    transparent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPod:
    """Carry the connections of a pod. No value.

    Descriptors: the pod's network namespace, if ``has_namespace``, then the sockets of ``listening``.
    """

    number: int
    name: PodName
    has_namespace: bool
    listening: tuple[Listening, ...]


@dataclass(frozen=True, slots=True)
class StopPod:
    """End a pod's proxy at once. No value."""

    number: int


@dataclass(frozen=True, slots=True)
class DrainPod:
    """Let a pod's connections end within a time. No value; the answer comes when they have."""

    number: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CountsWanted:
    """What has been counted: parts of it (:class:`ztunnel.istio.metrics.Counts`)."""


@dataclass(frozen=True, slots=True)
class ConnectionsWanted:
    """Live connections: :class:`ConnectionsPart`, several times per pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionsPart:
    """Entries of the dump, ``inbound`` or ``outbound``, of a pod."""

    number: int
    direction: str
    entries: tuple[dict[str, object], ...]


# What the main process is asked


@dataclass(frozen=True, slots=True)
class CertificateWanted:
    """Have a certificate for an identity; it is told before the answer. No value, or refused with the reason."""

    identity: SpiffeId


@dataclass(frozen=True, slots=True)
class KeyWanted:
    """On demand: have the control plane tell about a key. Whether it did in time; what it said is told before."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressWanted:
    """What the pod's DNS proxy says of a name: an address or ``None``."""

    number: int
    name: str
    ipv6: bool


Told = Begin | MeshChange | CertificateIssued | RevocationsChanged | LogFilterChanged
AskedOfWorker = Caught | StartPod | StopPod | DrainPod | CountsWanted | ConnectionsWanted
AskedOfMain = CertificateWanted | KeyWanted | AddressWanted
Question = AskedOfWorker | AskedOfMain


@dataclass(frozen=True, slots=True)
class Ask:
    """A question; its number is the asker's."""

    number: int
    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A part of an answer.

    Attributes:
        refused: why there is none, instead of a value.
        more: further parts follow.
    """

    number: int
    value: object = None
    refused: str | None = None
    more: bool = False


Message = Told | Ask | Reply


class _ByValue(dict[type, Callable[[Any], tuple[type, tuple[object]]]]):
    """How enumerations are written: as a call of their class, in any Python.

    Up to 3.11.3 it is one of ``getattr`` or ``or_`` otherwise, which nobody may name here.
    """

    def __missing__(self, kind: type) -> Callable[[Any], tuple[type, tuple[object]]]:
        if not issubclass(kind, Enum):
            raise KeyError(kind)
        self[kind] = found = lambda member: (kind, (member.value,))
        return found


_by_value = _ByValue()


def encode(message: Message, descriptors: int = 0) -> bytes:
    """One frame, with which so many descriptors go."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, protocol=5)
    pickler.dispatch_table = _by_value
    pickler.dump(message)
    body = written.getvalue()
    if len(body) > MOST_BYTES or descriptors > MOST_DESCRIPTORS:
        raise ValueError(f"{type(message).__name__} is too much for one frame: {len(body)} bytes")
    return _HEADER.pack(len(body), descriptors) + body


class Decoder:
    """Bytes as they come, to messages.

    Args:
        trusted: they come from the main process, which may send whole meshes and is obeyed anyway. Of a worker
            nothing is believed: its frames are read by Python, ten times slower, because the fast reader
            takes gigabytes for the six bytes that name an object by a large number.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self._buffer = bytearray()
        self._values = _Values if trusted else _CarefulValues

    def receive(self, data: bytes) -> None:
        """Take what came."""
        self._buffer += data

    def __iter__(self) -> Iterator[tuple[Message, int]]:
        """The complete messages, each with the number of its descriptors.

        Raises:
            Corrupt: from here on nothing can be read.
        """
        while len(self._buffer) >= _HEADER.size:
            length, descriptors = _HEADER.unpack_from(self._buffer)
            if length > MOST_BYTES or descriptors > MOST_DESCRIPTORS:
                raise Corrupt(f"a frame of {length} bytes and {descriptors} descriptors")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            yield self._message(body), descriptors

    def _message(self, body: bytes) -> Message:
        try:
            message = self._values(io.BytesIO(body)).load()
        except Corrupt:
            raise
        except Exception as error:  # whatever unpickling makes of foreign bytes
            raise Corrupt(f"a frame that cannot be read: {error!r}") from error
        if not isinstance(message, Message):
            raise Corrupt(f"a frame that is no message: {type(message).__name__}")
        return message


class _Values(pickle.Unpickler):
    """Reads fast."""

    def find_class(self, module: str, name: str) -> Any:
        return _named(module, name, super().find_class)


class _CarefulValues(pickle._Unpickler):
    """Reads with memory in proportion to what is read."""

    def find_class(self, module: str, name: str) -> Any:
        return _named(module, name, super().find_class)


def _named(module: str, name: str, find: Callable[[str, str], Any]) -> type:
    """A class that is named here; nothing else is found, and nothing but a class is called."""
    if (module, name) not in _OTHERS and not module.startswith(_MODULES):
        raise Corrupt(f"a value of {module}.{name}")
    found = find(module, name)
    if not isinstance(found, type) or found.__module__ != module:
        raise Corrupt(f"{module}.{name}, which is no value")
    return found
