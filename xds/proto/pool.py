"""The descriptor pool of this project's messages.

The modules that protoc generates register every file in the process-wide default pool, which refuses a second
definition of a full name. After an import of our messages, ``google.rpc.Status`` of googleapis-common-protos or
``envoy.service.discovery.v3.DiscoveryRequest`` of xds-protos could then not be imported, or the reverse. ``make
proto`` therefore rewrites the generated modules to register here.

Messages of a pool can only refer to types of the same pool. So the files of ``google.protobuf.Any`` and of the
other well-known types are added first. Their classes are in :mod:`xds.proto.well_known`.
"""

from typing import Final

from google.protobuf import (
    any_pb2,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor_pool import DescriptorPool

POOL: Final = DescriptorPool()

for _file in (any_pb2, duration_pb2, empty_pb2, field_mask_pb2, struct_pb2, timestamp_pb2, wrappers_pb2):
    POOL.AddSerializedFile(_file.DESCRIPTOR.serialized_pb)
