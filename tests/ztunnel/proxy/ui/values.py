"""Example values for tests of the live page."""

from dataclasses import replace
from typing import Any

from ztunnel.proxy.ui.seen import Connection, Facts, Flow, Security, Seen, Workload

FACTS = Facts(dialect="istio", version="1", node="w1", ready=True, state="ready", uptime_s=5.0)
NOTHING = Seen(
    facts=FACTS,
    workloads=(),
    flows=(),
    connections=(),
    connections_open=0,
    policies=(),
    denials=(),
    certificates=(),
    sources=(),
    refusals=(),
)
_FLOW = Flow(
    source="shop/a",
    destination="shop/b",
    service="b.shop",
    reporter="source",
    security=Security.MUTUAL_TLS,
    open=1,
    opened=10,
    failed=2,
    denied=1,
    bytes_sent=1000,
    bytes_received=5000,
)


def flow(**changes: Any) -> Flow:
    return replace(_FLOW, **changes)


def workload(key: str, **changes: Any) -> Workload:
    namespace, _, name = key.rpartition("/")
    return replace(Workload(key=key, name=name, namespace=namespace), **changes)


def connection(number: int) -> Connection:
    return Connection(
        id=str(number),
        direction="outbound",
        source="10.0.0.1:1",
        destination="10.0.0.2:80",
        security=Security.PLAIN,
    )


def seen(**changes: Any) -> Seen:
    return replace(NOTHING, **changes)
