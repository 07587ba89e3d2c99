"""Annotations of a sidecar: each value that is taken, each that denies the pod and how, each that is a warning."""

import re
from typing import Any

import pytest

from ztunnel.sidecar.inject.config import SidecarConfig, parse_config
from ztunnel.sidecar.inject.option_annotations import STATUS_PORT, Asked, BadAnnotations, asked

TRAFFIC = "traffic.sidecar.istio.io/"
SIDECAR = "sidecar.istio.io/"
READINESS = "readiness.status.sidecar.istio.io/"


def read(config: SidecarConfig | None = None, **annotations: Any) -> Asked:
    return asked(annotations, config or SidecarConfig())


def faults(**annotations: Any) -> list[str]:
    with pytest.raises(BadAnnotations) as raised:
        read(**annotations)
    return raised.value.faults


def test_without_annotations_the_configuration_applies() -> None:
    found = read()
    assert found.flags == {}
    assert found.resources == SidecarConfig().resources
    assert (found.capture, found.native, found.rewrite, found.status_port) == (True, None, True, 15020)
    config = parse_config("sidecar: {excludeOutboundPorts: '25', rewriteAppHTTPProbes: false, logLevel: debug}")
    configured = read(config.sidecar)
    assert (configured.flags, configured.rewrite, configured.log_level) == ({"-o": "25"}, False, "debug")
    # An annotation replaces the configured value.
    assert read(config.sidecar, **{TRAFFIC + "excludeOutboundPorts": " 26,27 "}).flags == {"-o": "26,27"}


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        (TRAFFIC + "includeOutboundIPRanges", "*", "-i"),
        (TRAFFIC + "includeOutboundIPRanges", "", "-i"),
        (TRAFFIC + "includeOutboundIPRanges", "10.0.0.0/8,fd00::/8", "-i"),
        (TRAFFIC + "excludeOutboundIPRanges", "10.1.0.0/16", "-x"),
        (TRAFFIC + "includeInboundPorts", "80,443", "-b"),
        (TRAFFIC + "excludeInboundPorts", "22", "-d"),
        (TRAFFIC + "includeOutboundPorts", "9000", "-q"),
        (TRAFFIC + "excludeOutboundPorts", "25", "-o"),
        (TRAFFIC + "excludeInterfaces", "eth1,eth2", "-c"),
        ("istio.io/reroute-virtual-interfaces", "tap0", "-k"),
        (TRAFFIC + "kubevirtInterfaces", "tap0", "-k"),
    ],
)
def test_lists_of_traffic_become_flags_of_init(name: str, value: str, flag: str) -> None:
    assert read(**{name: value}).flags == {flag: value}


def test_the_other_values() -> None:
    found = read(
        **{
            SIDECAR + "interceptionMode": "NONE",
            SIDECAR + "nativeSidecar": "false",
            SIDECAR + "rewriteAppHTTPProbers": "F",
            SIDECAR + "proxyCPU": "250m",
            SIDECAR + "proxyMemoryLimit": "1.5Gi",
            SIDECAR + "proxyImage": "example/other:2",
            SIDECAR + "logLevel": "warning",
            SIDECAR + "userVolume": '[{"name": "a", "emptyDir": {}}]',
            SIDECAR + "userVolumeMount": '{"a": {"mountPath": "/a"}}',
            STATUS_PORT: "16000",
            READINESS + "initialDelaySeconds": "0",
            READINESS + "periodSeconds": "2",
            READINESS + "failureThreshold": "30",
            "proxy.istio.io/config": "concurrency: 1\nproxyMetadata: {A: b}\n",
        }
    )
    assert found == Asked(
        capture=False,
        native=False,
        rewrite=False,
        resources={"requests": {"cpu": "250m"}, "limits": {"memory": "1.5Gi"}},
        image="example/other:2",
        log_level="warn",
        volumes=({"name": "a", "emptyDir": {}},),
        mounts=({"name": "a", "mountPath": "/a"},),
        status_port=16000,
        readiness={"initialDelaySeconds": 0, "periodSeconds": 2, "failureThreshold": 30},
        proxy_config={"concurrency": 1, "proxyMetadata": {"A": "b"}},
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (SIDECAR + "interceptionMode", "TPROXY", "TPROXY needs a proxy with CAP_NET_ADMIN"),
        (SIDECAR + "interceptionMode", "redirect", "must be REDIRECT or NONE, not 'redirect'"),
        (TRAFFIC + "includeOutboundIPRanges", "*,10.0.0.0/8", "mixes * with ranges"),
        (TRAFFIC + "excludeOutboundIPRanges", "*", "'*' is no IP range"),
        (TRAFFIC + "excludeOutboundIPRanges", "10.0.0.1/255.0.0.0", "is no IP range"),
        (TRAFFIC + "includeInboundPorts", "http", "'http' is no port from 1 to 65535"),
        (TRAFFIC + "excludeInboundPorts", "*", "'*' is no port"),
        (TRAFFIC + "excludeOutboundPorts", "0", "'0' is no port"),
        (TRAFFIC + "includeOutboundPorts", "80;443", "'80;443' is no port"),
        (TRAFFIC + "excludeInterfaces", "a-very-long-name", "is no name of a network interface"),
        (STATUS_PORT, "-1", "must be a port, or 0 for none"),
        (STATUS_PORT, "15008", "port 15008 is already used by the proxy"),
        (READINESS + "periodSeconds", "1s", "must be a whole number from 0, not '1s'"),
        (SIDECAR + "nativeSidecar", "yes", "must be true or false, not 'yes'"),
        (SIDECAR + "proxyCPU", "lots", "must be a quantity such as 100m or 128Mi, not 'lots'"),
        (SIDECAR + "proxyMemory", "1\x07Gi", "must be a quantity"),
        (SIDECAR + "logLevel", "loud", "must be one of trace, debug"),
        (SIDECAR + "userVolume", "{", "is not JSON"),
        (SIDECAR + "userVolume", "[3]", "must be a JSON list of objects with names"),
        ("proxy.istio.io/config", "a: [", "is not valid YAML"),
        ("proxy.istio.io/config", "[1]", "must be a mapping"),
        ("proxy.istio.io/config", "a: .inf", "has no equivalent in JSON"),
        ("proxy.istio.io/config", "proxyMetadata: x", "proxyMetadata must be a mapping"),
        ("proxy.istio.io/config", "concurrency: two", "concurrency must be a number of threads, not 'two'"),
        ("proxy.istio.io/config", "concurrency: true", "concurrency must be a number of threads, not True"),
        ("proxy.istio.io/config", "concurrency: -1", "concurrency must be a number of threads, not -1"),
        ("proxy.istio.io/config", "proxyAdminPort: 0", "proxyAdminPort must be a port, not 0"),
        ("proxy.istio.io/config", "statsPort: 65536", "statsPort must be a port, not 65536"),
        ("proxy.istio.io/config", "statsPort: 16000", f"statsPort 16000 is not that of {STATUS_PORT}: 15020"),
        (SIDECAR + "proxyCPU", 3, "must be a string, not 3"),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any, said: str) -> None:
    [fault] = faults(**{name: value})
    assert fault.startswith(f"annotation {name}: ")
    assert re.search(re.escape(said), fault)


def test_all_faults_are_told_together() -> None:
    found = faults(**{SIDECAR + "proxyCPU": "x", TRAFFIC + "excludeInboundPorts": "y", STATUS_PORT: "z"})
    assert len(found) == 3


def test_annotations_without_effect_are_warnings() -> None:
    found = read(
        **{
            SIDECAR + "componentLogLevel": "misc:error",
            TRAFFIC + "excludeOutboundPort": "25",
            SIDECAR + "zzz": "1",
            "example.com/else": "",
            SIDECAR + "inject": "true",
        }
    )
    assert found.warnings == (
        f"annotation {SIDECAR}componentLogLevel is ignored: it is for Envoy",
        f"annotation {TRAFFIC}excludeOutboundPort is not known; did you mean {TRAFFIC}excludeOutboundPorts?",
        f"annotation {SIDECAR}zzz is not known",
    )
