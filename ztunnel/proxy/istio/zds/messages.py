"""Encodes and decodes ZDS, the protocol of a node agent announcing pods to a proxy (``istio.workload.zds``).

One message is one packet of at most :data:`PACKET_BYTES`. The proxy sends a hello, and then exactly one answer per
request of the agent. A pod's network namespace accompanies its ``Add`` message as a file descriptor.
``channel.py`` sends and receives the descriptors. This module gets only their number.
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
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

#: The size of either side's receive buffer. A longer packet is truncated.
PACKET_BYTES = 1024
# The encoding overhead of an answer's text: two field tags, and two lengths of two bytes each.
_ANSWER_OVERHEAD = 6
_CUT = "..."


class ZdsError(Exception):
    """The peer broke the protocol. The agent receives the error's text as the answer.

    ::

        ZdsError
        ├── Unreadable     a malformed packet, or a wrong number of descriptors
        └── Unexpected     a message that is not allowed now, or lacks a field
    """

    doing = "failure to speak ZDS"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.doing} : {self.reason}"


class Unreadable(ZdsError):
    """The packet is not a valid message, or has the wrong number of descriptors."""

    doing = "failure to read message"


class Unexpected(ZdsError):
    """The message is not allowed in this state, or lacks a field."""

    doing = "failure to process message"


@dataclass(frozen=True, slots=True)
class AddPod:
    """Announces a pod. Its network namespace accompanies the message as a descriptor."""

    uid: PodUid
    info: PodInfo


@dataclass(frozen=True, slots=True)
class KeepPod:
    """Names a pod in the snapshot whose network namespace the agent has not found yet. An existing proxy of this
    pod keeps running.
    """

    uid: PodUid


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Announces that a pod was removed."""

    uid: PodUid


@dataclass(frozen=True, slots=True)
class SnapshotSent:
    """Ends the snapshot. Pods that the snapshot did not name have been removed from the node."""


Request: TypeAlias = AddPod | KeepPod | DeletePod | SnapshotSent


def hello_bytes() -> bytes:
    """Encode the proxy's hello, its only packet that does not answer a request."""
    return ZdsHello(version=Version.V1).SerializeToString()


def read_hello(data: bytes) -> None:
    """Check a proxy's first packet.

    Raises:
        Unreadable: the packet is not a hello, or has another version.
    """
    try:
        version = ZdsHello.FromString(data).version
    except DecodeError as error:
        raise Unreadable(f"no hello: {error}") from None
    if version != Version.V1:
        raise Unreadable(f"hello of version {version}; this is version {Version.V1}")


def request_bytes(request: Request) -> bytes:
    """Encode a request.

    Raises:
        ValueError: the request is longer than a packet. No valid Kubernetes names cause this.
    """
    # The arguments are in a dictionary, because the field ``del`` is a Python keyword.
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
    """Decode a packet of the agent.

    Args:
        data: the packet.
        descriptors: the number of descriptors that accompanied the packet.

    Raises:
        Unreadable: the packet is not one of the four messages, or has the wrong number of descriptors.
        Unexpected: an ``Add`` without ``workload_info``.
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
    """Encode the answer to a request. An error's text is cut to the size of a packet."""
    room = PACKET_BYTES - _ANSWER_OVERHEAD
    text = error.encode(errors="replace")
    if len(text) > room:
        text = text[: room - len(_CUT)] + _CUT.encode()
    # Decoding errors are ignored, because truncation can split a multi-byte character.
    return WorkloadResponse(ack=Ack(error=text.decode(errors="ignore"))).SerializeToString()


def read_answer(data: bytes) -> str:
    """Return the error that an answer reports, or an empty string for success.

    Raises:
        Unreadable: the packet is not an acknowledgement.
    """
    try:
        message = WorkloadResponse.FromString(data)
    except DecodeError as error:
        raise Unreadable(str(error)) from None
    if not message.HasField("ack"):
        raise Unreadable("an answer without ack")
    return message.ack.error
