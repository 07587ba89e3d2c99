"""Reads flags and environment variables into one frozen value, and reports all bad values together."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from xds.errors import ConfigError
from xds.model.address import SocketAddress
from ztunnel.policy.calico.settings import PolicySettings, policy_settings, sync_target, unknown_pods
from ztunnel.proxy.addons.settings import OPTIONS_FILE, VARIABLES, AddonSettings, addon_settings
from ztunnel.proxy.flows.ring import CAPACITY, flow_count
from ztunnel.proxy.flows.settings import VARIABLES as HUBBLE
from ztunnel.proxy.flows.settings import HubbleSettings, hubble_settings
from ztunnel.proxy.otlp.settings import OtlpSettings, otlp_settings
from ztunnel.proxy.ui.setting import page_setting
from ztunnel.runtime.console.proxy_flags import FLAGS, POLICY_FLAGS, REPLACE, SWITCH_FLAGS
from ztunnel.runtime.settings import (
    SPIN_US,
    SettingsError,
    boolean,
    count,
    duration_s,
    handover_dir,
    is_service_link,
    plain_reason,
    socket_path,
)

_ADMIN = SocketAddress("127.0.0.1", 15000)
_READINESS = SocketAddress("0.0.0.0", 15021)
_METRICS = SocketAddress("0.0.0.0", 15020)


class TunnelSource(StrEnum):
    """Which source address a tunnel's TCP connection uses if the configuration requests the client's address."""

    CLIENT_POD = "client-pod"
    ENVOY = "envoy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The intentional differences from Envoy. ``ENVOY_COMPAT`` disables all of these.

    Attributes:
        route_timeouts: whether Envoy's default timeouts of 15 s after half-close and 300 s idle apply where the
            configuration sets no timeout.
        node_local_shortcut: whether tunnels between two pods of this node stay in this process.
        early_data: whether the first bytes of a connection are sent along with its CONNECT, if the peer announces
            that it buffers these bytes until it has answered. This saves a round trip.
        check_authority: whether a tunnel can only name the pod that its connection was opened to.
        judge_ports: whether ports in policies mean the application's port. Envoy compares with the tunnel's port.
        strict_tls: whether servers are verified even if the configuration does not require it.
        tunnel_source: the source address of tunnels. Envoy loses the client's address in an internal listener.
    """

    route_timeouts: bool = False
    node_local_shortcut: bool = True
    early_data: bool = True
    check_authority: bool = True
    judge_ports: bool = True
    strict_tls: bool = True
    tunnel_source: TunnelSource = TunnelSource.CLIENT_POD


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``ztunnel proxy`` outside its bootstrap.

    Attributes:
        bootstrap: path of an Envoy bootstrap. Empty if ``control_plane`` is given.
        control_plane: ``host:port`` or ``unix:/path`` of an ADS server. A bootstrap with this server is generated.
        node: the name of the node, for the generated bootstrap.
        readiness, metrics: addresses to listen on. ``None`` disables the server.
        spin_us: the time to poll without sleeping after activity, in microseconds. 0: always sleep.
        restart_epoch: the number of earlier generations. If it is not 0, start beside the running proxy.
        policies: the source of Calico's policies. ``None`` disables them.
        handover_dir: folder for the sockets that move open connections from the predecessor and to the successor.
            Empty disables moving connections.
        replace: whether to make the predecessor hand over and exit as soon as this process is ready.
        tap_socket: path of the local socket through which root can request taps. Empty permits no taps.
        otlp: the metrics collector. ``None`` disables the export.
        flows: the number of connections in the flight recorder. 0 disables it.
        hubble: the addresses of Hubble's gRPC service. ``None`` disables it.
        addons: the addons to load, if any.
        ui: whether the admin server has the live page; see :func:`ztunnel.proxy.ui.setting.page_setting`.
        warnings: messages to log once the log is open.
    """

    bootstrap: str = ""
    control_plane: str = ""
    delta: bool = False
    node: str = ""
    admin: SocketAddress | None = _ADMIN
    readiness: SocketAddress | None = _READINESS
    metrics: SocketAddress | None = _METRICS
    drain_s: float = 45.0
    shutdown_s: float = 5.0
    log_flush_s: float = 10.0
    log_level: str = "info"
    spin_us: int = SPIN_US
    restart_epoch: int = 0
    handover_dir: str = ""
    replace: bool = False
    tap_socket: str = ""
    policies: PolicySettings | None = None
    otlp: OtlpSettings | None = None
    addons: AddonSettings | None = None
    ui: bool | None = None
    flows: int = CAPACITY
    hubble: HubbleSettings | None = None
    switches: Switches = Switches()
    warnings: tuple[str, ...] = ()


def _address(text: str, host: str = "0.0.0.0") -> SocketAddress | None:
    """Parse a server's address. If the text is only a port, the address is ``host`` with this port."""
    if text in ("", "off"):
        return None
    if text.isdigit():
        text = f"{host}:{text}"
    try:
        return SocketAddress.parse(text)
    except ValueError:
        raise ValueError("must be ip:port, a port, or off") from None


def _admin_address(text: str) -> SocketAddress | None:
    """Parse the admin server's address. For a port alone, the host is loopback, because admin pages can change the
    proxy.
    """
    return _address(text, "127.0.0.1")


def _tunnel_source(text: str) -> TunnelSource:
    if text not in list(TunnelSource):
        raise ValueError("must be one of " + ", ".join(TunnelSource))
    return TunnelSource(text)


def _level(text: str) -> str:
    levels = ("trace", "debug", "info", "warning", "error", "critical", "off")
    if text not in levels:
        raise ValueError("must be one of " + ", ".join(levels))
    return text


_READERS: Mapping[str, Callable[[str], Any]] = {
    "bootstrap": str,
    "control_plane": str,
    "delta": boolean,
    "node": str,
    "admin": _admin_address,
    "readiness": _address,
    "metrics": _address,
    "drain_s": duration_s,
    "shutdown_s": duration_s,
    "log_flush_s": duration_s,
    "log_level": _level,
    "spin_us": count,
    "restart_epoch": count,
    "handover_dir": handover_dir,
    "tap_socket": socket_path,
    "ui": page_setting,
    "flows": flow_count,
    "policy": str,
    "policy_sync": lambda text: text and sync_target(text),
    "unknown_pods": unknown_pods,
}
_SWITCH_READERS: Mapping[str, Callable[[str], Any]] = {
    "route_timeouts": boolean,
    "node_local_shortcut": boolean,
    "early_data": boolean,
    "check_authority": boolean,
    "judge_ports": boolean,
    "strict_tls": boolean,
    "tunnel_source": _tunnel_source,
}

COMPAT_VARIABLE = "ZTUNNEL_ENVOY_COMPAT"
_COMPAT = {
    "route_timeouts": True,
    "node_local_shortcut": False,
    "early_data": False,
    "check_authority": False,
    "judge_ports": False,
    "strict_tls": False,
    "tunnel_source": TunnelSource.ENVOY,
}


def settings_from(flags: Mapping[str, str | None], env: Mapping[str, str]) -> Settings:
    """Read settings. A flag has precedence over its variable.

    Raises:
        SettingsError: values are unusable, or ``ZTUNNEL_*`` variables are unknown. The text lists all faults.
    """
    faults: list[str] = []

    def read(table: Mapping[str, tuple[str, str]], readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
        values = {}
        for name, (variable, _) in table.items():
            flag = flags.get(name)
            text = flag if flag is not None else env.get(variable)
            if text is None:
                continue
            shown = f"--{name.removesuffix('_s').replace('_', '-')}" if flag is not None else variable
            try:
                values[name] = readers[name](text)
            except ValueError as error:
                faults.append(f"{shown}={text}: {error}")
        return values

    values = read(FLAGS, _READERS)
    try:
        policies = policy_settings(*(values.pop(name, "") for name in POLICY_FLAGS))
    except ValueError as error:
        faults.append(str(error))
    else:
        values["policies"] = policies
    try:
        values["otlp"] = otlp_settings(env, access=False)
    except SettingsError as error:
        faults += error.faults
    values["addons"] = _addons(env, faults)
    values["hubble"], wrong = hubble_settings(env)
    faults += wrong
    switches: dict[str, Any] = {}
    compat = flags.get("envoy_compat") or env.get(COMPAT_VARIABLE, "false")
    if compat not in ("true", "false"):
        faults.append(f"{COMPAT_VARIABLE}={compat}: must be true or false")
    if compat == "true":
        switches |= _COMPAT
    switches |= read(SWITCH_FLAGS, _SWITCH_READERS)
    replace = env.get(REPLACE, "false")
    if replace not in ("true", "false"):
        faults.append(f"{REPLACE}={replace}: must be true or false")
    elif replace == "true" and not values.get("handover_dir"):
        faults.append(
            f"--replace ({REPLACE}) needs --handover-dir (ZTUNNEL_HANDOVER_DIR), where both processes meet"
        )
    known = {variable for variable, _ in (*FLAGS.values(), *SWITCH_FLAGS.values())} | VARIABLES
    known |= {COMPAT_VARIABLE, REPLACE} | HUBBLE
    faults.extend(
        f"{name}: no such variable; see ztunnel proxy --help"
        for name, value in sorted(env.items())
        if name.startswith("ZTUNNEL_") and name not in known and not is_service_link(name, value)
    )
    if not values.get("bootstrap") and not values.get("control_plane"):
        faults.append("give --bootstrap FILE, or --control-plane ADDRESS with --node NAME")
    if values.get("bootstrap") and values.get("control_plane"):
        faults.append("--bootstrap and --control-plane exclude each other")
    if values.get("control_plane") and not values.get("node"):
        faults.append("--control-plane needs --node NAME (or NODE_NAME)")
    path = values.get("bootstrap")
    if path and not Path(path).is_file():
        faults.append(f"--bootstrap {path}: no such file")
    if faults:
        raise SettingsError(faults)
    return Settings(
        **values, replace=replace == "true", switches=Switches(**switches), warnings=tuple(_misspelt(env, known))
    )


def _addons(env: Mapping[str, str], faults: list[str]) -> AddonSettings | None:
    path, contents = env.get(OPTIONS_FILE, ""), None
    if path:
        from xds.proto import core_yaml  # for proxies with such a file only

        try:
            contents = core_yaml.load(Path(path).read_text())
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            faults.append(f"{OPTIONS_FILE}: {path}: {plain_reason(error)}")
    found, wrong = addon_settings(env, contents)
    faults.extend(wrong)
    return found


def _misspelt(env: Mapping[str, str], known: Collection[str]) -> Iterator[str]:
    """Yield a warning for each unknown variable whose name resembles a known one. (Unknown ``ZTUNNEL_*`` variables
    are errors.)
    """
    import difflib  # imported here: nothing else needs it

    for name in sorted(env.keys() - known):
        if is_service_link(name, env[name]):
            continue
        like = [each for each in known if each[:1] == name[:1] and abs(len(each) - len(name)) < 3]
        for near in difflib.get_close_matches(name, like, n=1, cutoff=0.88):
            yield f"environment variable {name} is not known; did you mean {near}?"
