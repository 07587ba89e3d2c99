"""The sidecar options that the author of a pod can set by annotations. Pure.

Names and meanings are the same as in Istio's injector. A pod with an unusable value is denied, and all such values
are reported together. Ignoring an unusable exclusion would do the pod's author more harm than denying the pod.
Annotations that only Envoy could obey, and misspelt ones, cause warnings.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from xds.digits import whole_number
from xds.errors import ConfigError
from ztunnel.runtime.formats.go_values import parse_bool
from ztunnel.runtime.formats.go_yaml import load
from ztunnel.sidecar.capture_lists import all_or_networks, all_or_ports, interfaces, networks, ports
from ztunnel.sidecar.inject.config import SidecarConfig

T = TypeVar("T")

MODE: Final = "sidecar.istio.io/interceptionMode"
NATIVE: Final = "sidecar.istio.io/nativeSidecar"
REWRITE: Final = "sidecar.istio.io/rewriteAppHTTPProbers"
STATUS_PORT: Final = "status.sidecar.istio.io/port"
PROXY_CONFIG: Final = "proxy.istio.io/config"
#: The annotations with lists of captured traffic: the flag of ``ztunnel init`` for each, and its reader.
TRAFFIC: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "traffic.sidecar.istio.io/includeOutboundIPRanges": ("-i", all_or_networks),
    "traffic.sidecar.istio.io/excludeOutboundIPRanges": ("-x", networks),
    "traffic.sidecar.istio.io/includeInboundPorts": ("-b", all_or_ports),
    "traffic.sidecar.istio.io/excludeInboundPorts": ("-d", ports),
    "traffic.sidecar.istio.io/includeOutboundPorts": ("-q", ports),
    "traffic.sidecar.istio.io/excludeOutboundPorts": ("-o", ports),
    "traffic.sidecar.istio.io/excludeInterfaces": ("-c", interfaces),
    "istio.io/reroute-virtual-interfaces": ("-k", interfaces),
    "traffic.sidecar.istio.io/kubevirtInterfaces": ("-k", interfaces),
}
_DEFAULT_STATUS_PORT: Final = 15020
_READINESS: Final = "readiness.status.sidecar.istio.io/"
_RESOURCES: Final = {
    "sidecar.istio.io/proxyCPU": ("requests", "cpu"),
    "sidecar.istio.io/proxyMemory": ("requests", "memory"),
    "sidecar.istio.io/proxyCPULimit": ("limits", "cpu"),
    "sidecar.istio.io/proxyMemoryLimit": ("limits", "memory"),
}
_VOLUMES: Final = ("sidecar.istio.io/userVolume", "sidecar.istio.io/userVolumeMount")
#: Annotations that only Envoy and its agent use. They are accepted with a warning.
_ENVOYS: Final = (
    "sidecar.istio.io/agentLogLevel",
    "sidecar.istio.io/bootstrapOverride",
    "sidecar.istio.io/capNetBindService",
    "sidecar.istio.io/componentLogLevel",
    "sidecar.istio.io/discoveryAddress",
    "sidecar.istio.io/enableCoreDump",
    "sidecar.istio.io/extraStatTags",
    "sidecar.istio.io/proxyImageType",
    "sidecar.istio.io/statsCompression",
    "sidecar.istio.io/statsHistogramBuckets",
    "sidecar.istio.io/statsInclusionPrefixes",
    "sidecar.istio.io/statsInclusionRegexps",
    "sidecar.istio.io/statsInclusionSuffixes",
)
_OTHERS: Final = (
    MODE,
    NATIVE,
    REWRITE,
    STATUS_PORT,
    "sidecar.istio.io/inject",
    "sidecar.istio.io/logLevel",
    "sidecar.istio.io/proxyImage",
    "sidecar.istio.io/status",
)
_KNOWN: Final = (*TRAFFIC, *_RESOURCES, *_VOLUMES, *_ENVOYS, *_OTHERS)
_PREFIXES: Final = ("sidecar.istio.io/", "traffic.sidecar.istio.io/", _READINESS, "status.sidecar.istio.io/")
_LEVELS: Final = ("trace", "debug", "info", "warning", "warn", "error", "critical", "off")
#: A quantity in the Kubernetes API's notation (resource.Quantity).
_QUANTITY: Final = re.compile(
    r"\d+(\.\d*)?([eE][-+]?\d+|[numkMGTPE]|[KMGTPE]i)?|\.\d+([numkMGTPE]|[KMGTPE]i)?", re.ASCII
)


class BadAnnotations(Exception):
    """All unusable annotations of a pod. Each text names its annotation."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options set by a pod's annotations, with the configuration's values as defaults.

    Attributes:
        capture: whether the pod gets rules (false for interceptionMode NONE).
        flags: the flags of ``ztunnel init``, with their values.
        native: whether to use a native sidecar. ``None`` leaves this to the template.
        rewrite: whether the proxy answers the application's probes.
        status_port: the proxy's metrics port. 0: it answers no probes, and has no readiness probe.
        readiness: fields of the proxy's readiness probe.
        resources: the proxy container's resources.
        image, log_level: the proxy container's image and log level.
        proxy_config: the value of ``proxy.istio.io/config``.
        volumes, mounts: further volumes and mounts of the proxy container.
        warnings: for the author.
    """

    capture: bool = True
    flags: Mapping[str, str] = field(default_factory=dict)
    native: bool | None = None
    rewrite: bool = True
    status_port: int = _DEFAULT_STATUS_PORT
    readiness: Mapping[str, int] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    image: str = ""
    log_level: str = "info"
    proxy_config: Mapping[str, Any] = field(default_factory=dict)
    volumes: tuple[Mapping[str, Any], ...] = ()
    mounts: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()


def asked(annotations: Mapping[str, Any], config: SidecarConfig) -> Asked:
    """Return the options that annotations set.

    Raises:
        BadAnnotations: with every fault.
    """
    reader = _Reader(annotations)
    mode = reader.read(MODE, _mode, "REDIRECT")
    flags = dict(config.flags)
    for name, (flag, read) in TRAFFIC.items():
        if name in annotations:
            reader.read(name, read, None)
            flags[flag] = str(annotations[name]).strip()
    sizes: dict[str, dict[str, str]] = {}
    for name, (kind, resource) in _RESOURCES.items():
        if (quantity := reader.read(name, _quantity, "")) != "":
            sizes.setdefault(kind, {})[resource] = quantity
    readiness = {}
    for key in ("initialDelaySeconds", "periodSeconds", "failureThreshold"):
        number = reader.read(_READINESS + key, _unsigned, None)
        if number is not None:
            readiness[key] = number
    none: tuple[Mapping[str, Any], ...] = ()
    volumes, mounts = (reader.read(name, _named_objects, none) for name in _VOLUMES)
    native: bool | None = reader.read(NATIVE, parse_bool, None)
    status_port = reader.read(STATUS_PORT, _status_port, _DEFAULT_STATUS_PORT)
    found = Asked(
        capture=mode != "NONE",
        flags=flags,
        native=native,
        rewrite=reader.read(REWRITE, parse_bool, config.rewrite_probes),
        status_port=status_port,
        readiness=readiness,
        resources=sizes or config.resources,
        image=reader.read("sidecar.istio.io/proxyImage", str.strip, ""),
        log_level=reader.read("sidecar.istio.io/logLevel", _level, config.log_level),
        proxy_config=reader.read(PROXY_CONFIG, lambda text: _proxy_config(text, status_port), {}),
        volumes=volumes,
        mounts=mounts,
        warnings=tuple(_warnings(annotations)),
    )
    if reader.faults:
        raise BadAnnotations(reader.faults)
    return found


def _warnings(annotations: Mapping[str, Any]) -> list[str]:
    found = []
    for name in annotations:
        if name in _ENVOYS:
            found.append(f"annotation {name} is ignored: it is for Envoy")
        elif name.startswith(_PREFIXES) and name not in _KNOWN and not name.startswith(_READINESS):
            near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.8)
            found.append(f"annotation {name} is not known{f'; did you mean {near[0]}?' if near else ''}")
    return found


class _Reader:
    def __init__(self, annotations: Mapping[str, Any]) -> None:
        self._annotations = annotations
        self.faults: list[str] = []

    def read(self, name: str, read: Callable[[str], T], default: T) -> T:
        if name not in self._annotations:
            return default
        value = self._annotations[name]
        try:
            if not isinstance(value, str):
                raise ValueError(f"must be a string, not {value!r}")
            return read(value)
        except ValueError as error:
            self.faults.append(f"annotation {name}: {error}")
            return default


def _mode(text: str) -> Literal["REDIRECT", "NONE"]:
    if text == "TPROXY":
        raise ValueError(
            "TPROXY needs a proxy with CAP_NET_ADMIN, which this sidecar does not have: use REDIRECT,"
            " or the template ambient, where applications see their clients' addresses"
        )
    if text not in ("REDIRECT", "NONE"):
        raise ValueError(f"must be REDIRECT or NONE, not {text!r}")
    return "NONE" if text == "NONE" else "REDIRECT"


def _unsigned(text: str) -> int | None:
    number = whole_number(text, 2**31 - 1)
    if number is None:
        raise ValueError(f"must be a whole number from 0, not {text!r}")
    return number


def _status_port(text: str) -> int:
    number = whole_number(text, 65535)
    if number is None:
        raise ValueError(f"must be a port, or 0 for none, not {text!r}")
    if number in (15000, 15001, 15006, 15008, 15021, 15053):
        raise ValueError(f"port {text} is already used by the proxy")
    return number


def _quantity(text: str) -> str:
    if _QUANTITY.fullmatch(text) is None:
        raise ValueError(f"must be a quantity such as 100m or 128Mi, not {text!r}")
    return text


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise ValueError(f"must be one of {', '.join(_LEVELS)}, not {text!r}")
    return {"warning": "warn", "critical": "error"}.get(text, text)


def _proxy_config(text: str, status_port: int) -> Mapping[str, Any]:
    """Read the configuration. A value that keeps the proxy from starting, or from becoming ready, is refused."""
    try:
        found = load(text)
    except ConfigError as error:
        raise ValueError(f"is {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("must be a mapping")
    metadata = found.get("proxyMetadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError("proxyMetadata must be a mapping")
    threads = found.get("concurrency")
    if threads is not None and not _is_number(threads, 0, 2**31 - 1):
        raise ValueError(f"concurrency must be a number of threads, not {threads!r}")
    for name in ("proxyAdminPort", "statsPort"):
        if name in found and not _is_number(found[name], 1, 65535):
            raise ValueError(f"{name} must be a port, not {found[name]!r}")
    stats_port = found.get("statsPort", status_port)
    if status_port and stats_port != status_port:
        # Kubelet's probes would go to the other port.
        raise ValueError(f"statsPort {stats_port} is not that of {STATUS_PORT}: {status_port}")
    return found


def _is_number(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _named_objects(text: str) -> tuple[Mapping[str, Any], ...]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    listed = (
        [{"name": name, **value} for name, value in found.items()] if _is_mapping_of_mappings(found) else found
    )
    if not isinstance(listed, list) or not all(isinstance(each, dict) and each.get("name") for each in listed):
        raise ValueError("must be a JSON list of objects with names, or an object of them")
    return tuple(listed)


def _is_mapping_of_mappings(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())
