"""Makes ``/config_dump`` in Rust ztunnel's format, which ``istioctl ztunnel-config`` reads; all keys are sorted.

The page is made entry by entry, so that a mesh of 200,000 workloads does not block the data path.
"""

from __future__ import annotations

import base64
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

import hbone
from xds.model.address import SocketAddress
from ztunnel import __version__
from ztunnel.proxy.addons.report import page as addon_page
from ztunnel.proxy.istio.accounting.metrics import DECISIONS, NONE_MATCHED, Metrics
from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.proxy.istio.certificates.credentials import Roots
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.settings.config import IstioConfig, OriginalSource, PodName, ProxyMode
from ztunnel.proxy.istio.xds import mesh_dump
from ztunnel.proxy.istio.zds.pods import RunningPod
from ztunnel.runtime.formats.entries import names_of
from ztunnel.runtime.revision import revision


def pieces(
    proxy: InspectedProxy,
    connections: Mapping[RunningPod, object] | None = None,
    metrics: Metrics | None = None,
    part: str = "",
    name: str = "",
) -> Iterator[str]:
    """Yield the text of the page, piece by piece.

    Args:
        proxy: the proxy to show.
        connections: the open connections that worker processes carry, by pod.
        metrics: the sum of all processes' counts. ``None`` without workers: the proxy's own counts are used.
        part: the only top-level key to show. Empty: all keys.
        name: show only entries of ``part`` with this name. Empty: all entries.

    Raises:
        LookupError: the part does not exist.
    """
    every = _parts(proxy, connections or {}, metrics or proxy.metrics)
    if part:
        if part not in every:
            raise LookupError(f"no part {part!r}; there are {', '.join(every)}")
        every = {part: every[part]}
    return _pieces(every, name)


def _pieces(parts: Mapping[str, Callable[[], object]], name: str) -> Iterator[str]:
    before = "{\n"
    for key, make in parts.items():
        yield before
        found = make()
        yield from _list(key, found, name) if isinstance(found, Iterator) else _value(key, found, name)
        before = ",\n"
    yield "\n}\n"


def _parts(
    proxy: InspectedProxy, connections: Mapping[RunningPod, object], counted: Metrics
) -> dict[str, Callable[[], object]]:
    """Return a function for each part of the dump that creates this part. Long parts are iterators
    over entries.
    """
    mesh, config = proxy.mesh, proxy.config
    decisions = cache(lambda: _decisions(counted))
    found: dict[str, Callable[[], object]] = {
        "certificates": lambda: _certificates(proxy),
        "config": lambda: config_entry(config),
        "controlPlane": lambda: control_plane_entry(proxy),
        "denials": lambda: iter(denials(counted)),
        "noPolicyMatched": lambda: decisions().get(NONE_MATCHED),
        "pending": lambda: sorted(proxy.readiness.pending),
        "policies": lambda: iter(mesh_dump.policies(mesh, decisions())),
        "services": lambda: iter(mesh_dump.services(mesh)),
        "stagedServices": lambda: mesh_dump.staged_services(mesh),
        "staticConfig": proxy.control.static_config,
        "version": lambda: version_entry(config.version_tag),
        "workloadState": lambda: _pods(proxy, connections),
        "workloads": lambda: iter(mesh_dump.workloads(mesh)),
    }
    refused = mesh_dump.refused_resources(mesh)
    if refused:
        found["refusedResources"] = lambda: refused
    if config.proxy_mode is not ProxyMode.SHARED:
        del found["workloadState"]
    if config.addons is not None:
        found = {"addons": lambda: iter(addon_page(counted.addons)), **found}
    return found


def connections(proxy: InspectedProxy, carried: Mapping[RunningPod, object]) -> Iterator[str]:
    """Yield only the dump's part ``workloadState``. ``carried`` holds the connections carried by
    worker processes.
    """
    yield _dumped(_pods(proxy, carried), 0) + "\n"


def denials(metrics: Metrics) -> list[Mapping[str, Any]]:
    """Return the latest denied connections, grouped by source and destination, newest first."""
    return [
        {
            **denial.pair._asdict(),
            "count": denial.times,
            "lastAddress": denial.address,
            "lastTime": _moment(denial.last_s),
        }
        for denial in metrics.ledger.denials
    ]


def _decisions(metrics: Metrics) -> Mapping[str, Mapping[str, Any]]:
    """Return how often each policy allowed and denied connections, by policy key. A dry-run policy's numbers are
    hypothetical.
    """
    found: dict[str, dict[str, Any]] = {}
    for policy, tally, last_s in metrics.ledger.own:
        counts = {result: tally[use] for use, result in DECISIONS.items()}
        if not any(counts.values()):
            would = {"allowed": tally.would_allow, "denied": tally.would_deny + tally.would_not_allow}
            counts = {result: number for result, number in would.items() if number}
        found[policy] = counts | {"lastTime": _moment(last_s)}
    return found


def _moment(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _dumped(value: object, indent: int) -> str:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return text.replace("\n", "\n" + " " * indent)


def _value(key: str, value: object, name: str) -> Iterator[str]:
    if name and isinstance(value, Mapping):
        value = {name: value[name]} if name in value else {}
    yield f'  "{key}": {_dumped(value, 2)}'


def _list(key: str, entries: Iterable[object], name: str) -> Iterator[str]:
    yield f'  "{key}": ['
    before, separator = "]", "\n    "
    for entry in entries:
        if name and name not in names_of(entry):
            yield " "  # whitespace, so that the caller can run other work in between
            continue
        yield separator + _dumped(entry, 4)
        before, separator = "\n  ]", ",\n    "
    yield before


def _certificates(proxy: InspectedProxy) -> Iterator[Mapping[str, Any]]:
    states = proxy.certificates.states()
    for identity in sorted(states, key=str):
        state = states[identity]
        issued = state.issued if isinstance(state, WorkloadCertificate) else None
        yield {
            "identity": str(identity),
            "state": "Available" if issued is not None else state,
            "certChain": [_certificate(each) for each in issued.chain] if issued is not None else [],
            "rootCerts": [_certificate(each) for each in issued.roots] if issued is not None else [],
        }


def _certificate(certificate: x509.Certificate) -> Mapping[str, str]:
    return {
        "pem": base64.b64encode(certificate.public_bytes(Encoding.PEM)).decode(),
        "serialNumber": str(certificate.serial_number),
        "validFrom": f"{certificate.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}",
        "expirationTime": f"{certificate.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}",
    }


def _pods(proxy: InspectedProxy, connections: Mapping[RunningPod, object]) -> Mapping[str, Any]:
    entries: dict[str, Any] = {}
    for uid, status in proxy.pods.states().items():
        entry: dict[str, Any] = {
            "info": {
                "name": status.info.name,
                "namespace": status.info.namespace,
                "serviceAccount": status.info.service_account,
            },
            "state": status.state.value,
        }
        if isinstance(status.running, PodProxy):
            entry["connections"] = status.running.dump()
        elif status.running is not None and status.running in connections:
            entry["connections"] = connections[status.running]
        entries[uid] = entry
    return entries


def control_plane_entry(proxy: InspectedProxy) -> Mapping[str, Any]:
    """Return the state of the control plane connection, for the first line of ``ztunnel status``. Rust ztunnel's
    dump has no such entry.
    """
    address, away_s = proxy.config.xds_address, proxy.control.staleness_s
    if not address:
        return {"address": None}
    return {"address": address, "connected": away_s == 0.0, "awaySeconds": round(away_s, 1)}


def version_entry(istio_version: str) -> Mapping[str, str]:
    """Return the version and build of this program, the same values that ``ztunnel version`` prints."""
    built = revision()
    return {
        "version": __version__,
        "gitRevision": built.commit,
        "rustVersion": f"Python {platform.python_version()}",
        "buildProfile": hbone.build(),
        "buildStatus": built.status,
        "istioVersion": istio_version,
        "cryptoProvider": "openssl",
    }


def build_info(istio_version: str) -> str:
    """Return the version line that ``ztunnel version`` prints."""
    shown = (f'{key[0].upper()}{key[1:]}:"{value}"' for key, value in version_entry(istio_version).items())
    return f"version.BuildInfo{{{', '.join(shown)}}}"


def logged_config(config: IstioConfig) -> Mapping[str, Any]:
    """Return the settings for the log line at start. It lists only the names of headers: values can be
    credentials.
    """
    headers = {
        key: [name for name, _ in values]
        for key, values in (("xdsHeaders", config.xds_headers), ("caHeaders", config.ca_headers))
    }
    return {**config_entry(config), **headers}


def _duration(seconds: float) -> Mapping[str, int]:
    nanos = round(seconds * 1e9)
    return {"secs": nanos // 1_000_000_000, "nanos": nanos % 1_000_000_000}


def _pod_name(name: PodName | None) -> Mapping[str, str] | None:
    if name is None:
        return None
    return {"name": name.name, "namespace": name.namespace, "serviceAccount": name.service_account}


def _roots(value: str) -> object:
    roots = Roots(value)
    return {"File": value} if roots.kind == "File" else roots.kind


def _resolver(config: IstioConfig, resolv_conf: Path) -> Mapping[str, Any]:
    """Return the resolver settings for names outside the mesh, in the Rust ztunnel's form."""
    try:
        text = resolv_conf.read_text(errors="replace")
    except OSError:
        text = ""
    from ztunnel.proxy.istio.dns.forwarder import (
        ATTEMPTS,
        TIMEOUT_S,
        name_servers,
        search_domains,
    )  # imported for this page only

    return {
        "dnsResolverCfg": {
            "domain": None,
            "search": list(search_domains(text)),
            "name_servers": [
                {
                    "socket_addr": str(server),
                    "protocol": protocol,
                    "tls_dns_name": None,
                    "trust_negative_responses": False,
                    "bind_addr": None,
                }
                for server in name_servers(text, ipv6=config.ipv6)
                for protocol in ("udp", "tcp")
            ],
        },
        "dnsResolverOpts": {"timeout": {"secs": int(TIMEOUT_S), "nanos": 0}, "attempts": ATTEMPTS},
    }


def config_entry(config: IstioConfig, resolv_conf: Path = Path("/etc/resolv.conf")) -> Mapping[str, Any]:
    """Return the current settings, without tokens and the local file."""
    wildcard = "[::]" if config.ipv6 else "0.0.0.0"
    sockets = config.socket

    def everywhere(port: int) -> str:
        return f"{wildcard}:{port}"

    own = config.own_pod
    identity = None
    if own is not None:
        identity = f"spiffe://{config.trust_domain}/ns/{own.namespace}/sa/{own.service_account}"
    return {
        "proxy": config.proxy,
        "dnsProxy": config.dns_proxy,
        "windowSize": config.stream_window,
        "connectionWindowSize": config.connection_window,
        "frameSize": config.frame_size,
        "poolMaxStreamsPerConn": config.pool_max_streams,
        "poolUnusedReleaseTimeout": _duration(config.pool_unused_release_s),
        "socks5Addr": "127.0.0.1:15080" if config.socks5 else None,
        "adminAddr": {"Localhost": [config.ipv6, config.admin_port]},
        "statsAddr": {"SocketAddr": everywhere(config.stats_port)},
        "readinessAddr": {"SocketAddr": everywhere(config.readiness_port)},
        "inboundAddr": everywhere(15008),
        "inboundPlaintextAddr": everywhere(15006),
        "outboundAddr": everywhere(15001),
        "dnsProxyAddr": {"SocketAddr": str(SocketAddress(config.dns_host, config.dns_port))}
        if config.dns_host
        else {"Localhost": [config.ipv6, config.dns_port]},
        "illegalPorts": sorted(config.illegal_ports),
        "network": config.network,
        "localNode": config.node or None,
        "proxyMode": config.proxy_mode.value,
        "proxyWorkloadInformation": _pod_name(config.workload),
        "clusterId": config.cluster_id,
        "clusterDomain": config.cluster_domain,
        "caAddress": config.ca_address or None,
        "caRootCert": _roots(config.ca_root_ca),
        "altCaHostname": config.alt_ca_hostname or None,
        "xdsAddress": config.xds_address or None,
        "xdsRootCert": _roots(config.xds_root_ca),
        "altXdsHostname": config.alt_xds_hostname or None,
        "preferedServiceNamespace": config.preferred_service_namespace or None,
        "secretTtl": _duration(config.secret_ttl_s),
        "xdsOnDemand": config.xds_on_demand,
        "fakeCa": config.fake_ca,
        "fakeSelfInbound": False,
        "selfTerminationDeadline": _duration(config.drain_s),
        "proxyMetadata": dict(config.proxy_metadata),
        "numWorkerThreads": config.worker_threads,
        "requireOriginalSource": {
            OriginalSource.AUTO: None,
            OriginalSource.REQUIRED: True,
            OriginalSource.OFF: False,
        }[config.original_source],
        "proxyArgs": config.arguments,
        **_resolver(config, resolv_conf),
        "inpodUds": config.inpod_uds,
        "inpodPortReuse": config.inpod_port_reuse,
        "packetMark": config.packet_mark,
        "socketConfig": {
            "keepaliveEnabled": sockets.keepalive_time_s is not None,
            "keepaliveTime": _duration(sockets.keepalive_time_s or 0.0),
            "keepaliveInterval": _duration(sockets.keepalive_interval_s),
            "keepaliveRetries": sockets.keepalive_retries,
            "userTimeoutEnabled": sockets.user_timeout,
        },
        "xdsHeaders": [list(header) for header in config.xds_headers],
        "caHeaders": [list(header) for header in config.ca_headers],
        "localhostAppTunnel": config.localhost_app_tunnel,
        "ztunnelIdentity": identity,
        "ztunnelWorkload": _pod_name(own),
        "ipv6Enabled": config.ipv6,
        "crlPath": config.crl_path or None,
        "enableEnhancedBaggage": config.baggage,
    }
