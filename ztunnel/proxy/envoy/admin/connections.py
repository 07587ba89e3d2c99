"""Makes ``/connections`` and ``/explain``: the live connections, and the path that a connection would take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from xds.model.address import SocketAddress
from xds.proto.dump import format_json
from ztunnel.proxy.envoy.admin.inspected import InspectedProxy
from ztunnel.proxy.envoy.config.settings import TunnelSource
from ztunnel.proxy.envoy.listeners.chains import LiveChain
from ztunnel.proxy.envoy.path.explain import Configuration, Question, client_address, explain
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.http.page import JSON, Page, Piece, Query, text

if TYPE_CHECKING:
    from ztunnel.proxy.envoy.listeners.connections import LiveConnection


def connections_page(proxy: InspectedProxy) -> Page:
    """Return the page of live connections, oldest first."""
    return Page(content_type=JSON, body=_connection_pieces(proxy))


def _connection_pieces(proxy: InspectedProxy) -> Iterator[Piece]:
    before = '{\n "connections": [\n  '
    for connection in proxy.connections:
        yield before
        shown = _connection(connection, proxy.clock.monotonic())
        yield format_json(shown).rstrip("\n").replace("\n", "\n  ")
        before = ",\n  "
    yield "\n ]\n}\n" if before.startswith(",") else '{\n "connections": []\n}\n'


def _connection(connection: LiveConnection, now: float) -> dict[str, Any]:
    info, counts, chain = connection.info, connection.counts, connection.chain
    return {
        "id": connection.id,
        "age_s": round(now - info.started, 3),
        "source": info.downstream_remote,
        "destination": str(info.destination),
        "listener": info.listener,
        "filter_chain": chain.name if isinstance(chain, LiveChain) else None,
        "cluster": info.cluster or None,
        "upstream_host": info.upstream_host or None,
        "upstream_local_address": info.upstream_local or None,
        "peer_identities": list(info.tls.peer_uri_sans) if info.tls is not None else [],
        "local_identities": list(info.tls.local_uri_sans) if info.tls is not None else [],
        "upstream_identities": list(info.upstream_uri_sans),
        "bytes_received": counts.sent if counts is not None else info.bytes_received,
        "bytes_sent": counts.received if counts is not None else info.bytes_sent,
        "inner_hops": [_inner(hop) for hop in connection.inner],
    }


def _inner(info: StreamInfo) -> dict[str, Any]:
    return {
        "listener": info.listener,
        "filter_chain": info.chain or None,
        "destination": str(info.destination),
        "cluster": info.cluster or None,
        "upstream_host": info.upstream_host or None,
        "upstream_local_address": info.upstream_local or None,
        "upstream_identities": list(info.upstream_uri_sans),
    }


_USAGE = "usage: /explain?source=IP[:PORT]&destination=IP:PORT[&identity=SPIFFE ID][&listener=NAME]\n"


def explain_page(proxy: InspectedProxy, query: Query) -> Page:
    """Return the page that explains the path of a connection, decision by decision."""
    try:
        question = Question(
            source=client_address(query.get("source") or ""),
            destination=SocketAddress.parse(query.get("destination") or ""),
            identity=query.get("identity") or "",
            listener=query.get("listener") or "",
        )
    except ValueError as error:
        return text(f"{error}\n{_USAGE}", 400)
    calico = None
    if proxy.policies is not None:
        from ztunnel.proxy.envoy.path.calico import (
            explained,  # imported here to save memory: most proxies have no Calico policies
        )

        calico = partial(explained, proxy.policies.guard)
    configuration = Configuration(
        proxy.listeners.active,
        proxy.clusters.get,
        proxy.clock.wall(),
        proxy.settings.switches.tunnel_source is TunnelSource.CLIENT_POD,
        tunnel_rules=proxy.tunnel_rules,
        calico=calico,
        addons=proxy.connections.addons.explained if proxy.connections.addons is not None else None,
    )
    try:
        answer = explain(question, configuration)
    except LookupError as error:
        return text(f"{error.args[0]}\n", 404)
    return text(format_json(answer), content_type=JSON)
