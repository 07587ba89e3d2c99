"""Holds the API of addons: what is below is what addons of others depend on. Changing it is a new version."""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields

from ztunnel import addons
from ztunnel.addons import HOOKS, Addon, Cut, Delay, Deny, Facts, MeshSummary, Metric, Prefer, Record, Workload

SIGNATURES = """
configured(self, options: 'Any') -> 'None'
connecting(self, facts: 'Facts') -> 'Verdict | None'
accepting(self, facts: 'Facts') -> 'Deny | None'
opened(self, facts: 'Facts') -> 'None'
closed(self, record: 'Record') -> 'None'
refused(self, record: 'Record') -> 'None'
mesh_changed(self, summary: 'MeshSummary') -> 'None'
metrics(self) -> 'Iterable[Metric]'
done(self) -> 'None'
"""
VALUES = {
    Workload: "name namespace service_account node cluster labels",
    Facts: "connection dialect direction path source source_address source_port source_identity destination"
    " destination_address destination_port destination_identity endpoint service names server_name",
    Record: "facts bytes_sent bytes_received duration_s reason addon",
    MeshSummary: "workloads services policies",
    Metric: "name help values labels kind",
}
VERDICTS = {
    Deny: "reason",
    Delay: "seconds",
    Prefer: "labels",
    Cut: "reason after_s after_bytes",
}
SETTINGS = {
    "name": "",
    "api": 1,
    "pure": True,
    "on_error": "deny",
    "budget_us": 200.0,
    "time_limit_s": 1.0,
    "needs": frozenset(),
}


def test_the_hooks_have_their_signatures() -> None:
    found = [f"{name}{inspect.signature(getattr(addons._Hooks, name))}" for name in HOOKS]
    assert found == SIGNATURES.split("\n")[1:-1]


def test_the_values_have_their_fields_in_order() -> None:
    for cls, names in VALUES.items():
        assert cls._fields == tuple(names.split())  # type: ignore[attr-defined]
    for verdict, names in VERDICTS.items():
        assert tuple(each.name for each in fields(verdict)) == tuple(names.split())
    assert set(typing.get_args(addons.Verdict)) == set(VERDICTS)


def test_new_fields_have_defaults_so_that_tests_of_addons_go_on_to_work() -> None:
    for cls in (Workload, Facts, MeshSummary):
        assert set(cls._field_defaults) == set(cls._fields)


def test_the_settings_have_their_defaults() -> None:
    assert {name: getattr(Addon, name) for name in SETTINGS} == SETTINGS
    assert typing.get_type_hints(Addon).keys() == {*SETTINGS, "Options"}


def test_the_names_are_public() -> None:
    assert addons.API_VERSION == 1
    assert all(hasattr(addons, name) for name in addons.__all__)
