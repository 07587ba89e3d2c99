"""The certificate checks that ``/explain`` predicts equal those of real connections, between two pods of a
node.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hbone.certificates import Authority
from tests.ztunnel.proxy.istio.inbound_case import NEAR, POD
from tests.ztunnel.proxy.istio.pods import APP_PORT, CLIENT, ROOT, SERVER, Cluster, Revoked, identity, play
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.admin.explain_page import explain_page
from ztunnel.runtime.http.page import Query

Json = dict[str, Any]
Given = Callable[[Cluster], None]


def explanation(cluster: Cluster, **more: str) -> Json:
    node = cluster.node
    proxy: Any = SimpleNamespace(
        mesh=node.mesh,
        config=node.config,
        node=node,
        clock=node.clock,
        certificates=node.certificates,
        policies=None,
    )
    asked = {"source": CLIENT, "destination": f"{SERVER}:{APP_PORT}", **more}
    page = explain_page(proxy, Query(tuple(asked.items())))
    answer: Json = json.loads("".join(page.body))
    return answer


def usual(cluster: Cluster) -> None:
    for name in ("client", "server"):
        cluster.certificates.put(identity(name))


def revoked(name: str) -> Given:
    def given(cluster: Cluster) -> None:
        held = cluster.certificates
        usual(cluster)
        found = next(each for key, each in held.held.items() if str(key) == identity(name))
        held.lists = lists = RevocationLists.parse(ROOT.revoke(found.issued.chain[0]))
        for key, each in held.held.items():
            held.held[key] = type(each)(each.issued, 7, each._policy, lists)
        cluster.node.revocations.current = lists  # type: ignore[union-attr, misc]

    return given


def put(name: str, *authority: Authority, **more: Any) -> Given:
    def given(cluster: Cluster) -> None:
        usual(cluster)
        cluster.certificates.put(identity(name), *authority, **more)

    return given


def failing(name: str) -> Given:
    def given(cluster: Cluster) -> None:
        usual(cluster)
        del cluster.certificates.held[next(key for key in cluster.certificates.held if str(key) == identity(name))]
        cluster.certificates.errors[identity(name)] = "signing gRPC error (UNAVAILABLE): away"

    return given


PAST = {"from_day": -2, "to_day": -1}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (usual, ""),
        (revoked("client"), "the client's certificate is revoked by the revocation lists"),
        (revoked("server"), "the server's certificate is revoked by the revocation lists"),
        (put("client", **PAST), "the client's certificate has expired"),
        (put("server", **PAST), "the server's certificate has expired"),
        (put("client", from_day=1, to_day=2), "the client's certificate is not valid yet"),
        (put("server", Authority()), "the server's certificate is not of a trusted root"),
        (failing("client"), "identity error: signing gRPC error (UNAVAILABLE): away"),
    ],
)
def test_explain_verdict_includes_a_refused_certificate(given: Given, why: str, tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        given(cluster)
        await cluster.start(POD, NEAR)
        cluster.application(SERVER)
        answer = explanation(cluster)
        assert answer["verdict"] == (f"refused: {why}" if why else "allowed")
        (way,) = answer["ways"]
        assert way["handshake"] == (
            f"refused: {why}" if why else "both certificates are of this node, and accept each other"
        )
        assert ("inbound" in way) is (not why)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == (b"" if why else b"ping")

    play(tmp_path, body, revocations=Revoked())


def test_the_own_certificate_is_checked_against_the_lists(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        revoked("server")(cluster)
        inbound = {"identity": identity("far"), "direction": "inbound", "source": "127.9.9.9"}
        await cluster.start(POD, NEAR)
        answer = explanation(cluster, **inbound)
        assert answer["verdict"] == "refused by the destination"
        why = "the server's certificate is revoked by the revocation lists"
        assert answer["inbound"]["handshake"] == f"refused: {why}"

    play(tmp_path, body, revocations=Revoked())


def test_certificate_of_another_node_is_reported_as_unknown(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        usual(cluster)
        await cluster.start(POD, NEAR)
        answer = explanation(cluster, identity=identity("far"), direction="inbound", source="127.9.9.9")
        assert answer["verdict"] == "allowed"
        far = "a certificate of another node is not known before the handshake"
        assert answer["inbound"]["handshake"] == far

    play(tmp_path, body)
