"""Filters of flows; the same ones run in Hubble's own programs in tests/ztunnel/ask/flows/test_hubble.py."""

import pytest

from xds.proto.hubble.flow.flow_pb2 import FlowFilter
from ztunnel.proxy.flows.filters import compiled


@pytest.mark.parametrize(
    ("pattern", "node", "matches"),
    [
        ("c1/n1", "c1/n1", True),
        ("c1/", "c1/n1", True),
        ("n*", "default/n1", True),
        ("n*", "c1/n1", False),
        ("*/n*1", "c1/n1", True),
        ("*/*-*-b", "c1/a-a-a-b", True),
        ("*/*a*b", "c1/ba", False),
        ("*/a*a", "c1/a", False),
        ("*" * 40 + "x", "default/" + "n" * 60, False),
        ("*n" * 40 + "*x", "default/" + "n" * 60, False),
    ],
)
def test_a_node_is_found_by_wildcards_in_little_time(pattern: str, node: str, matches: bool) -> None:
    assert compiled([FlowFilter(node_name=[pattern])], [])({"node_name": node}) is matches
