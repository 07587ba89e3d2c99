"""Makes ``/server_info``: version, state and settings, in the format of ``envoy.admin.v3.ServerInfo``."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from xds.proto.dump import to_dict
from xds.proto.envoy.admin.v3 import admin_pb2 as admin
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.admin.process import version

_64_BIT = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def server_info(proxy: InspectedProxy) -> dict[str, Any]:
    """Return the page's JSON object. Like in Envoy, ``command_line_options`` contains every field."""
    uptime = f"{int(proxy.clock.monotonic() - proxy.started)}s"
    return {
        "version": version(),
        "state": str(proxy.state),
        "uptime_current_epoch": uptime,
        "uptime_all_epochs": uptime,
        "hot_restart_version": "disabled",
        "command_line_options": _options(proxy),
        "node": to_dict(proxy.bootstrap.message.node),
    }


def _options(proxy: InspectedProxy) -> dict[str, Any]:
    settings = proxy.settings
    known = {
        "concurrency": 1,
        "config_path": settings.bootstrap,
        "log_level": settings.log_level,
        "file_flush_interval": _seconds(settings.log_flush_s),
        "drain_time": _seconds(settings.drain_s),
        "parent_shutdown_time": _seconds(settings.shutdown_s),
        "disable_hot_restart": True,
        "restart_epoch": settings.restart_epoch,
        "allow_unknown_static_fields": False,
    }
    fields = sorted(admin.CommandLineOptions.DESCRIPTOR.fields, key=lambda field: field.number)
    return {field.name: known.get(field.name, _default(field)) for field in fields}


def _seconds(value: float) -> str:
    return f"{value:g}s"


def _default(field: FieldDescriptor) -> Any:
    if field.is_repeated:
        return []
    if field.message_type is not None:
        return "0s"  # all message fields of this type are durations
    if field.enum_type is not None:
        return field.enum_type.values_by_number[0].name
    return str(field.default_value) if field.cpp_type in _64_BIT else field.default_value
