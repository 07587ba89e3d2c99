"""Plans against the decisions made anew, while listeners and their filters change."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model import listener as model
from xds.model.address import SocketAddress
from xds.model.chain_match import ChainMatch
from xds.model.facts import ConnectionFacts
from xds.model.matcher import ExactMap, Input, InputKind, Matcher, OnMatch
from ztunnel.proxy.envoy.listeners import plans as module
from ztunnel.proxy.envoy.listeners.filters import annotate, due
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.listeners.plans import Key, Plans
from ztunnel.proxy.envoy.listeners.table import ListenerTable
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo

CLIENTS = ("10.0.0.1", "10.0.0.2")
DESTINATIONS = [SocketAddress(host, port) for host in ("10.0.1.1", "10.0.1.2") for port in (80, 15006)]
OWN = SocketAddress("127.0.0.1", 15001)
Facts = tuple[Any, ...]


class Stub(SimpleNamespace):
    """Compared by identity, like a listener."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def chain(name: str, **match: Any) -> model.FilterChain:
    return cast("model.FilterChain", SimpleNamespace(name=name, match=ChainMatch(**match)))


def listener(
    port: int, chains: tuple[model.FilterChain, ...], matcher: Matcher | None, *, reads_bytes: bool = False
) -> LiveListener:
    """Everything of a listener that plans and the decisions below read."""
    made = model.Listener(
        name=f"on {port}",
        internal=False,
        addresses=(SocketAddress("0.0.0.0", port),),
        chains=chains,
        default_chain=None,
        matcher=matcher,
        use_original_dst=True,
    )
    live = {each.name: SimpleNamespace(name=each.name, proxy=object(), tls=None) for each in chains}

    def chain_for(facts: ConnectionFacts) -> object:
        found = made.chain_for(facts)
        return live[found.name] if found is not None else None

    return cast(
        "LiveListener",
        Stub(name=made.name, model=made, filters=[], reads_bytes=reads_bytes, chain_for=chain_for),
    )


def filters(mark: int, baggage: str) -> list[tuple[model.ListenerFilterEntry, model.ListenerFilter | None]]:
    """The filters of an ambient listener, as ECDS replaces them."""
    entry = model.ListenerFilterEntry
    source, metadata = model.OriginalSrc(mark=mark), model.WorkloadMetadata(baggage={CLIENTS[0]: baggage})
    return [(entry(name="src", filter=source), source), (entry(name="metadata", filter=metadata), metadata)]


class Node:
    """A node's listeners, with decisions about connections."""

    def __init__(self) -> None:
        self.table = ListenerTable()
        self.plans = Plans(self.table)
        self.table.put(listener(15001, (chain("first"),), None))

    @property
    def accepting(self) -> LiveListener:
        found = self.table.listening_on(15001)
        assert found is not None
        return found

    def anew(self, source: SocketAddress, destination: SocketAddress) -> tuple[LiveListener, StreamInfo, Any]:
        """Decide like the data path, without a plan."""
        facts = ConnectionFacts(source=source, direct_source=source, destination=destination)
        info = StreamInfo(
            connection_id=1, facts=facts, started=0.0, started_at=0.0, restored=True, direct_local=OWN
        )
        found = self.table.hand_off(destination, self.accepting)
        for name, each in due(found.filters, info):
            annotate(each, info, name)
        return found, info, found.chain_for(facts)

    def connect(self, source: SocketAddress, destination: SocketAddress) -> bool:
        """Check a connection's plan, or make it. Return whether there was one."""
        key: Key = self.accepting, source.host, OWN, destination
        found, info, chosen = self.anew(source, destination)
        plan = self.plans.plan(key)
        if plan is None:
            if chosen is not None:
                self.plans.learn(key, found, chosen, info)
            return False
        planned = plan.listener, plan.chain, plan.destination, plan.restored, plan.options, plan.metadata
        assert planned == (found, chosen, info.facts.destination, info.restored, info.options, info.facts.metadata)
        assert (plan.host, plan.local) == (source.host, OWN)
        return True


def by_address(kind: InputKind, names: list[str]) -> Matcher:
    texts = [str(each.host) for each in DESTINATIONS] if kind is InputKind.DESTINATION_IP else list(CLIENTS)
    if kind is InputKind.SOURCE_PORT:
        texts = ["1001", "1002"]
    entries = {text: OnMatch(name) for text, name in zip(texts, names, strict=False)}
    return Matcher(ExactMap(Input(kind), entries), OnMatch(names[-1]))


@st.composite
def listeners(draw: Callable[[Any], Any]) -> LiveListener:
    port, names = draw(st.sampled_from((15001, 15006))), ["a", "b", "c"]
    if draw(st.booleans()):
        kinds = (InputKind.DESTINATION_IP, InputKind.SOURCE_IP, InputKind.SOURCE_PORT)
        chains = tuple(chain(name) for name in names)
        matcher = by_address(draw(st.sampled_from(kinds)), draw(st.permutations(names)))
        return listener(port, chains, matcher, reads_bytes=draw(st.booleans()))
    matches: list[dict[str, Any]] = [
        {},
        {"destination_port": 80},
        {"source_ports": (1001,)},
        {"destination": (ip_network("10.0.1.1/32"),)},
        {"source": (ip_network("10.0.0.1/32"),)},
    ]
    chosen = draw(st.lists(st.sampled_from(matches), min_size=1, max_size=3))
    return listener(port, tuple(chain(f"chain {place}", **match) for place, match in enumerate(chosen)), None)


def changes() -> st.SearchStrategy[Callable[[Node], object]]:
    def refilter(mark: int, baggage: str, port: int) -> Callable[[Node], object]:
        def change(node: Node) -> None:
            found = node.table.listening_on(port)
            if found is not None:
                found.filters = filters(mark, baggage)

        return change

    connect = st.builds(
        lambda host, port, destination: lambda node: node.connect(SocketAddress(host, port), destination),
        st.sampled_from(CLIENTS),
        st.sampled_from((1001, 1002, 1003)),
        st.sampled_from(DESTINATIONS),
    )
    put = listeners().map(lambda made: lambda node: node.table.put(made))
    remove = st.just(lambda node: node.table.pop("on 15006"))
    refiltered = st.builds(
        refilter, st.sampled_from((1, 2)), st.sampled_from(("x", "y")), st.sampled_from((15001, 15006))
    )
    return st.one_of(connect, connect, connect, put, remove, refiltered)


@given(st.lists(changes(), min_size=5, max_size=40))
def test_a_plan_is_the_decision_made_anew(steps: list[Callable[[Node], object]]) -> None:
    node = Node()
    for step in steps:
        step(node)


def test_the_second_connection_has_a_plan() -> None:
    node = Node()
    assert not node.connect(SocketAddress(CLIENTS[0], 1001), DESTINATIONS[0])
    assert node.connect(SocketAddress(CLIENTS[0], 1002), DESTINATIONS[0])
    assert not node.connect(SocketAddress(CLIENTS[1], 1002), DESTINATIONS[0])


def test_a_changed_filter_drops_the_plan() -> None:
    node = Node()
    for _ in range(2):
        node.connect(SocketAddress(CLIENTS[0], 1001), DESTINATIONS[0])
    node.accepting.filters = filters(7, "changed")
    assert not node.connect(SocketAddress(CLIENTS[0], 1001), DESTINATIONS[0])
    assert node.connect(SocketAddress(CLIENTS[0], 1001), DESTINATIONS[0])


@pytest.mark.parametrize(
    "made",
    [
        listener(15001, (chain("a"), chain("b", source_ports=(1001,))), None),
        listener(15001, (chain("a"), chain("b")), by_address(InputKind.SOURCE_PORT, ["a", "b"])),
        listener(15001, (chain("a"),), None, reads_bytes=True),
    ],
    ids=["source ports", "matcher", "bytes"],
)
def test_decisions_that_read_more_than_addresses_have_no_plan(made: LiveListener) -> None:
    node = Node()
    node.table.put(made)
    for _ in range(2):
        assert not node.connect(SocketAddress(CLIENTS[0], 1001), DESTINATIONS[0])


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 4)
    node = Node()
    for number in range(20):
        node.connect(SocketAddress(CLIENTS[0], 1001), SocketAddress(f"10.9.0.{number}", 80))
    assert len(node.plans._made) <= 4
