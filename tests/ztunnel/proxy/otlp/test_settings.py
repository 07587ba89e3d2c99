"""OpenTelemetry's variables: what they mean here, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from ztunnel.proxy.envoy.config.settings import settings_from
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.otlp.settings import VARIABLES, Batching, Destination, otlp_settings
from ztunnel.runtime.settings import SettingsError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
LOGS = "OTEL_EXPORTER_OTLP_LOGS_"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_"


def faults(env: dict[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        otlp_settings({**ENDPOINT, **env})
    return caught.value.faults


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {
            **ENDPOINT,
            **dict.fromkeys(("OTEL_METRICS_EXPORTER", "OTEL_LOGS_EXPORTER", "OTEL_TRACES_EXPORTER"), "none"),
        },
        {f"{TRACES}ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER": "always_off"},
        {"OTEL_SERVICE_NAME": "x", "OTEL_METRIC_EXPORT_INTERVAL": "1000"},
    ],
)
def test_export_is_off_without_an_endpoint_or_if_disabled(env: dict[str, str]) -> None:
    assert otlp_settings(env) is None


def test_common_endpoint_gets_the_path_of_each_signal() -> None:
    found = otlp_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4318/base/"})
    assert found is not None
    assert found.metrics == Destination(url="https://c:4318/base/v1/metrics")
    assert found.logs == Destination(url="https://c:4318/base/v1/logs")
    assert found.traces == Destination(url="https://c:4318/base/v1/traces")
    assert found.interval_s == 60.0
    assert found.lines == Batching(queue=8192, batch=512, delay_s=1.0)
    assert found.spans == Batching(queue=2048, batch=512, delay_s=5.0)


def test_variable_of_a_signal_wins_and_its_endpoint_is_used_unchanged(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    found = otlp_settings(
        {
            **ENDPOINT,
            "OTEL_EXPORTER_OTLP_HEADERS": "key=all",
            f"{LOGS}ENDPOINT": "http://logs:80/in",
            f"{LOGS}HEADERS": "api-key=a%2Cb, other=1",
            f"{LOGS}TIMEOUT": "2500",
            f"{LOGS}COMPRESSION": "gzip",
            f"{LOGS}CERTIFICATE": str(ca),
            "OTEL_METRIC_EXPORT_INTERVAL": "15000",
            "OTEL_BLRP_MAX_QUEUE_SIZE": "10",
            "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE": "5",
            "OTEL_BLRP_SCHEDULE_DELAY": "50",
            "OTEL_BSP_MAX_QUEUE_SIZE": "20",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=prod%20eu,service.name=no",
            "OTEL_SERVICE_NAME": "mesh",
        }
    )
    assert found is not None
    assert found.logs == Destination(
        url="http://logs:80/in",
        headers=(("api-key", "a,b"), ("other", "1")),
        timeout_s=2.5,
        compression="gzip",
        certificate=str(ca),
    )
    assert found.metrics == Destination(url="http://collector:4318/v1/metrics", headers=(("key", "all"),))
    assert found.interval_s == 15.0
    assert found.lines == Batching(queue=10, batch=5, delay_s=0.05)
    assert found.spans == Batching(queue=20, batch=4, delay_s=0.1)
    assert dict(found.attributes) == {"deployment.environment": "prod eu", "service.name": "mesh"}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "must be a URL such as http://collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:99999", "must be a URL such as http://collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me@c", "must be a URL without user, query and fragment"),
        (f"{LOGS}ENDPOINT", "http:///in", "must be a URL such as http://collector:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "must be http/protobuf"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "br", "must be none or gzip or deflate"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "must be a whole number above 0"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/none", "no such file, or it cannot be read"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "must be a whole number above 0"),
        ("OTEL_METRICS_EXPORTER", "prometheus", "must be otlp or none"),
        (
            "OTEL_TRACES_SAMPLER",
            "always_on",
            "must be parentbased_always_off or always_off or parentbased_traceidratio",
        ),
        ("OTEL_SDK_DISABLED", "maybe", "must be true or false"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b,c", "item 2 is not name=value"),
    ],
)
def test_invalid_value_is_named_with_its_reason(name: str, value: str, reason: str) -> None:
    assert faults({name: value}) == [f"{name}={value}: {reason}"]


def test_a_share_of_the_traces_that_begin_here_is_sampled() -> None:
    ratio = {f"{TRACES}ENDPOINT": "http://c", "OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
    for share, below in (("0.5", 1 << 55), ("1", 1 << 56), ("0", 0), ("", 1 << 56)):
        found = otlp_settings({**ratio, "OTEL_TRACES_SAMPLER_ARG": share})
        assert found is not None
        assert found.sampled_below == below
    assert faults({**ratio, "OTEL_TRACES_SAMPLER_ARG": "2"}) == [
        "OTEL_TRACES_SAMPLER_ARG=2: must be between 0 and 1"
    ]
    plain = otlp_settings({f"{TRACES}ENDPOINT": "http://c"})
    assert plain is not None
    assert plain.sampled_below == 0


def test_header_values_are_never_printed() -> None:
    assert faults({"OTEL_EXPORTER_OTLP_HEADERS": "secret"}) == [
        "OTEL_EXPORTER_OTLP_HEADERS: item 1 is not name=value"
    ]
    assert "secret" not in str(faults({"OTEL_EXPORTER_OTLP_HEADERS": "x=secret%0D"}))
    assert "secret" not in repr(otlp_settings({**ENDPOINT, "OTEL_EXPORTER_OTLP_HEADERS": "x=secret"}))


def test_all_otlp_faults_are_reported_together() -> None:
    env = {
        "OTEL_METRIC_EXPORT_INTERVAL": "x",
        "OTEL_BLRP_MAX_QUEUE_SIZE": "5",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": __file__,
    }
    assert [fault.partition("=")[0].partition(" ")[0] for fault in faults(env)] == [
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
        "OTEL_METRIC_EXPORT_INTERVAL",
        "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE",
    ]


def test_without_the_library_an_endpoint_is_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert faults({}) == [
        "OTEL_EXPORTER_OTLP_ENDPOINT: OpenTelemetry's exporter is not installed: pip install 'ztunnel-py[otlp]'"
    ]
    assert otlp_settings({}) is None


def test_both_front_ends_read_the_otlp_variables(tmp_path: Path) -> None:
    named = {"NODE_NAME": "n1"}
    config = config_from({**ENDPOINT, **named}, cpus=1, read_file=lambda path: None)
    assert config.otlp is not None
    assert config.otlp.logs is not None
    assert not config.warnings
    flags = {"control_plane": "127.0.0.1:1", "node": "n"}
    settings = settings_from(flags, ENDPOINT)
    assert settings.otlp is not None
    assert settings.otlp.metrics is not None
    assert settings.otlp.logs is None
    with pytest.raises(SettingsError, match="LOGS_ENDPOINT: here the listeners' access loggers configure"):
        settings_from(flags, {f"{LOGS}ENDPOINT": "http://c"})
    with pytest.raises(SettingsError, match="TRACES_ENDPOINT: this dialect creates no spans"):
        settings_from(flags, {f"{TRACES}ENDPOINT": "http://c"})
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc: must be http/protobuf"):
        config_from({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, cpus=1, read_file=lambda path: None)
    others = {**ENDPOINT, **named, f"{TRACES}ENDPOINT": "http://c", "OTEL_BSP_EXPORT_TIMEOUT": "1"}
    config = config_from(others, cpus=1, read_file=lambda path: None)
    assert not config.warnings
    assert config.otlp is not None
    assert config.otlp.traces == Destination(url="http://c")
    near = config_from({"OTEL_EXPORTER_OTLP_ENDPIONT": "x", **named}, cpus=1, read_file=lambda path: None).warnings
    assert "did you mean OTEL_EXPORTER_OTLP_ENDPOINT?" in near[0]


def test_opentelemetry_is_not_imported_by_the_front_ends() -> None:
    program = (
        "import sys, ztunnel.proxy.istio.app, ztunnel.proxy.envoy.app, ztunnel.proxy.otlp.exporter;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'requests'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_documentation_lists_every_otlp_variable() -> None:
    page = (Path(__file__).parents[4] / "docs/telemetry.md").read_text()
    of_all = {
        name for name in VARIABLES if not any(f"_OTLP_{each}_" in name for each in ("LOGS", "METRICS", "TRACES"))
    }
    assert {name for name in of_all if f"`{name}`" not in page} == {"OTEL_EXPORTER_OTLP_CLIENT_KEY"}
    assert "`_CLIENT_KEY`" in page
