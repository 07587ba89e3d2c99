"""Statistics: Envoy's names and values beside ours, for the same bootstrap and the same connections.

``pytest -s`` prints how many names there are, and which of Envoy's are not here.
"""

import json
import re
import urllib.request
from typing import Any

import pytest

from tests.interop import loopback
from tests.interop.operators import Pair
from tests.interop.proxies import ENVOY
from tests.ports import free_port
from tests.ztunnel.envoy.rig import Json

pytestmark = pytest.mark.interop

#: What is not here is of HTTP/1.1, of requests to the admin server, of zones, subsets, retried requests, and much
#: else that only an L7 proxy has.
_LEAST_NAMES = 125
#: Counters of what both did, by listener, cluster and prefix; the number of connections is the client's.
_EQUAL = """
    cluster.dead.upstream_cx_connect_fail cluster.plain.upstream_cx_total cluster.plain.upstream_cx_active
    cluster.plain.circuit_breakers.default.cx_open cluster.plain.circuit_breakers.default.rq_open
    cluster.plain.circuit_breakers.default.rq_pending_open cluster.plain.upstream_cx_destroy
    cluster.plain.upstream_cx_rx_bytes_total cluster.plain.upstream_rq_total cluster.plain.upstream_rq_active
    cluster.inside.upstream_cx_rx_bytes_total cluster.inside.upstream_rq_total cluster.tls.upstream_rq_total
    cluster.tls.ssl.handshake cluster.tls.ssl.versions.TLSv1.3 cluster.tls.ssl.fail_verify_error
    cluster.tls.ssl.fail_verify_san cluster.tls.ssl.connection_error cluster.tls.ssl.curves.X25519
    http.inbound.downstream_cx_total http.inbound.downstream_cx_http2_total http.inbound.downstream_cx_http2_active
    http.inbound.downstream_cx_ssl_total http.inbound.downstream_cx_ssl_active http.inbound.downstream_cx_destroy
    http.inbound.downstream_rq_total http.inbound.downstream_rq_http2_total http.inbound.downstream_rq_completed
    http.inbound.downstream_rq_2xx http.inbound.downstream_rq_4xx http.inbound.downstream_rq_active
    http.inbound.rq_total
    http.inbound.downstream_rq_rx_reset http.inbound.no_route
    listener.tls.downstream_cx_total listener.tls.downstream_cx_active listener.tls.downstream_pre_cx_active
    listener.tls.ssl.handshake listener.tls.ssl.no_certificate listener.tls.ssl.versions.TLSv1.3
    listener.tls.ssl.curves.X25519 listener.tls.ssl.fail_verify_no_cert
    tls_inspector.tls_found tls_inspector.tls_not_found tls_inspector.sni_found tls_inspector.sni_not_found
    tls_inspector.alpn_found tls_inspector.alpn_not_found
    listener_manager.total_listeners_active cluster_manager.active_clusters
    cluster.plain.membership_change cluster.retried.membership_change cluster.inside.membership_change
"""
_HISTOGRAMS = (
    "listener.tls.downstream_cx_length_ms",
    "http.inbound.downstream_cx_length_ms",
    "http.inbound.downstream_rq_time",
    "server.initialization_time_ms",
)


class Counted(Pair):
    """A proxy with an admin server."""

    def start(self, bootstrap: Json, ports: list[int]) -> None:
        """See :meth:`tests.interop.loopback.Running.start`."""
        self._admin = free_port()
        address = {"socket_address": {"address": "127.0.0.1", "port_value": self._admin}}
        path = self.folder / "bootstrap.json"
        path.write_text(json.dumps({**bootstrap, "stats_flush_interval": "0.2s", "admin": {"address": address}}))
        self._stack.enter_context(loopback.serving(self.kind, path, admin=True))
        loopback.until(lambda: all(map(loopback.listening, [*ports, self._admin])))

    def statistics(self) -> dict[str, Any]:
        """Make the connections; all statistics by name, ports replaced by the names of listeners."""
        self.values()
        loopback.until(lambda: self._read().get("listener.tls.downstream_cx_active") == "0")
        # Envoy's workers hand histograms over every few seconds, when the page is asked for.
        loopback.until(lambda: "P0(" in self._read()[_HISTOGRAMS[0]])
        return self._read()

    def _read(self) -> dict[str, str]:
        names = {
            str(port): name for name, port in {**self._ports, "tls": self._tls, "tunnel": self._tunnel}.items()
        }
        names[str(self._admin)] = "admin"
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/stats", timeout=10) as page:
            text = page.read().decode()
        found = {}
        for line in text.splitlines():
            name, _, value = line.partition(": ")
            found[re.sub(r"127\.0\.0\.1_(\d+)", lambda port: names[port[1]], name)] = value
        return found


def kinds(names: dict[str, Any]) -> set[str]:
    """Names without those of listeners, clusters, prefixes and threads."""
    found = set()
    for name in names:
        kind = re.sub(r"^(listener|cluster)\.(envoy_internal_)?\w+\.", r"\1.*.", name)
        kind = re.sub(r"^(http|tcp)\.(?!admin|async)\w+\.", r"\1.*.", kind)
        found.add(re.sub("worker_0|main_thread", "*", kind))
    return found


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
def test_names_and_values() -> None:
    seen = {}
    for kind in ("envoy", "ours"):
        with Counted(kind) as proxy:
            seen[kind] = proxy.statistics()
    theirs, ours = kinds(seen["envoy"]), kinds(seen["ours"])
    both = theirs & ours
    print(f"\nEnvoy's names: {len(theirs)}, of them here: {len(both)}; ours: {len(ours)}")
    print("not here:", *sorted(theirs - ours))
    assert len(both) >= _LEAST_NAMES
    # What never happened Envoy may not have made yet.
    values = {kind: {name: found.get(name, "0") for name in _EQUAL.split()} for kind, found in seen.items()}
    assert values["ours"] == values["envoy"]
    assert sum(value != "0" for value in values["ours"].values()) >= 25
    assert [name for name in _HISTOGRAMS if "P0(" not in seen["ours"].get(name, "")] == []
