"""Alerts for Prometheus and a dashboard for Grafana: queries that Prometheus reads, about what a real page has."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy import dashboard
from hbone.aio.relay import ByteCounts
from tests.programs import metrics_lint, needed
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from xds.model.identity import SpiffeId
from ztunnel.node.agent import status
from ztunnel.policy.ledger import Use
from ztunnel.policy.netpol.controller import Counts
from ztunnel.policy.netpol.metrics import families as netpol_families
from ztunnel.proxy.dataplane.reasons import Reason, Stage
from ztunnel.proxy.istio.accounting.metrics import PeerLabels, traffic_labels
from ztunnel.runtime.http import exposition
from ztunnel.runtime.http.page import PageRequest

FILE = Path(__file__).parents[2] / "deploy" / "helm" / "ztunnel" / "files" / "ztunnel.rules.yaml"
RUNBOOK = Path(__file__).parents[2] / "docs" / "alerts.md"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
#: A series in a query: its name, which contains an underscore or colon, and its matchers.
SERIES = re.compile(r"\b((?:istio|netpol|process|workload_manager|ztunnel)[_:][a-z0-9_:]+)(?:\{([^}]*)\})?")
#: Names of the Rust ztunnel, which the checker dislikes.
OF_RUST = ("workload_manager_active_proxy_count", "workload_manager_pending_proxy_count")
#: The labels that Prometheus itself adds to each series.
OF_PROMETHEUS = {"instance", "job"}


def others() -> list[str]:
    """Return the pages of a node agent and of netpol, of which nothing is known but what a page is made of."""
    enroller, informer, auditor = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    enroller.agent.pods.return_value, enroller.pods.return_value, enroller.steps = {}, {}, {}
    auditor.audited = {}
    controller = mock.MagicMock(built=None, **dict.fromkeys(("synced", "in_force", "problems"), 1))
    controller.counts = Counts()
    found = []
    for families in (
        status.families(enroller, informer, auditor, None),
        netpol_families(controller, None, ("pods",)),
    ):
        answer = exposition.page(families, PageRequest(method="GET", path="/metrics"))
        found.append(b"".join(piece for piece in answer.body if isinstance(piece, bytes)).decode())
    return found


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """The pages of a proxy that has done everything once, and of a node agent and netpol."""
    found: list[str] = []

    async def read(harness: Harness) -> None:
        metrics, counts = harness.proxy.metrics, ByteCounts()
        labels = traffic_labels("source", PeerLabels(known=True), PeerLabels(), None, secured=True)
        metrics.opened(labels, (), counts, 0.0).finished("DENY", counts)
        metrics.ledger.own.note("shop/p", Use.DENIED, 0.0)
        metrics.failed("source", Stage.EARLY, Reason.DNS)
        metrics.connects["hbone", "ok"].observe(0.1)
        metrics.shook_hands("client", 0.1, True)
        metrics.waited("policy", 0.1)
        await harness.proxy.certificates.fetch(SpiffeId("cluster.local", "shop", "a"))
        found.append((await harness.ask("stats", "/stats/prometheus")).text)

    served(read)
    return [*found, *others()]


def test_prometheus_reads_the_pages(pages: list[str]) -> None:
    for page in pages:
        names = [line for line in metrics_lint(page) if not line.startswith(OF_RUST)]
        assert names == []


def test_queries_are_about_what_a_page_has(pages: list[str]) -> None:
    page: dict[str, set[str]] = {}
    for each in pages:
        for family in text_string_to_metric_families(each):
            for sample in family.samples:
                page.setdefault(sample.name, set()).update(sample.labels)
    asked = 0
    for query in [*(rule["expr"] for rule in RULES), *dashboard.queries()]:
        series = SERIES.findall(query)
        assert series, query
        for name, matchers in series:
            if name in RECORDED:
                continue
            asked += 1
            assert name in page, (query, name)
            matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", query))))
            assert matched | grouped <= page[name] | OF_PROMETHEUS, (query, name)
    assert asked > len(RULES)


def test_texts_name_labels_that_a_query_keeps() -> None:
    for rule in RULES:
        if "alert" not in rule:
            continue
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["for"], rule["alert"]
        assert rule["labels"]["severity"] in {"info", "warning"}
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = {"destination_service"} if any(name in rule["expr"] for name in RECORDED) else set()
        kept |= set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", rule["expr"]))))
        assert used <= (kept or OF_PROMETHEUS), rule


def test_each_alert_has_a_section_that_its_runbook_url_leads_to() -> None:
    alerts = [rule["alert"] for rule in RULES if "alert" in rule]
    assert re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE) == alerts
    for rule in RULES:
        if "alert" in rule:
            assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"


def test_the_dashboard_is_made_of_its_panels() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "python -m deploy.dashboard"


def test_panels_of_histograms_show_exemplars() -> None:
    targets = [target for panel in dashboard.dashboard()["panels"] for target in panel.get("targets", ())]
    shown = {target["expr"] for target in targets if target.get("exemplar")}
    assert shown == {target["expr"] for target in targets if "_bucket" in target["expr"]} != set()


def test_bytes_to_a_service_are_those_that_it_has_received() -> None:
    """Istio's metrics take the server's view ("received during request", "sent during response")."""
    (panel,) = (each for each in dashboard.dashboard()["panels"] if each["title"] == "Bytes by service")
    found = {each["legendFormat"].split()[0]: SERIES.findall(each["expr"])[0][0] for each in panel["targets"]}
    assert found == {"to": "istio_tcp_received_bytes_total", "from": "istio_tcp_sent_bytes_total"}


def test_panels_fill_the_width_and_none_lies_on_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
    assert len(taken) == 24 * (1 + max(y for _, y in taken))


def test_legends_name_labels_that_a_query_keeps() -> None:
    for row in dashboard.ROWS:
        for panel in row.panels:
            for query, legend in panel.queries:
                kept = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", query))))
                used = set(re.findall(r"{{(\w+)}}", legend))
                assert used <= (kept if " by (" in query else OF_PROMETHEUS), (query, legend)


def test_prometheus_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    promtool = needed("promtool")
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$instance", ".*")}
        for number, query in enumerate(dashboard.queries())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_prometheus_reads_the_rules() -> None:
    promtool = needed("promtool")
    checked = subprocess.run(
        [promtool, "check", "rules", str(FILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr


#: Alert, series with its values of each minute, labels that the alert then has.
FIRES = [
    ("ZtunnelAgentStale", {'ztunnel_agent_faults{instance="n"}': "1x20"}, {"instance": "n"}),
    (
        "NetpolStale",
        {'netpol_not_followed{instance="n",what="pods"}': "1x20"},
        {"instance": "n", "what": "pods"},
    ),
    ("NetpolDown", {'netpol_synced{instance="n"}': "1 1 1 1 1"}, {"instance": "n"}),
    (
        "ZtunnelConnectionsFail",
        {
            "istio_tcp_connections_opened_total{reporter='source',destination_service='s'}": "0+60x20",
            "istio_tcp_connections_failed_total{reporter='source',destination_service='s',response_flags='UF'}": (
                "0+6x20"
            ),
        },
        {"destination_service": "s"},
    ),
    (
        "ZtunnelPolicyDenies",
        {'ztunnel_authorization_decisions_total{policy="shop/p",result="denied"}': "0+60x20"},
        {"policy": "shop/p", "result": "denied"},
    ),
    ("ZtunnelConfigurationStale", {'ztunnel_xds_staleness_seconds{instance="n"}': "0+60x20"}, {"instance": "n"}),
    (
        "ZtunnelSecretsSlow",
        {
            'ztunnel_wait_seconds_count{instance="n",what="secret"}': "0+1x20",
            'ztunnel_wait_seconds_bucket{instance="n",what="secret",le="5.0"}': "0x20",
        },
        {"instance": "n"},
    ),
    (
        "ZtunnelDescriptorsRunOut",
        {
            'process_open_fds{instance="n"}': "90x20",
            'process_max_fds{instance="n"}': "100x20",
            'ztunnel_build{instance="n",version="1"}': "1x20",
        },
        {"instance": "n"},
    ),
]


@pytest.mark.parametrize(("alert", "series", "labels"), FIRES, ids=[each[0] for each in FIRES])
def test_alerts_fire(alert: str, series: dict[str, str], labels: dict[str, str], tmp_path: Path) -> None:
    promtool = needed("promtool")
    (rule,) = (rule for rule in RULES if rule.get("alert") == alert)
    query = {"expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})', "eval_time": "20m"}
    fired = ",".join(f'{name}="{value}"' for name, value in {**labels, **rule["labels"]}.items())
    exact = f'ALERTS{{alertname="{alert}",alertstate="firing",{fired}}}'
    test = {
        "rule_files": [str(FILE)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {**query, "exp_samples": [{"labels": "{}", "value": 1}]},
                    {"expr": exact, "eval_time": "20m", "exp_samples": [{"labels": exact, "value": 1}]},
                    {**query, "eval_time": "0m", "exp_samples": []},
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    run = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
