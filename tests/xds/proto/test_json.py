import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.errors import ConfigError
from xds.proto import core_yaml, envoy_yaml, registry
from xds.proto import json as xds_json
from xds.proto.dump import to_dict, to_json
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster, OutlierDetection
from xds.proto.envoy.config.core.v3.core_pb2 import DataSource, Metadata, SocketOption, TypedExtensionConfig
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.extensions.filters.network.tcp_proxy.v3.tcp_proxy_pb2 import TcpProxy
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import TlsParameters
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from xds.proto.envoy_yaml import plain
from xds.proto.well_known import StringValue, Struct
from xds.proto.xds.type.matcher.v3.matcher_pb2 import Matcher
from xds.proto.xds.type.v3.type_pb2 import TypedStruct

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


def read(text: str, message_type: type[Any]) -> Any:
    parsed = xds_json.parse_text(text, message_type)
    assert parsed.unknown_fields == ()
    return parsed.message


def error_of(text: str, message_type: type[Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        xds_json.parse_text(text, message_type)
    return caught.value


# ---------------------------------------------------------------------- the reference configuration


@pytest.mark.parametrize(
    ("name", "message_type"),
    [
        ("w1/bootstrap", Bootstrap),
        ("w1/lds", DiscoveryResponse),
        ("w1/cds", DiscoveryResponse),
        ("w2/bootstrap", Bootstrap),
        ("w2/lds", DiscoveryResponse),
        ("w2/cds", DiscoveryResponse),
        ("w2/eds", DiscoveryResponse),
    ],
)
def test_reference_configuration_parses_and_round_trips(name: str, message_type: type[Any]) -> None:
    parsed = xds_json.parse_text((REFERENCE / f"{name}.yaml").read_text(), message_type)
    assert parsed.unknown_fields == ()
    assert parsed.unknown_types == ()
    again = xds_json.parse_text(to_json(parsed.message), message_type)
    assert again == parsed
    assert message_type.FromString(parsed.message.SerializeToString()) == parsed.message


def _reference_resource(name: str, index: int) -> dict[str, Any]:
    response = read((REFERENCE / f"{name}.yaml").read_text(), DiscoveryResponse)
    shown: dict[str, Any] = to_dict(response)["resources"][index]
    return shown


def test_dumped_outbound_listener_has_envoys_key_order() -> None:
    shown = _reference_resource("w2/lds", 0)
    assert list(shown) == [
        "@type",
        "name",
        "address",
        "filter_chains",
        "use_original_dst",
        "listener_filters",
        "transparent",
        "socket_options",
        "access_log",
        "default_filter_chain",
        "filter_chain_matcher",
    ]
    assert shown["socket_options"] == [
        {"description": "mark of packets this listener sends", "level": "1", "name": "36", "int_value": "1025"}
    ]


def test_dumped_tunnel_cluster_has_envoys_key_order() -> None:
    assert list(_reference_resource("w2/cds", 1)) == [
        "@type",
        "name",
        "type",
        "connect_timeout",
        "lb_policy",
        "cleanup_interval",
        "transport_socket",
        "original_dst_lb_config",
        "typed_extension_protocol_options",
    ]


def test_matcher_levels_of_the_reference_are_found() -> None:
    response = read((REFERENCE / "w2/lds.yaml").read_text(), DiscoveryResponse)
    listener = registry.unpack(response.resources[0])
    assert isinstance(listener, Listener)
    matcher: Matcher = listener.filter_chain_matcher
    assert set(matcher.matcher_tree.exact_match_map.map) == {"15001"}
    by_source = matcher.on_no_match.matcher
    by_destination = by_source.matcher_tree.exact_match_map.map["10.244.2.3"].matcher
    assert set(by_destination.matcher_tree.exact_match_map.map) == {
        "10.96.183.192",
        "10.244.1.23",
        "10.244.2.23",
        "10.244.2.22",
    }
    action = by_source.on_no_match.action
    assert registry.unpack(action.typed_config) == StringValue(value="PassthroughFilterChain")


# ---------------------------------------------------------------------- what is accepted


def test_both_name_styles() -> None:
    assert read('{"useOriginalDst": true}', Listener) == read("use_original_dst: true", Listener)


def test_enums_by_name_and_number() -> None:
    assert read("state: STATE_LISTENING", SocketOption).state == SocketOption.STATE_LISTENING
    assert read("state: 2", SocketOption).state == SocketOption.STATE_LISTENING
    assert read("state: 77", SocketOption).state == 77


@pytest.mark.parametrize(
    ("text", "seconds", "nanos"),
    [("2s", 2, 0), ("0.250s", 0, 250_000_000), ("0s", 0, 0), ("1.5s", 1, 500_000_000)],
)
def test_durations(text: str, seconds: int, nanos: int) -> None:
    duration = read(f"connect_timeout: {text}", Cluster).connect_timeout
    assert (duration.seconds, duration.nanos) == (seconds, nanos)


def test_numbers_of_too_many_digits_are_refused() -> None:
    # int() refuses more than 4300 decimal digits, and a float has no room for 400 hexadecimal ones.
    assert error_of(f'state: "{"7" * 5000}"', SocketOption).path == "state"
    text = f'common_lb_config: {{healthy_panic_threshold: {{value: "0x{"f" * 400}"}}}}'
    assert error_of(text, Cluster).path == "common_lb_config.healthy_panic_threshold.value"


def test_64_bit_integers_as_string_and_number() -> None:
    assert read('level: "9007199254740993"', SocketOption).level == 9007199254740993
    assert read("level: 9007199254740993", SocketOption).level == 9007199254740993


def test_wrappers_are_bare_values_and_present_even_when_zero() -> None:
    detection = read("consecutive_5xx: 0", OutlierDetection)
    assert detection.HasField("consecutive_5xx")
    assert detection.consecutive_5xx.value == 0


def test_present_but_empty_messages_are_present() -> None:
    listener = read("internal_listener: {}", Listener)
    assert listener.WhichOneof("listener_specifier") == "internal_listener"


def test_null_means_absent() -> None:
    assert read("name: ~\naddress:\nuse_original_dst: null", Listener) == Listener()


def test_well_known_types_in_any_are_under_value() -> None:
    text = 'typed_config: {"@type": type.googleapis.com/google.protobuf.StringValue, value: chain}'
    assert registry.unpack(read(text, TypedExtensionConfig).typed_config) == StringValue(value="chain")


def test_typed_struct_inside_any_of_the_2022_listener_filter() -> None:
    text = """
    typed_config:
      "@type": type.googleapis.com/xds.type.v3.TypedStruct
      type_url: type.googleapis.com/istio.set_internal_dst_address.v1.Config
      value: {}
    """
    message = registry.unpack(read(text, TypedExtensionConfig).typed_config)
    assert isinstance(message, TypedStruct)
    assert message.type_url == "type.googleapis.com/istio.set_internal_dst_address.v1.Config"


def test_struct_takes_any_json() -> None:
    message = read('{"a": [1, "x", null, {"b": true}], "c": {}}', Struct)
    assert to_dict(message) == {"a": [1, "x", None, {"b": True}], "c": {}}


def test_bytes_are_base64_in_both_alphabets() -> None:
    assert read("inline_bytes: -_8=", DataSource).inline_bytes == b"\xfb\xff"
    assert read("inline_bytes: +/8", DataSource).inline_bytes == b"\xfb\xff"


def test_yaml_reads_dates_and_fractions_as_text() -> None:
    for word in ("2022-09-07", "12:30", "0o17", "1.5", "1e3", ".inf", "'no'", "'5'", "oN"):
        assert read(f"name: {word}", Listener).name == word.strip("'")


@pytest.mark.parametrize("word", ["no", "on", "Yes", "y", "5", "010", "0x1f", "-3"])
def test_yaml_words_that_are_no_text_to_envoy_are_refused_as_text(word: str) -> None:
    assert "expected a string" in str(error_of(f"name: {word}", Listener))


@given(st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=20))
def test_any_text_that_json_quotes_is_read_back_from_yaml(text: str) -> None:
    assert read(f"name: {json.dumps(text)}", Listener).name == text


@given(st.text(alphabet="0123456789abcdefxXtTyYnNoO+-._~", max_size=8))
def test_a_plain_scalar_is_null_a_boolean_an_integer_of_32_bits_or_its_text(text: str) -> None:
    value = plain(text)
    assert value is None or isinstance(value, bool | int | str)
    if isinstance(value, int) and not isinstance(value, bool):
        assert -(2**31) <= value < 2**31
    elif isinstance(value, str) and not text.lstrip("+-")[:1].isdigit():
        assert value == text


def test_ignored_keys_and_unknown_tags_of_yaml() -> None:
    assert read("!ignore a: &x b\nname: *x", Listener).name == "b"
    assert read("name: !anything b", Listener).name == "b"


def test_of_repeated_keys_the_last_and_of_documents_the_first_is_taken() -> None:
    assert read("name: a\nname: b\n---\nname: c", Listener).name == "b"


def test_file_of_yaml_is_yaml_also_where_it_could_be_json() -> None:
    text = '{"filter_metadata": {"a": {"b": 1.5}}}'

    def kind(name: str) -> object:
        return xds_json.parse_text(text, Metadata, name=name).message.filter_metadata["a"]["b"]

    assert (kind("x.json"), kind(""), kind("x.yaml")) == (1.5, 1.5, "1.5")


def test_yaml_keys_are_text() -> None:
    text = "exact_match_map: {map: {9080: {keep_matching: true}, true: {}}}"
    assert set(read(text, Matcher.MatcherTree).exact_match_map.map) == {"9080", "true"}


def test_yaml_anchors_and_merge_keys() -> None:
    text = """
    thresholds:
    - &base {max_connections: 5, max_retries: 2}
    - {<<: *base, priority: HIGH, max_retries: 9}
    """
    from xds.proto.envoy.config.cluster.v3.cluster_pb2 import CircuitBreakers

    second = read(text, CircuitBreakers).thresholds[1]
    assert (second.max_connections.value, second.max_retries.value) == (5, 9)


# ---------------------------------------------------------------------- what is reported or refused


def test_unknown_fields_are_reported_by_path() -> None:
    text = """
    name: l
    colour: red
    filter_chains:
    - filters:
      - name: f
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: s
          extra: 1
    """
    parsed = xds_json.parse_text(text, Listener)
    found = [field.path for field in parsed.unknown_fields]
    assert found == ["colour", "filter_chains[0].filters[0].typed_config.extra"]
    proxy = registry.unpack(parsed.message.filter_chains[0].filters[0].typed_config)
    assert proxy == TcpProxy(stat_prefix="s")


def test_any_of_an_unknown_type_becomes_a_typed_struct() -> None:
    text = 'typed_config: {"@type": type.googleapis.com/acme.Filter, depth: 3}'
    parsed = xds_json.parse_text(text, TypedExtensionConfig)
    assert parsed.unknown_types == (("typed_config", "type.googleapis.com/acme.Filter"),)
    inner = registry.unpack(parsed.message.typed_config)
    assert isinstance(inner, TypedStruct)
    assert inner.type_url == "type.googleapis.com/acme.Filter"
    assert dict(inner.value) == {"depth": 3.0}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (
            """
            resources:
            - "@type": type.googleapis.com/envoy.config.listener.v3.Listener
              filter_chains:
              - {}
              - filters:
                - typed_config:
                    "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
                    stat_prefix: 5
            """,
            "resources[0].filter_chains[1].filters[0].typed_config.stat_prefix",
        ),
        ('{"version_info": 1}', "version_info"),
        ('{"resources": 5}', "resources[0]"),
        ('{"resources": [null]}', "resources[0]"),
        ('{"resources": [{"name": "x"}]}', "resources[0]"),
        ('{"canary": "maybe"}', "canary"),
    ],
)
def test_errors_name_the_place(text: str, path: str) -> None:
    error = error_of(text, DiscoveryResponse)
    assert error.path == path
    assert str(error).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "message_type", "path", "reason"),
    [
        ("level: 1.5", SocketOption, "level", "expected an integer"),
        ("level: 9223372036854775808", SocketOption, "level", "from -9223372036854775808"),
        ("level: true", SocketOption, "level", "expected an integer"),
        ("state: STATE_NONE", SocketOption, "state", "one of STATE_PREBIND, STATE_BOUND"),
        ("int_value: 1\nbuf_value: AA==", SocketOption, "buf_value", "only one of 'int_value' and 'buf_value'"),
        ("inline_bytes: '*'", DataSource, "inline_bytes", "base64"),
        ("connect_timeout: 2", Cluster, "connect_timeout", "expected a string"),
        ("connect_timeout: 2m", Cluster, "connect_timeout", "such as 2s"),
        (
            "common_lb_config: {healthy_panic_threshold: 50}",
            Cluster,
            "common_lb_config.healthy_panic_threshold",
            "object",
        ),
        ("useOriginalDst: true\nuse_original_dst: true", Listener, "use_original_dst", "given twice"),
        ("name: [a]", Listener, "name", "a list"),
        ("name: 'a", Listener, "", "not valid YAML"),
        ('{"name" "x"}', Listener, "", "not valid JSON"),
        ("- a", Listener, "", "expected an object for envoy.config.listener.v3.Listener"),
        ("", Listener, "", "found null"),
        ('{"name": "\\ud800"}', Listener, "name", "surrogate"),
        (
            "metadata: {filter_metadata: {tunnel: 5}}",
            Cluster,
            'metadata.filter_metadata["tunnel"]',
            "expected an object",
        ),
    ],
)
def test_refusals(text: str, message_type: type[Any], path: str, reason: str) -> None:
    error = error_of(text, message_type)
    assert error.path == path
    assert reason in error.reason


def test_nesting_without_end_is_refused() -> None:
    assert "nested" in error_of("&a\non_no_match: {matcher: *a}", Matcher).reason
    assert "nested" in error_of("a: &a [*a]", Struct).reason
    assert "nested" in error_of("[" * 100_000, Struct).reason


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["@type", "name", "value", "address", "filter_chains", "typed_config", "listener_filters"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_any_value_is_read_or_refused(value: object) -> None:
    try:
        parsed = xds_json.parse_value(value, Listener)
    except ConfigError:
        return
    Listener.FromString(parsed.message.SerializeToString())


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        xds_json.parse_text(text, Listener)
    except ConfigError:
        pass


def test_tls_versions_keep_their_mixed_case() -> None:
    assert to_dict(read("tls_minimum_protocol_version: TLSv1_3", TlsParameters)) == {
        "tls_minimum_protocol_version": "TLSv1_3"
    }


def _levels(count: int) -> str:
    """A document whose aliases of aliases make 8 ** count values."""
    lines = [f"  a{n + 1}: &a{n + 1} {{{', '.join(f'k{k}: *a{n}' for k in range(8))}}}\n" for n in range(count)]
    return "node:\n  a0: &a0 {k: v}\n" + "".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("node: &a {id: *a}", "contains itself"),
        ("node: {metadata: &a {x: [*a]}}", "contains itself"),
        (_levels(12), "its aliases would make"),
    ],
)
def test_aliases_that_multiply_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        xds_json.parse_text(text, Bootstrap)


# The last three are no starts of documents.
@pytest.mark.parametrize("level", ["[", "{a: ", "- ", "? ", "[\n", "[\n---x, ", "[\n---\xa0, ", "[\n ---\n, "])
def test_nesting_that_would_overflow_the_stack_of_the_parser_is_refused(level: str) -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        envoy_yaml.load(f"{level * 100_000}")
    with pytest.raises(ConfigError, match="nested too deeply"):
        core_yaml.load(f"{level * 100_000}")


def test_many_documents_with_brackets_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_yaml.yaml, "parse", lambda *args, **kwargs: pytest.fail("parsed twice"))
    documents = core_yaml.load_all("---\n".join(["a: [[{b: 1}]]\n"] * 500))
    assert documents == [{"a": [[{"b": 1}]]}] * 500


def test_an_integer_of_any_length_is_read_or_refused() -> None:
    text = f'{{"node": {{"id": {"1" * 5000}}}}}'
    for name in ("x.json", "x.yaml"):
        with pytest.raises(ConfigError):
            xds_json.parse_text(text, Bootstrap, name=name)


def test_an_anchor_may_be_named_many_times() -> None:
    text = "node: {metadata: {a: &a {x: y}, " + ", ".join(f"k{n}: *a" for n in range(2000)) + "}}"
    assert len(xds_json.parse_text(text, Bootstrap).message.node.metadata.fields) == 2001


def test_a_fault_shows_the_beginning_of_a_value_of_any_size() -> None:
    with pytest.raises(ConfigError, match="expected a string, found an object") as refused:
        xds_json.parse_text("a: &a {k: v}\nnode: {id: {x: [" + ", ".join(["*a"] * 100) + "]}}", Bootstrap)
    assert len(str(refused.value)) < 200
