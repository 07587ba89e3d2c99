"""The table of accepted fields reports how each field is in a scenario; no Envoy runs here."""

import pytest

from tests.interop import beside, scenario_clusters, scenarios
from tests.interop.envoy_diff import Recorder
from tests.ztunnel.proxy.envoy.harness import cluster

_SERVED = next(iter(scenario_clusters.SERVED))


def test_fields_that_only_served_clusters_set_are_not_called_observed() -> None:
    recorder = Recorder()
    recorder.name = "it"
    both = [cluster(1, name="other")[1], cluster(1, name=_SERVED, max_requests_per_connection={"value": 2})[1]]
    recorder.note({"static_resources": {"clusters": both}})
    recorder.judged.add("a.b")
    prefix = "envoy.config.cluster.v3.Cluster"
    fields = (f"{prefix}.name", f"{prefix}.max_requests_per_connection", "a.b", f"{prefix}.metadata")
    assert [recorder.kind(field) for field in fields] == ["observed", "served", "judged", "-"]


@pytest.mark.parametrize(
    ("envoy", "ours", "differs"),
    [
        ('{"clients": ["closed"], "log": ["-"]}', '{"clients": ["closed"], "log": ["why"]}', False),
        ('{"clients": ["closed"], "log": ["-"]}', '{"clients": ["one"], "log": ["why"]}', True),
        ('{"clients": ["closed"], "log": ["-"]}', '{"clients": ["closed"], "log": ["-"]}', True),
    ],
)
def test_only_the_expected_difference_of_logs_is_none(envoy: str, ours: str, differs: bool) -> None:
    (name,) = scenarios.DIFFERENT_LOGS
    assert bool(beside.differences({name: envoy}, {name: ours}, scenarios.DIFFERENT_LOGS)) is differs
    assert bool(beside.differences({"x": envoy}, {"x": ours}, scenarios.DIFFERENT_LOGS)) is (envoy != ours)
