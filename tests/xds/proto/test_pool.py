"""Our descriptor pool: apart from everybody else's, and with all that protobuf does for well-known types."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from google.protobuf import any_pb2, descriptor_pool, json_format, text_format

from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from xds.proto.google.rpc.status_pb2 import Status
from xds.proto.pool import POOL
from xds.proto.well_known import Any, Duration, StringValue, Struct, Timestamp, UInt32Value

ROOT = Path(__file__).parents[3]
#: Installed by `make setup` from requirements/rivals.lock: xds-protos and googleapis-common-protos.
RIVALS = Path(sys.prefix) / "rivals"

OURS = "from xds.proto import registry"
THEIRS = "from google.rpc import status_pb2; from envoy.service.discovery.v3 import ads_pb2, discovery_pb2"
#: A message of one pool read by the other: both have the fields.
COMPARE = """
ours = registry.message_for("envoy.service.discovery.v3.DiscoveryRequest")
theirs = discovery_pb2.DiscoveryRequest
assert ours is not theirs and ours.DESCRIPTOR.full_name == theirs.DESCRIPTOR.full_name
request = theirs(type_url="t", error_detail=status_pb2.Status(code=3, message="m"))
read = ours.FromString(request.SerializeToString())
assert (read.type_url, read.error_detail.code, read.error_detail.message) == ("t", 3, "m")
assert registry.message_for("google.rpc.Status") is not status_pb2.Status
"""


@pytest.mark.skipif(not RIVALS.is_dir(), reason="`make setup` installs what this test imports")
@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("path", ["ours first", "theirs beside ours"])
def test_packages_with_the_same_messages_live_in_one_process(first: str, path: str, tmp_path: Path) -> None:
    """Two packages with the same messages can be imported in either order. ``xds`` is found in our folder, or in
    one folder that has both.
    """
    entries = [str(ROOT), str(RIVALS)]
    if path == "theirs beside ours":
        # Like after pip: the __init__.py of the last installed one, here xds-protos'.
        shared = tmp_path / "xds"
        shared.mkdir()
        for folder in (ROOT / "xds", RIVALS / "xds"):
            for entry in folder.iterdir():
                link = shared / entry.name
                link.unlink(missing_ok=True)
                link.symlink_to(entry)
        entries.insert(0, str(tmp_path))
    imports = [OURS, THEIRS] if first == "ours" else [THEIRS, OURS]
    program = "\n".join([f"import sys; sys.path[:0] = {entries!r}", *imports, COMPARE])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_no_file_of_ours_is_in_the_default_pool() -> None:
    for name in ("google.rpc.Status", "envoy.config.cluster.v3.Cluster"):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindMessageTypeByName(name)
        assert POOL.FindMessageTypeByName(name).file.pool is POOL


def test_well_known_types_keep_their_methods() -> None:
    packed = Any()
    packed.Pack(Cluster(name="c"))
    assert packed.Is(Cluster.DESCRIPTOR)
    unpacked = Cluster()
    assert packed.Unpack(unpacked)
    assert unpacked.name == "c"
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=1.5))
    assert duration.ToJsonString() == "1.500s"
    stamp = Timestamp()
    stamp.FromJsonString("2026-01-01T00:00:00Z")
    assert stamp.ToSeconds() == 1767225600
    struct = Struct()
    struct.update({"a": {"b": [1, "x", None]}})
    assert struct["a"]["b"][1] == "x"


def test_fields_are_of_the_well_known_classes() -> None:
    """Otherwise assigning and copying between them would fail, or ``isinstance`` be false."""
    response = DiscoveryResponse()
    response.resources.add().Pack(Cluster(name="c"))
    assert type(response.resources[0]) is Any
    response.resources.append(registry.pack(Cluster(name="d")))
    node = Node()
    node.metadata.update({"k": "v"})
    assert type(node.metadata) is Struct
    assert type(Cluster().connect_timeout) is Duration
    assert type(Cluster().per_connection_buffer_limit_bytes) is UInt32Value
    assert type(registry.unpack(registry.pack(StringValue(value="s")))) is StringValue
    assert type(DiscoveryRequest().error_detail) is Status


def test_json_and_text_of_any_need_our_pool() -> None:
    response = DiscoveryResponse(type_url="t", resources=[registry.pack(Cluster(name="c"))])
    shown = json.loads(json_format.MessageToJson(response, descriptor_pool=POOL))
    assert shown["resources"] == [{"@type": registry.type_url(Cluster), "name": "c"}]
    assert json_format.ParseDict(shown, DiscoveryResponse(), descriptor_pool=POOL) == response
    text = text_format.MessageToString(response, descriptor_pool=POOL)
    assert text_format.Parse(text, DiscoveryResponse(), descriptor_pool=POOL) == response


def test_classes_of_two_pools_do_not_mix() -> None:
    """Why :mod:`xds.proto.well_known` exists."""
    with pytest.raises(TypeError):
        DiscoveryResponse().resources.append(any_pb2.Any())
