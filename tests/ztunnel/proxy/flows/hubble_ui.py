"""What Hubble UI needs of flows in order to show them, as its code has it: requests, and rules that drop flows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from xds.proto.hubble.flow.flow_pb2 import FlowFilter
from xds.proto.hubble.observer.observer_pb2 import GetFlowsRequest, GetFlowsResponse
from xds.proto.pool import POOL

#: Labels whose flows the page leaves out, on either side.
_HIDDEN_LABELS: Final = (
    *("reserved:unknown", "reserved:host", "reserved:remote-node"),
    *("k8s:k8s-app=kube-dns", "k8s:app=prometheus"),
)
_HIDDEN_NAMES: Final = "*.cluster.local*"
_WORLD: Final = "reserved:world"
#: Keys of labels that become the title of a card, without their prefixes.
_TITLES: Final = frozenset(("app", "name", "functionName", "k8s-app"))
_PREFIXES: Final = ("k8s:", "io.kubernetes.pod.", "app.kubernetes.io/")


def request(namespace: str) -> GetFlowsRequest:
    """Return the request of an open page for a namespace."""
    found = GetFlowsRequest(follow=True, number=10_000)
    found.whitelist.extend(
        (
            FlowFilter(source_pod=[f"{namespace}/"], reply=[False]),
            FlowFilter(destination_pod=[f"{namespace}/"], reply=[False]),
        )
    )
    found.blacklist.extend(
        (
            FlowFilter(source_label=_HIDDEN_LABELS),
            FlowFilter(destination_label=_HIDDEN_LABELS),
            FlowFilter(source_fqdn=[_HIDDEN_NAMES]),
            FlowFilter(destination_fqdn=[_HIDDEN_NAMES]),
        )
    )
    return found


def flow_of(response: GetFlowsResponse) -> dict[str, Any]:
    """Return the flow in JSON's types, with the names of the protocol."""
    shown = MessageToDict(response, preserving_proto_field_name=True, descriptor_pool=POOL)
    return dict(shown["flow"])


def check(flows: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, int]]:
    """Check that the page shows every flow, with one card per workload; return links by titles and port.

    Raises:
        AssertionError: the page drops a flow, shows two as one, or draws one workload as two.
    """
    rows: set[tuple[str, str]] = set()
    workloads: dict[object, tuple[str, str]] = {}
    links = set()
    for flow in flows:
        assert "l4" in flow, flow
        assert {"source", "destination"} <= flow.keys(), flow
        assert flow["is_reply"] is False, flow
        row = flow["time"], flow["node_name"]
        assert row not in rows, "two flows are one row of the table"
        rows.add(row)
        source, destination = flow["source"], flow["destination"]
        names = [*flow.get("source_names", ()), *flow.get("destination_names", ())]
        assert not [name for name in names if ".cluster.local" in name], flow
        if "destination_service" in flow:
            assert not flow.get("destination_names"), flow
            assert _WORLD not in destination.get("labels", ()), flow
        for side in (source, destination):
            if _WORLD in side.get("labels", ()):
                continue
            (workload,) = side["workloads"]
            known = workloads.setdefault(side["identity"], (side["namespace"], workload["name"]))
            assert known == (side["namespace"], workload["name"]), "one card for two workloads"
        (protocol,) = flow["l4"].values()
        links.add((_title(source), _title(destination), protocol["destination_port"]))
    assert len(set(workloads.values())) == len(workloads), "two cards for one workload"
    return links


def _title(side: Mapping[str, Any]) -> str:
    for label in side.get("labels", ()):
        key, _, value = label.partition("=")
        for prefix in _PREFIXES:
            key = key.removeprefix(prefix)
        if key in _TITLES:
            return str(value)
    return str(side["workloads"][0]["name"]) if side.get("workloads") else "world"
