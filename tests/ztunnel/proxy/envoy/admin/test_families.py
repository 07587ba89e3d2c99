"""The numbers of Envoy's dialect that alerts ask for by the names of an Istio mesh, from a proxy that serves."""

import re
import time
from pathlib import Path
from typing import Any, cast

import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    application,
    ask,
    cluster,
    listener,
    rbac,
    run,
    tunnel,
)
from ztunnel.proxy.envoy.admin.metrics import page
from ztunnel.runtime.http.page import PageRequest

ROOT = Path(__file__).parents[5]
RULES = ROOT / "deploy" / "helm" / "ztunnel" / "files" / "ztunnel.rules.yaml"
ALERTS = ROOT / "docs" / "alerts.md"


def samples(harness: Harness) -> dict[tuple[str, ...], float]:
    """Return the values of the scrape port's page by name and values of the labels."""
    request = PageRequest(method="GET", path="/metrics", accept="application/openmetrics-text")
    text = b"".join(piece for piece in cast(Any, page(harness.proxy, request).body)).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_configuration_certificates_and_waits_are_on_the_page(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            everything = await tunnel(harness, port, Identities(), rbac(CLIENT))
            assert await ask(harness.port("l"), b"there") == b"hi there"
            found = samples(harness)
            kinds = ("cluster", "endpoint", "listener", "secret", "route", "extension")
            objects = [found["ztunnel_mesh_objects", kind] for kind in kinds]
            assert objects == [3, 3, 2, 3, 0, 0]  # one cluster is of the bootstrap
            assert {found["ztunnel_xds_refused_resources", kind] for kind in kinds if kind != "endpoint"} == {0}
            # Both certificates and the root were waited for.
            assert found["ztunnel_wait_seconds_count", "secret"] == 3
            assert found[("ztunnel_generations",)] == 1
            assert found[("ztunnel_xds_staleness_seconds",)] == 0
            assert 0 <= time.time() - found[("ztunnel_xds_last_update_seconds",)] < 60
            for identity in (CLIENT, SERVER):
                assert found["istio_cert_expiry_seconds", identity] > time.time()
            assert found[("ztunnel_root_expiry_seconds",)] > time.time()
            names = names_of_alerts() - {name for name, *_ in found}
            assert names == {"ztunnel:connections_failed:ratio5m"} | NOT_HERE

            broken = ("secret", {"name": SERVER, "tls_certificate": {"private_key": {"inline_string": "no key"}}})
            kept = [each for each in everything if each[1]["name"] != SERVER]
            bad = cluster(port, name="bad", lb_policy="CLUSTER_PROVIDED")
            worse = listener(name="worse", connection_balance_config={"exact_balance": {}}, address={})
            harness.publish(*kept, broken, bad, worse)

            def refused() -> list[float]:
                found = samples(harness)
                return [found["ztunnel_xds_refused_resources", kind] for kind in ("secret", "cluster", "listener")]

            await harness.until(lambda: refused() == [1, 1, 1])
            harness.publish(*everything)
            await harness.until(lambda: refused() == [0, 0, 0])

    run(tmp_path, body)


#: Metrics of alerts about an Istio mesh, the node agent and netpol. The documentation names the alerts.
NOT_HERE = {
    "istio_tcp_connections_failed_total",
    "istio_tcp_connections_opened_total",
    "netpol_faulty_objects",
    "netpol_in_force",
    "netpol_not_followed",
    "netpol_synced",
    "workload_manager_pending_proxy_count",
    "ztunnel_agent_faults",
    "ztunnel_agent_findings",
    "ztunnel_agent_synced",
    "ztunnel_authorization_decisions_total",
    "ztunnel_calmed_connections_total",
    "ztunnel_certificate_fetches_total",
    "ztunnel_connection_errors_total",  # without a value here
    "ztunnel_metric_series_over_budget_total",
    "ztunnel_policies_without_effect",
}


def names_of_alerts() -> set[str]:
    """Return the names of all metrics in the chart's rules."""
    return {name for rule in rules() for name in names_in(rule["expr"])}


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b((?:istio|netpol|process|workload_manager|ztunnel)[_:][a-z0-9_:]+)", query))


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_documentation_names_the_alerts_of_an_istio_mesh_only() -> None:
    never = {"ztunnel:connections_failed:ratio5m"} | NOT_HERE - {"ztunnel_connection_errors_total"}
    alerts = [rule for rule in rules() if rule.get("alert", "").startswith("Ztunnel")]
    proxies = [rule for rule in alerts if not rule["alert"].startswith("ZtunnelAgent")]
    silent = {rule["alert"] for rule in proxies if names_in(rule["expr"]) <= never}
    (sentence,) = re.findall(r"In Envoy's dialect (.*?) never\s", ALERTS.read_text(), re.DOTALL)
    assert set(re.findall(r"\bZtunnel\w+", sentence)) == silent
