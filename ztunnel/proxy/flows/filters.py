"""Filters of Hubble's GetFlows, compiled once per call. Pure.

Filters have the same meaning as Hubble's own; tests compare both by ``hubble observe --input-file``. A filter that
is unknown or has an invalid value is refused with an error naming it, because ignoring it would show too many
flows. Flows are in JSON's types, as :mod:`ztunnel.proxy.flows.hubble` makes them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from google.protobuf.unknown_fields import UnknownFieldSet

from xds.digits import whole_number
from xds.proto.hubble.flow.flow_pb2 import (
    DropReason,
    EventTypeFilter,
    FlowFilter,
    IPVersion,
    TCPFlags,
    TrafficDirection,
    Verdict,
    Workload,
)

Flow = Mapping[str, Any]
Test = Callable[[Flow], bool]
#: The names of unsupported filters, by their field number in FlowFilter.
_UNSUPPORTED: Final = {
    9: "http_status_code",
    18: "dns_query",
    21: "http_method",
    22: "http_path",
    31: "http_url",
    32: "http_header",
    34: "source_ip_xlated",
    35: "interface",
    36: "node_labels",
    39: "ip_trace_id",
    999: "cel_expression",
}
#: The protocol names that Hubble uses. Connections here are TCP.
_PROTOCOLS: Final = frozenset(("tcp", "udp", "icmp", "icmpv4", "icmpv6", "sctp", "dns", "http", "kafka"))
#: Matches one requirement of a label selector in Kubernetes' syntax. The key can have a prefix that names its
#: source, with a colon.
_REQUIREMENT: Final = re.compile(
    r"\s*(?:(?P<absent>!)\s*)?(?P<key>[\w./:-]+)\s*"
    r"(?:(?P<op>==|=|!=)\s*(?P<value>[\w.-]*)|(?P<set>in|notin)\s*\((?P<values>[\w.,\s-]*)\))?\s*"
)


class BadFilter(ValueError):
    """A filter cannot be read, or is not supported. The text names the filter."""


def compiled(whitelist: Iterable[FlowFilter], blacklist: Iterable[FlowFilter]) -> Test:
    """Return a test for flows. If there are whitelist filters, at least one must match. No blacklist filter may
    match.

    Raises:
        BadFilter: a filter cannot be read.
    """
    wanted, unwanted = [_filter(each) for each in whitelist], [_filter(each) for each in blacklist]
    return lambda flow: (
        (not wanted or any(test(flow) for test in wanted)) and not any(test(flow) for test in unwanted)
    )


def _filter(message: FlowFilter) -> Test:
    """Return the test of one filter. Each field that is set must match with one of its values."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]  # the stubs lack __iter__
        name = _UNSUPPORTED.get(unknown.field_number, f"number {unknown.field_number}")
        raise BadFilter(f"filter {name} is not supported")
    tests = []
    for field, values in message.ListFields():
        make = _TESTS[field.name]
        try:
            alternatives = [make(value) for value in values]
        except ValueError as error:
            raise BadFilter(f"filter {field.name}: {error}") from None
        tests.append(_any(alternatives))
    return lambda flow: all(test(flow) for test in tests)


def _any(tests: list[Test]) -> Test:
    return tests[0] if len(tests) == 1 else lambda flow: any(test(flow) for test in tests)


def _ip(name: str) -> Callable[[str], Test]:
    def make(value: str) -> Test:
        block = ipaddress.ip_network(value, strict=False)

        def test(flow: Flow) -> bool:
            text = flow["IP"].get(name)
            return bool(text) and ipaddress.ip_address(text) in block

        return test

    return make


def _pod(side: str) -> Callable[[str], Test]:
    return lambda value: _named(value, lambda flow: flow[side], "pod_name")


def _service(side: str) -> Callable[[str], Test]:
    return lambda value: _named(value, lambda flow: flow.get(f"{side}_service") or {}, "name")


def _named(value: str, of: Callable[[Flow], Flow], key: str) -> Test:
    """Return the test of a filter ``NAMESPACE/PREFIX``. Without a slash, the namespace is ``default``. An empty
    namespace matches every namespace.
    """
    namespace, slash, prefix = value.rpartition("/")
    namespace = namespace if slash else "default"

    def test(flow: Flow) -> bool:
        found = of(flow)
        name, where = found.get(key) or "", found.get("namespace") or ""
        if not namespace:
            return bool(name or where) and name.startswith(prefix)
        return bool(where == namespace and name.startswith(prefix))

    return test


def _workload(side: str) -> Callable[[Workload], Test]:
    def make(value: Workload) -> Test:
        wanted = {key: text for key, text in (("name", value.name), ("kind", value.kind)) if text}
        return lambda flow: any(wanted.items() <= each.items() for each in flow[side].get("workloads") or ())

    return make


def _labels(side: str) -> Callable[[str], Test]:
    def make(value: str) -> Test:
        requirements = _requirements(value)

        def test(flow: Flow) -> bool:
            found = [label.partition("=") for label in flow[side].get("labels") or ()]
            have = {key: text for key, _, text in found}
            have |= {key.partition(":")[2]: text for key, _, text in found}
            return all(holds(have) for holds in requirements)

        return test

    return make


def _requirements(text: str) -> list[Callable[[Mapping[str, str]], bool]]:
    found, place = [], 0
    while True:
        match = _REQUIREMENT.match(text, place)
        if match is None or (match["absent"] and (match["op"] or match["set"])):
            raise ValueError(f"not a label selector: {text!r}")
        found.append(_requirement(match))
        place = match.end()
        if place == len(text):
            return found
        if text[place] != ",":
            raise ValueError(f"not a label selector: {text!r}")
        place += 1


def _requirement(match: re.Match[str]) -> Callable[[Mapping[str, str]], bool]:
    key = match["key"].removeprefix("any:")
    if match["op"] is None and match["set"] is None:
        wanted = not match["absent"]
        return lambda have: (key in have) is wanted
    values = {match["value"]} if match["op"] else {each.strip() for each in match["values"].split(",")}
    if match["op"] == "!=" or match["set"] == "notin":
        return lambda have: have.get(key) not in values
    return lambda have: have.get(key) in values


def _port(name: str) -> Callable[[str], Test]:
    def make(value: str) -> Test:
        number = whole_number(value, 65535)
        if number is None:
            raise ValueError(f"not a port: {value!r}")
        return lambda flow: flow["l4"]["TCP"].get(name) == number

    return make


def _protocol(value: str) -> Test:
    if value.lower() not in _PROTOCOLS:
        raise ValueError(f"not a protocol: {value!r}")
    tcp = value.lower() == "tcp"
    return lambda flow: tcp


def _flags(value: TCPFlags) -> Test:
    wanted = {field.name for field, _ in value.ListFields()}
    return lambda flow: wanted <= flow["l4"]["TCP"]["flags"].keys()


def _event_type(value: EventTypeFilter) -> Test:
    def test(flow: Flow) -> bool:
        event = flow["event_type"]
        if value.type and event["type"] != value.type:
            return False
        return not value.match_sub_type or event.get("sub_type", 0) == value.sub_type

    return test


def _node(value: str) -> Test:
    """Return the test of a filter ``CLUSTER/NODE`` with ``*`` as a wildcard. Without a slash, the cluster is
    ``default``.
    """
    cluster, slash, node = value.rpartition("/")
    pattern = re.compile("/".join(map(_wildcards, (cluster if slash else "default", node or "*"))))
    return lambda flow: pattern.fullmatch(flow["node_name"]) is not None


def _wildcards(text: str) -> str:
    """Return a pattern with wildcards as a regular expression.

    Only the last wildcard backtracks, because for a text between two wildcards the first occurrence is always the
    best. Otherwise the time would be exponential in the number of wildcards, and the event loop would wait.
    """
    first, *rest = map(re.escape, text.split("*"))
    if not rest:
        return first
    return first + "".join(f"(?>.*?{each})" for each in rest[:-1] if each) + f".*{rest[-1]}"


def _equal(read: Callable[[Flow], Any]) -> Callable[[Any], Test]:
    return lambda value: lambda flow: bool(read(flow) == value)


def _enum(kind: Any, read: Callable[[Flow], str | None]) -> Callable[[int], Test]:
    def make(value: int) -> Test:
        name = kind.Name(value) if value in kind.values() else None
        return lambda flow: name is not None and read(flow) == name

    return make


def _trace(flow: Flow) -> str | None:
    parent = (flow.get("trace_context") or {}).get("parent") or {}
    found: str | None = parent.get("trace_id")
    return found


def _no_name(value: str) -> Test:
    """Return the test of a DNS name. It never matches, because flows here have no DNS names."""
    return lambda flow: False


_TESTS: Final[Mapping[str, Callable[[Any], Test]]] = {
    "source_ip": _ip("source"),
    "destination_ip": _ip("destination"),
    "source_pod": _pod("source"),
    "destination_pod": _pod("destination"),
    "source_fqdn": _no_name,
    "destination_fqdn": _no_name,
    "source_label": _labels("source"),
    "destination_label": _labels("destination"),
    "source_service": _service("source"),
    "destination_service": _service("destination"),
    "source_workload": _workload("source"),
    "destination_workload": _workload("destination"),
    "source_identity": _equal(lambda flow: flow["source"].get("identity")),
    "destination_identity": _equal(lambda flow: flow["destination"].get("identity")),
    "source_cluster_name": _equal(lambda flow: flow["source"].get("cluster_name")),
    "destination_cluster_name": _equal(lambda flow: flow["destination"].get("cluster_name")),
    "source_port": _port("source_port"),
    "destination_port": _port("destination_port"),
    "protocol": _protocol,
    "tcp_flags": _flags,
    "event_type": _event_type,
    "node_name": _node,
    "reply": _equal(lambda flow: flow["is_reply"]),
    "encrypted": _equal(lambda flow: flow["IP"].get("encrypted", False)),
    "trace_id": _equal(_trace),
    "uuid": _equal(lambda flow: flow["uuid"]),
    "verdict": _enum(Verdict, lambda flow: flow["verdict"]),
    "traffic_direction": _enum(TrafficDirection, lambda flow: flow["traffic_direction"]),
    "drop_reason_desc": _enum(DropReason, lambda flow: flow.get("drop_reason_desc")),
    "ip_version": _enum(IPVersion, lambda flow: flow["IP"]["ipVersion"]),
}
