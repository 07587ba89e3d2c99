"""The effects of changed policies, and the smallest policies that admit the observed connections."""

from dataclasses import replace

import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.ask.simulate.test_policies import DUMP, read, written
from xds.dialects.istio.local_file import LocalMesh
from xds.model.address import SocketAddress
from ztunnel.ask.simulate.changes import Change, Judge, Row, allowed, simulate
from ztunnel.ask.simulate.policies import applied, mesh_of, read_policies
from ztunnel.ask.simulate.seen import Seen
from ztunnel.ask.simulate.suggest import suggest

MESH = mesh_of(DUMP)
CLIENT, THIEF, WEB = (f"spiffe://cluster.local/ns/shop/sa/{name}" for name in ("client", "thief", "web"))


def seen(identity: str, port: int = 80, source: str = "10.0.0.9", host: str = "10.0.0.2") -> Seen:
    return Seen(source, identity, SocketAddress(host, port))


def test_each_pair_is_told_with_its_reason() -> None:
    only_client = {"from": [{"source": {"principals": ["cluster.local/ns/shop/sa/client"]}}]}
    # The dump has two workloads at one address. The last one is used, which has no policy of its own.
    mesh = replace(MESH, workloads=MESH.workloads[:1])
    after = applied(mesh, [read(written(only_client))], removed=["shop/old"])
    answer = simulate(mesh, after, {seen(CLIENT): 3, seen(WEB): 2, seen(THIEF): 1, seen("", host="10.9.9.9"): 4})
    none = "allow policies exist, but none allowed"
    assert answer.rows == [
        Row(Change.NEWLY_REFUSED, "10.0.0.9", WEB, "back.shop:80", 2, none),
        Row(Change.STILL_ALLOWED, "10.0.0.9", CLIENT, "back.shop:80", 3, "shop/p"),
        Row(Change.STILL_REFUSED, "10.0.0.9", THIEF, "back.shop:80", 1, none),
    ]
    assert (answer.unknown, answer.total(Change.NEWLY_REFUSED)) == (4, 2)
    back = simulate(mesh, applied(mesh, [], removed=["shop/old"]), {seen(THIEF): 1})
    assert [(row.change, row.because) for row in back.rows] == [
        (Change.NEWLY_ALLOWED, "before: explicitly denied by: shop/old")
    ]


def test_a_policy_that_has_not_arrived_refuses() -> None:
    mesh = replace(MESH, workloads=MESH.workloads[:1], policies=())
    (row,) = simulate(mesh, mesh, {seen(CLIENT): 1}).rows
    assert (row.change, row.because) == (Change.STILL_REFUSED, "policy shop/old has not arrived")


CONNECTIONS = st.sets(
    st.builds(
        seen,
        st.sampled_from([CLIENT, WEB, ""]),
        st.sampled_from([80, 443, 9000]),
        st.sampled_from(["10.0.0.9", "10.0.0.10", "2001:db8::1"]),
    ),
    max_size=8,
)
EVERY = [
    seen(identity, port, source)
    for identity in (CLIENT, WEB, THIEF, "")
    for port in (80, 443, 9000)
    for source in ("10.0.0.9", "10.0.0.10", "2001:db8::1")
]


@given(CONNECTIONS)
def test_what_is_suggested_lets_in_what_was_seen_and_nothing_else(connections: set[Seen]) -> None:
    mesh = replace(MESH, workloads=MESH.workloads[1:], policies=())
    text = suggest(allowed(mesh, connections))
    if not connections:
        assert text == ""
        return
    after = applied(mesh, read_policies(text, "suggested", "istio-system"))
    (workload,) = after.workloads
    judged = Judge(after)
    # An identity is let in from wherever it comes, plain text only from where it came.
    wanted = {(each.identity, each.identity or each.source, each.destination.port) for each in connections}
    for each in EVERY:
        expected = (each.identity, each.identity or each.source, each.destination.port) in wanted or (
            # A rule about addresses holds for tunnels from there, too.
            ("", each.source, each.destination.port) in wanted
        )
        assert (judged.refusal(workload, each)[0] == "") is expected, each


def test_a_suggestion_is_one_policy_for_each_application() -> None:
    other = replace(MESH.workloads[1], uid=MESH.workloads[1].uid, canonical_name="front", addresses=("10.0.0.3",))
    mesh = LocalMesh(workloads=(replace(MESH.workloads[0], authorization_policies=()), other))
    connections = [seen(CLIENT), seen(WEB), seen(CLIENT, 443), seen(WEB, 443), seen("", host="10.0.0.3")]
    made = list(yaml.safe_load_all(suggest(allowed(mesh, connections))))
    assert [(each["metadata"]["name"], each["spec"]["selector"]["matchLabels"]) for each in made] == [
        ("back-callers", {"app": "back"}),
        ("front-callers", {"app": "front"}),
    ]
    principals = [each.removeprefix("spiffe://") for each in (CLIENT, WEB)]
    assert made[0]["spec"]["rules"] == [
        {"from": [{"source": {"principals": principals}}], "to": [{"operation": {"ports": ["80", "443"]}}]}
    ]
    assert made[1]["spec"]["rules"] == [
        {"from": [{"source": {"ipBlocks": ["10.0.0.9/32"]}}], "to": [{"operation": {"ports": ["80"]}}]}
    ]
