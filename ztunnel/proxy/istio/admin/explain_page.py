"""Makes ``/explain``: the proxy's decisions about a connection, one by one."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.workload import Workload
from xds.proto.dump import format_json
from ztunnel.policy.calico.live import LivePolicies
from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.proxy.istio.certificates.manager import IdentityError, WorkloadCertificate, disagreement
from ztunnel.proxy.istio.path.explain import Answer, Surroundings, certificate, explain, question
from ztunnel.runtime.http.page import JSON, Page, Query, printable, text

_USAGE = (
    "usage: /explain?source=IP|NAMESPACE/POD&destination=IP|NAMESPACE/POD|SERVICE.NAMESPACE:PORT"
    "[&identity=SPIFFE ID][&direction=inbound|outbound][&endpoint=IP:PORT]\n"
)
_PARAMETERS = ("source", "destination", "identity", "direction", "endpoint")
_DIRECTIONS = ("inbound", "outbound")


def explain_page(proxy: InspectedProxy, query: Query) -> Page:
    """Return the page."""
    given = dict(query.pairs)
    unknown = [name for name in given if name not in _PARAMETERS]
    if unknown:
        return _bad(f"{unknown[0]}: unknown; there are {', '.join(_PARAMETERS)}")
    around = Surroundings(
        mesh=proxy.mesh,
        network=proxy.config.network,
        illegal_ports=proxy.config.illegal_ports,
        avoided=proxy.node.failed_endpoints.current(proxy.clock.monotonic()),
        cluster_domain=proxy.config.cluster_domain,
        handshake=partial(_handshake, proxy),
    )
    identity, direction = given.get("identity", ""), given.get("direction", "")
    if direction and direction not in _DIRECTIONS:
        return _bad(f"direction: {direction!r} is none of {', '.join(_DIRECTIONS)}")
    try:
        if identity:
            SpiffeId.parse(identity)
        asked = question(
            given.get("source", ""),
            given.get("destination", ""),
            identity,
            around,
            inbound=direction == "inbound",
            captured=direction == "outbound",
            endpoint=given.get("endpoint", ""),
        )
    except ValueError as error:
        return _bad(str(error))
    answer = explain(asked, around)
    if not asked.inbound and asked.source is not None and asked.identity == str(asked.source.identity):
        answer["certificate"] = _certificate(proxy, asked.source.identity)
    if proxy.policies is not None:
        _ask_calico(proxy.policies, asked.host, asked.destination, answer)
    if proxy.config.addons is not None or proxy.node.addons is not None:
        from ztunnel.proxy.istio.admin.explained_addons import ask_addons  # most proxies have no addons

        ask_addons(proxy, asked, answer)
    return text(format_json(answer), content_type=JSON)


def _bad(reason: str) -> Page:
    return text(f"{printable(reason)}\n{_USAGE}", 400)


def _certificate(proxy: InspectedProxy, identity: SpiffeId) -> dict[str, Any]:
    """Return the state of the source's certificate. It is known only if the source is a pod of this node."""
    state = proxy.certificates.states().get(identity)
    if isinstance(state, WorkloadCertificate):
        return certificate("", state.issued.chain[0].not_valid_after_utc, proxy.clock.wall())
    return certificate(state or "", None, 0.0)


def _handshake(
    proxy: InspectedProxy, client: Workload | None, server: Workload, expected: tuple[str, ...]
) -> tuple[bool, str]:
    """Predict a TLS handshake from the certificates of this node's pods. Implements
    :data:`~ztunnel.proxy.istio.path.explain.Handshake`.
    """
    try:
        ours = _issued(proxy, client) if client is not None else None
    except IdentityError as error:
        return False, f"identity error: {error}"
    try:
        theirs = _issued(proxy, server)
    except IdentityError as error:
        return False, f"the destination has no certificate: signing error: {error}"
    if ours is not None and theirs is not None:
        why = disagreement(ours, theirs, expected, datetime.fromtimestamp(proxy.clock.wall(), UTC))
        return not why, why or "both certificates are of this node, and accept each other"
    lists = proxy.node.revocation_lists()
    for which, known in (("client", ours), ("server", theirs)):
        if known is not None and lists is not None and known.is_revoked_by(lists):
            return False, f"the {which}'s certificate is revoked by the revocation lists"
    if client is not None and ours is None and _of_this_node(proxy, client):
        return True, "the source's certificate has not been issued yet, and a connection waits for it"
    return True, "a certificate of another node is not known before the handshake"


def _of_this_node(proxy: InspectedProxy, workload: Workload) -> bool:
    """Return whether a workload runs on this node, so that this proxy manages the workload's certificate."""
    own_node = not proxy.config.node or workload.node == proxy.config.node
    return own_node and workload.identity in proxy.certificates.states()


def _issued(proxy: InspectedProxy, workload: Workload) -> WorkloadCertificate | None:
    """Return a workload's certificate. None if the workload runs on another node, or its first certificate is
    pending.

    Raises:
        IdentityError: fetching the certificate has failed. Connections would fail with this error.
    """
    return proxy.certificates.at_once(workload.identity) if _of_this_node(proxy, workload) else None


def _ask_calico(policies: LivePolicies, host: str, dialled: SocketAddress, answer: Answer) -> None:
    """Add the result of Calico's policies to each candidate endpoint (``ways``). A refusal changes the overall
    verdict.
    """
    from ztunnel.policy.calico.explain import answer as ask

    verdicts = []
    for way in answer.get("ways", [answer]):
        inbound = way.get("inbound", {})
        there = SocketAddress.parse(inbound["application"]) if inbound else dialled
        allowed, lines = ask(policies.source.evaluator, {"from": host, "to": there.host, "port": str(there.port)})
        way["calico"] = {"allowed": allowed, "lines": lines}
        verdicts.append(allowed)
    if not all(verdicts) and answer["verdict"] == "allowed":
        some = "" if not any(verdicts) else f" to {verdicts.count(False)} of {len(verdicts)} endpoints"
        answer["verdict"] = f"refused by Calico's policies{some}"
