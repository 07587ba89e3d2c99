"""Metrics that are declared and made when touched look as if they had always been there."""

from operator import attrgetter

from ztunnel.proxy.envoy.stats.prometheus import envoy_text
from ztunnel.proxy.envoy.stats.stats import (
    Counter,
    Declared,
    Gauge,
    Histogram,
    OnTouch,
    Stats,
    TextReadout,
    cluster_scope,
    count_parameters,
    declared_in,
)
from ztunnel.proxy.envoy.stats.stats_page import Choice, Kind, chosen, text_pieces


class Owner:
    __slots__ = ("__dict__", "scope")

    total = OnTouch(Counter, "cx_total")
    active = OnTouch(Gauge, "cx_active")
    length = OnTouch(Histogram, "cx_length_ms")

    def __init__(self, stats: Stats, name: str) -> None:
        self.scope = cluster_scope(stats, name)
        self.size = 3
        self.scope.declare(OWNED, self)
        self.scope.declare(READ, self)


OWNED = declared_in(Owner)
READ = (
    Declared("size", Gauge, attrgetter("size")),
    Declared("size_text", TextReadout, lambda owner: f"{owner.size} of them"),
)


class Eager:
    """The same, made at once."""

    def __init__(self, stats: Stats, name: str) -> None:
        scope = cluster_scope(stats, name)
        self.total = scope.counter("cx_total")
        self.active = scope.gauge("cx_active")
        scope.gauge("size", lambda: 3)
        scope.text("size_text", lambda: "3 of them")


def page(stats: Stats, **choice: object) -> str:
    return "".join(text_pieces(chosen(stats, Choice(**choice))))  # type: ignore[arg-type]


def test_pages_are_those_of_metrics_made_at_once() -> None:
    lazy, eager = Stats(), Stats()
    for name in ("spiffe://a_to_b", "c.d"):
        one, other = Owner(lazy, name), Eager(eager, name)
        assert page(lazy) == page(eager)
        assert page(lazy, used_only=True) == page(eager, used_only=True)
        one.total.value += 2
        other.total.value += 2
        one.active.value = 1
        other.active.value = 1
        for kind in Kind:
            assert page(lazy, kind=kind) == page(eager, kind=kind)
        assert page(lazy, used_only=True) == page(eager, used_only=True)
        assert "".join(envoy_text(lazy, lazy.texts)) == "".join(envoy_text(eager, eager.texts))


def test_metrics_are_created_on_first_use() -> None:
    stats = Stats()
    owner = Owner(stats, "c")
    page(stats)
    assert owner.__dict__ == {"size": 3}
    total = owner.total
    assert owner.total is total
    assert [metric for metric in stats if metric.name == "cluster.c.cx_total"] == [total]


def test_a_histogram_appears_with_its_first_value() -> None:
    stats = Stats()
    owner = Owner(stats, "c")
    assert "cx_length_ms" not in page(stats)
    owner.length.record(3.0)
    Owner(stats, "c").length.record(4.0)
    assert owner.length.counts[2] == 2
    assert page(stats).count("cluster.c.cx_length_ms: P0(nan,3)") == 1


def test_owners_of_one_scope_share_counters() -> None:
    stats = Stats()
    first, second = Owner(stats, "c"), Owner(stats, "c")
    second.size = 5
    first.total.value += 1
    second.total.value += 1
    assert page(stats, kind=Kind.COUNTERS) == "cluster.c.cx_total: 2\n"
    assert "cluster.c.size: 5\n" in page(stats)
    assert page(stats).count("size:") == 1


def test_metrics_of_a_prefix_are_shown_until_its_last_scope_is_closed() -> None:
    stats = Stats()
    first, second = Owner(stats, "c"), Owner(stats, "c")
    second.size = 5
    first.total.value += 1
    second.scope.close()
    second.scope.close()
    assert page(stats, kind=Kind.COUNTERS) == "cluster.c.cx_total: 1\n"
    assert "cluster.c.size: 3\n" in page(stats)
    # A connection can outlive its version of a cluster.
    second.total.value += 1
    second.length.record(3.0)
    assert "cluster.c.cx_total: 2\n" in page(stats)
    assert "cluster.c.cx_length_ms" in page(stats)
    first.scope.close()
    assert page(stats) == ""
    assert stats.texts == []
    third = Owner(stats, "c")
    second.active.value = 1
    assert page(stats, used_only=True, kind=Kind.COUNTERS) == ""
    third.scope.close()
    assert page(stats) == ""


def test_versions_that_declare_one_name_differently_show_the_latest() -> None:
    stats = Stats()
    first, second = Owner(stats, "c"), cluster_scope(stats, "c")
    other = (Declared("size", Gauge, lambda _: 7),)
    second.declare(other, None)
    assert page(stats).count("cluster.c.size:") == 1
    assert "cluster.c.size: 7\n" in page(stats)
    second.close()
    assert "cluster.c.size: 3\n" in page(stats)
    second.declare(other, None)
    assert "cluster.c.size: 3\n" in page(stats)
    first.scope.close()
    assert page(stats) == ""


def test_closed_scope_shows_no_metrics() -> None:
    stats = Stats()
    owner = Owner(stats, "c")
    owner.total.value += 1
    owner.scope.close()
    owner.active.value = 1
    assert page(stats) == ""
    assert stats.texts == []


def test_handshake_parameters_are_counted_under_envoys_names() -> None:
    stats = Stats()
    scope = stats.scope("listener.l.ssl")
    count_parameters(scope, "TLSv1.3", "TLS_AES_128_GCM_SHA256", "secp256r1")
    count_parameters(scope, "TLSv1.3", "TLS_AES_128_GCM_SHA256", "X25519MLKEM768")
    count_parameters(scope, "TLSv1.2", "", None)
    counted = [(metric.name, metric.value) for metric in stats if isinstance(metric, Counter)]
    assert {name.removeprefix("listener.l.ssl."): value for name, value in counted} == {
        "versions.TLSv1.3": 2,
        "versions.TLSv1.2": 1,
        "ciphers.TLS_AES_128_GCM_SHA256": 2,
        "curves.P-256": 1,
        "curves.X25519MLKEM768": 1,
    }


def test_counts_below_a_closed_scope_appear_on_no_page() -> None:
    stats = Stats()
    scope = cluster_scope(stats, "removed")
    before = scope.scope("ssl")
    before.counter("handshake").value += 1
    scope.close()
    # A handshake can end after its cluster was removed.
    for ssl in (before, scope.scope("ssl")):
        count_parameters(ssl, "TLSv1.3", "TLS_AES_128_GCM_SHA256", "x25519")
        ssl.text("text", str)
        ssl.declare((Declared("declared", Counter),), None)
    assert list(stats) == []
    assert stats.texts == []
