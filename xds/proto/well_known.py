"""The well-known types of this project's descriptor pool (see :mod:`xds.proto.pool`).

Use these instead of ``google.protobuf.any_pb2`` and similar modules, because protobuf refuses to copy between
classes of two pools. They behave like the usual classes, including ``Any.Pack``, ``Duration.FromTimedelta`` and
``Struct.update``, which protobuf attaches by full name. For type checkers they are the usual classes, which the
stubs of the generated modules refer to.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.any_pb2 import Any
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.field_mask_pb2 import FieldMask
    from google.protobuf.struct_pb2 import ListValue, Struct, Value
    from google.protobuf.timestamp_pb2 import Timestamp
    from google.protobuf.wrappers_pb2 import BoolValue, StringValue, UInt32Value
else:
    from google.protobuf.message_factory import GetMessageClass

    from xds.proto.pool import POOL

    def _class(name):
        return GetMessageClass(POOL.FindMessageTypeByName(f"google.protobuf.{name}"))

    Any = _class("Any")
    BoolValue = _class("BoolValue")
    Duration = _class("Duration")
    Empty = _class("Empty")
    FieldMask = _class("FieldMask")
    ListValue = _class("ListValue")
    StringValue = _class("StringValue")
    Struct = _class("Struct")
    Timestamp = _class("Timestamp")
    UInt32Value = _class("UInt32Value")
    Value = _class("Value")

__all__ = [
    "Any",
    "BoolValue",
    "Duration",
    "Empty",
    "FieldMask",
    "ListValue",
    "StringValue",
    "Struct",
    "Timestamp",
    "UInt32Value",
    "Value",
]
