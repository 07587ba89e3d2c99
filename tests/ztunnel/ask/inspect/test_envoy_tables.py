"""Tables in Envoy's dialect, from pages as our proxies and Envoys write them."""

from collections.abc import Iterable
from typing import Any

import pytest

from ztunnel.ask.inspect.envoy_tables import certificates, policies, status
from ztunnel.ask.inspect.kinds import ENVOY_CERTIFICATE, ENVOY_POLICY, Fact
from ztunnel.ask.inspect.nodes import of_envoy
from ztunnel.runtime.console.output import Answer, table

_DUMP = "type.googleapis.com/envoy.admin.v3."
SERVER = {"version": "v", "state": "LIVE", "uptime_current_epoch": "5s", "node": {"id": "n"}}
LEAF = {
    "serial_number": "2b",
    "subject_alt_names": [{"uri": "spiffe://td/ns/a/sa/b"}, {"dns": "b.example"}],
    "valid_from": "2026-11-22T00:00:00Z",
    "expiration_time": "2026-11-24T00:00:00Z",
}
ROOT = {"serial_number": "1", "valid_from": "2026-11-01T00:00:00Z", "expiration_time": "2036-11-01T00:00:00Z"}
CERTS = {"certificates": [{"cert_chain": [LEAF], "ca_cert": [ROOT]}, {"cert_chain": [LEAF], "ca_cert": [ROOT]}]}


def pages(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "/server_info": SERVER,
        "/clusters": {},
        "/certs": {},
        "/init_dump": {},
        "/connections": None,
        "/denials": None,
        "/config_dump": {"configs": []},
    }
    return found | {f"/{name}": page for name, page in more.items()}


def facts(found: Iterable[Fact]) -> list[tuple[str, str]]:
    return [(each.name, each.state) for each in found]


def test_the_status_of_a_bare_envoy() -> None:
    assert facts(status(pages())) == [
        ("version", "v"),
        ("state", "LIVE"),
        ("up for", "5s"),
        ("node", "n"),
        ("listeners", "none"),
        ("clusters", "0"),
        ("certificates", "0"),
    ]


@pytest.mark.parametrize(
    ("value", "said"), [(1, "connected to ADS"), (0, "NOT CONNECTED: ADS; its last configuration")]
)
def test_the_status_begins_with_the_control_plane(value: int, said: str) -> None:
    stats = {"stats": [{"name": "control_plane.connected_state", "value": value}]}
    first = next(status({**pages(), "/stats": stats}))
    assert first.name == "control plane"
    assert first.state.startswith(said)
    assert first.severity == ("ok" if value else "error")


def host(**health: Any) -> dict[str, Any]:
    return {"health_status": health}


def test_the_status_says_what_is_wrong() -> None:
    listeners = {
        "@type": f"{_DUMP}ListenersConfigDump",
        "static_listeners": [{"listener": {"name": "s"}}],
        "dynamic_listeners": [
            {"name": "a", "active_state": {"version_info": "1"}, "warming_state": {"version_info": "2"}},
            {"name": "b", "error_state": {"details": "no such filter"}},
        ],
    }
    clusters = {
        "@type": f"{_DUMP}ClustersConfigDump",
        "dynamic_warming_clusters": [{"error_state": {"details": "bad type"}}],
    }
    statuses = [
        {"name": "empty"},
        {"name": "up", "host_statuses": [host(eds_health_status="HEALTHY"), host(eds_health_status="UNHEALTHY")]},
        {"name": "down", "host_statuses": [host(eds_health_status="UNHEALTHY")]},
        {"name": "ejected", "host_statuses": [host(eds_health_status="HEALTHY", failed_outlier_check=True)]},
    ]
    denial = {
        "listener": "in",
        "chain": "c",
        "source": "10.0.0.1",
        "identity": "spiffe://td/ns/a/sa/b",
        "destination": "10.0.0.2:80",
        "reason": "rbac_access_denied_matched_policy[none]",
        "count": 3,
        "lastAddress": "10.0.0.1:4000",
        "lastTime": "2026-11-23T00:00:00Z",
    }
    rows = facts(
        status(
            pages(
                config_dump={"configs": [listeners, clusters]},
                clusters={"cluster_statuses": statuses},
                certs=CERTS,
                init_dump={"unready_targets_dumps": [{"name": "x", "target_names": ["Cluster down"]}]},
                connections={"connections": [{}]},
                denials=[denial, *({**denial, "identity": ""} for _ in range(9))],
            )
        )
    )
    assert rows[4:] == [
        ("listeners", "2 active, 1 warming"),
        ("clusters", "4"),
        ("connections", "1"),
        ("certificates", "1, the first ends 2026-11-24T00:00:00Z"),
        ("not accepted", "listener b: no such filter"),
        ("not accepted", "cluster: bad type"),
        ("not ready", "Cluster down"),
        ("no healthy endpoint", "down"),
        ("no healthy endpoint", "ejected"),
        (
            "denied",
            "3 x 10.0.0.1 (spiffe://td/ns/a/sa/b) to 10.0.0.2:80 at in/c: "
            "rbac_access_denied_matched_policy[none]; last 2026-11-23T00:00:00Z from 10.0.0.1:4000",
        ),
        *rows[14:21],
        ("denied", "and 2 more: see /denials"),
    ]
    assert rows[14][1].startswith("3 x 10.0.0.1 to 10.0.0.2:80 at in/c: ")


def test_policies_show_what_they_decided() -> None:
    last = {"lastTime": "2026-11-23T00:00:00Z"}
    given = [
        {"policy": "new", "action": "ALLOW", "mode": "enforced", "chains": 2, "decisions": None},
        {
            "policy": "used",
            "action": "DENY",
            "mode": "enforced",
            "chains": 1,
            "decisions": {"allowed": 0, "denied": 7, "ended": 2, **last},
        },
        {
            "policy": "trial",
            "action": "DENY",
            "mode": "shadow",
            "chains": 1,
            "decisions": {"allowed": 0, "denied": 0, "ended": 0, "shadow_denied": 5, **last},
        },
        {
            "policy": "none",
            "action": "",
            "mode": "",
            "chains": 0,
            "decisions": {"allowed": 0, "denied": 1, "ended": 0, **last},
        },
    ]
    assert table(Answer(kind=ENVOY_POLICY, items=list(policies(pages(rbac={"policies": given})))))[1:] == [
        ("new", "ALLOW", "enforced", "2", "-", "-", "-"),
        ("used", "DENY", "enforced", "1", "0", "7, 2 ended", "2026-11-23T00:00:00Z"),
        ("trial", "DENY", "shadow", "1", "-", "5", "2026-11-23T00:00:00Z"),
        ("none", "-", "-", "0", "0", "1", "2026-11-23T00:00:00Z"),
    ]


def test_certificates_are_shown_once() -> None:
    assert table(Answer(kind=ENVOY_CERTIFICATE, items=list(certificates(pages(certs=CERTS)))))[1:] == [
        (
            "spiffe://td/ns/a/sa/b, b.example",
            "Leaf",
            "2b",
            "2026-11-24T00:00:00Z",
            "2026-11-22T00:00:00Z",
        ),
        ("-", "Root", "1", "2036-11-01T00:00:00Z", "2026-11-01T00:00:00Z"),
    ]


def test_the_line_of_a_node_has_stream_certificates_denials_and_the_oldest_connection() -> None:
    live = [
        {"id": 1, "age_s": 5.0, "source": "10.0.0.1:1", "destination": "10.0.0.9:80"},
        {"id": 2, "age_s": 90.0, "source": "10.0.0.1:2", "destination": "10.0.0.9:81"},
    ]
    found = of_envoy(
        pages(
            certs=CERTS,
            connections={"connections": live},
            denials=[{"count": 3}, {"count": 4}],
            stats={"stats": [{"name": "control_plane.connected_state", "value": 0}]},
        )
    )
    assert (found.version, found.ready, found.connected) == ("v", True, False)
    assert (found.certificates, found.first_expiry) == (1, "2026-11-24T00:00:00Z")
    assert (found.denials, found.connections, found.oldest_seconds) == (7, 2, 90.0)
    assert found.oldest == "10.0.0.1:2 to 10.0.0.9:81"


def test_the_line_of_a_bare_envoy_lacks_what_it_does_not_show() -> None:
    found = of_envoy({**pages(), "/stats": None})
    assert (found.ready, found.connected, found.denials, found.oldest) == (True, None, None, None)
