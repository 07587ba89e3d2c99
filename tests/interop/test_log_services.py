"""Access log services: the same connections through Envoy and through ours, and what the same service is sent."""

import re
from typing import Any

import pytest
from google.protobuf import json_format

from tests.interop.loopback import until
from tests.interop.operators import Pair
from tests.interop.proxies import ENVOY
from tests.ztunnel.proxy.envoy.harness import Json, T, http2
from tests.ztunnel.proxy.envoy.telemetry.log_service import LogService
from xds.proto.pool import POOL

pytestmark = pytest.mark.interop

_KINDS = f"{T}envoy.extensions.access_loggers.grpc.v3"
#: What differs by the moment, is not measured here, or is ours to choose (the order of suites).
_UNMEASURED = re.compile(
    "startTime|duration|streamId|requestId|tlsSessionId|tlsCipherSuite|portValue|timeTo.*Byte|requestHeadersBytes"
    "|responseHeadersBytes|(up|down)stream(Wire|Header)Bytes(Sent|Received)"
)


class Logging(Pair):
    """A proxy of which every logger has a service beside its file."""

    def _open(self) -> None:
        self.service = self._stack.enter_context(LogService())
        super()._open()

    def _others(self) -> tuple[list[Json], list[Json]]:
        listeners, clusters = super()._others()
        address = {"socket_address": {"address": "127.0.0.1", "port_value": self.service.port}}
        load = {"cluster_name": "als", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
        log_service = {"name": "als", "type": "STATIC", "load_assignment": load}
        return listeners, [*clusters, {**log_service, "typed_extension_protocol_options": http2()}]

    def _logger(self, name: str) -> list[Json]:
        common = {
            "log_name": name,
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": "als"}},
            "buffer_flush_interval": "0.05s",
        }
        config: Json = {"@type": f"{_KINDS}.TcpGrpcAccessLogConfig", "common_config": common}
        if name in ("tunnel", "page"):
            config["@type"] = f"{_KINDS}.HttpGrpcAccessLogConfig"
            config["additional_request_headers_to_log"] = ["x-one"]
        return [*super()._logger(name), {"name": "service", "typed_config": config}]

    def entries(self) -> dict[str, list[Any]]:
        """All entries, by the name of their log."""
        names: dict[int, str] = {}
        found: dict[str, list[Any]] = {}
        for stream, message in list(self.service.messages):
            name = names.setdefault(stream, message.identifier.log_name)
            found.setdefault(name, []).extend((*message.tcp_logs.log_entry, *message.http_logs.log_entry))
        return found

    def seen(self) -> dict[str, list[Json]]:
        """Make the connections and return their entries, without those of attempts that were retried."""
        self.values()
        logs = ("tls", "tunnel", "outer", "inner", "dead", "page", "retried")
        until(lambda: all(len(self.entries().get(name, ())) == len(self._logged(name)) for name in logs))
        entries = self.entries()
        entries["retried"] = entries["retried"][-1:]
        return {
            name: sorted((_plain(each) for each in found), key=lambda entry: str(entry.get("request")))
            for name, found in entries.items()
        }


def _plain(entry: Any) -> Json:
    plain = json_format.MessageToDict(entry, descriptor_pool=POOL)
    return _without(plain)  # type: ignore[no-any-return]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if not _UNMEASURED.fullmatch(name)}
    return [_without(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
def test_log_services_get_the_same_entries_from_envoy_and_from_us() -> None:
    seen = {}
    for kind in ("envoy", "ours"):
        with Logging(kind) as proxy:
            seen[kind] = proxy.seen()
    assert seen["ours"] == seen["envoy"]
