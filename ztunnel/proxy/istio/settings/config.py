"""The configuration of a node proxy in an Istio mesh, as read by ``environment``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from hbone.limits import HANDSHAKE_TIMEOUT_S
from ztunnel.policy.calico.settings import PolicySettings
from ztunnel.proxy.addons.settings import AddonSettings
from ztunnel.proxy.flows.ring import CAPACITY
from ztunnel.proxy.flows.settings import HubbleSettings
from ztunnel.proxy.istio.certificates.manager import TlsPolicy
from ztunnel.proxy.istio.settings.app_probes import AppProbe
from ztunnel.proxy.otlp.settings import OtlpSettings
from ztunnel.runtime.settings import SPIN_US

OUTBOUND_PORT, PLAINTEXT_PORT, HBONE_PORT, SOCKS_PORT, DNS_PORT = 15001, 15006, 15008, 15080, 15053

#: The default path of the root certificates, relative to the working directory. Istio's chart mounts this file
#: there.
ROOT_CERT = "./var/run/secrets/istio/root-cert.pem"


class ProxyMode(StrEnum):
    """Whether a proxy serves all pods of a node, or runs beside a single workload and serves only this one."""

    SHARED = "Shared"
    DEDICATED = "Dedicated"


class OriginalSource(StrEnum):
    """Whether applications see the client's address as the source. ``AUTO``: if the kernel permits it."""

    REQUIRED = "true"
    OFF = "false"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodName:
    """The name of a pod, from environment variables or ZDS."""

    name: str
    namespace: str
    service_account: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketConfig:
    """The TCP keepalive of connections. A time of None disables it."""

    keepalive_time_s: float | None = 180.0
    keepalive_interval_s: float = 180.0
    keepalive_retries: int = 9
    user_timeout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IstioConfig:
    """The settings of a node proxy, from its environment.

    Attributes:
        workload: the workload that a dedicated proxy serves.
        sidecar: whether ``ztunnel init`` has set up this pod's redirect rules, for a proxy without capabilities.
        app_probes: the application's probes by path, answered on the metrics port.
        app_probes_localhost: whether to probe the loopback address instead of the pod's.
        own_pod: this proxy's own pod. If set, tunnels to this pod are served, too.
        xds_address, ca_address: ``https://host:port`` or ``unix:/path``. Empty means none.
        auth_token: the token, or the path of its file. ``None`` uses the default file, if it exists.
        packet_mark: the mark of the proxy's sockets, if any.
        dns_host: the address of the DNS proxy. Empty means loopback, IPv4 and IPv6.
        compliance: see :meth:`ztunnel.proxy.istio.certificates.manager.TlsPolicy.for_compliance`.
        policies: the source of Calico's policies. ``None`` disables them.
        connect_retries: how many further endpoints to try before a connection fails.
        ui: whether the admin server has the live page; see :func:`ztunnel.proxy.ui.setting.page_setting`.
        early_data: see :attr:`hbone.settings.Http2Settings.early_data`.
        open_ahead: tunnel connections are opened ahead of use while a pod has fewer idle ones than this. 0: never.
        metric_ports: whether connections are also counted by port.
        warns_unmatched: whether access lines of connections that match no service or workload are warnings.
        flows: the number of connections in the flight recorder. 0 disables it.
        hubble: the addresses of Hubble's gRPC service. ``None`` disables it.
        metric_series: the largest number of label sets per metric. Further label sets are counted as ``unknown``.
        log_wait_s: the longest time that new connections wait for the log. 0 drops lines instead.
        otlp: the collector of metrics, access logs and spans. ``None`` disables the export.
        metric_expiry_s, metric_labels_removed: see :class:`ztunnel.proxy.istio.accounting.metrics.Metrics`.
        tap_socket: path of the local socket through which root can request taps. Empty permits no taps.
        addons: the addons to load, if any.
        handover_dir: folder for the sockets that move open connections from the predecessor and to the successor.
            Empty disables moving connections.
        replace: whether to take over from the running proxy as soon as this one is ready.
        worker_threads: the number of processes that carry connections. With 1, this process carries them itself.
        warnings: messages to log once the log is open.
    """

    proxy: bool = True
    dns_proxy: bool = True
    proxy_mode: ProxyMode = ProxyMode.SHARED
    workload: PodName | None = None
    sidecar: bool = False
    app_probes: Mapping[str, AppProbe] = field(default_factory=dict)
    app_probes_localhost: bool = False
    own_pod: PodName | None = None
    network: str = ""
    node: str = ""
    cluster_id: str = "Kubernetes"
    cluster_domain: str = "cluster.local"
    trust_domain: str = "cluster.local"
    pod_name: str = ""
    pod_namespace: str = ""
    service_account: str = ""
    instance_ip: str = "1.1.1.1"
    xds_address: str = ""
    ca_address: str = ""
    xds_root_ca: str = ROOT_CERT
    ca_root_ca: str = ROOT_CERT
    alt_xds_hostname: str = ""
    alt_ca_hostname: str = ""
    auth_token: str | None = field(default=None, repr=False)
    xds_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ca_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    xds_on_demand: bool = False
    local_xds_path: str = ""
    local_xds: str = ""
    fake_ca: bool = False
    secret_ttl_s: float = 86400.0
    preferred_service_namespace: str = ""
    inpod_uds: str = "/var/run/ztunnel/ztunnel.sock"
    inpod_port_reuse: bool = True
    packet_mark: int | None = 1337
    socket: SocketConfig = SocketConfig()
    original_source: OriginalSource = OriginalSource.AUTO
    localhost_app_tunnel: bool = True
    baggage: bool = True
    pool_max_streams: int = 100
    pool_unused_release_s: float = 300.0
    stream_window: int = 4 * 1024 * 1024
    connection_window: int = 16 * 1024 * 1024
    frame_size: int = 1024 * 1024
    drain_s: float = 5.0
    socks5: bool = False
    ipv6: bool = True
    crl_path: str = ""
    worker_threads: int = 1
    compliance: str = ""
    tls12: bool = False
    authz_info_logging: bool = False
    warns_unmatched: bool = False
    metric_ports: bool = False
    log_filter: str = "info"
    log_json: bool = False
    proxy_metadata: Mapping[str, str] = field(default_factory=dict)
    metadata_json: Mapping[str, Any] = field(default_factory=dict)
    admin_port: int = 15000
    stats_port: int = 15020
    readiness_port: int = 15021
    dns_host: str = ""
    dns_port: int = DNS_PORT
    policies: PolicySettings | None = None
    connect_retries: int = 2
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    node_local_shortcut: bool = True
    early_data: bool = True
    spin_us: int = SPIN_US
    open_ahead: int = 0
    metric_series: int = 20_000
    flows: int = CAPACITY
    hubble: HubbleSettings | None = None
    log_wait_s: float = 0.0
    metric_expiry_s: float = 900.0
    metric_labels_removed: frozenset[str] = frozenset()
    tap_socket: str = ""
    handover_dir: str = ""
    replace: bool = False
    otlp: OtlpSettings | None = None
    addons: AddonSettings | None = None
    ui: bool | None = None
    arguments: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def illegal_ports(self) -> frozenset[int]:
        """The ports on which this proxy itself listens in pods, and which it therefore never dials."""
        socks = {SOCKS_PORT} if self.socks5 else set()
        return frozenset({OUTBOUND_PORT, PLAINTEXT_PORT, HBONE_PORT} | socks)

    @property
    def tls_policy(self) -> TlsPolicy:
        """The TLS parameters of tunnels."""
        policy = TlsPolicy.for_compliance(self.compliance, tls_1_2=self.tls12)
        return replace(policy, movable=self.moves)

    @property
    def moves(self) -> bool:
        """Whether open connections can move to another process."""
        return bool(self.handover_dir)

    @property
    def version_tag(self) -> str:
        """The version of Istio that Istio's chart has passed to the proxy."""
        return self.proxy_metadata.get("ISTIO_VERSION", "unknown")
