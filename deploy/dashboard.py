"""Makes the Grafana dashboard of the charts: ``python -m deploy.dashboard``.

This module describes panels by their queries, and generates Grafana's JSON, which is ten times as long. There are
two rows: the users' view of the mesh by service and policy, and the state of the proxies by node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).resolve().parent / "helm" / "ztunnel" / "files" / "ztunnel.dashboard.json"
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24
_HEIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel with a graph over time, or with a single number.

    Attributes:
        queries: PromQL queries, with the legend of each.
        unit: Grafana's name of the unit.
        text: the panel's meaning, and where to look next.
        width: the width, out of :data:`_COLUMNS`.
        number: whether to show only the last value, coloured from ``bad_above`` on.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str
    text: str = ""
    width: int = 8
    number: bool = False
    bad_above: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


_OPENED: Final = 'istio_tcp_connections_opened_total{reporter="source"}'
_FAILED: Final = 'istio_tcp_connections_failed_total{reporter="source"}'
_INSTANCE: Final = '{instance=~"$instance"}'
_BY_SERVICE: Final = "{{destination_service}}"

ROWS: Final = (
    Row(
        "The mesh",
        (
            Panel("Connections a second", ((f"sum(rate({_OPENED}[5m]))", "opened"),), "cps", width=4, number=True),
            Panel(
                "Failed",
                ((f"sum(rate({_FAILED}[5m])) / sum(rate({_OPENED}[5m]))", "failed"),),
                "percentunit",
                "Of the connections that sources opened. The access lines of their nodes have the reasons.",
                width=4,
                number=True,
                bad_above=0.01,
            ),
            Panel(
                "Denied a second",
                (('sum(rate(ztunnel_authorization_decisions_total{result=~"denied|ended"}[5m]))', "denied"),),
                "cps",
                "By authorization policies; the table below has them one by one.",
                width=4,
                number=True,
                bad_above=1.0,
            ),
            Panel(
                "Not in mTLS",
                (
                    (
                        "sum(rate(istio_tcp_connections_opened_total"
                        '{reporter="destination", connection_security_policy!="mutual_tls"}[5m]))'
                        ' / sum(rate(istio_tcp_connections_opened_total{reporter="destination"}[5m]))',
                        "plain",
                    ),
                ),
                "percentunit",
                "Connections that came to pods of the mesh in plain text.",
                width=4,
                number=True,
                bad_above=0.0,
            ),
            Panel("Open", (("sum(istio_tcp_sockets_open) by (reporter)", "{{reporter}}"),), "none", width=8),
            Panel(
                "Connections by service",
                ((f"topk(10, sum by (destination_service) (rate({_OPENED}[5m])))", _BY_SERVICE),),
                "cps",
            ),
            Panel(
                "Failed by service and flag",
                (
                    (
                        f"topk(10, sum by (destination_service, response_flags) (rate({_FAILED}[5m])))",
                        f"{_BY_SERVICE} {{{{response_flags}}}}",
                    ),
                ),
                "cps",
                "docs/troubleshooting.md explains each flag.",
            ),
            # Istio's metrics take the server's view: it has received what went to the service.
            Panel(
                "Bytes by service",
                (
                    (
                        "topk(10, sum by (destination_service) "
                        '(rate(istio_tcp_received_bytes_total{reporter="source"}[5m])))',
                        f"to {_BY_SERVICE}",
                    ),
                    (
                        "topk(10, sum by (destination_service) "
                        '(rate(istio_tcp_sent_bytes_total{reporter="source"}[5m])))',
                        f"from {_BY_SERVICE}",
                    ),
                ),
                "Bps",
            ),
            Panel(
                "Decisions by policy",
                (
                    (
                        "topk(20, sum by (policy, result) (rate(ztunnel_authorization_decisions_total[5m])))",
                        "{{policy}} {{result}}",
                    ),
                ),
                "cps",
                "`ztunnel status` on the destination's node names the last pairs, `ztunnel explain` the clause.",
                width=16,
            ),
            Panel(
                "Tried again",
                ((f"sum by (instance) (rate(ztunnel_connect_retries_total{_INSTANCE}[5m]))", "{{instance}}"),),
                "cps",
                "Connections that another endpoint served after the first had failed.",
            ),
        ),
    ),
    Row(
        "The proxies",
        (
            Panel("CPU", ((f"rate(process_cpu_seconds_total{_INSTANCE}[5m])", "{{instance}}"),), "none", "Cores."),
            Panel("Memory", ((f"process_resident_memory_bytes{_INSTANCE}", "{{instance}}"),), "bytes"),
            Panel(
                "Descriptors in use",
                ((f"process_open_fds{_INSTANCE} / process_max_fds{_INSTANCE}", "{{instance}}"),),
                "percentunit",
            ),
            Panel(
                "Late event loop",
                ((f"rate(ztunnel_loop_late_seconds_total{_INSTANCE}[5m])", "{{instance}}"),),
                "s",
                "Seconds of delay per second: above 0.1 small requests wait, and the proxy needs more CPU.",
            ),
            Panel(
                "Without a control plane",
                ((f"ztunnel_xds_staleness_seconds{_INSTANCE}", "{{instance}}"),),
                "s",
                "Seconds since the stream was lost; 0 while it is there.",
            ),
            Panel(
                "Pods",
                (
                    (f"workload_manager_active_proxy_count{_INSTANCE}", "{{instance}}"),
                    (f"workload_manager_pending_proxy_count{_INSTANCE} > 0", "{{instance}} pending"),
                ),
                "none",
            ),
            Panel(
                "Limits that bite",
                (
                    (f"rate(ztunnel_half_open_turned_away_total{_INSTANCE}[5m])", "{{instance}} half-open"),
                    (f"rate(ztunnel_calmed_connections_total{_INSTANCE}[5m])", "{{instance}} calmed"),
                    (f"rate(ztunnel_accepts_paused_total{_INSTANCE}[5m])", "{{instance}} paused"),
                    (f"rate(ztunnel_baggage_refused_total{_INSTANCE}[5m])", "{{instance}} baggage"),
                    (f"rate(ztunnel_log_lines_dropped_total{_INSTANCE}[5m])", "{{instance}} log lines"),
                ),
                "cps",
                "docs/reliability.md#limits explains each.",
                width=16,
            ),
            Panel(
                "Connect, p99",
                (
                    (
                        "histogram_quantile(0.99, sum by (path, le)"
                        ' (rate(ztunnel_connect_seconds_bucket{result="ok"}[5m])))',
                        "{{path}}",
                    ),
                ),
                "s",
                "From accept to the far side's answer, by sources.",
            ),
            Panel(
                "Handshakes, p99",
                (
                    (
                        "histogram_quantile(0.99, sum by (role, le)"
                        ' (rate(ztunnel_handshake_seconds_bucket{result="ok"}[5m])))',
                        "{{role}}",
                    ),
                ),
                "s",
                "TLS of tunnel connections.",
            ),
            Panel(
                "Waits",
                (("sum by (what) (rate(ztunnel_wait_seconds_count[5m]))", "{{what}}"),),
                "cps",
                "Connections that waited for a workload, a policy or a certificate, and requested secrets (SDS).",
            ),
            Panel(
                "Configuration",
                (
                    (f"max by (kind) (ztunnel_mesh_objects{_INSTANCE})", "{{kind}}"),
                    (f"sum by (kind) (ztunnel_xds_refused_resources{_INSTANCE}) > 0", "{{kind}} refused"),
                ),
                "none",
                "What the control plane has described, and what could not be read.",
            ),
            Panel(
                "Failures by reason",
                (
                    (
                        "sum by (stage, reason) (rate(ztunnel_connection_errors_total[5m]))",
                        "{{stage}} {{reason}}",
                    ),
                ),
                "cps",
                "docs/troubleshooting.md explains each reason.",
            ),
            Panel(
                "First certificate to end",
                ((f"min by (instance) (istio_cert_expiry_seconds{_INSTANCE}) - time()", "{{instance}}"),),
                "s",
            ),
            Panel("Series", ((f"ztunnel_metric_series{_INSTANCE}", "{{instance}}"),), "none"),
        ),
    ),
)


def queries() -> Iterator[str]:
    """Yield every PromQL query of the dashboard."""
    for row in ROWS:
        for panel in row.panels:
            yield from (query for query, _ in panel.queries)


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports."""
    return {
        "uid": "ztunnel",
        "title": "ztunnel",
        "tags": ["ztunnel", "ambient", "istio"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _instances()]},
        "panels": list(_panels()),
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Proxy",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(ztunnel_build, instance)", "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, left, top = 0, 0, 0
    for row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "gridPos": _place(0, top, _COLUMNS, 1),
            "panels": [],
        }
        top += 1
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + _HEIGHT
            number += 1
            yield _panel(panel, number, _place(left, top, panel.width, _HEIGHT))
            left += panel.width
        left, top = 0, top + _HEIGHT


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above or 1e-9})
    return {
        "id": number,
        "type": "stat" if panel.number else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                # Show exemplars as dots, which stand for single connections and have their trace ids.
                **({"exemplar": True} if "_bucket" in query else {}),
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """Return the dashboard file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
