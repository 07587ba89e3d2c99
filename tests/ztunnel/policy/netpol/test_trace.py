"""The lines of a trace; test_netpol.py in tests/netns traces real packets."""

from ipaddress import ip_address

from tproxy.render.trace import Header, TraceEvent
from ztunnel.policy.netpol.table_builder import TABLE
from ztunnel.policy.netpol.trace import _Rules


def event(packet: int, chain: str, header: Header | None = None) -> TraceEvent:
    return TraceEvent(packet, TABLE, chain, 0, None, header)


def header(source: str, destination: str) -> Header:
    return Header(ip_address(source), ip_address(destination), 6, 1000, 80)


def test_events_of_two_packets_that_come_mixed_are_shown_under_their_own_packet() -> None:
    rules = _Rules(None)
    events = [
        event(1, "egress", header("10.0.0.1", "10.0.0.2")),
        event(2, "egress", header("10.0.0.2", "10.0.0.1")),
        event(1, "ingress"),
        event(1, "in-x"),
        event(2, "ingress"),
    ]
    lines = [line.partition(":")[0] for each in events for line in rules.lines(each)]
    assert lines == [
        "10.0.0.1",
        "  egress",
        "10.0.0.2",
        "  egress",
        "10.0.0.1",
        "  ingress",
        "  in-x",
        "10.0.0.2",
        "  ingress",
    ]


def test_remembered_packets_are_bounded() -> None:
    rules = _Rules(None)
    for number in range(2000):
        list(rules.lines(event(number, "egress", header("10.0.0.1", "10.0.0.2"))))
    assert len(rules._headers) <= 1024
