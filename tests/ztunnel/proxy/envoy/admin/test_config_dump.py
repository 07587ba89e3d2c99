"""The printing of dumps, against printing them whole."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from xds.proto import registry
from xds.proto.dump import to_json
from xds.proto.envoy.admin.v3 import admin_pb2 as admin
from xds.proto.envoy.config.cluster.v3 import cluster_pb2
from xds.proto.envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from xds.proto.well_known import Any as AnyMessage
from ztunnel.proxy.envoy.admin.config_dump import pieces
from ztunnel.proxy.envoy.admin.dump import Dump
from ztunnel.runtime.http.page import Deferred

names = st.text(max_size=20)


def whole(*messages: object) -> str:
    return to_json(admin.ConfigDump(configs=[registry.pack(m) for m in messages]), redact=True)  # type: ignore[arg-type]


def in_pieces(*messages: object) -> str:
    made = pieces(map(Dump, messages))  # type: ignore[arg-type]
    return "".join(piece.make() if isinstance(piece, Deferred) else piece for piece in made)


@st.composite
def clusters_dumps(draw: st.DrawFn) -> admin.ClustersConfigDump:
    dump = admin.ClustersConfigDump(version_info=draw(names))
    for name in draw(st.lists(names, max_size=4)):
        cluster = cluster_pb2.Cluster(name=name)
        entry = dump.dynamic_active_clusters.add(version_info=draw(names), cluster=registry.pack(cluster))
        if draw(st.booleans()):
            entry.error_state.details = draw(names)
    if draw(st.booleans()):
        dump.static_clusters.add(cluster=AnyMessage(type_url="type.googleapis.com/not.Known", value=b"\xff"))
    return dump


@settings(max_examples=examples(60))
@given(st.lists(clusters_dumps(), max_size=3))
def test_pieces_join_to_the_whole(dumps: list[admin.ClustersConfigDump]) -> None:
    assert in_pieces(*dumps) == whole(*dumps)


def test_bootstrap_routes_and_empty_dumps_print_as_the_whole() -> None:
    bootstrap = admin.BootstrapConfigDump()
    bootstrap.bootstrap.node.id = "a"
    bootstrap.last_updated.FromMilliseconds(1234567890123)
    dumps = (bootstrap, admin.ScopedRoutesConfigDump(), admin.RoutesConfigDump())
    assert in_pieces(*dumps) == whole(*dumps)
    assert in_pieces() == whole() == "{}\n"


def test_large_elements_are_deferred_and_print_the_same() -> None:
    cluster = cluster_pb2.Cluster(name=random.Random(1).randbytes(20_000).hex())
    dump = admin.ClustersConfigDump()
    dump.dynamic_active_clusters.add(cluster=registry.pack(cluster))
    assert any(isinstance(piece, Deferred) for piece in pieces([Dump(dump)]))
    assert in_pieces(dump) == whole(dump)


def test_secrets_of_refused_versions_are_redacted_too() -> None:
    secret = tls_pb2.Secret(name="s")
    secret.tls_certificate.private_key.inline_string = "very secret"
    secret.tls_certificate.password.inline_bytes = b"very secret"
    dump = admin.SecretsConfigDump()
    entry = dump.dynamic_active_secrets.add(name="s", secret=registry.pack(secret))
    entry.error_state.failed_configuration.CopyFrom(registry.pack(secret))
    text = in_pieces(dump)
    assert "very secret" not in text
    assert text.count('"inline_string": "[redacted]"') == 2
    assert text.count('"inline_bytes": "W3JlZGFjdGVkXQ=="') == 2


@settings(max_examples=examples(30))
@given(clusters_dumps())
def test_lists_made_late_print_in_their_place(dump: admin.ClustersConfigDump) -> None:
    head = admin.ClustersConfigDump(version_info=dump.version_info)
    names = ("static_clusters", "dynamic_active_clusters", "dynamic_warming_clusters")
    late = Dump(head, tuple((name, iter(getattr(dump, name))) for name in names))
    made = "".join(piece.make() if isinstance(piece, Deferred) else piece for piece in pieces([late]))
    assert made == whole(dump)
    again = Dump(head, tuple((name, iter(getattr(dump, name))) for name in names))
    assert again.complete() == dump
