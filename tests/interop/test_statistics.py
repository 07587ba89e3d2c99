"""Statistics: Envoy's names and values beside ours, for the same bootstrap and the same connections.

``pytest -s`` prints how many names there are, and which of Envoy's are not here.
"""

import json
import re
import socket
import urllib.request
from typing import Any

import pytest

from tests.interop import loopback
from tests.interop.loopback import Running
from tests.interop.operators import Pair
from tests.interop.proxies import ENVOY, WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T

pytestmark = pytest.mark.interop

#: What is not here is of HTTP/1.1, of requests to the admin server, of zones, subsets, retried requests, and much
#: else that only an L7 proxy has.
_LEAST_NAMES = 146
#: Counters that must be equal, by listener, cluster and prefix. The client determines the number of connections.
_EQUAL = """
    cluster.dead.upstream_cx_connect_fail cluster.plain.upstream_cx_total cluster.plain.upstream_cx_active
    cluster.plain.circuit_breakers.default.cx_open cluster.plain.circuit_breakers.default.rq_open
    cluster.plain.circuit_breakers.default.rq_pending_open cluster.plain.upstream_cx_destroy
    cluster.plain.upstream_cx_destroy_local cluster.plain.upstream_cx_destroy_remote
    cluster.plain.upstream_cx_destroy_with_active_rq cluster.plain.upstream_cx_destroy_local_with_active_rq
    cluster.plain.upstream_cx_destroy_remote_with_active_rq cluster.inside.upstream_cx_destroy
    cluster.inside.upstream_cx_destroy_remote cluster.inside.upstream_cx_destroy_remote_with_active_rq
    cluster.inside.upstream_cx_total cluster.tls.upstream_cx_total cluster.tls.upstream_cx_destroy
    cluster.tls.upstream_cx_destroy_local cluster.tls.upstream_cx_destroy_local_with_active_rq
    cluster.tls.upstream_cx_destroy_remote cluster.dead.upstream_cx_total cluster.dead.upstream_cx_active
    cluster.dead.upstream_cx_destroy cluster.dead.upstream_cx_destroy_local cluster.dead.upstream_cx_destroy_remote
    cluster.dead.upstream_cx_destroy_with_active_rq cluster.dead.upstream_cx_connect_attempts_exceeded
    cluster.plain.bind_errors cluster.plain.lb_healthy_panic cluster.dead.lb_healthy_panic
    cluster.plain.update_attempt cluster.plain.update_success cluster.plain.update_failure
    cluster.plain.update_empty cluster.plain.update_no_rebuild cluster.plain.version
    cluster.plain.upstream_cx_rx_bytes_total cluster.plain.upstream_rq_total cluster.plain.upstream_rq_active
    cluster.inside.upstream_cx_rx_bytes_total cluster.inside.upstream_rq_total cluster.tls.upstream_rq_total
    cluster.tls.ssl.handshake cluster.tls.ssl.versions.TLSv1.3 cluster.tls.ssl.fail_verify_error
    cluster.tls.ssl.fail_verify_san cluster.tls.ssl.connection_error cluster.tls.ssl.curves.X25519
    http.inbound.downstream_cx_total http.inbound.downstream_cx_http2_total http.inbound.downstream_cx_http2_active
    http.inbound.downstream_cx_ssl_total http.inbound.downstream_cx_ssl_active http.inbound.downstream_cx_destroy
    http.inbound.downstream_rq_total http.inbound.downstream_rq_http2_total http.inbound.downstream_rq_completed
    http.inbound.downstream_rq_2xx http.inbound.downstream_rq_4xx http.inbound.downstream_rq_active
    http.inbound.rq_total http.inbound.downstream_cx_destroy_local http.inbound.downstream_cx_destroy_remote
    http.inbound.downstream_cx_destroy_active_rq http.inbound.downstream_cx_destroy_local_active_rq
    http.inbound.downstream_cx_destroy_remote_active_rq
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
    "cluster.tls.upstream_cx_connect_ms",
    "cluster.tls.upstream_cx_length_ms",
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
        """Make the connections; return all statistics by name, with listeners' names instead of ports."""
        self.values()
        loopback.until(lambda: self._read().get("listener.tls.downstream_cx_active") == "0")
        # Envoy's workers hand histograms over every few seconds, when the page is asked for.
        loopback.until(lambda: "P0(" in self._read()[_HISTOGRAMS[0]])
        return self._read()

    def reset(self) -> dict[str, Any]:
        """Let clients disconnect early, and return all statistics afterwards.

        One resets a connection that goes through an internal listener, one disconnects with a tunnel open.
        """
        with socket.create_connection(("127.0.0.1", self._ports["outer"]), WAIT_S) as sock:
            sock.sendall(b"hi")
            assert sock.recv(10)
            loopback.cut(sock)
        loopback.until(lambda: self._read().get("cluster.inside.upstream_cx_destroy") == "1")
        with socket.create_connection(("127.0.0.1", self._tunnel), WAIT_S) as sock:
            loopback.tunnelled(leave=loopback.disconnects)(loopback.Tunnels(sock))
        loopback.until(lambda: self._read().get("cluster.plain.upstream_cx_destroy") == "2")
        loopback.until(lambda: self._read().get("http.inbound.downstream_cx_destroy") == "1")
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
    """Return the names of statistics without the parts that name listeners, clusters, prefixes and threads."""
    found = set()
    for name in names:
        kind = re.sub(r"^(listener|cluster)\.(envoy_internal_)?\w+\.", r"\1.*.", name)
        kind = re.sub(r"^(http|tcp)\.(?!admin|async)\w+\.", r"\1.*.", kind)
        found.add(re.sub("worker_0|main_thread", "*", kind))
    return found


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
def test_counters_have_envoys_names_and_values() -> None:
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


class Updated(Counted):
    """A proxy whose clusters find their endpoints by a file, and by a name that is resolved once."""

    def _open(self) -> None:
        Running._open(self)
        self._tls = self._tunnel = 0
        self._ports = {}
        self._path = self.folder / "endpoints.json"
        self.endpoints("1", "127.0.0.1")
        source = {"resource_api_version": "V3", "path_config_source": {"path": str(self._path)}}
        clusters = [
            {"name": "file", "type": "EDS", "eds_cluster_config": {"service_name": "f", "eds_config": source}},
            *(
                {"name": kind.lower(), "type": kind, "dns_refresh_rate": "60s", "load_assignment": _assigned(name)}
                for kind, name in (("STRICT_DNS", "localhost"), ("LOGICAL_DNS", "localhost"))
            ),
        ]
        self.start({"node": {"id": "n", "cluster": "c"}, "static_resources": {"clusters": clusters}}, [])
        loopback.until(lambda: self._read().get("cluster.logical_dns.update_success") == "1")
        loopback.until(lambda: self._read().get("cluster.file.update_success") == "1")

    def endpoints(self, version: str, *hosts: str) -> None:
        """Replace the file; without a host it has no resource."""
        kind = T + "envoy.config.endpoint.v3.ClusterLoadAssignment"
        resources = [{"@type": kind, **_assigned(host, "f")} for host in hosts]
        new = self.folder / "new.json"
        new.write_text(json.dumps({"version_info": version, "resources": resources}))
        new.replace(self._path)

    def updates(self) -> dict[str, str]:
        """What is counted of updates: once with other endpoints, once with the same, once with none."""
        for number, hosts in enumerate((["127.0.0.2"], ["127.0.0.2"], []), start=2):
            self.endpoints(str(number), *hosts)
            loopback.until(lambda n=number: self._read()["cluster.file.update_success"] == str(n))
        found = self._read()
        assert int(found["cluster.file.update_time"]) > 1_700_000_000_000
        kept = re.compile(r"cluster\.\w+\.(update_(?!time|duration).*|version.*|membership_change)")
        return {name: value for name, value in found.items() if kept.fullmatch(name)}


def _assigned(host: str, name: str = "") -> Json:
    address = {"socket_address": {"address": host, "port_value": 80}}
    return {"cluster_name": name or host, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
def test_updates_of_endpoints() -> None:
    seen = {}
    for kind in ("envoy", "ours"):
        with Updated(kind) as proxy:
            seen[kind] = proxy.updates()
    assert seen["ours"] == seen["envoy"]
    counted = [
        seen["ours"][f"cluster.file.update_{name}"] for name in ("attempt", "success", "no_rebuild", "empty")
    ]
    assert counted == ["4", "4", "1", "1"]


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
def test_clients_that_leave_too_early() -> None:
    kept = re.compile(
        r"cluster\.(inside|plain)\.(upstream_cx_(destroy.*|total|active)|upstream_rq_(total|active))"
        r"|http\.inbound\.downstream_cx_destroy.*"
    )
    seen = {}
    for kind in ("envoy", "ours"):
        with Counted(kind) as proxy:
            seen[kind] = {name: value for name, value in proxy.reset().items() if kept.fullmatch(name)}
    assert seen["ours"] == seen["envoy"]
    assert seen["ours"]["cluster.inside.upstream_cx_destroy_local_with_active_rq"] == "1"
    assert seen["ours"]["cluster.plain.upstream_cx_destroy_local_with_active_rq"] == "2"
    assert seen["ours"]["http.inbound.downstream_cx_destroy_remote_active_rq"] == "1"
