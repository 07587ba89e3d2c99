"""ZDS, how a node agent announces pods to a proxy: messages as values, bytes both ways (``istio.workload.zds``).

One message is one packet of at most :data:`PACKET_BYTES`. The proxy says hello, then every request of the agent
gets exactly one answer, and nothing is ever sent unasked. A pod's network namespace travels beside its ``Add``
as a descriptor; how many came is an argument here, the descriptors themselves are ``channel.py``'s business.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from google.protobuf.message import DecodeError

from xds.proto.istio.zds import zds_pb2
from xds.proto.istio.zds.zds_pb2 import (
    Ack,
    AddWorkload,
    DelWorkload,
    KeepWorkload,
    Version,
    WorkloadInfo,
    WorkloadRequest,
    WorkloadResponse,
    ZdsHello,
)
from ztunnel.istio.zds.pods import PodInfo, PodUid

#: What either side reads at once; a longer packet counts as truncated.
PACKET_BYTES = 1024
# Two tags, and two lengths of two bytes each, around the text of an answer.
_ANSWER_OVERHEAD = 6
_CUT = "..."


class ZdsError(Exception):
    """The peer did not keep to the protocol.

    ::

        ZdsError
        ├── Unreadable     a packet that is no message, or came with the wrong descriptors
        └── Unexpected     a message that has no meaning now, or lacks what it is about
    """

    doing = "failure to speak ZDS"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.doing} : {self.reason}"


class Unreadable(ZdsError):
    """See :class:`ZdsError`; its text is what the agent is told."""

    doing = "failure to read message"


class Unexpected(ZdsError):
    """See :class:`ZdsError`; its text is what the agent is told."""

    doing = "failure to process message"


@dataclass(frozen=True, slots=True)
class AddPod:
    """A pod is there; its network namespace comes along."""

    uid: PodUid
    info: PodInfo


@dataclass(frozen=True, slots=True)
class KeepPod:
    """A pod is there, and the agent has not found its namespace yet: leave its proxy running."""

    uid: PodUid


@dataclass(frozen=True, slots=True)
class DeletePod:
    """A pod is gone."""

    uid: PodUid


@dataclass(frozen=True, slots=True)
class SnapshotSent:
    """Every pod of the node has been named; what was not, is gone."""


Request: TypeAlias = AddPod | KeepPod | DeletePod | SnapshotSent


def hello_bytes() -> bytes:
    """The proxy's first and only unasked packet."""
    return ZdsHello(version=Version.V1).SerializeToString()


def read_hello(data: bytes) -> None:
    """Check a proxy's first packet.

    Raises:
        Unreadable: no hello, or of a version that this is not.
    """
    try:
        version = ZdsHello.FromString(data).version
    except DecodeError as error:
        raise Unreadable(f"no hello: {error}") from None
    if version != Version.V1:
        raise Unreadable(f"hello of version {version}; this is version {Version.V1}")


def request_bytes(request: Request) -> bytes:
    """A request as a packet.

    Raises:
        ValueError: longer than a packet: names that no Kubernetes object could have.
    """
    # Named by a string, because one of the fields is called like a keyword of Python.
    named: dict[str, Any]
    match request:
        case AddPod(uid, info):
            workload = WorkloadInfo(name=info.name, namespace=info.namespace, service_account=info.service_account)
            named = {"add": AddWorkload(uid=uid, workload_info=workload)}
        case KeepPod(uid):
            named = {"keep": KeepWorkload(uid=uid)}
        case DeletePod(uid):
            named = {"del": DelWorkload(uid=uid)}
        case SnapshotSent():
            named = {"snapshot_sent": zds_pb2.SnapshotSent()}
        case _:
            assert_never(request)
    data = WorkloadRequest(**named).SerializeToString()
    if len(data) > PACKET_BYTES:
        raise ValueError(f"{len(data)} bytes for one pod, ZDS takes {PACKET_BYTES}: {str(request)[:80]}{_CUT}")
    return data


def read_request(data: bytes, descriptors: int) -> Request:
    """A packet of the agent as a value.

    Args:
        data: the packet.
        descriptors: how many came with it.

    Raises:
        Unreadable: no message, none of the four, or not exactly the descriptors it needs.
        Unexpected: a pod is added without saying who it is.
    """
    try:
        message = WorkloadRequest.FromString(data)
    except DecodeError as error:
        raise Unreadable(str(error)) from None
    kind = message.WhichOneof("payload")
    if kind is None:
        raise Unreadable("no payload, or one that this version does not know")
    if kind == "add":
        if descriptors == 0:
            raise Unreadable("No control message")
        if descriptors > 1:
            raise Unreadable(f"Expected 1 FD, got {descriptors}")
        return _added(message.add)
    if descriptors:
        raise Unreadable("Unexpected control message")
    if kind == "keep":
        return KeepPod(PodUid(message.keep.uid))
    if kind == "del":
        return DeletePod(PodUid(getattr(message, "del").uid))
    return SnapshotSent()


def _added(message: AddWorkload) -> AddPod:
    if not message.HasField("workload_info"):
        raise Unexpected(f"no workload_info for {message.uid!r}")
    info = message.workload_info
    return AddPod(
        PodUid(message.uid),
        PodInfo(name=info.name, namespace=info.namespace, service_account=info.service_account),
    )


def answer_bytes(error: str = "") -> bytes:
    """The answer to a request; an error's text is cut to what fits into a packet."""
    room = PACKET_BYTES - _ANSWER_OVERHEAD
    text = error.encode(errors="replace")
    if len(text) > room:
        text = text[: room - len(_CUT)] + _CUT.encode()
    # "ignore": the cut may have gone through a character.
    return WorkloadResponse(ack=Ack(error=text.decode(errors="ignore"))).SerializeToString()


def read_answer(data: bytes) -> str:
    """An answer as the error it reports, empty for success.

    Raises:
        Unreadable: no message, or not an acknowledgement.
    """
    try:
        message = WorkloadResponse.FromString(data)
    except DecodeError as error:
        raise Unreadable(str(error)) from None
    if not message.HasField("ack"):
        raise Unreadable("an answer without ack")
    return message.ack.error
