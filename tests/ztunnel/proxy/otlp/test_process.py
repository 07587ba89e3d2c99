"""A proxy of Envoy's dialect, as a process, sends its statistics at the interval and at its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.ztunnel.proxy.otlp.collector import attributes, collecting

BOOTSTRAP = "node: {id: node-1, cluster: edge}\nstatic_resources: {}\n"


def test_statistics_are_sent_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "bootstrap.yaml"
    path.write_text(BOOTSTRAP)
    command = [sys.executable, "-m", "ztunnel", "proxy", "--bootstrap", str(path), "--admin", "off"]
    command += ["--metrics", "off", "--readiness", "off"]
    with collecting() as collector:
        env = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
        }
        proxy = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        collector.wait(lambda: len(collector.metrics) >= 2)
        proxy.send_signal(signal.SIGTERM)
        _, log = proxy.communicate(timeout=60)
    assert proxy.returncode == 0, log
    resource = attributes(collector.metrics[0].resource_metrics[0].resource)
    assert (resource["service.instance.id"], resource["service.namespace"]) == ("node-1", "edge")
    found = {metric.name: metric.WhichOneof("data") for metric in collector.families()}
    assert found["envoy_server_live"] == "gauge"
    assert found["envoy_otlp_metrics_dropped"] == "gauge"
    assert found["process_cpu_seconds_total"] == "sum"


def test_an_unusable_variable_is_an_error_of_the_start(tmp_path: Path) -> None:
    path = tmp_path / "bootstrap.yaml"
    path.write_text(BOOTSTRAP)
    command = [sys.executable, "-m", "ztunnel", "proxy", "--bootstrap", str(path), "--validate"]
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "collector"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "ztunnel: OTEL_EXPORTER_OTLP_ENDPOINT=collector: must be a URL such as http://collector:4318\n"
    )
