"""Evaluation of matcher trees: what current Envoy does, case by case."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.matcher import (
    AllPredicates,
    AnyPredicate,
    ExactMap,
    Input,
    InputKind,
    IpRange,
    IpTree,
    Matcher,
    MatcherList,
    NotPredicate,
    OnMatch,
    PrefixMap,
    ServerNameTree,
    Single,
    chain_names,
)
from xds.model.string_match import StringMatch

SOURCE = Input(InputKind.SOURCE_IP)
DESTINATION = Input(InputKind.DESTINATION_IP)
PORT = Input(InputKind.DESTINATION_PORT)
SNI = Input(InputKind.SERVER_NAME)


def facts(
    source: str = "10.244.2.3", destination: str = "10.96.183.192", port: int = 9080, **more: object
) -> ConnectionFacts:
    client = SocketAddress(source, 40000)
    return ConnectionFacts(
        source=client,
        direct_source=client,
        destination=SocketAddress(destination, port),
        **more,  # type: ignore[arg-type]
    )


def ambient_tree() -> Matcher:
    """The tree control planes send: port, source, destination, port."""
    service = Matcher(ExactMap(PORT, {"9080": OnMatch("service")}))
    destinations = Matcher(
        ExactMap(DESTINATION, {"10.96.183.192": OnMatch(service), "10.244.1.23": OnMatch("pod")})
    )
    sources = Matcher(ExactMap(SOURCE, {"10.244.2.3": OnMatch(destinations)}), OnMatch("passthrough"))
    return Matcher(ExactMap(PORT, {"15001": OnMatch("BlackHoleCluster")}), OnMatch(sources))


@pytest.mark.parametrize(
    ("connection", "chain"),
    [
        (facts(), "service"),
        (facts(destination="10.244.1.23", port=1), "pod"),
        (facts(port=15001), "BlackHoleCluster"),
        (facts(source="10.244.2.9"), "passthrough"),
        # Nested levels without on_no_match fall back to the enclosing level's (current Envoy).
        (facts(destination="1.1.1.1"), "passthrough"),
        (facts(port=1), "passthrough"),
    ],
)
def test_the_ambient_tree_leads_where_envoy_leads(connection: ConnectionFacts, chain: str) -> None:
    assert ambient_tree().evaluate(connection) == chain


def test_no_action_is_none_without_any_fallback() -> None:
    assert Matcher(ExactMap(PORT, {"1": OnMatch("x")})).evaluate(facts()) is None


def test_a_port_key_that_is_no_number_never_matches() -> None:
    tree = Matcher(ExactMap(PORT, {"notaport": OnMatch("x")}), OnMatch("other"))
    assert tree.evaluate(facts()) == "other"


def test_longest_prefix_wins_and_shorter_ones_are_tried_when_it_leads_nowhere() -> None:
    nowhere = Matcher(ExactMap(PORT, {"1": OnMatch("never")}))
    tree = Matcher(
        PrefixMap(DESTINATION, {"10.": OnMatch("ten"), "10.96.": OnMatch(nowhere), "1": OnMatch("one")})
    )
    assert tree.evaluate(facts()) == "ten"
    assert tree.evaluate(facts(port=1)) == "never"
    assert tree.evaluate(facts(destination="172.16.0.1")) == "one"


def ip_tree(*ranges: tuple[str, str | Matcher, bool]) -> Matcher:
    entries = [IpRange(ipaddress.ip_network(net), OnMatch(target), exclusive) for net, target, exclusive in ranges]
    return Matcher(
        IpTree(DESTINATION, tuple(sorted(entries, key=lambda e: -e.network.prefixlen))), OnMatch("none")
    )


def test_ip_ranges_go_from_the_longest_prefix() -> None:
    tree = ip_tree(("10.0.0.0/8", "wide", False), ("10.96.0.0/16", "narrow", False))
    assert tree.evaluate(facts()) == "narrow"
    assert tree.evaluate(facts(destination="10.1.0.1")) == "wide"
    assert tree.evaluate(facts(destination="fd00::1")) == "none"


@pytest.mark.parametrize(
    ("wide", "wider", "chain"),
    [(False, False, "wide"), (True, False, "wider"), (True, True, "none"), (False, True, "wide")],
)
def test_an_exclusive_range_counts_only_as_the_longest(wide: bool, wider: bool, chain: str) -> None:
    """Like in Envoy's trie matcher: shorter exclusive ranges are skipped, but not those after them."""
    nowhere = Matcher(ExactMap(PORT, {"1": OnMatch("never")}))
    tree = ip_tree(("0.0.0.0/0", "wider", wider), ("10.0.0.0/8", "wide", wide), ("10.96.0.0/16", nowhere, True))
    assert tree.evaluate(facts()) == chain
    assert tree.evaluate(facts(destination="10.1.0.1")) == "wide", "the longest one counts in any case"


def test_server_names_go_from_exact_to_wildcards() -> None:
    tree = Matcher(
        ServerNameTree(
            SNI, {"a.b.c": OnMatch("exact"), "*.b.c": OnMatch("near"), "*.c": OnMatch("far"), "*": OnMatch("any")}
        )
    )
    for name, chain in (("a.b.c", "exact"), ("x.b.c", "near"), ("x.y.c", "far"), ("z", "any"), ("A.B.C", "exact")):
        assert tree.evaluate(facts(server_name=name)) == chain
    assert tree.evaluate(facts()) is None  # a missing server name is no value, not an empty one


def test_a_list_takes_the_first_predicate_that_holds() -> None:
    port = Single(PORT, StringMatch("exact", "9080"))
    other = Single(SOURCE, StringMatch("prefix", "192."))
    listed = MatcherList(
        (
            (AllPredicates((port, other)), OnMatch("both")),
            (NotPredicate(AnyPredicate((port, other))), OnMatch("neither")),
            (AnyPredicate((port, other)), OnMatch("either")),
        )
    )
    tree = Matcher(listed)
    assert tree.evaluate(facts()) == "either"
    assert tree.evaluate(facts(source="192.168.0.1")) == "both"
    assert tree.evaluate(facts(port=1)) == "neither"


def test_a_predicate_without_value_is_false_and_its_negation_true() -> None:
    sni = Single(SNI, StringMatch("prefix", "a"))
    tree = Matcher(MatcherList(((sni, OnMatch("named")), (NotPredicate(sni), OnMatch("unnamed")))))
    assert tree.evaluate(facts()) == "unnamed"


def test_keep_matching_passes_its_action_over() -> None:
    first = (Single(PORT, StringMatch("exact", "9080")), OnMatch("noted", keep_matching=True))
    second = (Single(PORT, StringMatch("exact", "9080")), OnMatch("taken"))
    assert Matcher(MatcherList((first, second))).evaluate(facts()) == "taken"
    assert Matcher(MatcherList((first,)), OnMatch("else")).evaluate(facts()) == "else"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (InputKind.SOURCE_PORT, "40000"),
        (InputKind.DIRECT_SOURCE_IP, "10.244.2.3"),
        (InputKind.SOURCE_TYPE, None),
        (InputKind.TRANSPORT_PROTOCOL, "tls"),
        (InputKind.APPLICATION_PROTOCOL, "'h2','http/1.1'"),
    ],
)
def test_inputs_read_as_envoy_prints_them(kind: InputKind, value: str | None) -> None:
    connection = facts(transport_protocol="tls", application_protocols=("h2", "http/1.1"))
    assert Input(kind).read(connection) == value


def test_source_type_is_local_for_this_host_only() -> None:
    assert Input(InputKind.SOURCE_TYPE).read(facts(source="127.0.0.1")) == "local"
    assert Input(InputKind.SOURCE_TYPE).read(facts(source="10.96.183.192")) == "local"


def test_metadata_and_filter_state_inputs() -> None:
    connection = facts(metadata={"ns": {"a": {"b": "deep"}}}, filter_state={"key": "state"})
    assert Input(InputKind.DYNAMIC_METADATA, "ns", ("a", "b")).read(connection) == "deep"
    assert Input(InputKind.DYNAMIC_METADATA, "ns", ("a",)).read(connection) is None
    assert Input(InputKind.FILTER_STATE, "key").read(connection) == "state"


def test_every_chain_name_of_a_tree_is_known() -> None:
    assert chain_names(ambient_tree()) == {"service", "pod", "BlackHoleCluster", "passthrough"}


@given(
    st.dictionaries(st.text("abc.", max_size=4), st.text("xyz", min_size=1, max_size=2), max_size=6),
    st.text("abc.", max_size=6),
)
def test_prefix_maps_agree_with_the_definition(entries: dict[str, str], text: str) -> None:
    tree = Matcher(
        PrefixMap(Input(InputKind.FILTER_STATE, "k"), {key: OnMatch(value) for key, value in entries.items()})
    )
    prefixes = [key for key in entries if text.startswith(key)]
    expected = entries[max(prefixes, key=len)] if prefixes else None
    assert tree.evaluate(facts(filter_state={"k": text})) == expected
