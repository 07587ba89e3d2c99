"""The environment: every variable by value, every fault in upstream's words, nothing secret in messages."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from ztunnel.policy.calico.settings import PolicySettings
from ztunnel.proxy.istio.certificates.manager import TlsPolicy
from ztunnel.proxy.istio.environment import ISTIOD, MESH_CONFIG, config_from
from ztunnel.proxy.istio.settings.config import IstioConfig, OriginalSource, PodName, ProxyMode, SocketConfig
from ztunnel.proxy.tap.request import VARIABLE as TAP_VARIABLE
from ztunnel.runtime.settings import SettingsError, duration_s

NOTHING: Mapping[str, str] = {}
DEDICATED = {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "ns/name/sa"}


def config(env: Mapping[str, str] = NOTHING, *, cpus: int = 8, mesh_file: str | None = None) -> IstioConfig:
    env = {"NODE_NAME": "w1", **env}
    return config_from(env, cpus=cpus, read_file=lambda path: mesh_file if path == MESH_CONFIG else None)


def faults(env: Mapping[str, str], mesh_file: str | None = None) -> list[str]:
    with pytest.raises(SettingsError) as refused:
        config(env, mesh_file=mesh_file)
    return list(refused.value.faults)


def test_empty_environment_has_defaults() -> None:
    assert config() == IstioConfig(
        node="w1", xds_address="https://localhost:15012", ca_address="https://localhost:15012", worker_threads=2
    )


def test_a_missing_node_name_is_a_warning_for_the_proxy_of_a_node() -> None:
    said = "NODE_NAME is not set: the control plane cannot know which node this proxy serves"
    assert config({"NODE_NAME": ""}).warnings == (said,)
    assert config({"NODE_NAME": "", **DEDICATED}).warnings == ()


@pytest.mark.parametrize(
    ("env", "field", "value"),
    [
        ({"ENABLE_PROXY": "false"}, "proxy", False),
        ({"PROXY_MODE": "shared"}, "proxy_mode", ProxyMode.SHARED),
        (DEDICATED, "proxy_mode", ProxyMode.DEDICATED),
        (DEDICATED, "workload", PodName(namespace="ns", name="name", service_account="sa")),
        (DEDICATED, "packet_mark", None),
        ({**DEDICATED, "PACKET_MARK": "7"}, "packet_mark", 7),
        ({"PACKET_MARK": "1338"}, "packet_mark", 1338),
        ({"PACKET_MARK": "0"}, "packet_mark", None),
        ({"NETWORK": "net"}, "network", "net"),
        ({"NODE_NAME": "w1"}, "node", "w1"),
        ({"CLUSTER_ID": "c"}, "cluster_id", "c"),
        ({"CLUSTER_ID": "c", "ISTIO_META_CLUSTER_ID": "d"}, "cluster_id", "d"),
        ({"CLUSTER_DOMAIN": "c.l"}, "cluster_domain", "c.l"),
        ({"TRUST_DOMAIN": "t.d"}, "trust_domain", "t.d"),
        ({"POD_NAME": "p"}, "pod_name", "p"),
        ({"POD_NAMESPACE": "n"}, "pod_namespace", "n"),
        ({"SERVICE_ACCOUNT": "s"}, "service_account", "s"),
        ({"POD_NAME": "p", "POD_NAMESPACE": "n"}, "own_pod", None),
        (
            {"POD_NAME": "p", "POD_NAMESPACE": "n", "SERVICE_ACCOUNT": "s"},
            "own_pod",
            PodName(name="p", namespace="n", service_account="s"),
        ),
        ({**DEDICATED, "POD_NAME": "p", "POD_NAMESPACE": "n", "SERVICE_ACCOUNT": "s"}, "own_pod", None),
        ({"INSTANCE_IP": "10.0.0.1"}, "instance_ip", "10.0.0.1"),
        ({"XDS_ADDRESS": "istiod.istio-system.svc:15012"}, "xds_address", "https://istiod.istio-system.svc:15012"),
        ({"XDS_ADDRESS": ""}, "xds_address", ""),
        ({"XDS_ADDRESS": "unix:/run/xds"}, "xds_address", "unix:/run/xds"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "xds_address", ISTIOD),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "ca_address", ISTIOD),
        ({"PROXY_CONFIG": "{discoveryAddress: 'd:1', proxyMetadata: {}}"}, "xds_address", "https://d:1"),
        (
            {"PROXY_CONFIG": "{discoveryAddress: 'd:1', proxyMetadata: {}}", "XDS_ADDRESS": "e:2"},
            "xds_address",
            "https://e:2",
        ),
        ({"XDS_ROOT_CA": "SYSTEM"}, "xds_root_ca", "SYSTEM"),
        ({"CA_ROOT_CA": "/c"}, "ca_root_ca", "/c"),
        ({}, "xds_root_ca", "./var/run/secrets/istio/root-cert.pem"),
        ({}, "ca_root_ca", "./var/run/secrets/istio/root-cert.pem"),
        ({"ALT_XDS_HOSTNAME": "x"}, "alt_xds_hostname", "x"),
        ({"ALT_CA_HOSTNAME": "y"}, "alt_ca_hostname", "y"),
        ({"CA_ADDRESS": "ca:1"}, "ca_address", "https://ca:1"),
        ({"CA_ADDRESS": "ca:1", "FAKE_CA": "true"}, "ca_address", ""),
        ({"CA_ADDRESS": "", "FAKE_CA": "true"}, "fake_ca", True),
        ({"AUTH_TOKEN": "./token"}, "auth_token", "./token"),
        ({"XDS_HEADER_X_Foo": "bar", "XDS_HEADER_A": ""}, "xds_headers", (("a", ""), ("x_foo", "bar"))),
        ({"CA_HEADER_x-foo": "bar"}, "ca_headers", (("x-foo", "bar"),)),
        ({"XDS_ON_DEMAND": "true", "ISTIO_META_DNS_CAPTURE": "false"}, "xds_on_demand", True),
        ({"LOCAL_XDS_PATH": "/f"}, "local_xds_path", "/f"),
        ({"LOCAL_XDS": "workloads: []"}, "local_xds", "workloads: []"),
        ({"SECRET_TTL": "1h30m"}, "secret_ttl_s", 5400.0),
        ({"PREFERED_SERVICE_NAMESPACE": "p"}, "preferred_service_namespace", "p"),
        ({"INPOD_UDS": "/s"}, "inpod_uds", "/s"),
        ({}, "inpod_uds", "/var/run/ztunnel/ztunnel.sock"),
        ({"INPOD_PORT_REUSE": "false"}, "inpod_port_reuse", False),
        ({"KEEPALIVE_ENABLED": "false"}, "socket", SocketConfig(keepalive_time_s=None)),
        (
            {
                "KEEPALIVE_TIME": "10s",
                "KEEPALIVE_INTERVAL": "1500ms",
                "KEEPALIVE_RETRIES": "3",
                "USER_TIMEOUT_ENABLED": "true",
            },
            "socket",
            SocketConfig(keepalive_time_s=10.0, keepalive_interval_s=1.5, keepalive_retries=3, user_timeout=True),
        ),
        ({"ENABLE_ORIG_SRC": "true"}, "original_source", OriginalSource.REQUIRED),
        ({"ENABLE_ORIG_SRC": "false"}, "original_source", OriginalSource.OFF),
        ({"ENABLE_ORIG_SRC": "auto"}, "original_source", OriginalSource.AUTO),
        ({"LOCALHOST_APP_TUNNEL": "false"}, "localhost_app_tunnel", False),
        ({"ENABLE_RESPONSE_BAGGAGE": "false"}, "baggage", False),
        ({"POOL_MAX_STREAMS_PER_CONNECTION": "1"}, "pool_max_streams", 1),
        ({"POOL_UNUSED_RELEASE_TIMEOUT": "90"}, "pool_unused_release_s", 90.0),
        ({"HTTP2_STREAM_WINDOW_SIZE": "65535"}, "stream_window", 65535),
        ({"HTTP2_CONNECTION_WINDOW_SIZE": "100000"}, "connection_window", 100000),
        ({"HTTP2_FRAME_SIZE": "16384"}, "frame_size", 16384),
        ({"CONNECTION_TERMINATION_DEADLINE": "7s"}, "drain_s", 7.0),
        ({"CONNECTION_TERMINATION_DEADLINE": "7s", "TERMINATION_GRACE_PERIOD_SECONDS": "30"}, "drain_s", 7.0),
        ({"TERMINATION_GRACE_PERIOD_SECONDS": "30"}, "drain_s", 25.0),
        ({"TERMINATION_GRACE_PERIOD_SECONDS": "11"}, "drain_s", 6.0),
        ({"TERMINATION_GRACE_PERIOD_SECONDS": "10"}, "drain_s", 9.0),
        ({"TERMINATION_GRACE_PERIOD_SECONDS": "1"}, "drain_s", 1.0),
        ({"TERMINATION_GRACE_PERIOD_SECONDS": "0"}, "drain_s", 1.0),
        ({}, "drain_s", 5.0),
        ({"UNSTABLE_ENABLE_SOCKS5": "true"}, "socks5", True),
        ({"UNSTABLE_ENABLE_SOCKS5": "true"}, "illegal_ports", frozenset({15001, 15006, 15008, 15080})),
        ({}, "illegal_ports", frozenset({15001, 15006, 15008})),
        ({"IPV6_ENABLED": "false"}, "ipv6", False),
        ({"CRL_PATH": "/crl"}, "crl_path", "/crl"),
        ({"COMPLIANCE_POLICY": "pqc"}, "compliance", "pqc"),
        ({"COMPLIANCE_POLICY": "fips-140-2"}, "compliance", "fips-140-2"),
        ({"COMPLIANCE_POLICY": "fips-140-2"}, "tls_policy", TlsPolicy(groups=("P-256", "P-384"))),
        ({"TLS12_ENABLED": "true"}, "tls12", True),
        ({"TLS12_ENABLED": "1"}, "tls12", True),
        ({"TLS12_ENABLED": "0"}, "tls12", False),
        ({"AUTHZ_POLICY_INFO_LOGGING": "1"}, "authz_info_logging", True),
        ({"LOG_FORMAT": "text"}, "log_json", False),
        ({"LOG_FORMAT": "JSON"}, "log_json", True),
        ({"LOG_FORMAT": "Plain"}, "log_json", False),
        ({"LOG_FORMAT": ""}, "log_json", False),
        ({"LOG_FORMAT": "xml"}, "log_json", False),
        ({"COMPLIANCE_POLICY": "PQC"}, "compliance", "pqc"),
        ({"COMPLIANCE_POLICY": "FIPS-140-2"}, "compliance", "fips-140-2"),
        ({"SECRET_TTL": "24hour"}, "secret_ttl_s", 86400.0),
        ({"SECRET_TTL": "1w"}, "secret_ttl_s", 604800.0),
        ({"SECRET_TTL": "1h 30m"}, "secret_ttl_s", 5400.0),
        ({"SECRET_TTL": "500us"}, "secret_ttl_s", 0.0005),
        ({"KEEPALIVE_RETRIES": "0"}, "socket", SocketConfig(keepalive_retries=1)),
        ({"POOL_MAX_STREAMS_PER_CONNECTION": "0"}, "pool_max_streams", 1),
        ({"HTTP2_STREAM_WINDOW_SIZE": "32768"}, "stream_window", 32768),
        ({"AUTHZ_POLICY_INFO_LOGGING": "true"}, "authz_info_logging", True),
        ({"RUST_LOG": "error,ztunnel::proxy=warn"}, "log_filter", "error,ztunnel::proxy=warn"),
        ({"LOG_FORMAT": "json"}, "log_json", True),
        ({"LOG_FORMAT": "plain"}, "log_json", False),
        ({"ISTIO_META_ISTIO_VERSION": "1.2"}, "version_tag", "1.2"),
        ({}, "version_tag", "unknown"),
        ({"ISTIO_METAJSON_LABELS": '{"a": [1]}'}, "metadata_json", {"LABELS": {"a": [1]}}),
        ({"ISTIO_META_DNS_CAPTURE": "TRUE"}, "dns_proxy", True),
        ({"ISTIO_META_DNS_CAPTURE": "no"}, "dns_proxy", False),
        ({"ISTIO_META_DNS_PROXY_ADDR": "localhost:1053"}, "dns_port", 1053),
        ({"ISTIO_META_DNS_PROXY_ADDR": "127.0.0.9:1053"}, "dns_host", "127.0.0.9"),
        ({"ISTIO_META_DNS_PROXY_ADDR": "[::1]:1053"}, "dns_host", "::1"),
        ({"PROXY_CONFIG": "{statsPort: 1, proxyMetadata: {}}"}, "stats_port", 1),
        ({"PROXY_CONFIG": "{proxyAdminPort: 2, proxyMetadata: {}}"}, "admin_port", 2),
        ({"PROXY_CONFIG": "{unknown: 2, proxyMetadata: {}}"}, "admin_port", 15000),
        ({"ZTUNNEL_CONNECT_RETRIES": "0"}, "connect_retries", 0),
        ({"ZTUNNEL_CONNECT_TIMEOUT": "1s"}, "connect_timeout_s", 1.0),
        ({"ZTUNNEL_HANDSHAKE_TIMEOUT": "2s"}, "handshake_timeout_s", 2.0),
        ({"ZTUNNEL_NODE_LOCAL_SHORTCUT": "false"}, "node_local_shortcut", False),
        ({"ZTUNNEL_EARLY_DATA": "false"}, "early_data", False),
        ({"ZTUNNEL_SPIN_US": "50"}, "spin_us", 50),
        ({"ZTUNNEL_METRIC_SERIES": "100"}, "metric_series", 100),
        ({}, "metric_expiry_s", 900.0),
        ({"ZTUNNEL_METRIC_EXPIRY": "1h"}, "metric_expiry_s", 3600.0),
        ({"ZTUNNEL_METRIC_EXPIRY": "0"}, "metric_expiry_s", 0.0),
        ({}, "log_wait_s", 0.0),
        ({"ZTUNNEL_LOG_WAIT": "5s"}, "log_wait_s", 5.0),
        ({}, "metric_labels_removed", frozenset()),
        (
            {"ZTUNNEL_METRIC_LABELS_REMOVED": "source_version, source_zone,"},
            "metric_labels_removed",
            frozenset({"source_version", "source_zone"}),
        ),
        ({}, "tap_socket", ""),
        ({"ZTUNNEL_TAP_SOCKET": ""}, "tap_socket", ""),
        ({TAP_VARIABLE: "/run/ztunnel/tap.sock"}, "tap_socket", "/run/ztunnel/tap.sock"),
        ({}, "ui", None),
        ({"ZTUNNEL_UI": "auto"}, "ui", None),
        ({"ZTUNNEL_UI": "true"}, "ui", True),
        ({"ZTUNNEL_UI": "false"}, "ui", False),
    ],
)
def test_variables_are_parsed(env: dict[str, str], field: str, value: Any) -> None:
    assert getattr(config(env), field) == value


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, 2),
        ({"ZTUNNEL_RESOURCE_CPU_LIMIT": "3500m"}, 1),
        ({"ZTUNNEL_RESOURCE_CPU_LIMIT": "4500m"}, 2),
        ({"ZTUNNEL_RESOURCE_CPU_LIMIT": "1", "ZTUNNEL_RESOURCE_CPU_REQUEST": "2.5"}, 1),
        ({"ZTUNNEL_RESOURCE_CPU_REQUEST": "3"}, 2),
        ({"ZTUNNEL_CPU_LIMIT": "16"}, 4),
        ({"ZTUNNEL_CPU_LIMIT": "2"}, 1),
        ({"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c"}, 1),
        ({"ZTUNNEL_CPU_LIMIT": "128"}, 8),
        ({"ZTUNNEL_WORKER_THREADS": "0"}, 8),
        ({"ZTUNNEL_WORKER_THREADS": "5"}, 5),
        ({"ZTUNNEL_WORKER_THREADS": "30%"}, 3),
        ({"ZTUNNEL_WORKER_THREADS": "1%"}, 1),
        ({"ZTUNNEL_WORKER_THREADS": "12.5%"}, 1),
        ({"ZTUNNEL_WORKER_THREADS": "37.6%"}, 4),
        ({"ZTUNNEL_WORKER_THREADS": "50%", "ZTUNNEL_RESOURCE_CPU_LIMIT": "2"}, 1),
        ({"PROXY_CONFIG": "{concurrency: 3, proxyMetadata: {}}"}, 3),
        ({"PROXY_CONFIG": "{concurrency: 0, proxyMetadata: {}}"}, 8),
        ({"PROXY_CONFIG": "{concurrency: 3, proxyMetadata: {}}", "ZTUNNEL_WORKER_THREADS": "6"}, 6),
    ],
)
def test_worker_threads(env: dict[str, str], threads: int) -> None:
    assert config(env, cpus=8).worker_threads == threads


def test_worker_threads_are_processes_and_limited() -> None:
    found = config({"ZTUNNEL_WORKER_THREADS": "4096"}, cpus=8)
    assert found.worker_threads == 64
    assert found.warnings == ("4096 worker threads are requested, each a process here; 64 are started",)


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({"ENABLE_PROXY": "yes"}, "invalid env var ENABLE_PROXY=yes (must be true or false)"),
        ({"TLS12_ENABLED": "True"}, "invalid env var TLS12_ENABLED=True (must be true or false)"),
        (
            {"SECRET_TTL": "1 moon"},
            "invalid env var SECRET_TTL=1 moon (must be a duration such as 90, 10s, 500ms or 1h30m)",
        ),
        (
            {"ZTUNNEL_METRIC_LABELS_REMOVED": "source_zone,response_flags"},
            "invalid env var ZTUNNEL_METRIC_LABELS_REMOVED=source_zone,response_flags"
            " (response_flags is no label of traffic that can be left out)",
        ),
        ({"PROXY_MODE": "both"}, "invalid env var PROXY_MODE=both (must be one of shared, dedicated)"),
        (
            {"ENABLE_ORIG_SRC": "maybe"},
            "invalid env var ENABLE_ORIG_SRC=maybe (must be one of true, false, auto)",
        ),
        (
            {"RUST_LOG": "info,ztunnel=loud"},
            "invalid env var RUST_LOG=info,ztunnel=loud (ztunnel=loud is neither a level nor target=level)",
        ),
        (
            {"ZTUNNEL_SIDECAR": "true"},
            "ZTUNNEL_SIDECAR=true needs PROXY_MODE=dedicated",
        ),
        (
            {**DEDICATED, "ZTUNNEL_SIDECAR": "true", "ENABLE_ORIG_SRC": "true"},
            "ENABLE_ORIG_SRC cannot be used with ZTUNNEL_SIDECAR=true, whose rules match the user",
        ),
        (
            {**DEDICATED, "ZTUNNEL_SIDECAR": "true", "PACKET_MARK": "1337"},
            "PACKET_MARK cannot be used with ZTUNNEL_SIDECAR=true, whose rules match the user",
        ),
        (
            {"PROXY_MODE": "dedicated"},
            "PROXY_MODE=dedicated needs PROXY_WORKLOAD_INFO=namespace/name/serviceaccount",
        ),
        (
            {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "ns/name"},
            "invalid env var PROXY_WORKLOAD_INFO=ns/name (must be namespace/name/serviceaccount)",
        ),
        ({"CA_ADDRESS": ""}, "CA_ADDRESS must not be empty (FAKE_CA=true makes certificates for tests)"),
        ({"XDS_ON_DEMAND": "true"}, "DNS proxy does not currently support on-demand mode"),
        (
            {"ENABLE_PROXY": "false", "ISTIO_META_DNS_CAPTURE": "false"},
            "ztunnel run without any servers enabled",
        ),
        (
            {"LOCAL_XDS": "a", "LOCAL_XDS_PATH": "b"},
            "only one of LOCAL_XDS_PATH and LOCAL_XDS may be set",
        ),
        ({"PROXY_CONFIG": "{statsPort: 1}"}, "PROXY_CONFIG: missing field proxyMetadata"),
        ({"PROXY_CONFIG": "[]"}, "PROXY_CONFIG: must be a mapping"),
        ({"PROXY_CONFIG": "{statsPort: 0, proxyMetadata: {}}"}, "PROXY_CONFIG: statsPort: 0 is not a port"),
        ({"PROXY_CONFIG": "{statsPort: true, proxyMetadata: {}}"}, "PROXY_CONFIG: statsPort: True is not a port"),
        (
            {"PROXY_CONFIG": "{concurrency: many, proxyMetadata: {}}"},
            "PROXY_CONFIG: concurrency: 'many' is not a number of threads",
        ),
        ({"ISTIO_META_DNS_PROXY_ADDR": "dns:53"}, "DNS_PROXY_ADDR=dns:53: must be localhost:port or ip:port"),
        ({"ISTIO_META_DNS_PROXY_ADDR": "::1:53"}, "DNS_PROXY_ADDR=::1:53: must be localhost:port or ip:port"),
        ({"ISTIO_META_DNS_PROXY_ADDR": "1.2.3.4"}, "DNS_PROXY_ADDR=1.2.3.4: must be localhost:port or ip:port"),
        ({"XDS_HEADER_a b": "secret"}, "invalid env var XDS_HEADER_a b (not the name of a gRPC header)"),
        ({"CA_HEADER_a": "sec\nret"}, "invalid env var CA_HEADER_a (not a printable ASCII value)"),
        ({"POOL_MAX_STREAMS_PER_CONNECTION": "65536"}, None),
        ({"HTTP2_FRAME_SIZE": "1"}, None),
        ({"KEEPALIVE_RETRIES": "-1"}, None),
        ({"PACKET_MARK": "0x539"}, None),
        ({"ZTUNNEL_WORKER_THREADS": "half"}, None),
        ({"ZTUNNEL_CPU_LIMIT": "2Gi"}, None),
        ({"XDS_ADDRESS": "http://istiod:15010"}, None),
        (
            {"COMPLIANCE_POLICY": "fips"},
            "invalid env var COMPLIANCE_POLICY=fips"
            " (must be one of pqc, fips-140-2: without a known policy TLS would be weaker than asked for)",
        ),
        (
            {"COMPLIANCE_POLICY": "pqc", "TLS12_ENABLED": "true"},
            "COMPLIANCE_POLICY=pqc excludes TLS12_ENABLED: TLS 1.2 has no post-quantum groups",
        ),
    ],
)
def test_invalid_variables_are_faults(env: dict[str, str], fault: str | None) -> None:
    found = faults(env)
    name, value = next(iter(env.items()))
    assert len(found) == 1
    if fault is None:
        assert found[0].startswith(f"invalid env var {name}={value} (")
    else:
        assert found == [fault]


def test_all_environment_faults_are_reported_together() -> None:
    assert len(faults({"ENABLE_PROXY": "x", "NETWORK": "n", "PACKET_MARK": "y", "CA_ADDRESS": ""})) == 3


def test_the_mesh_file_comes_before_the_variable() -> None:
    read = config(
        {"PROXY_CONFIG": "{statsPort: 2, proxyMetadata: {ISTIO_META_B: env, C: env}}", "ISTIO_META_C": "variable"},
        mesh_file="defaultConfig: {statsPort: 1, proxyAdminPort: 3, proxyMetadata: {A: file, B: file}}",
    )
    assert (read.stats_port, read.admin_port) == (2, 3)
    assert read.proxy_metadata == {"A": "file", "B": "env", "C": "variable"}


@pytest.mark.parametrize("mesh_file", [None, "", "defaultConfig:\n", "trustDomain: x\n"])
def test_a_mesh_file_without_proxy_config_is_fine(mesh_file: str | None) -> None:
    assert config(mesh_file=mesh_file).stats_port == 15020


def test_a_faulty_mesh_file_is_named() -> None:
    assert faults({}, "{")[0].startswith(f"{MESH_CONFIG}: not valid YAML: ")


def test_yaml_booleans_in_metadata_stay_text() -> None:
    read = config({"PROXY_CONFIG": "{proxyMetadata: {DNS_CAPTURE: false, N: 1}}"})
    assert not read.dns_proxy
    assert read.proxy_metadata == {"DNS_CAPTURE": "false", "N": "1"}


@pytest.mark.parametrize("text", ["{", "NaN", "Infinity"])
def test_metadata_that_is_no_json_is_left_out(text: str) -> None:
    read = config({"ISTIO_METAJSON_X": text, "ISTIO_METAJSON_Y": "1"})
    assert read.metadata_json == {"Y": 1}
    assert read.warnings[0].startswith("environment variable ISTIO_METAJSON_X is ignored: not JSON: ")


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("ZTUNNEL_SPIN", "environment variable ZTUNNEL_SPIN is not known; did you mean ZTUNNEL_SPIN_US?"),
        ("ZTUNNEL_QQQQ", "environment variable ZTUNNEL_QQQQ is not known"),
        ("PREFERRED_SERVICE_NAMESPACE", "did you mean PREFERED_SERVICE_NAMESPACE?"),
        ("TLS12_ENABLE", "did you mean TLS12_ENABLED?"),
    ],
)
def test_misspelt_variables_are_warnings(name: str, warning: str) -> None:
    assert config({name: "1"}).warnings[0].endswith(warning)


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "INPOD_ENABLED", "RUST_BACKTRACE", "ZTUNNEL_SERVICE_HOST", "ZTUNNEL_PORT_15012_TCP"),
        *("ZTUNNEL_METRICS_SERVICE_HOST", "ZTUNNEL_METRICS_PORT_15020_TCP_ADDR"),
    ],
)
def test_variables_of_other_programs_are_ignored(name: str) -> None:
    assert config({name: "1"}).warnings == ()


def test_sources_of_calicos_policies() -> None:
    assert config({}).policies is None
    assert config({"CALICO_POLICY_DIR": "", "POLICY_SYNC": ""}).policies is None
    assert config({"CALICO_POLICY_DIR": "/p"}).policies == PolicySettings(directory="/p")
    found = config({"POLICY_SYNC": "unix:///run/node", "CALICO_UNKNOWN_PODS": "allow"}).policies
    assert found == PolicySettings(sync="unix:/run/node", allow_unknown=True)
    found = config({"CALICO_POLICY_DIR": "/p", "CALICO_HTTP_WAYPOINTS": "shop/waypoint, a/b"}).policies
    assert found == PolicySettings(directory="/p", http_waypoints=frozenset({"shop/waypoint", "a/b"}))


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        (
            {"CALICO_POLICY_DIR": "/p", "POLICY_SYNC": "/s"},
            "CALICO_POLICY_DIR and POLICY_SYNC exclude each other",
        ),
        ({"CALICO_UNKNOWN_PODS": "allow"}, "CALICO_UNKNOWN_PODS needs CALICO_POLICY_DIR or POLICY_SYNC"),
        (
            {"POLICY_SYNC": "/s", "CALICO_UNKNOWN_PODS": "yes"},
            "invalid env var CALICO_UNKNOWN_PODS=yes (must be deny or allow)",
        ),
        ({"CALICO_HTTP_WAYPOINTS": "a/b"}, "CALICO_HTTP_WAYPOINTS needs CALICO_POLICY_DIR or POLICY_SYNC"),
        (
            {"POLICY_SYNC": "/s", "CALICO_HTTP_WAYPOINTS": "waypoint"},
            "invalid env var CALICO_HTTP_WAYPOINTS=waypoint ('waypoint' is no namespace/account)",
        ),
        ({"POLICY_SYNC": "unix:"}, "invalid env var POLICY_SYNC=unix: ('unix:' has no path)"),
    ],
)
def test_invalid_sources_of_calico_policies_are_faults(env: dict[str, str], fault: str) -> None:
    with pytest.raises(SettingsError) as error:
        config(env)
    assert error.value.faults == [fault]


def test_secrets_are_not_shown() -> None:
    shown = repr(config({"AUTH_TOKEN": "hush", "XDS_HEADER_A": "hush", "CA_HEADER_A": "hush"}))
    assert "hush" not in shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("10s", 10), ("1500ms", 1.5), ("5m", 300), ("1h30m", 5400), ("1d", 86400), ("0", 0)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert math.isclose(duration_s(text), seconds)


@pytest.mark.parametrize(
    ("env", "socket", "warning"),
    [
        ({"KEEPALIVE_TIME": "12h"}, (32767, 180, 9), "KEEPALIVE_TIME: Linux takes 1 to 32767 s; 32767 s is used"),
        ({"KEEPALIVE_INTERVAL": "1d"}, (180, 32767, 9), "KEEPALIVE_INTERVAL: Linux takes 1 to 32767 s"),
        ({"KEEPALIVE_TIME": "500us"}, (1, 180, 9), "KEEPALIVE_TIME: Linux takes 1 to 32767 s; 1 s is used"),
        ({"KEEPALIVE_RETRIES": "0"}, (180, 180, 1), "KEEPALIVE_RETRIES: Linux takes 1 to 127; 1 is used"),
    ],
)
def test_keepalive_that_the_kernel_would_refuse(
    env: dict[str, str], socket: tuple[int, int, int], warning: str
) -> None:
    config = config_from(env, cpus=1, read_file=lambda path: None)
    found = config.socket
    assert (found.keepalive_time_s, found.keepalive_interval_s, found.keepalive_retries) == socket
    assert any(line.startswith(warning) for line in config.warnings)


@pytest.mark.parametrize("value", ["plain", "text", "json", "JSON", ""])
def test_known_log_format_is_no_warning(value: str) -> None:
    assert config({"LOG_FORMAT": value}).warnings == ()


def test_unknown_log_format_is_a_warning() -> None:
    assert config({"LOG_FORMAT": "xml"}).warnings == (
        "LOG_FORMAT=xml is neither plain nor json; lines are plain text",
    )
