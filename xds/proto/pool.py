"""The descriptor pool of this project's messages.

protoc's Python output registers every file in the process-wide default pool, which refuses a second definition of a
full name: ``google.rpc.Status`` of googleapis-common-protos or ``envoy.service.discovery.v3.DiscoveryRequest`` of
xds-protos would then fail to import after ours, or ours after theirs. ``make proto`` therefore rewrites the generated
modules to register here.

A pool is closed: a message of this pool has ``google.protobuf.Any`` and the other well-known types of this pool as its
fields, so their files are added first. Their classes are in :mod:`xds.proto.well_known`.
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
