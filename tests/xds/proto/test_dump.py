import base64

from xds.proto import json as xds_json
from xds.proto import registry
from xds.proto.dump import to_dict, to_json
from xds.proto.envoy.admin.v3.admin_pb2 import ConfigDump, Memory, SecretsConfigDump, UpdateFailureState
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.core.v3.core_pb2 import SocketOption, TypedExtensionConfig
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.well_known import Any as AnyMessage
from xds.proto.well_known import Duration, Struct, Timestamp

REDACTED_BYTES = base64.b64encode(b"[redacted]").decode()


def test_layout_is_envoys() -> None:
    dump = ConfigDump()
    dump.configs.append(registry.pack(Memory(allocated=5)))
    assert to_json(dump) == (
        '{\n "configs": [\n  {\n   "@type": "type.googleapis.com/envoy.admin.v3.Memory",\n'
        '   "allocated": "5"\n  }\n ]\n}\n'
    )


def test_angle_brackets_are_escaped_and_other_text_is_not() -> None:
    assert to_json(TypedExtensionConfig(name="<é>&")) == '{\n "name": "\\u003cé\\u003e&"\n}\n'


def test_fields_are_ordered_by_number_not_by_assignment_or_declaration() -> None:
    cluster = Cluster(lb_policy=Cluster.CLUSTER_PROVIDED, type=Cluster.ORIGINAL_DST, name="c")
    cluster.cluster_type.name = "x"  # same oneof as type, number 38
    assert list(to_dict(cluster)) == ["name", "lb_policy", "cluster_type"]


def test_defaults_are_omitted_but_present_members_of_oneofs_are_not() -> None:
    assert to_dict(SocketOption(name=0, state=SocketOption.STATE_PREBIND)) == {}
    assert to_dict(Cluster(type=Cluster.STATIC)) == {"type": "STATIC"}


def test_times() -> None:
    state = UpdateFailureState(last_update_attempt=Timestamp(seconds=1_662_552_000, nanos=125_000_000))
    assert to_dict(state) == {"last_update_attempt": "2022-09-07T12:00:00.125Z"}
    assert to_dict(Cluster(connect_timeout=Duration(nanos=250_000_000))) == {"connect_timeout": "0.250s"}


def test_a_duration_out_of_range_is_shown_by_its_fields() -> None:
    assert to_dict(Duration(seconds=1 << 62)) == {"seconds": str(1 << 62)}


def test_integral_numbers_have_no_fraction() -> None:
    struct = Struct()
    struct.update({"a": 140, "b": 0.5, "c": float("nan")})
    assert to_dict(struct) == {"a": 140, "b": 0.5, "c": "NaN"}


def test_maps_are_sorted() -> None:
    assignment = ClusterLoadAssignment()
    for key in "bca":
        assignment.named_endpoints[key].hostname = key
    assert list(to_dict(assignment)["named_endpoints"]) == ["a", "b", "c"]


def test_unnamed_enum_numbers_are_shown() -> None:
    assert to_dict(SocketOption(state=77)) == {"state": 77}  # type: ignore[arg-type]  # open enum


def test_unknown_any_types_are_shown_and_read_back() -> None:
    odd = TypedExtensionConfig(typed_config=AnyMessage(type_url="type.googleapis.com/acme.X", value=b"\x08\x01"))
    assert to_dict(odd) == {"typed_config": {"@type": "type.googleapis.com/acme.X", "@bytes": "CAE="}}
    assert xds_json.parse_text(to_json(odd), TypedExtensionConfig).message == odd


def test_malformed_any_is_shown_and_read_back() -> None:
    odd = TypedExtensionConfig(typed_config=AnyMessage(type_url=registry.type_url(Cluster), value=b"\x0a\xff"))
    assert to_dict(odd)["typed_config"]["@bytes"] == "Cv8="
    assert xds_json.parse_text(to_json(odd), TypedExtensionConfig).message == odd


def test_unknown_fields_are_shown_last() -> None:
    cluster = Cluster.FromString(
        b"\xc0\x3e\x05\xc2\x3e\x01a\xc1\x3e" + bytes(8) + b"\xc3\x3e\x08\x07\xc4\x3e\x0a\x01c"
    )
    assert to_dict(cluster) == {
        "name": "c",
        "@unknown": ["1000:varint:5", "1000:bytes:YQ==", "1000:fixed64:0", "1000:group:(1:varint:7)"],
    }


def test_an_empty_any_is_an_empty_object() -> None:
    assert to_dict(AnyMessage()) == {}


def _secret(**sources: str) -> Secret:
    secret = Secret(name="s")
    secret.tls_certificate.certificate_chain.inline_string = "CHAIN"
    for name, value in sources.items():
        getattr(secret.tls_certificate, name).inline_string = value
    return secret


def test_private_keys_are_redacted_inside_any_and_certificates_shown() -> None:
    dump = SecretsConfigDump()
    dump.dynamic_active_secrets.add(name="s", secret=registry.pack(_secret(private_key="KEY", password="WORD")))
    text = to_json(dump, redact=True)
    assert "KEY" not in text
    assert "WORD" not in text
    shown = to_dict(dump, redact=True)["dynamic_active_secrets"][0]["secret"]["tls_certificate"]
    assert shown == {
        "certificate_chain": {"inline_string": "CHAIN"},
        "private_key": {"inline_string": "[redacted]"},
        "password": {"inline_string": "[redacted]"},
    }


def test_redacted_bytes_are_base64_and_paths_are_hidden_too() -> None:
    secret = Secret()
    secret.tls_certificate.private_key.inline_bytes = b"KEY"
    secret.tls_certificate.pkcs12.filename = "/secret/path"
    assert to_dict(secret, redact=True)["tls_certificate"] == {
        "private_key": {"inline_bytes": REDACTED_BYTES},
        "pkcs12": {"filename": "[redacted]"},
    }


def test_other_kinds_of_secrets_are_redacted() -> None:
    tickets = Secret()
    tickets.session_ticket_keys.keys.add(inline_bytes=b"KEY")
    generic = Secret()
    generic.generic_secret.secret.inline_string = "KEY"
    generic.generic_secret.secrets["a"].inline_string = "KEY"
    assert "KEY" not in to_json(generic, redact=True)
    assert to_dict(tickets, redact=True)["session_ticket_keys"]["keys"] == [{"inline_bytes": REDACTED_BYTES}]


def test_unknown_fields_of_a_secret_are_redacted() -> None:
    secret = Secret.FromString(b"\xc2\x3e\x03KEY")
    assert to_dict(secret, redact=True) == {"@unknown": ["[redacted]"]}


def test_without_redact_everything_is_shown() -> None:
    assert "KEY" in to_json(_secret(private_key="KEY"))
