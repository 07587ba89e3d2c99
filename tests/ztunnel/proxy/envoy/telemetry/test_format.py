"""Format strings as Envoy prints them, and log lines nobody can forge."""

import hashlib
import json
from urllib.parse import unquote

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from hbone.tls import PeerFacts
from tests.hbone.certificates import Authority
from xds.errors import ConfigError
from xds.model.access_log import AccessLog, JsonFormat
from xds.model.address import InternalAddress, SocketAddress
from xds.model.cluster import Endpoint
from xds.model.facts import ConnectionFacts
from xds.model.format_string import COMMANDS, Command, FormatString, parse_format
from xds.model.secret import Certificate
from ztunnel.proxy.envoy.stream.stream_info import LONG_NAMES, Flag, StreamInfo, TlsFacts
from ztunnel.proxy.envoy.telemetry.format import _EXPRESSIONS, log_renderer, renderer


def info(**more: object) -> StreamInfo:
    facts = ConnectionFacts(
        source=SocketAddress("10.244.2.3", 40000),
        direct_source=SocketAddress("10.244.2.3", 40000),
        destination=SocketAddress("10.96.183.192", 9080),
        metadata={"tunnel": {"destination": "10.244.1.23:9080", "deep": {"n": 1}}},
        filter_state={"key": "state"},
    )
    made = StreamInfo(connection_id=7, facts=facts, started=1.0, started_at=1668503741.834567)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def render(text: str, *, missing: str = "-", **more: object) -> str:
    return renderer(parse_format(text), missing=missing)(info(**more))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("100%%", "100%"),
        ("%START_TIME%", "2022-11-15T09:15:41.834Z"),
        ("%START_TIME(%s)%", "1668503741"),
        ("%START_TIME(%Y/%m/%d %H:%M:%S.%6f)%", "2022/11/15 09:15:41.834567"),
        ("%START_TIME(%E4f)%", "8345"),
        ("%START_TIME(%H:%E3S)%", "09:41.834"),
        ("%START_TIME(%E0S %E*S %E*f %E4Y)%", "41 41.834567 834567 2022"),
        ("%DOWNSTREAM_REMOTE_ADDRESS%", "10.244.2.3:40000"),
        ("%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT% %DOWNSTREAM_REMOTE_PORT%", "10.244.2.3 40000"),
        ("%DOWNSTREAM_LOCAL_ADDRESS%", "10.96.183.192:9080"),
        ("%DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT%:%DOWNSTREAM_LOCAL_PORT%", "10.96.183.192:9080"),
        ("%DYNAMIC_METADATA(tunnel:destination)%", "10.244.1.23:9080"),
        ('%DYNAMIC_METADATA(["tunnel", "destination"])%', "10.244.1.23:9080"),
        ("%DYNAMIC_METADATA(tunnel:deep)%", '{"n":1}'),
        ("%DYNAMIC_METADATA(tunnel:none)%", "-"),
        ("%FILTER_STATE(key:PLAIN)%", "state"),
        ("%RESPONSE_CODE% %RESPONSE_FLAGS% %PROTOCOL%", "0 - -"),
        ("%DOWNSTREAM_REMOTE_ADDRESS%:x", "10.244.2.3:40000:x"),
        ("%DOWNSTREAM_REMOTE_ADDRESS:4%", None),
        ("%CONNECTION_ID%", "7"),
        ("%REQUESTED_SERVER_NAME%", "-"),
    ],
)
def test_format_commands_render_values(text: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError):
            render(text)
    else:
        assert render(text) == expected


def test_command_length_truncates_the_value() -> None:
    assert render("%REQ(:AUTHORITY):5%", authority="reviews:80", method="CONNECT") == "revie"
    assert render("%REQ(x?:METHOD)%", method="CONNECT") == "CONNECT"


def test_flags_in_their_order() -> None:
    flags = {Flag.UPSTREAM_RETRY_EXHAUSTED, Flag.UPSTREAM_CONNECT_FAILURE}
    assert render("%RESPONSE_FLAGS%", flags=flags) == "UF,URX"


def test_spaces_in_reasons_become_underscores() -> None:
    assert render("%UPSTREAM_TRANSPORT_FAILURE_REASON%", upstream_failure="Invalid argument") == "Invalid_argument"


def test_an_internal_client_has_a_name_and_no_port() -> None:
    text = render(
        "%DOWNSTREAM_REMOTE_ADDRESS% %DOWNSTREAM_REMOTE_PORT%", remote_text="envoy://internal_client_address/"
    )
    assert text == "envoy://internal_client_address/ -"


def test_addresses_of_version_6() -> None:
    text = "%UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT% %UPSTREAM_REMOTE_PORT%"
    assert render(text, upstream_host="[fd00::1]:80", connected=True) == "fd00::1 80"
    assert render(text, upstream_host="[fd00::1]:80") == "- -"  # a host that was tried, and no connection


def test_missing_value_uses_the_configured_text() -> None:
    assert render("%ROUTE_NAME%", missing="") == ""


@pytest.mark.parametrize(
    "text",
    ["%", "%NOPE%", "50%", "%REQ%", "%BYTES_SENT(x)%", '%DYNAMIC_METADATA(["a")%', "%DYNAMIC_METADATA([1])%"],
)
def test_invalid_format_string_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="format string"):
        parse_format(text)


def test_every_command_renders() -> None:
    for name, takes in COMMANDS.items():
        argument = ("(DYNAMIC:x)" if name == "METADATA" else "(x)") if takes else ""
        assert isinstance(render(f"%{name}{argument}%", tls=TlsFacts()), str)


@given(st.text(max_size=60))
def test_rendered_value_cannot_contain_control_characters(name: str) -> None:
    line = render("[%REQ(x)%]\n", request_headers=(("x", name),))
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert "\r" not in line


@given(st.text(max_size=40))
def test_any_text_is_a_format_or_refused(text: str) -> None:
    try:
        parsed = parse_format(text)
    except ConfigError:
        return
    assert all(isinstance(part, str | Command) for part in parsed.parts)


def test_json_format_keeps_types_and_empty_values() -> None:
    fields: dict[str, object] = {
        "bytes": parse_format("%BYTES_SENT%"),
        "mixed": parse_format("n=%BYTES_SENT%"),
        "none": parse_format("%ROUTE_NAME%"),
        "nested": {"list": [parse_format("%CONNECTION_ID%"), 1.5, True]},
    }
    line = log_renderer(AccessLog("/x", JsonFormat(fields)))(info(bytes_sent=3))  # type: ignore[arg-type]
    assert line.endswith("\n")
    assert json.loads(line) == {"bytes": 3, "mixed": "n=3", "none": None, "nested": {"list": [7, 1.5, True]}}
    short = log_renderer(AccessLog("/x", JsonFormat(fields), omit_empty=True))(info())  # type: ignore[arg-type]
    assert "none" not in json.loads(short)


def test_equal_formats_are_equal_values() -> None:
    assert parse_format("%BYTES_SENT% x") == FormatString((Command("BYTES_SENT"), " x"))


def json_line(*, omit_empty: bool = False, **fields: object) -> str:
    formats = {
        key: parse_format(value) if isinstance(value, str) else value for key, value in sorted(fields.items())
    }
    log = AccessLog("/x", JsonFormat(formats), omit_empty=omit_empty)  # type: ignore[arg-type]
    return log_renderer(log)(info(upstream_host="10.0.0.1:80", connected=True))


def test_json_reads_as_envoys() -> None:
    """Metadata is a JSON value, not text; whole numbers have no fraction; names are sorted."""
    line = json_line(
        tunnel="%DYNAMIC_METADATA(tunnel)%",
        mixed="m=%DYNAMIC_METADATA(tunnel:deep)%",
        port="%UPSTREAM_REMOTE_PORT%",
        number=2.0,
        half=2.5,
        name="\u00e4",
    )
    assert line == (
        '{"half":2.5,"mixed":"m={\\"n\\":1}","name":"\u00e4","number":2,"port":80,'
        '"tunnel":{"deep":{"n":1},"destination":"10.244.1.23:9080"}}\n'
    )


def test_json_format_can_omit_empty_values_at_any_depth() -> None:
    none = parse_format("%ROUTE_NAME%")
    line = json_line(omit_empty=True, a="x%ROUTE_NAME%", b={"c": none, "d": [none, 1.0]}, e="%ROUTE_NAME%")
    assert line == '{"a":"x","b":{"d":[1]}}\n'


def test_flags_have_long_names() -> None:
    assert render("%RESPONSE_FLAGS_LONG%", flags={Flag.UPSTREAM_RESET}) == "UpstreamRemoteReset"
    assert render("%RESPONSE_FLAGS_LONG%") == "-"
    assert set(LONG_NAMES) == set(Flag)


def test_metadata_by_kind() -> None:
    assert render("%METADATA(DYNAMIC:tunnel:destination)%") == "10.244.1.23:9080"
    assert render("%METADATA(ROUTE:x:y)%", route_metadata={"x": {"y": "z"}}) == "z"
    with pytest.raises(ConfigError, match=r"METADATA\(NODE\)"):
        parse_format("%METADATA(NODE:x)%")


def test_empty_values_print_like_in_envoy() -> None:
    assert render("[%CUSTOM_FLAGS%]") == "[]"
    assert render("%QUERY_PARAMS%", path="/a") == "-"
    assert render("[%QUERY_PARAMS%]", path="/a?") == "[]"
    assert render("%QUERY_PARAMS(DECODED)%", path="/a?b=%20") == "b=%20"
    with pytest.raises(ConfigError, match="QUERY_PARAMS option: 'X'"):
        parse_format("%QUERY_PARAMS(X)%")


def test_hosts_of_all_attempts_are_in_order() -> None:
    first = Endpoint(address=SocketAddress("10.0.0.1", 80))
    named = Endpoint(address=SocketAddress("10.0.0.2", 80), hostname="[fd00::1]:80")
    hop = {"failed": (first,), "endpoint": named}
    assert render("%UPSTREAM_HOSTS_ATTEMPTED%", **hop) == "10.0.0.1:80,10.0.0.2:80"
    assert render("%UPSTREAM_HOSTS_ATTEMPTED_WITHOUT_PORT%", **hop) == "10.0.0.1,10.0.0.2"
    assert render("%UPSTREAM_HOST_NAMES_ATTEMPTED%", **hop) == "10.0.0.1:80,[fd00::1]:80"
    assert render("%UPSTREAM_HOST_NAMES_ATTEMPTED_WITHOUT_PORT%", **hop) == "10.0.0.1,[fd00::1]"
    assert render("%UPSTREAM_HOSTS_ATTEMPTED% %UPSTREAM_HOST_NAME%") == "- -"


def test_a_request_has_a_path_and_parameters() -> None:
    assert render("%PATH% %PATH(NQ)% %QUERY_PARAM(b)%", path="/a?b=c&d", method="GET") == "/a?b=c&d /a c"


def test_the_moment_of_the_line_is_later_than_the_start() -> None:
    assert render("%EMIT_TIME(%s)%", duration_s=2.5) == "1668503744"
    assert render("%START_TIME_LOCAL(%s)%") == "1668503741"


def test_a_stream_keeps_its_id() -> None:
    once = renderer(parse_format("%STREAM_ID%"))
    hop = info()
    assert once(hop) == once(hop) != once(info())


def test_values_of_certificates() -> None:
    leaf = Authority().issue("spiffe://td/ns/a/sa/b")
    chain = tuple(x509.load_pem_x509_certificates(leaf.chain_pem))
    facts = TlsFacts(peer_chain=chain, local=Certificate(chain_pem=leaf.chain_pem, key_pem=b""))
    serial, *_ = render("%DOWNSTREAM_PEER_CHAIN_SERIALS%", tls=facts).split(",")
    assert serial == render("%DOWNSTREAM_PEER_SERIAL%", tls=facts) == f"{chain[0].serial_number:x}"
    fingerprint = render("%DOWNSTREAM_PEER_FINGERPRINT_256%", tls=facts)
    assert fingerprint == hashlib.sha256(chain[0].public_bytes(Encoding.DER)).hexdigest()
    assert unquote(render("%DOWNSTREAM_PEER_CERT%", tls=facts)).encode() == chain[0].public_bytes(Encoding.PEM)
    assert render("%DOWNSTREAM_LOCAL_DNS_SAN% %UPSTREAM_PEER_SUBJECT%", tls=facts) == "- -"
    end = chain[0].not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    assert render("%DOWNSTREAM_PEER_CERT_V_END%", tls=facts) == end
    upstream = PeerFacts(certificate=chain[0], chain=chain, version="TLSv1.3", cipher="c")
    assert render("%UPSTREAM_PEER_URI_SAN%", upstream_uri_sans=("spiffe://td/x",)) == "spiffe://td/x"
    assert render("%UPSTREAM_PEER_ISSUER%", upstream_tls=upstream) == chain[0].issuer.rfc4514_string()
    assert render("%UPSTREAM_TLS_VERSION% %UPSTREAM_TLS_CIPHER%", upstream_tls=upstream) == "TLSv1.3 c"


def test_cluster_is_shown_by_its_alternative_name_and_not_if_it_does_not_exist() -> None:
    text = "%UPSTREAM_CLUSTER% %UPSTREAM_CLUSTER_RAW%"
    assert render(text, cluster="a") == "- -"
    assert render(text, cluster="a", upstream_cluster="a") == "a a"
    assert render(text, cluster="a", upstream_cluster="other") == "other a"


_TEXTS = st.text("ab :-\n", max_size=4)
_ADDRESSES = st.sampled_from((SocketAddress("10.0.0.1", 1), SocketAddress("2001:db8::1", 2)))
_INTERNAL = InternalAddress("listener", "endpoint")
_HEADERS = st.lists(st.tuples(st.sampled_from(("x-a", "x-b", "x-forwarded-proto")), _TEXTS), max_size=3).map(tuple)
_TEXT_FIELDS = (
    *("remote_text", "termination_details", "protocol", "response_details", "route", "upstream_cluster"),
    *("upstream_host", "upstream_local", "upstream_failure", "method", "authority", "path"),
)
_STREAM_INFOS = st.builds(
    StreamInfo,
    connection_id=st.just(1),
    started=st.just(1.0),
    started_at=st.just(2.0),
    facts=st.builds(
        ConnectionFacts, source=_ADDRESSES, direct_source=_ADDRESSES, destination=_ADDRESSES, server_name=_TEXTS
    ),
    restored=st.booleans(),
    direct_local=st.none() | _ADDRESSES | st.just(_INTERNAL),
    flags=st.sets(st.sampled_from(Flag), max_size=2),
    duration_s=st.none() | st.floats(0, 1e4),
    response_code=st.sampled_from((0, 200, 503)),
    request_headers=_HEADERS,
    response_headers=_HEADERS,
    bytes_received=st.integers(0, 9),
    bytes_sent=st.integers(0, 9),
    **dict.fromkeys(_TEXT_FIELDS, _TEXTS),
)
_OF_HEADERS = ("x-a", "x-b?x-a", ":method", ":PATH", ":authority?x-a", "x-forwarded-proto", "x-request-id")


_COMMANDS = (
    *(f"%{name}%" for name in sorted(_EXPRESSIONS)),
    *(f"%{name}({header})%" for name in ("REQ", "REQUEST_HEADER", "RESP") for header in _OF_HEADERS),
)


@given(_STREAM_INFOS, st.sampled_from(("-", "")))
def test_a_value_in_a_line_is_the_value_of_the_command_alone(stream: StreamInfo, missing: str) -> None:
    """A line reads frequent values without calls of their readers."""
    alone = [renderer(parse_format(text), missing=missing)(stream) for text in _COMMANDS]
    assert renderer(parse_format("|".join(_COMMANDS)), missing=missing)(stream) == "|".join(alone)
