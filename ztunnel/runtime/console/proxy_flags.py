"""The flags of ``ztunnel proxy`` with their variables and help, and which dialect each one is for.

Separate from their readers (``ztunnel/proxy/envoy/config/settings.py``), so that a proxy of an Istio mesh does not
import Envoy's dialect.
"""

from collections.abc import Mapping
from typing import Final

#: By setting, the environment variable and the help of the flag. A flag is the setting's name with dashes.
FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "bootstrap": ("ZTUNNEL_BOOTSTRAP", "an Envoy bootstrap, YAML or JSON"),
    "control_plane": (
        "ZTUNNEL_CONTROL_PLANE",
        "ADS server, host:port or unix:/path, instead of a bootstrap",
    ),
    "delta": ("ZTUNNEL_XDS_DELTA", "true: incremental xDS (with --control-plane)"),
    "node": ("NODE_NAME", "name of this node (with --control-plane)"),
    "admin": (
        "ZTUNNEL_ADMIN_ADDRESS",
        "admin address, ip:port, a port of loopback, or off (default 127.0.0.1:15000)",
    ),
    "readiness": ("ZTUNNEL_READINESS_ADDRESS", "readiness address (default 0.0.0.0:15021)"),
    "metrics": ("ZTUNNEL_METRICS_ADDRESS", "Prometheus address (default 0.0.0.0:15020)"),
    "drain_s": (
        "ZTUNNEL_DRAIN_TIME",
        "how long connections of a removed listener or chain can continue (default 45s)",
    ),
    "shutdown_s": (
        "CONNECTION_TERMINATION_DEADLINE",
        "how long connections can continue after SIGTERM (default 5s)",
    ),
    "log_flush_s": (
        "ZTUNNEL_LOG_FLUSH_INTERVAL",
        "how long an access log line can wait to be written (default 10s)",
    ),
    "log_level": (
        "ZTUNNEL_LOG_LEVEL",
        "trace, debug, info, warning, error, critical or off (default info)",
    ),
    "spin_us": (
        "ZTUNNEL_SPIN_US",
        "poll this many microseconds after activity, if that is measured to pay (default 200; 0: off)",
    ),
    "restart_epoch": (
        "ZTUNNEL_RESTART_EPOCH",
        "if not 0, start beside the running proxy and replace it (default 0)",
    ),
    "handover_dir": (
        "ZTUNNEL_HANDOVER_DIR",
        "folder shared with the successor, so that open connections move to it (docs/upgrades.md)",
    ),
    "tap_socket": (
        "ZTUNNEL_TAP_SOCKET",
        "path of the local socket at which root can request captures (ztunnel tap); without it captures are off",
    ),
    "ui": (
        "ZTUNNEL_UI",
        "the live page, /ui of the admin server: true, false, or auto: if bound to loopback (default auto)",
    ),
    "flows": ("ZTUNNEL_FLOWS", "connections that the flight recorder keeps (default 4096; 0: off)"),
    "policy": (
        "CALICO_POLICY_DIR",
        "folder of Calico's and Kubernetes' policies in YAML, enforced in addition to the others",
    ),
    "policy_sync": ("POLICY_SYNC", "PolicySync server of the node, instead of --policy"),
    "unknown_pods": (
        "CALICO_UNKNOWN_PODS",
        "allow: only the other policies apply to pods that these do not know (default deny)",
    ),
}
#: The flags of Calico's policies.
POLICY_FLAGS: Final = ("policy", "policy_sync", "unknown_pods")
#: The flags that also apply to a proxy of an Istio mesh, which reads their variables.
SHARED_FLAGS: Final = (*POLICY_FLAGS, "handover_dir")
#: The help of ``--replace``, in both dialects.
REPLACE: Final = "ZTUNNEL_REPLACE"

#: The flags of addons: flag, metavar and help of each. They can be repeated, and are valid in both dialects.
ADDON_FLAGS: Final = (
    (
        "--addon",
        "ADDON",
        "FILE.py[:Class][@sha256:DIGEST], module:Class, or an entry point of ztunnel.addons; can be repeated,"
        " called in this order [ZTUNNEL_ADDONS]",
    ),
    ("--addon-option", "NAME.KEY=VALUE", "an option of an addon; can be repeated [ZTUNNEL_ADDON_OPTION]"),
    ("--addon-options", "FILE", "options of addons in YAML: name: {key: value} [ZTUNNEL_ADDON_OPTIONS]"),
)
#: The environment variable of each addon flag, by the name of the argument.
ADDON_VARIABLES: Final[Mapping[str, str]] = {
    "addon": "ZTUNNEL_ADDONS",
    "addon_option": "ZTUNNEL_ADDON_OPTION",
    "addon_options": "ZTUNNEL_ADDON_OPTIONS",
}

#: The flags for deliberate differences from Envoy, with the variable and the help of each.
SWITCH_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "route_timeouts": (
        "ZTUNNEL_ROUTE_TIMEOUTS",
        "true: Envoy's 15 s route and 300 s idle timeouts (default false)",
    ),
    "node_local_shortcut": (
        "ZTUNNEL_NODE_LOCAL_SHORTCUT",
        "false: tunnels between pods of this node use the network, too",
    ),
    "early_data": (
        "ZTUNNEL_EARLY_DATA",
        "false: bytes of a connection are sent only after its tunnel has been accepted",
    ),
    "check_authority": ("ZTUNNEL_CHECK_AUTHORITY", "false: a tunnel can name any pod (like in Envoy)"),
    "judge_ports": (
        "ZTUNNEL_JUDGE_PORTS",
        "false: ports in policies are compared with the tunnel's port, 15008 (like in Envoy)",
    ),
    "strict_tls": ("ZTUNNEL_STRICT_TLS", "false: accept configurations that do not verify servers"),
    "tunnel_source": (
        "ZTUNNEL_TUNNEL_SOURCE",
        "client-pod, or envoy: tunnels to services have the proxy's source address",
    ),
}


def names_a_source(flags: Mapping[str, str | None], env: Mapping[str, str]) -> bool:
    """Return whether flags or variables name a bootstrap or a control plane of Envoy's dialect. Otherwise this is
    the proxy of an Istio mesh.
    """
    return any(flags.get(name) or env.get(FLAGS[name][0]) for name in ("bootstrap", "control_plane"))
