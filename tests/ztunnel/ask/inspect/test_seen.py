"""Questions from observed connections; the answers are compared with the outcomes of real connections."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.istio.inbound_case import ALLOW, DENY, GATED, NEAR
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    ELSEWHERE,
    OTHER,
    SERVER,
    VIP,
    Cluster,
    endpoint,
    identity,
    play,
    shop,
)
from xds.model.authorization import AuthorizationPolicy
from xds.model.policy import Never, PeerServiceAccount
from ztunnel.ask.inspect.seen import BadLine, Seen, live, logged, told_of
from ztunnel.proxy.istio.path.explain import Answer, Surroundings, explain, question

CLIENT_ID = "spiffe://cluster.local/ns/shop/sa/client"

PODS: dict[str, Any] = {
    "uid-a": {
        "connections": {
            "inbound": [],
            "outbound": [
                {"src": "10.0.0.1:4000", "originalDst": "10.1.0.1:80", "actualDst": "10.0.0.2:15008"},
                {"src": "10.0.0.1:4001", "originalDst": "my-host.example:80", "actualDst": "10.0.0.3:15008"},
            ],
        }
    },
    "uid-b": {
        "connections": {
            "inbound": [
                {
                    "src": "10.0.0.1:4000",
                    "originalDst": None,
                    "actualDst": "10.0.0.2:8080",
                    "protocol": "HBONE",
                    "srcIdentity": CLIENT_ID,
                },
                {
                    "src": "[fd00::9]:1",
                    "originalDst": None,
                    "actualDst": "10.0.0.2:8080",
                    "protocol": "TCP",
                    "srcIdentity": None,
                },
            ],
            "outbound": [],
        }
    },
    "uid-c": {"state": "Pending"},
}
ENVOY = {
    "connections": [
        {
            "id": 7,
            "source": "10.0.0.1:4000",
            "destination": "10.1.0.1:80",
            "listener": "out",
            "upstream_host": "envoy://inner/a",
            "inner_hops": [{"upstream_host": "10.0.0.2:15008"}],
        },
        {
            "id": 8,
            "source": "10.0.0.9:4000",
            "destination": "10.0.0.2:15008",
            "listener": "in",
            "peer_identities": [CLIENT_ID],
        },
    ]
}
OUTBOUND = {"source": "10.0.0.1:4000", "destination": "10.1.0.1:80", "direction": "outbound"}
INBOUND = {
    "source": "10.0.0.1:4000",
    "destination": "10.0.0.2:8080",
    "identity": CLIENT_ID,
    "direction": "inbound",
}


@pytest.mark.parametrize(
    ("page", "wanted", "asked", "taken"),
    [
        (PODS, "10.0.0.1:4000-10.1.0.1:80", OUTBOUND, 1),
        (PODS, "10.0.0.1:4000-10.0.0.2:15008", OUTBOUND, 1),
        (PODS, "10.0.0.1:4000-10.0.0.2:8080", INBOUND, 0),
        (
            PODS,
            "10.0.0.1:4001-my-host.example:80",
            {**OUTBOUND, "source": "10.0.0.1:4001", "destination": "my-host.example:80"},
            1,
        ),
        (
            PODS,
            "[fd00::9]:1",
            {"source": "[fd00::9]:1", "destination": "10.0.0.2:8080", "direction": "inbound"},
            0,
        ),
        (ENVOY, "7", {"source": "10.0.0.1:4000", "destination": "10.1.0.1:80", "listener": "out"}, 2),
        (
            ENVOY,
            "10.0.0.9:4000",
            {
                "source": "10.0.0.9:4000",
                "destination": "10.0.0.2:15008",
                "identity": CLIENT_ID,
                "listener": "in",
            },
            0,
        ),
    ],
)
def test_a_live_connection_is_found_by_its_ends(page: Any, wanted: str, asked: dict[str, str], taken: int) -> None:
    (seen,) = live(page, wanted)
    assert seen.asked == asked
    assert len(seen.taken) == taken


def test_both_ends_of_a_connection_are_found() -> None:
    assert [seen.shown["direction"] for seen in live(PODS, "10.0.0.1:4000")] == ["outbound", "inbound"]


@pytest.mark.parametrize("wanted", ["10.0.0.1:4002", "10.0.0.1:4000-10.1.0.1:81", "10.0.0.1", "", "9"])
def test_no_other_connection_is_found(wanted: str) -> None:
    assert list(live(PODS, wanted)) == []
    assert list(live(ENVOY, wanted)) == []


def test_without_what_was_proven_a_tunnels_client_is_the_workload_at_its_address() -> None:
    (seen,) = live(_rust_page("HBONE"), "10.0.0.1:4000", {"10.0.0.1": CLIENT_ID})
    assert seen.asked["identity"] == CLIENT_ID
    (plain,) = live(_rust_page("TCP"), "10.0.0.1:4000", {"10.0.0.1": CLIENT_ID})
    assert "identity" not in plain.asked


def _rust_page(protocol: str) -> Any:
    entry = {"src": "10.0.0.1:4000", "originalDst": None, "actualDst": "10.0.0.2:80", "protocol": protocol}
    return {"uid": {"connections": {"inbound": [entry], "outbound": []}}}


# Access lines

_RUST = (
    '2026-11-21T11:14:45.9Z\tinfo\taccess\tconnection complete\tsrc.addr=10.0.0.1:39204 src.workload="client" '
    f'src.namespace="shop" src.identity="{CLIENT_ID}" '
)
_ENVOY = (
    '[2026-11-23T09:15:41.834Z] "{method}" {code} {flags} - {details} "-" 77 133 10 - "-" "-" "-" "{authority}" '
    '"10.0.0.2:15008" {cluster} 10.0.0.1:5555 10.1.0.1:80 10.0.0.1:4000 - - {label}'
)


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (
            _RUST + 'dst.addr=10.0.0.2:15008 dst.hbone_addr=10.0.0.2:8080 dst.service="cart.example" '
            'direction="outbound" bytes_sent=5 bytes_recv=5 duration="2ms"',
            {
                "source": "10.0.0.1:39204",
                "destination": "cart.example",
                "endpoint": "10.0.0.2:8080",
                "direction": "outbound",
            },
        ),
        (
            _RUST + 'dst.addr=10.0.0.2:15008 dst.hbone_addr=10.0.0.2:8080 direction="outbound" error="no"',
            {"source": "10.0.0.1:39204", "destination": "10.0.0.2:8080", "direction": "outbound"},
        ),
        (
            _RUST + 'dst.addr=10.0.0.2:15008 dst.hbone_addr=cart.example:8080 direction="inbound"',
            {
                "source": "10.0.0.1:39204",
                "destination": "10.0.0.2:8080",
                "identity": CLIENT_ID,
                "direction": "inbound",
            },
        ),
        (
            '{"level":"info","scope":"access","message":"connection complete","src.addr":"10.0.0.9:33176",'
            '"dst.addr":"10.0.0.2:8080","direction":"inbound","bytes_sent":5}',
            {"source": "10.0.0.9:33176", "destination": "10.0.0.2:8080", "direction": "inbound"},
        ),
        (
            _ENVOY.format(
                method="- - -",
                code=0,
                flags="UF",
                details="rbac_access_denied_matched_policy[none]",
                authority="-",
                cluster="spiffe://cluster.local/ns/shop/sa/x",
                label="capture outbound (no waypoint proxy)",
            ),
            {"source": "10.0.0.1:4000", "destination": "10.1.0.1:80"},
        ),
        (
            json.dumps(
                {
                    "hop": "inbound hcm",
                    "source": "10.0.0.1:4000",
                    "destination": "10.0.0.2:15008",
                    "authority": "10.0.0.2:8080",
                    "upstream": "10.0.0.2:8080",
                    "client_identity": CLIENT_ID,
                    "termination": None,
                    "flags": None,
                }
            ),
            {"source": "10.0.0.1:4000", "destination": "10.0.0.2:8080", "identity": CLIENT_ID},
        ),
    ],
)
def test_what_an_access_line_asks(line: str, asked: dict[str, str]) -> None:
    for before in ("", "[pod/ztunnel-abcde/istio-proxy] "):  # of kubectl logs --prefix
        seen = logged(f"{before}{line}\n")
        assert seen is not None
        assert seen.asked == asked


def test_a_tunnel_in_istiods_format_needs_an_identity() -> None:
    line = _ENVOY.format(
        method="CONNECT - HTTP/2",
        code=200,
        flags="-",
        details="-",
        authority="10.0.0.2:80",
        cluster="virtual_inbound",
        label="inbound hcm",
    )
    with pytest.raises(BadLine, match="give --identity"):
        logged(line)
    seen = logged(line, CLIENT_ID)
    assert seen is not None
    assert (seen.asked["identity"], seen.asked["destination"]) == (CLIENT_ID, "10.0.0.2:80")


def test_errors_of_a_line_are_shown() -> None:
    line = _ENVOY.format(
        method="- - -", code=0, flags="UH", details="-", authority="-", cluster="a b c", label="passthrough"
    )
    seen = logged(line)
    assert seen is not None
    assert seen.shown["error"] == "UH"


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", "2026 info ztunnel ready", "started port=15001"])
def test_other_lines_are_no_connections(line: str) -> None:
    assert logged(line) is None


def test_a_line_that_does_not_say_enough() -> None:
    with pytest.raises(BadLine, match=r"src.addr is no IP:PORT: '10.0.0.1'"):
        logged('connection complete src.addr=10.0.0.1 dst.addr=10.0.0.2:80 direction="inbound"')


# The way that was taken


def test_the_way_that_was_taken_is_marked() -> None:
    ways = [
        {"target": "10.0.0.2:15008", "authority": "10.1.0.1:80"},
        {"target": "10.0.0.3:15008", "authority": "10.1.0.1:80"},
    ]
    seen = Seen(shown={"a": "b"}, asked={}, taken=("10.0.0.3:15008", "10.1.0.1:80"))
    told = told_of(seen, {"ways": [dict(way) for way in ways]})
    assert (told["seen"], [way.get("taken", False) for way in told["ways"]]) == ({"a": "b"}, [False, True])
    gone = told_of(replace(seen, taken=("10.0.0.4:15008",)), {"ways": [dict(way) for way in ways]})
    assert gone["taken"] == "none of these: the configuration has changed since"


def test_inner_hops_are_marked() -> None:
    inner = {"clusters": [{"endpoints": [{"address": "10.0.0.2:15008"}, {"address": "10.0.0.3:15008"}]}]}
    hop = {"clusters": [{"endpoints": [{"address": "envoy://inner/a", "hop": inner}]}]}
    told_of(Seen(shown={}, asked={}, taken=("envoy://inner/a", "10.0.0.2:15008")), {"hop": hop})
    assert [each.get("taken") for each in inner["clusters"][0]["endpoints"]] == [True, None]


# Against real connections


def _ask(cluster: Cluster, seen: Seen) -> Answer:
    asked = dict(seen.asked)
    around = Surroundings(mesh=cluster.mesh, network="", illegal_ports=cluster.node.config.illegal_ports)
    question_ = question(
        asked["source"],
        asked["destination"],
        asked.get("identity", ""),
        around,
        inbound=asked.get("direction") == "inbound",
        captured=asked.get("direction") == "outbound",
        endpoint=asked.get("endpoint", ""),
    )
    return told_of(seen, explain(question_, around))


ALLOW_CLIENT = replace(ALLOW, condition=PeerServiceAccount("default", "client"))


@pytest.mark.parametrize("policy", [ALLOW_CLIENT, DENY, replace(ALLOW, condition=Never())])
@pytest.mark.parametrize("dialled", [f"{VIP}:80", f"{SERVER}:{APP_PORT}"])
def test_explain_of_a_live_or_logged_connection_agrees_with_its_outcome(
    tmp_path: Path, dialled: str, policy: AuthorizationPolicy
) -> None:
    """Open a connection through both proxies. Ask about its live entries, then about its log lines."""

    async def body(cluster: Cluster) -> None:
        await cluster.start(replace(GATED, services=endpoint("x").services), NEAR)
        cluster.application(SERVER)
        # Another endpoint, so that there is a choice, and one that never serves: the pod is taken.
        cluster.mesh.apply([shop(), policy, endpoint("spare", OTHER, node=ELSEWHERE, capacity=0)])
        client = cluster.dial(dialled)
        allowed = policy is ALLOW_CLIENT
        if allowed:
            await client.send(b"hello")
            assert await client.read(5) == b"hello"
            page = {name: {"connections": pod.dump()} for name, pod in cluster.pods.items()}
            source = "{}:{}".format(*client.sock.getsockname())
            out, into = (_ask(cluster, seen) for seen in live(page, source))
            assert (out["seen"]["direction"], into["seen"]["direction"]) == ("outbound", "inbound")
            assert (out["verdict"], into["verdict"]) == ("allowed", "allowed")
            assert out["ways"][0]["taken"] is True
            assert into["source"]["identity"] == identity("client")
            assert into["inbound"]["allowed_by"] == "default/gate"
        client.eof()
        await client.read_all()
        await cluster.line(2)
        answers = {}
        for line in cluster.lines():
            seen = logged(json.dumps(line))
            assert seen is not None
            answers[line["direction"]] = _ask(cluster, seen)
        out, into = answers["outbound"], answers["inbound"]
        assert out["ways"][0]["taken"] is True
        assert out["destination"] == dialled
        said = "allowed" if allowed else "refused by the destination"
        assert (out["verdict"], into["verdict"]) == (said, said)
        assert ("error" in into["seen"]) is not allowed
        if not allowed:
            assert into["inbound"]["refused"] in into["seen"]["error"]

    play(tmp_path, body)


def test_plain_connections_are_asked_about_as_plain(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(GATED, NEAR)
        cluster.mesh.apply([ALLOW_CLIENT])
        cluster.application(SERVER)
        assert await cluster.plain(f"{SERVER}:{APP_PORT}", source=NEAR.addresses[0]).ask() == b""
        seen = logged(json.dumps(await cluster.line()))
        assert seen is not None
        told = _ask(cluster, seen)
        # The address is the client's, whose identity is allowed; but nothing was proven.
        assert told["verdict"] == "refused by the destination"
        assert told["source"]["identity"] is None

    play(tmp_path, body)
