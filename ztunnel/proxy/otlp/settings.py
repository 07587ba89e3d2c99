"""Reads OpenTelemetry's variables: the destinations of metrics, access logs and spans, intervals, and resource
attributes.

Names and meanings follow OpenTelemetry's specification (SDK environment variables; OTLP exporter).
``http/protobuf`` is the only protocol. Nothing is sent unless an endpoint is named, although the specification has
a default, because a node proxy must not connect to an arbitrary listener on port 4318 of the node.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from xds.digits import whole_number
from ztunnel.runtime.settings import SettingsError, boolean

LIBRARY: Final = "opentelemetry.exporter.otlp.proto.http"
#: The limit of queued lines. A node with 3,000 connections a second would exceed the specification's 2,048 within
#: one delay.
_QUEUE: Final = 8192
_BATCH: Final = 512
#: The limit of queued spans is the specification's default, because spans are rarer than lines.
_SPAN_QUEUE: Final = 2048
_SPAN_DELAY_S: Final = 5.0
_EXPORTER: Final = "OTEL_EXPORTER_OTLP_"
_PATHS: Final = {"metrics": "v1/metrics", "logs": "v1/logs", "traces": "v1/traces"}
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_OF_EXPORTER: Final = (
    "ENDPOINT",
    "PROTOCOL",
    "HEADERS",
    "TIMEOUT",
    "CERTIFICATE",
    "CLIENT_CERTIFICATE",
    "CLIENT_KEY",
    "COMPRESSION",
)
#: Every variable that this module reads.
VARIABLES: Final = frozenset(
    {
        "OTEL_SDK_DISABLED",
        "OTEL_METRICS_EXPORTER",
        "OTEL_LOGS_EXPORTER",
        "OTEL_TRACES_EXPORTER",
        "OTEL_TRACES_SAMPLER",
        "OTEL_TRACES_SAMPLER_ARG",
        "OTEL_METRIC_EXPORT_INTERVAL",
        "OTEL_BLRP_MAX_QUEUE_SIZE",
        "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE",
        "OTEL_BLRP_SCHEDULE_DELAY",
        "OTEL_BSP_MAX_QUEUE_SIZE",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
        "OTEL_BSP_SCHEDULE_DELAY",
        "OTEL_RESOURCE_ATTRIBUTES",
        "OTEL_SERVICE_NAME",
        *(
            f"{_EXPORTER}{signal}{name}"
            for signal in ("", "METRICS_", "LOGS_", "TRACES_")
            for name in _OF_EXPORTER
        ),
    }
)

#: OpenTelemetry's other variables for exports, which have no effect here. They are listed so that they do not
#: count as misspelt.
OTHERS: Final = frozenset(
    {
        "OTEL_METRIC_EXPORT_TIMEOUT",
        "OTEL_BLRP_EXPORT_TIMEOUT",
        "OTEL_BSP_EXPORT_TIMEOUT",
    }
)
#: Variables that Envoy's dialect refuses, with the reasons.
_ENVOYS: Final = {
    f"{_EXPORTER}LOGS_ENDPOINT": "here the listeners' access loggers configure the export of logs",
    f"{_EXPORTER}TRACES_ENDPOINT": "this dialect creates no spans",
}
#: Variables whose values can be credentials.
SECRETS: Final = frozenset(name for name in VARIABLES if name.endswith("_HEADERS"))

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """The destination of one signal, and how to send it.

    Attributes:
        url: the URL, including the signal's path.
        headers: each request's headers. Values can be credentials.
        timeout_s: the time limit of an export with its retries.
        certificate: path of the trusted roots. Empty means the system's.
        client_certificate, client_key: paths of the proxy's certificate and key. Empty sends none.
        compression: ``none``, ``gzip`` or ``deflate``.
    """

    url: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_s: float = 10.0
    certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""
    compression: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """The limits of a queue, and of the requests that are made from the queue.

    Attributes:
        queue: the queue's limit. Above it the oldest items are dropped.
        batch: the largest number of items in a request.
        delay_s: how long the first item of a batch waits for others.
    """

    queue: int
    batch: int
    delay_s: float


_RATIO: Final = "parentbased_traceidratio"
#: The number of values that the last 7 octets of a trace id can have.
_TRACES: Final = 1 << 56
_LINES: Final = Batching(queue=_QUEUE, batch=_BATCH, delay_s=1.0)
_SPANS: Final = Batching(queue=_SPAN_QUEUE, batch=_BATCH, delay_s=_SPAN_DELAY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings:
    """The settings of all exports.

    Attributes:
        metrics, logs, traces: the destination of each signal. None disables it.
        sampled_below: see :func:`hbone.tunnel_headers.format_traceparent`. 0 means that this proxy starts no
            sampled trace.
        interval_s: the time between two exports of all metrics.
        lines, spans: the batching of access lines and spans.
        attributes: resource attributes set by the operator. They replace the proxy's own.
    """

    metrics: Destination | None = None
    logs: Destination | None = None
    traces: Destination | None = None
    sampled_below: int = 0
    interval_s: float = 60.0
    lines: Batching = _LINES
    spans: Batching = _SPANS
    attributes: tuple[tuple[str, str], ...] = ()


def otlp_settings(env: Mapping[str, str], *, access: bool = True) -> OtlpSettings | None:
    """Return the settings that the variables define. None if no destination is configured.

    Args:
        env: the environment of the process.
        access: whether access lines and spans can be exported. If not, the endpoint for all telemetry applies to
            metrics only, and an endpoint for logs or traces is refused.

    Raises:
        SettingsError: lists all unusable values, except values that can be credentials.
    """
    seen = _Variables(env)
    metrics = _destination(seen, "metrics")
    logs = _destination(seen, "logs") if access else None
    traces = _destination(seen, "traces") if access else None
    if not access:
        for variable, reason in _ENVOYS.items():
            if env.get(variable, "").strip():
                seen.refuse(f"{variable}: {reason}")
    sampler = seen.read("OTEL_TRACES_SAMPLER", _one_of("parentbased_always_off", "always_off", _RATIO), "")
    ratio = seen.read("OTEL_TRACES_SAMPLER_ARG", _share, 1.0) if sampler == _RATIO else 0.0
    settings = OtlpSettings(
        metrics=metrics,
        logs=logs,
        traces=traces if sampler != "always_off" else None,
        sampled_below=int(ratio * _TRACES) if traces is not None else 0,
        interval_s=seen.read("OTEL_METRIC_EXPORT_INTERVAL", _milliseconds, 60.0),
        lines=_batching(seen, "OTEL_BLRP", _LINES),
        spans=_batching(seen, "OTEL_BSP", _SPANS),
        attributes=_attributes(seen),
    )
    sends = bool(settings.metrics or settings.logs or settings.traces)
    if seen.read("OTEL_SDK_DISABLED", boolean, False):
        sends = False
    elif sends and not _installed():
        seen.refuse(f"{seen.endpoint}: OpenTelemetry's exporter is not installed: pip install 'ztunnel-py[otlp]'")
    if seen.faults:
        raise SettingsError(seen.faults)
    return settings if sends else None


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise ValueError("must be between 0 and 1")
    return value


class _Variables:
    """Reads variables and collects faults. As in the specification, an empty variable counts as unset.

    Attributes:
        endpoint: the first variable that has set an endpoint.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self.faults: list[str] = []
        self.endpoint = ""

    def read(self, name: str, parse: Callable[[str], ValueT], default: ValueT, *, secret: bool = False) -> ValueT:
        text = self._env.get(name, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except ValueError as error:
            self.refuse(f"{name}: {error}" if secret else f"{name}={text}: {error}")
            return default

    def refuse(self, fault: str) -> None:
        """Record a fault only once, because several signals can read the same variable."""
        if fault not in self.faults:
            self.faults.append(fault)

    def of(self, signal: str, name: str) -> str:
        """Return the name of a signal's own variable if that is set, otherwise the name of the variable for all
        signals.
        """
        own = f"{_EXPORTER}{signal.upper()}_{name}"
        return own if self._env.get(own, "").strip() else _EXPORTER + name


def _destination(seen: _Variables, signal: str) -> Destination | None:
    exporter = seen.read(f"OTEL_{signal.upper()}_EXPORTER", _one_of("otlp", "none"), "otlp")
    variable = seen.of(signal, "ENDPOINT")
    url = seen.read(variable, _url, "")
    seen.read(seen.of(signal, "PROTOCOL"), _one_of("http/protobuf"), "")
    certificate = seen.read(seen.of(signal, "CERTIFICATE"), _file, "")
    shown = seen.read(seen.of(signal, "CLIENT_CERTIFICATE"), _file, "")
    key = seen.read(seen.of(signal, "CLIENT_KEY"), _file, "")
    if bool(shown) != bool(key):
        seen.refuse(f"{seen.of(signal, 'CLIENT_CERTIFICATE')} and its key, _CLIENT_KEY, must be set together")
    nothing: tuple[tuple[str, str], ...] = ()
    headers = seen.read(seen.of(signal, "HEADERS"), _headers, nothing, secret=True)
    timeout_s = seen.read(seen.of(signal, "TIMEOUT"), _milliseconds, 10.0)
    compression = seen.read(seen.of(signal, "COMPRESSION"), _one_of("none", "gzip", "deflate"), "none")
    if not url or exporter == "none":
        return None
    seen.endpoint = seen.endpoint or variable
    if variable == f"{_EXPORTER}ENDPOINT":
        url = f"{url.rstrip('/')}/{_PATHS[signal]}"
    return Destination(
        url=url,
        headers=headers,
        timeout_s=timeout_s,
        certificate=certificate,
        client_certificate=shown,
        client_key=key,
        compression=compression,
    )


def _batching(seen: _Variables, prefix: str, default: Batching) -> Batching:
    found = Batching(
        queue=seen.read(f"{prefix}_MAX_QUEUE_SIZE", _count, default.queue),
        batch=seen.read(f"{prefix}_MAX_EXPORT_BATCH_SIZE", _count, default.batch),
        delay_s=seen.read(f"{prefix}_SCHEDULE_DELAY", _milliseconds, default.delay_s),
    )
    if found.batch > found.queue:
        seen.refuse(f"{prefix}_MAX_EXPORT_BATCH_SIZE={found.batch}: more than the queue holds, {found.queue}")
    return found


def _attributes(seen: _Variables) -> tuple[tuple[str, str], ...]:
    nothing: tuple[tuple[str, str], ...] = ()
    found = dict(seen.read("OTEL_RESOURCE_ATTRIBUTES", _pairs, nothing))
    name = seen.read("OTEL_SERVICE_NAME", str, "")
    return tuple((found | {"service.name": name} if name else found).items())


def _installed() -> bool:
    try:
        return importlib.util.find_spec(LIBRARY) is not None
    except ModuleNotFoundError:  # a parent package is not installed
        return False


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        usable = False
    if not usable:
        raise ValueError("must be a URL such as http://collector:4318")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("must be a URL without user, query and fragment")
    return text


def _milliseconds(text: str) -> float:
    return _count(text) / 1000


def _count(text: str) -> int:
    number = whole_number(text, 2**31 - 1)
    if not number:
        raise ValueError("must be a whole number above 0")
    return number


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError("must be " + " or ".join(allowed))
        return text

    return parse


def _file(text: str) -> str:
    if not os.access(text, os.R_OK) or not os.path.isfile(text):
        raise ValueError("no such file, or it cannot be read")
    return text


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Parse ``name=value,name=value``. Values can have percent encoding (W3C Baggage, without properties)."""
    found = []
    for number, item in enumerate(filter(str.strip, text.split(",")), start=1):
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"item {number} is not name=value")
        found.append((name.strip(), unquote(value.strip())))
    return tuple(found)


def _headers(text: str) -> tuple[tuple[str, str], ...]:
    found = _pairs(text)
    for number, (name, value) in enumerate(found, start=1):
        if not _TOKEN.fullmatch(name):
            raise ValueError(f"item {number} has no name of a header")
        if not re.fullmatch(r"[\x20-\x7e]*", value):
            raise ValueError(f"item {number} has a value that is not printable ASCII")
    return found
