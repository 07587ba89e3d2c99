"""Choice of a chain by filter_chain_match."""

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xds.model.address import SocketAddress
from xds.model.chain_match import ChainMatch, ChainSelector, SourceType, _exact, _longest
from xds.model.facts import ConnectionFacts


def net(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text)


def facts(
    destination: str = "10.0.0.1", port: int = 80, source: str = "10.9.9.9", **more: object
) -> ConnectionFacts:
    client = SocketAddress(source, 40000)
    return ConnectionFacts(
        source=client,
        direct_source=client,
        destination=SocketAddress(destination, port),
        **more,  # type: ignore[arg-type]
    )


def choose(matches: list[ChainMatch], connection: ConnectionFacts) -> int | None:
    return ChainSelector(matches).select(connection)


PER_POD = [
    ChainMatch(destination=(net("10.0.0.1/32"),)),
    ChainMatch(destination=(net("10.0.0.2/32"), net("fd00::2/128"))),
    ChainMatch(),
]


@pytest.mark.parametrize(
    ("destination", "chain"), [("10.0.0.1", 0), ("10.0.0.2", 1), ("fd00::2", 1), ("10.0.0.3", 2)]
)
def test_per_pod_chains_and_the_catch_all(destination: str, chain: int) -> None:
    assert choose(PER_POD, facts(destination)) == chain


def test_nothing_matches_without_a_catch_all() -> None:
    assert choose(PER_POD[:2], facts("10.0.0.3")) is None
    assert choose([], facts()) is None


def test_a_port_once_fixed_is_not_reconsidered() -> None:
    matches = [
        ChainMatch(destination_port=80, destination=(net("10.0.0.9/32"),)),
        ChainMatch(destination=(net("10.0.0.1/32"),)),
    ]
    assert choose(matches, facts()) is None  # port 80 is fixed, and no chain of that port has the address
    assert choose(matches, facts(port=81)) == 1


def test_longest_prefix_beats_shorter_ones() -> None:
    matches = [
        ChainMatch(destination=(net("10.0.0.0/8"),)),
        ChainMatch(destination=(net("10.0.0.0/24"),)),
        ChainMatch(),
    ]
    assert choose(matches, facts()) == 1
    assert choose(matches, facts("10.1.0.0")) == 0


def test_a_mixed_range_list_competes_with_a_single_address() -> None:
    matches = [
        ChainMatch(destination=(net("10.0.0.1/32"),)),
        ChainMatch(destination=(net("10.0.0.1/32"), net("10.1.0.0/16")), server_names=("a",)),
    ]
    assert choose(matches, facts(server_name="a")) == 1
    assert choose(matches, facts()) == 0


@pytest.mark.parametrize(
    ("name", "chain"), [("a.b.c", 0), ("x.b.c", 1), ("x.y.c", 2), ("z", 3), ("", 3), ("A.B.C", 0)]
)
def test_server_names_from_exact_to_wildcard(name: str, chain: int) -> None:
    matches = [ChainMatch(server_names=(n,)) for n in ("a.b.c", "*.b.c", "*.c")] + [ChainMatch()]
    assert choose(matches, facts(server_name=name)) == chain


def test_the_remaining_criteria_in_their_order() -> None:
    matches = [
        ChainMatch(transport_protocol="tls"),
        ChainMatch(application_protocols=("h2",)),
        ChainMatch(source_type=SourceType.SAME_IP_OR_LOOPBACK),
        ChainMatch(source=(net("10.9.0.0/16"),)),
        ChainMatch(source_ports=(40001,)),
        ChainMatch(),
    ]
    assert choose(matches, facts(transport_protocol="tls", application_protocols=("h2",))) == 0
    assert choose(matches, facts(application_protocols=("http/1.1", "h2"))) == 1
    assert choose(matches, facts(source="127.0.0.1")) == 2
    assert choose(matches, facts()) == 3
    assert choose(matches, facts(source="10.8.0.1")) == 5


def test_direct_source_is_the_socket_peer() -> None:
    matches = [ChainMatch(direct_source=(net("10.9.0.0/16"),)), ChainMatch()]
    connection = facts()
    connection.source = SocketAddress("192.0.2.1", 1)
    assert choose(matches, connection) == 0


def reference(matches: list[ChainMatch], connection: ConnectionFacts) -> int | None:
    """The definition, without any index: narrow by port, then by address."""
    left = list(range(len(matches)))
    for rank in (
        lambda m: _exact(m.destination_port, connection.destination.port),
        lambda m: _longest(m.destination, connection.destination.host),
    ):
        ranks = {index: rank(matches[index]) for index in left}
        best = max((value for value in ranks.values() if value is not None), default=None)
        left = [index for index in left if ranks[index] is not None and ranks[index] == best]
    return left[0] if left else None


networks = st.sampled_from(
    ["10.0.0.1/32", "10.0.0.2/32", "10.0.0.0/24", "10.0.0.0/8", "0.0.0.0/0", "fd00::/64", "fd00::1/128"]
)
chain_matches = st.builds(
    ChainMatch,
    destination_port=st.sampled_from([None, 80, 81]),
    destination=st.lists(networks.map(net), max_size=2).map(tuple),
)


def test_an_address_beside_a_network_is_named() -> None:
    selector = ChainSelector([ChainMatch(destination=(net("10.0.0.1/32"), net("10.1.0.0/24")))])
    assert selector.names("10.0.0.1")
    assert not selector.names("10.1.0.0")


@example(
    [
        ChainMatch(destination=(net("10.0.0.1/32"), net("10.0.0.0/24"))),
        ChainMatch(destination=(net("10.0.0.1/32"),)),
    ],
    "10.0.0.1",
    80,
)
@given(
    st.lists(chain_matches, max_size=6, unique=True),
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.3.0.1", "fd00::1", "fd00::2"]),
    st.sampled_from([80, 81, 82]),
)
def test_the_index_agrees_with_the_definition(matches: list[ChainMatch], host: str, port: int) -> None:
    assert choose(matches, facts(host, port)) == reference(matches, facts(host, port))


def test_a_connection_is_raw_while_nothing_has_inspected_it() -> None:
    """As Envoy, whose listeners fill in ``raw_buffer`` where no filter has found TLS."""
    matches = [ChainMatch(transport_protocol="tls"), ChainMatch(transport_protocol="raw_buffer"), ChainMatch()]
    assert choose(matches, facts()) == 1


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [(("h2", "http/1.1"), 1), (("http/1.1", "h2"), 0), (("x", "h2"), 1), (("x",), 2), ((), 2)],
)
def test_clients_order_of_protocols_decides(offered: tuple[str, ...], chosen: int) -> None:
    matches = [
        ChainMatch(application_protocols=("http/1.1",)),
        ChainMatch(application_protocols=("h2", "h3")),
        ChainMatch(),
    ]
    assert choose(matches, facts(application_protocols=offered)) == chosen
