"""Reads the Rust ztunnel's environment variables into an :class:`IstioConfig`, and reports all bad values
together.

Names, defaults and meanings are the same as in the Rust ztunnel. Additional variables are
``ZTUNNEL_CONNECT_RETRIES``, ``ZTUNNEL_NODE_LOCAL_SHORTCUT``, ``ZTUNNEL_OPEN_AHEAD``, ``ZTUNNEL_SPIN_US``,
``ZTUNNEL_METRIC_SERIES``, ``ZTUNNEL_METRIC_EXPIRY``, ``ZTUNNEL_METRIC_LABELS_REMOVED``,
``ZTUNNEL_HANDSHAKE_TIMEOUT``, ``ZTUNNEL_EARLY_DATA``, ``ZTUNNEL_CONNECT_TIMEOUT``, ``ZTUNNEL_ADDONS``,
``ZTUNNEL_ADDON_OPTION``, ``ZTUNNEL_ADDON_OPTIONS``, ``ZTUNNEL_TAP_SOCKET``, ``ZTUNNEL_UI``, ``ZTUNNEL_FLOWS``,
``ZTUNNEL_HUBBLE*``, ``ZTUNNEL_LOG_WAIT``, ``ZTUNNEL_HANDOVER_DIR``, ``ZTUNNEL_REPLACE``,
``ZTUNNEL_WARN_UNMATCHED``, ``ZTUNNEL_METRIC_PORTS``, and the variables in :mod:`ztunnel.policy.calico.settings`.
The variables in :mod:`ztunnel.proxy.otlp.settings` are OpenTelemetry's.
"""

import ipaddress
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hbone.limits import HANDSHAKE_TIMEOUT_S
from xds.digits import whole_number
from xds.errors import ConfigError
from ztunnel.policy.calico.settings import (
    DIRECTORY,
    HTTP_WAYPOINTS,
    SYNC,
    UNKNOWN_PODS,
    PolicySettings,
    policy_settings,
    sync_target,
    unknown_pods,
    waypoints,
)
from ztunnel.proxy.addons.settings import OPTIONS_FILE, AddonSettings, addon_settings
from ztunnel.proxy.addons.settings import VARIABLES as ADDON_VARIABLES
from ztunnel.proxy.flows.ring import CAPACITY, flow_count
from ztunnel.proxy.flows.settings import VARIABLES as HUBBLE
from ztunnel.proxy.flows.settings import hubble_settings
from ztunnel.proxy.istio.accounting.logs import InvalidLevel, LogFilter
from ztunnel.proxy.istio.accounting.metrics import EXPIRY_S, REMOVABLE_LABELS
from ztunnel.proxy.istio.certificates.credentials import Endpoint
from ztunnel.proxy.istio.certificates.manager import TlsPolicy
from ztunnel.proxy.istio.settings.app_probes import LEGACY_LOCALHOST, VARIABLE, AppProbe, parse_probers
from ztunnel.proxy.istio.settings.config import (
    DNS_PORT,
    ROOT_CERT,
    IstioConfig,
    OriginalSource,
    PodName,
    ProxyMode,
    SocketConfig,
)
from ztunnel.proxy.otlp.settings import OTHERS as OTHERS_OF_OTLP
from ztunnel.proxy.otlp.settings import VARIABLES as OTLP
from ztunnel.proxy.otlp.settings import OtlpSettings, otlp_settings
from ztunnel.proxy.ui.setting import VARIABLE as UI
from ztunnel.proxy.ui.setting import page_setting
from ztunnel.runtime.settings import (
    SPIN_US,
    SettingsError,
    boolean,
    duration_s,
    handover_dir,
    is_service_link,
    socket_path,
)

MESH_CONFIG = "./etc/istio/config/mesh"
ISTIOD = "https://istiod.istio-system.svc:15012"
#: The largest ``KEEPALIVE_TIME`` and ``_INTERVAL`` accepted by Linux (``MAX_TCP_KEEPIDLE`` in include/net/tcp.h).
_KEEPALIVE_LONGEST_S = 32767.0
#: The largest accepted number of worker processes, and the largest default.
MOST_WORKERS = 64
_MOST_BY_DEFAULT = 8

ValueT = TypeVar("ValueT")


def _number(smallest: int, largest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = whole_number(text, largest)
        if number is None or number < smallest:
            raise ValueError(f"must be a number from {smallest} to {largest}")
        return number

    return read


def _switch(text: str) -> bool:
    """Parse a boolean, written as a word or, for some variables, as a number. The Rust ztunnel accepts both."""
    return boolean({"1": "true", "0": "false", "": "false"}.get(text, text))


def _quantity(text: str) -> int:
    """Parse a number of CPUs in Kubernetes' quantity format, rounded up."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", text, re.ASCII)
    if match is None:
        raise ValueError("must be a CPU quantity such as 2, 1.5 or 500m")
    return math.ceil(float(match[1]) / (1000 if match[2] else 1))


def _address(text: str) -> str:
    """Return a control plane address with its scheme. Empty text (no address) is returned unchanged."""
    if not text:
        return text
    endpoint = Endpoint.parse(text)
    return endpoint.target if endpoint.target.startswith("unix:") else text if "://" in text else f"https://{text}"


class _Environment:
    """Reads environment variables, and collects faults, warnings and the names that were read."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.environment = env
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self.names: set[str] = set()

    def get(self, name: str, read: Callable[[str], ValueT], default: ValueT) -> ValueT:
        self.names.add(name)
        text = self.environment.get(name)
        if text is None:
            return default
        try:
            return read(text)
        except ValueError as error:
            self.faults.append(f"invalid env var {name}={text} ({error})")
            return default

    def text(self, name: str, default: str = "") -> str:
        return self.get(name, str, default)

    def prefixed(self, prefix: str) -> list[tuple[str, str]]:
        """Return the variables whose names begin with ``prefix``, as (rest of the name, value)."""
        return [
            (name[len(prefix) :], value)
            for name, value in sorted(self.environment.items())
            if name.startswith(prefix)
        ]


#: Variables that are known but not read here: other code reads them, or Istio's chart sets them without effect.
_OTHER_VARIABLES = frozenset(
    (
        "INPOD_ENABLED",
        "RUST_BACKTRACE",
        "KUBERNETES_SERVICE_HOST",
        "KUBERNETES_SERVICE_PORT",
        "ISTIO_META_CLUSTER_ID",
        *OTHERS_OF_OTLP,
    )
)
_PREFIXES = ("XDS_HEADER_", "CA_HEADER_", "ISTIO_META_", "ISTIO_METAJSON_", "KUBERNETES_")


def config_from(
    env: Mapping[str, str],
    *,
    cpus: int,
    arguments: str = "",
    read_file: Callable[[str], str | None] = lambda path: Path(path).read_text() if Path(path).exists() else None,
) -> IstioConfig:
    """Return the configuration that an environment describes.

    Args:
        env: the environment of the process.
        cpus: the number of CPUs that this process may use.
        arguments: the command line, for the dump.
        read_file: returns the text of a file, or None if it does not exist.

    Raises:
        SettingsError: lists all invalid values.
    """
    seen = _Environment(env)
    values: dict[str, Any] = {"arguments": arguments}
    proxy_config = _proxy_config(seen, read_file)
    _modes(seen, values)
    _names(seen, values)
    metadata = _metadata(seen, proxy_config, values)
    _control_plane(seen, values, proxy_config)
    _sockets(seen, values)
    _tunnels(seen, values)
    _limits(seen, values, proxy_config, cpus, read_file)
    _dns(seen, values, metadata)
    values["log_filter"] = seen.get("RUST_LOG", _log_filter, "info")
    values["log_json"] = _log_json(seen)
    _validate(seen, values)
    if seen.faults:
        raise SettingsError(seen.faults)
    return IstioConfig(**values, warnings=(*seen.warnings, *_unknown(env, seen.names)))


def _labels(text: str) -> frozenset[str]:
    found = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for name in sorted(found - REMOVABLE_LABELS):
        raise ValueError(f"{name} is no label of traffic that can be left out")
    return found


def _log_filter(text: str) -> str:
    try:
        LogFilter(text)
    except InvalidLevel as error:
        raise ValueError(f"{error.clause} is neither a level nor target=level") from error
    return text


def _log_json(seen: _Environment) -> bool:
    """Return whether log lines are written as JSON. An unknown format means plain text, as in the Rust ztunnel."""
    text = seen.text("LOG_FORMAT", "plain")
    if text.lower() not in ("", "plain", "text", "json"):
        seen.warnings.append(f"LOG_FORMAT={text} is neither plain nor json; lines are plain text")
    return text.lower() == "json"


def _compliance(text: str) -> str:
    """Return the known compliance policy with this name, ignoring case.

    An unknown policy is refused, because its restrictions could not be enforced. The Rust ztunnel ignores it.
    """
    if text.lower() not in ("", "pqc", "fips-140-2"):
        raise ValueError(
            "must be one of pqc, fips-140-2: without a known policy TLS would be weaker than asked for"
        )
    return text.lower()


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError("must be one of " + ", ".join(allowed))
        return text

    return read


def _proxy_config(seen: _Environment, read_file: Callable[[str], str | None]) -> dict[str, Any]:
    """Return ``defaultConfig`` of the mesh configuration file, overridden by ``PROXY_CONFIG``."""
    merged: dict[str, Any] = {}
    given = False
    for place, text, key in (
        (MESH_CONFIG, read_file(MESH_CONFIG), "defaultConfig"),
        ("PROXY_CONFIG", seen.get("PROXY_CONFIG", str, None), None),
    ):
        if text is None:
            continue
        from xds.proto import core_yaml  # imported only with these settings, because it takes 1 MiB

        try:
            loaded = core_yaml.load(text)
            if key is not None and isinstance(loaded, dict):
                loaded = loaded.get(key)
            loaded = {} if loaded is None else loaded
        except ConfigError as error:
            seen.faults.append(f"{place}: {error}")
            continue
        if not isinstance(loaded, dict):
            seen.faults.append(f"{place}: must be a mapping")
            continue
        given = given or bool(loaded)
        metadata = {**_string_map(merged.get("proxyMetadata")), **_string_map(loaded.get("proxyMetadata"))}
        merged |= loaded
        if metadata or "proxyMetadata" in loaded:
            merged["proxyMetadata"] = metadata
    if given and "proxyMetadata" not in merged:
        seen.faults.append("PROXY_CONFIG: missing field proxyMetadata")
    return merged


def _string_map(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    # YAML reads an unquoted true as a boolean, but metadata values are strings, so it becomes the word "true".
    return {str(k): str(item).lower() if isinstance(item, bool) else str(item) for k, item in value.items()}


def _modes(seen: _Environment, values: dict[str, Any]) -> None:
    mode = seen.get("PROXY_MODE", _one_of("shared", "dedicated"), "shared")
    values["proxy_mode"] = ProxyMode.DEDICATED if mode == "dedicated" else ProxyMode.SHARED
    values["proxy"] = seen.get("ENABLE_PROXY", boolean, True)

    def workload(text: str) -> PodName:
        pieces = text.split("/")
        if len(pieces) != 3 or not all(pieces):
            raise ValueError("must be namespace/name/serviceaccount")
        return PodName(namespace=pieces[0], name=pieces[1], service_account=pieces[2])

    values["workload"] = seen.get("PROXY_WORKLOAD_INFO", workload, None)
    values["sidecar"] = seen.get("ZTUNNEL_SIDECAR", boolean, False)
    no_probes: Mapping[str, AppProbe] = {}
    values["app_probes"] = seen.get(VARIABLE, parse_probers, no_probes)
    values["app_probes_localhost"] = seen.get(LEGACY_LOCALHOST, boolean, False)
    if values["sidecar"] and mode != "dedicated":
        seen.faults.append("ZTUNNEL_SIDECAR=true needs PROXY_MODE=dedicated")
        values["sidecar"] = False
    if mode == "dedicated" and values["workload"] is None and "PROXY_WORKLOAD_INFO" not in " ".join(seen.faults):
        seen.faults.append("PROXY_MODE=dedicated needs PROXY_WORKLOAD_INFO=namespace/name/serviceaccount")


def _names(seen: _Environment, values: dict[str, Any]) -> None:
    values["network"] = seen.text("NETWORK")
    values["node"] = seen.text("NODE_NAME")
    if not values["node"] and values["proxy_mode"] is ProxyMode.SHARED:
        seen.warnings.append("NODE_NAME is not set: the control plane cannot know which node this proxy serves")
    cluster = seen.text("CLUSTER_ID", "Kubernetes")
    values["cluster_id"] = seen.text("ISTIO_META_CLUSTER_ID", cluster)
    values["cluster_domain"] = seen.text("CLUSTER_DOMAIN", "cluster.local")
    values["trust_domain"] = seen.text("TRUST_DOMAIN", "cluster.local")
    name, namespace = seen.text("POD_NAME"), seen.text("POD_NAMESPACE")
    account = seen.text("SERVICE_ACCOUNT")
    values |= {"pod_name": name, "pod_namespace": namespace, "service_account": account}
    if name and namespace and account and values["proxy_mode"] is ProxyMode.SHARED:
        values["own_pod"] = PodName(name=name, namespace=namespace, service_account=account)
    values["instance_ip"] = seen.text("INSTANCE_IP", "1.1.1.1")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _metadata(seen: _Environment, proxy_config: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    metadata = {
        key.removeprefix("ISTIO_META_"): value
        for key, value in _string_map(proxy_config.get("proxyMetadata")).items()
    }
    metadata |= dict(seen.prefixed("ISTIO_META_"))
    values["proxy_metadata"] = metadata
    parsed = {}
    for key, text in seen.prefixed("ISTIO_METAJSON_"):
        try:
            parsed[key] = json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            # As in the Rust ztunnel, an invalid value is left out of the node's metadata, but does not prevent the
            # start.
            seen.warnings.append(f"environment variable ISTIO_METAJSON_{key} is ignored: not JSON: {error}")
    values["metadata_json"] = parsed
    return metadata


def _control_plane(seen: _Environment, values: dict[str, Any], proxy_config: dict[str, Any]) -> None:
    default = ISTIOD if seen.text("KUBERNETES_SERVICE_HOST") else "https://localhost:15012"
    discovery = str(proxy_config.get("discoveryAddress") or "")
    try:
        discovery = _address(discovery)
    except ValueError as error:
        seen.faults.append(f"PROXY_CONFIG: discoveryAddress: {discovery}: {error}")
    values["xds_address"] = seen.get("XDS_ADDRESS", _address, discovery or default)
    values["fake_ca"] = seen.get("FAKE_CA", boolean, False)
    ca = seen.get("CA_ADDRESS", _address, default)
    if not ca and not values["fake_ca"]:
        seen.faults.append("CA_ADDRESS must not be empty (FAKE_CA=true makes certificates for tests)")
    values["ca_address"] = "" if values["fake_ca"] else ca
    values["xds_root_ca"] = seen.text("XDS_ROOT_CA", ROOT_CERT)
    values["ca_root_ca"] = seen.text("CA_ROOT_CA", ROOT_CERT)
    values["alt_xds_hostname"] = seen.text("ALT_XDS_HOSTNAME")
    values["alt_ca_hostname"] = seen.text("ALT_CA_HOSTNAME")
    values["auth_token"] = seen.get("AUTH_TOKEN", str, None)
    for prefix, name in (("XDS_HEADER_", "xds_headers"), ("CA_HEADER_", "ca_headers")):
        headers = []
        for key, value in seen.prefixed(prefix):
            lower = key.lower()
            # Header values can be credentials, so error messages do not contain them.
            if not re.fullmatch(r"[0-9a-z_.-]+", lower) or lower.endswith("-bin") or lower.startswith("grpc-"):
                seen.faults.append(f"invalid env var {prefix}{key} (not the name of a gRPC header)")
            elif not re.fullmatch(r"[\x20-\x7e]*", value):
                seen.faults.append(f"invalid env var {prefix}{key} (not a printable ASCII value)")
            else:
                headers.append((lower, value))
        values[name] = tuple(headers)
    values["xds_on_demand"] = seen.get("XDS_ON_DEMAND", boolean, False)
    values["local_xds_path"] = seen.text("LOCAL_XDS_PATH")
    values["local_xds"] = seen.text("LOCAL_XDS")
    values["secret_ttl_s"] = seen.get("SECRET_TTL", duration_s, 86400.0)
    values["preferred_service_namespace"] = seen.text("PREFERED_SERVICE_NAMESPACE")
    values["crl_path"] = seen.text("CRL_PATH")


def _sockets(seen: _Environment, values: dict[str, Any]) -> None:
    shared = values["proxy_mode"] is ProxyMode.SHARED
    values["inpod_uds"] = seen.text("INPOD_UDS", "/var/run/ztunnel/ztunnel.sock")
    values["inpod_port_reuse"] = seen.get("INPOD_PORT_REUSE", boolean, True)
    mark = seen.get("PACKET_MARK", _number(0, 0xFFFFFFFF), 1337 if shared else 0)
    values["packet_mark"] = mark or None
    keepalive = seen.get("KEEPALIVE_ENABLED", boolean, True)
    time_s = _keepalive_s(seen, "KEEPALIVE_TIME")
    values["socket"] = SocketConfig(
        keepalive_time_s=time_s if keepalive else None,
        keepalive_interval_s=_keepalive_s(seen, "KEEPALIVE_INTERVAL"),
        keepalive_retries=_keepalive_retries(seen),
        user_timeout=seen.get("USER_TIMEOUT_ENABLED", boolean, False),
    )
    wanted = seen.get("ENABLE_ORIG_SRC", _one_of("true", "false", "auto"), "auto")
    if values["sidecar"]:
        # The following settings need CAP_NET_ADMIN, which a sidecar does not have.
        for name, given in (("ENABLE_ORIG_SRC", wanted == "true"), ("PACKET_MARK", bool(mark))):
            if given:
                seen.faults.append(f"{name} cannot be used with ZTUNNEL_SIDECAR=true, whose rules match the user")
        wanted = "false"
    values["original_source"] = OriginalSource(wanted)
    values["ipv6"] = seen.get("IPV6_ENABLED", boolean, True)


def _keepalive_s(seen: _Environment, name: str) -> float:
    """Return a keepalive setting in seconds, limited to the range that Linux accepts.

    Linux refuses values outside this range with EINVAL (``MAX_TCP_KEEPIDLE``, ``MAX_TCP_KEEPINTVL`` in
    ``include/net/tcp.h``). The Rust ztunnel ignores this error, so its connections keep the system's default of
    two hours.
    """
    wanted = seen.get(name, duration_s, 180.0)
    taken = min(max(wanted, 1.0), _KEEPALIVE_LONGEST_S)
    if taken != wanted:
        seen.warnings.append(f"{name}: Linux takes 1 to {_KEEPALIVE_LONGEST_S:.0f} s; {taken:.0f} s is used")
    return taken


def _keepalive_retries(seen: _Environment) -> int:
    retries = seen.get("KEEPALIVE_RETRIES", _number(0, 127), 9)
    if retries == 0:
        seen.warnings.append("KEEPALIVE_RETRIES: Linux takes 1 to 127; 1 is used")
    return max(retries, 1)


def _tunnels(seen: _Environment, values: dict[str, Any]) -> None:
    values["localhost_app_tunnel"] = seen.get("LOCALHOST_APP_TUNNEL", boolean, True)
    values["baggage"] = seen.get("ENABLE_RESPONSE_BAGGAGE", boolean, True)
    values["pool_max_streams"] = max(1, seen.get("POOL_MAX_STREAMS_PER_CONNECTION", _number(0, 65535), 100))
    values["pool_unused_release_s"] = seen.get("POOL_UNUSED_RELEASE_TIMEOUT", duration_s, 300.0)
    # The limits of SETTINGS and WINDOW_UPDATE (RFC 9113, 6.5.2 and 6.9). A connection's window cannot be smaller
    # than its initial size. Here a stream's window cannot be smaller either (hbone/windows.py).
    values["stream_window"] = seen.get("HTTP2_STREAM_WINDOW_SIZE", _number(16_384, 2**31 - 1), 4 * 1024 * 1024)
    values["connection_window"] = seen.get(
        "HTTP2_CONNECTION_WINDOW_SIZE", _number(65_535, 2**31 - 1), 16 * 1024 * 1024
    )
    values["frame_size"] = seen.get("HTTP2_FRAME_SIZE", _number(16_384, 2**24 - 1), 1024 * 1024)
    values["socks5"] = seen.get("UNSTABLE_ENABLE_SOCKS5", boolean, False)
    compliance = values["compliance"] = seen.get("COMPLIANCE_POLICY", _compliance, "")
    if compliance == "fips-140-2":
        seen.warnings.append(
            "COMPLIANCE_POLICY=fips-140-2: only approved groups and suites are used, of a cryptographic module"
            " that is not validated itself"
        )
    values["tls12"] = seen.get("TLS12_ENABLED", _switch, False)
    try:
        TlsPolicy.for_compliance(compliance, tls_1_2=values["tls12"])
    except ValueError as error:
        seen.faults.append(str(error))
    values["authz_info_logging"] = seen.get("AUTHZ_POLICY_INFO_LOGGING", _switch, False)
    values["metric_ports"] = seen.get("ZTUNNEL_METRIC_PORTS", _switch, False)
    values["warns_unmatched"] = seen.get("ZTUNNEL_WARN_UNMATCHED", _switch, False)
    values["connect_retries"] = seen.get("ZTUNNEL_CONNECT_RETRIES", _number(0, 10), 2)
    values["connect_timeout_s"] = seen.get("ZTUNNEL_CONNECT_TIMEOUT", duration_s, 10.0)
    values["handshake_timeout_s"] = seen.get("ZTUNNEL_HANDSHAKE_TIMEOUT", duration_s, HANDSHAKE_TIMEOUT_S)
    values["node_local_shortcut"] = seen.get("ZTUNNEL_NODE_LOCAL_SHORTCUT", boolean, True)
    values["early_data"] = seen.get("ZTUNNEL_EARLY_DATA", boolean, True)
    values["spin_us"] = seen.get("ZTUNNEL_SPIN_US", _number(0, 10_000), SPIN_US)
    values["open_ahead"] = seen.get("ZTUNNEL_OPEN_AHEAD", _number(0, 500), 0)


def _limits(
    seen: _Environment,
    values: dict[str, Any],
    proxy_config: dict[str, Any],
    cpus: int,
    read_file: Callable[[str], str | None],
) -> None:
    deadline: float | None = seen.get("CONNECTION_TERMINATION_DEADLINE", duration_s, None)
    grace: float | None = seen.get("TERMINATION_GRACE_PERIOD_SECONDS", duration_s, None)
    if deadline is None:
        deadline = 5.0 if grace is None else grace - 5 if grace > 10 else max(grace - 1, 1.0)
    values["drain_s"] = deadline
    values["worker_threads"] = _worker_threads(
        seen, proxy_config, cpus, dedicated=values["proxy_mode"] is ProxyMode.DEDICATED
    )
    if values["sidecar"] and values["worker_threads"] > 1:
        seen.warnings.append("ZTUNNEL_SIDECAR=true: one process carries the connections of one pod")
        values["worker_threads"] = 1
    for name, key, default in (("admin_port", "proxyAdminPort", 15000), ("stats_port", "statsPort", 15020)):
        port = proxy_config.get(key, default)
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            seen.faults.append(f"PROXY_CONFIG: {key}: {port!r} is not a port")
            port = default
        values[name] = port
    values["policies"] = _policies(seen)
    values["tap_socket"] = seen.get("ZTUNNEL_TAP_SOCKET", socket_path, "")
    values["handover_dir"] = seen.get("ZTUNNEL_HANDOVER_DIR", handover_dir, "")
    values["replace"] = seen.get("ZTUNNEL_REPLACE", _switch, False)
    if values["replace"] and not values["handover_dir"]:
        seen.faults.append("--replace (ZTUNNEL_REPLACE) needs ZTUNNEL_HANDOVER_DIR, where both processes meet")
    values["log_wait_s"] = seen.get("ZTUNNEL_LOG_WAIT", duration_s, 0.0)
    values["flows"] = seen.get("ZTUNNEL_FLOWS", flow_count, CAPACITY)
    values["metric_series"] = seen.get("ZTUNNEL_METRIC_SERIES", _number(100, 10_000_000), 20_000)
    values["metric_expiry_s"] = seen.get("ZTUNNEL_METRIC_EXPIRY", duration_s, EXPIRY_S)
    no_labels: frozenset[str] = frozenset()
    values["metric_labels_removed"] = seen.get("ZTUNNEL_METRIC_LABELS_REMOVED", _labels, no_labels)
    values["ui"] = seen.get(UI, page_setting, None)
    values["otlp"] = _otlp(seen)
    seen.names |= HUBBLE
    values["hubble"], faults = hubble_settings(seen.environment)
    seen.faults += faults
    values["addons"] = _addons(seen, read_file)


def _otlp(seen: _Environment) -> OtlpSettings | None:
    seen.names |= OTLP
    try:
        return otlp_settings(seen.environment)
    except SettingsError as error:
        seen.faults += error.faults
        return None


def _addons(seen: _Environment, read_file: Callable[[str], str | None]) -> AddonSettings | None:
    seen.names |= ADDON_VARIABLES
    path, contents = seen.environment.get(OPTIONS_FILE, ""), None
    if path:
        from xds.proto import core_yaml  # imported only with this file, because it takes 1 MiB

        try:
            text = read_file(path)
            if text is None:
                raise ConfigError("no such file")
            contents = core_yaml.load(text)
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            seen.faults.append(f"{OPTIONS_FILE}: {path}: {error}")
    found, faults = addon_settings(seen.environment, contents)
    seen.faults += faults
    return found


def _policies(seen: _Environment) -> PolicySettings | None:
    directory = seen.text(DIRECTORY)
    sync = seen.get(SYNC, lambda text: text and sync_target(text), "")
    unknown = seen.get(UNKNOWN_PODS, unknown_pods, "")
    none: frozenset[str] = frozenset()
    judging = seen.get(HTTP_WAYPOINTS, waypoints, none)
    try:
        return policy_settings(directory, sync, unknown, judging)
    except ValueError as error:
        seen.faults.append(str(error))
        return None


def _worker_threads(seen: _Environment, proxy_config: dict[str, Any], cpus: int, *, dedicated: bool) -> int:
    limit = seen.get("ZTUNNEL_RESOURCE_CPU_LIMIT", _quantity, 0)
    seen.get("ZTUNNEL_RESOURCE_CPU_REQUEST", _quantity, 0)  # only validated
    old_limit = seen.get("ZTUNNEL_CPU_LIMIT", _quantity, 0)
    available = limit or old_limit or cpus

    def threads(text: str) -> int:
        if re.fullmatch(r"\d+(\.\d+)?%", text, re.ASCII):
            return max(1, math.ceil(available * float(text[:-1]) / 100))
        count = _number(0, 4096)(text)
        return count or available

    # Each worker process holds its own copy of the mesh, unlike a thread of the Rust ztunnel. So the default is
    # low: one process per four CPUs, and one for a dedicated proxy.
    default = 1 if available <= 2 or dedicated else min(math.ceil(available / 4), _MOST_BY_DEFAULT)
    concurrency = proxy_config.get("concurrency")
    if isinstance(concurrency, int) and not isinstance(concurrency, bool) and concurrency >= 0:
        default = concurrency or available
    elif concurrency is not None:
        seen.faults.append(f"PROXY_CONFIG: concurrency: {concurrency!r} is not a number of threads")
    wanted = seen.get("ZTUNNEL_WORKER_THREADS", threads, default)
    if wanted > MOST_WORKERS:
        seen.warnings.append(
            f"{wanted} worker threads are requested, each a process here; {MOST_WORKERS} are started"
        )
    return min(wanted, MOST_WORKERS)


def _dns(seen: _Environment, values: dict[str, Any], metadata: Mapping[str, str]) -> None:
    capture = metadata.get("DNS_CAPTURE", "true").lower() == "true"
    values["dns_proxy"] = capture
    values["dns_host"], values["dns_port"] = "", DNS_PORT
    address = metadata.get("DNS_PROXY_ADDR")
    if address is not None:
        try:
            values["dns_host"], values["dns_port"] = _dns_address(address)
        except ValueError:
            seen.faults.append(f"DNS_PROXY_ADDR={address}: must be localhost:port or ip:port")


def _dns_address(text: str) -> tuple[str, int]:
    """Parse the DNS proxy's address into host and port. The host is empty for ``localhost``."""
    host, _, port = text.rpartition(":")
    number = _number(1, 65535)(port)
    if host == "localhost":
        return "", number
    bracketed = host.startswith("[") and host.endswith("]")
    address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    if bracketed != (address.version == 6):
        raise ValueError(text)
    return str(address), number


def _validate(seen: _Environment, values: dict[str, Any]) -> None:
    if values["dns_proxy"] and values["xds_on_demand"]:
        seen.faults.append("DNS proxy does not currently support on-demand mode")
    if not values["proxy"] and not values["dns_proxy"]:
        seen.faults.append("ztunnel run without any servers enabled")
    if values["local_xds"] and values["local_xds_path"]:
        seen.faults.append("only one of LOCAL_XDS_PATH and LOCAL_XDS may be set")


def _nearest(name: str, names: list[str]) -> list[str]:
    import difflib  # imported here, because it is rarely needed

    return difflib.get_close_matches(name, names, n=1, cutoff=0.88)


def _unknown(env: Mapping[str, str], names: set[str]) -> list[str]:
    """Return warnings about unknown ``ZTUNNEL_*`` variables, and about other names that look misspelt."""
    known = names | _OTHER_VARIABLES
    warnings = []
    for name in sorted(env.keys() - known):
        if name.startswith(_PREFIXES) or is_service_link(name, env[name]):
            continue
        # Comparing with all known names would take 20 ms if Kubernetes has set the variables of thirty services.
        like = [
            each
            for each in known
            if abs(len(each) - len(name)) < 4 and (each[:1] == name[:1] or each[-1:] == name[-1:])
        ]
        near = _nearest(name, like) if like else []
        if name.startswith("ZTUNNEL_") or near:
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"environment variable {name} is not known{hint}")
    return warnings
