"""Every table of cases, with its columns."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tests.generated import every_example
from tests.interop import (
    checklist,
    chosen,
    conditions,
    control,
    files,
    log_filters,
    loopback,
    operators,
    request_headers,
    tunnels,
)
from tests.interop import istio_inbound as ambient_inbound
from tests.interop import istio_outbound as ambient_outbound
from tests.interop import istio_waypoints as ambient_waypoints
from tests.interop.case import Case
from tests.interop.istio_site import IstioSite, Setting
from tests.interop.proxies import Kind
from tests.interop.site import Pairing, Site


@dataclass(frozen=True)
class Table:
    """One table: its cases, its columns, and what makes the site of a column."""

    title: str
    cases: tuple[Case[Any], ...]
    columns: tuple[Any, ...]
    headings: tuple[str, ...]
    site: Callable[[Any], AbstractContextManager[Any]] = Site

    @property
    def tested(self) -> tuple[Any, ...]:
        """The columns of this run's tests; ``make nightly`` has all.

        Envoy alone changes with its version only. Worker processes run the code of the column without them, and
        ``tests/netns/test_istio_workers.py`` tests the rest. Of the control plane's columns each variant of the
        protocol has one, and each direction: a client of either variant does not know the direction of the tunnels
        that it configures, and ``tests/xds`` holds both variants to the same answers.
        """
        return tuple(column for column in self.columns if every_example() or not _nightly(column))


def _nightly(column: Any) -> bool:
    match column:
        case Pairing(worker1=Kind.ENVOY, worker2=Kind.ENVOY) | "envoy":
            return True
        case Pairing(worker1=Kind.ENVOY, source="sotw") | Pairing(worker1=Kind.NATIVE, source="delta"):
            return column in control.COLUMNS
        case Setting(workers=workers):
            return workers > 1
        case _:
            return False


_VERSIONS = (ambient_outbound.COLUMNS, ambient_outbound.HEADINGS, IstioSite)
TABLES = (
    Table("Checklist", checklist.CASES, checklist.COLUMNS, ("envoy", "ours (compat)", "ours (native)")),
    Table("Tunnels", tunnels.CASES, tunnels.COLUMNS, tunnels.HEADINGS),
    Table("Files", files.CASES, files.COLUMNS, files.HEADINGS),
    Table("Control plane", control.CASES, control.COLUMNS, control.HEADINGS),
    Table("Node proxy to Envoy", ambient_outbound.CASES, *_VERSIONS),
    Table("Node proxy through Envoy", ambient_waypoints.CASES, *_VERSIONS),
    Table("Envoy to node proxy", ambient_inbound.CASES, *_VERSIONS),
)

#: Tables that need no namespaces; run by ``test_loopback.py``.
_SIDE_BY_SIDE = (loopback.COLUMNS, loopback.HEADINGS)
LOOPBACK = (
    Table("Accepted configuration", loopback.REFUSAL_CASES, *_SIDE_BY_SIDE, loopback.Running),
    Table("CEL conditions", conditions.CASES, *_SIDE_BY_SIDE, conditions.Conditions),
    Table("Certificates and discovered filters", chosen.CASES, *_SIDE_BY_SIDE, chosen.Chosen),
    Table("Ends of connections", loopback.BEHAVIOUR_CASES, *_SIDE_BY_SIDE, loopback.Behaviours),
    Table("Filters of access logs", log_filters.CASES, *_SIDE_BY_SIDE, log_filters.Filters),
    Table("Headers of requests", request_headers.CASES, *_SIDE_BY_SIDE, request_headers.Requests),
    Table("Operators of access logs", operators.CASES, ("beside",), ("ours beside Envoy's",), operators.Operators),
)
