"""The servers of the process over real sockets, with the requests of istioctl, kubelet and Prometheus."""

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.istio.nodes import LOCAL
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT
from tproxy.errors import TproxyError
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.policy import Always
from ztunnel.policy.ledger import TierPolicy, Use
from ztunnel.proxy.istio.accounting.denials import Pair
from ztunnel.proxy.istio.admin.config_dump import build_info, config_entry, logged_config
from ztunnel.proxy.istio.admin.server import Servers
from ztunnel.proxy.istio.app import IstioProxy
from ztunnel.proxy.istio.environment import config_from

ALONE = {"XDS_ADDRESS": "", "FAKE_CA": "true", "IPV6_ENABLED": "false", "INPOD_UDS": "/nowhere/ztunnel.sock"}
ALWAYS = "hickory_server::server=off"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(frozen=True, slots=True)
class Harness:
    proxy: IstioProxy
    addresses: Mapping[str, list[SocketAddress]]

    async def ask(self, server: str, path: str, method: str = "GET", **headers: str) -> Answer:
        def work() -> Answer:
            address = self.addresses[server][0]
            connection = http.client.HTTPConnection(address.host, address.port, timeout=10)
            try:
                fields = {name.replace("_", "-"): value for name, value in headers.items()}
                connection.request(method, path, headers=fields)
                response = connection.getresponse()
                body = response.read().decode()
                return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, body)
            finally:
                connection.close()

        return await asyncio.to_thread(work)


@asynccontextmanager
async def harness(env: Mapping[str, str] | None = None) -> AsyncIterator[Harness]:
    config = config_from({**ALONE, **(env or {})}, cpus=2, read_file=lambda path: None)
    proxy = IstioProxy(replace(config, admin_port=0, stats_port=0, readiness_port=0))
    try:
        async with proxy.control, Servers(proxy) as servers:
            yield Harness(proxy, servers.addresses)
    finally:
        await proxy.certificates.close()
        proxy.poller.close()
        proxy.writer.close()


def served(check: Callable[[Harness], Any], env: Mapping[str, str] | None = None) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), harness(env) as proxy:
            await check(proxy)

    asyncio.run(main())


# Calico's policies


def test_policies_page_needs_calico_policies(tmp_path: Path) -> None:
    async def without(harness: Harness) -> None:
        for path in ("/policies", "/policies/explain?from=10.0.0.1&to=10.0.0.2"):
            answer = await harness.ask("admin", path)
            assert (answer.status, answer.text) == (
                404,
                "no policies of Calico: give CALICO_POLICY_DIR or POLICY_SYNC\n",
            )

    async def check(harness: Harness) -> None:
        for _ in range(3):
            harness.proxy.metrics.ledger.calico.note(TierPolicy("none", "UNAVAILABLE"), Use.DENIED, 0.0)
        told = json.loads((await harness.ask("admin", "/policies")).text)
        assert told["source"] == {"name": str(tmp_path), "in_sync": False, "stale_s": 0.0, "error": ""}
        assert told["without_a_rule"]["UNAVAILABLE"]["denied"] == 3
        answer = await harness.ask("admin", "/policies/explain?from=10.0.0.1&to=10.0.0.2")
        assert json.loads(answer.text)["lines"][0] == "egress of 10.0.0.1"
        answer = await harness.ask("admin", "/policies/explain?from=10.0.0.1")
        assert (answer.status, answer.text.partition(":")[0]) == (400, "to")

    served(without)
    served(check, {"CALICO_POLICY_DIR": str(tmp_path)})


# Taps


@pytest.mark.parametrize(
    ("socket", "reason"),
    [
        ("", "taps are not permitted: ZTUNNEL_TAP_SOCKET names no socket\n"),
        ("/run/tap.sock", "taps are for root, at the local socket /run/tap.sock: ztunnel tap\n"),
    ],
)
def test_the_admin_server_gives_no_capture(socket: str, reason: str) -> None:
    async def check(harness: Harness) -> None:
        answer = await harness.ask("admin", "/tap?pod=default/web")
        assert (answer.status, answer.text) == (403, reason)

    served(check, {"ZTUNNEL_TAP_SOCKET": socket})


# Explaining


def test_a_connection_is_explained(tmp_path: Path) -> None:
    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, BACK])
        answer = await harness.ask("admin", "/explain?source=shop/client&destination=10.0.0.2:8080")
        told = json.loads(answer.text)
        assert (answer.status, told["verdict"], told["ways"][0]["target"]) == (200, "allowed", "10.0.0.2:15008")
        assert told["certificate"] == {"state": "none here: no pod of this node has the identity"}
        await harness.proxy.certificates.fetch(CLIENT.identity)
        told = json.loads((await harness.ask("admin", "/explain?source=10.0.0.1&destination=10.0.0.2:8080")).text)
        assert told["certificate"]["state"] == "available"
        assert 0 < told["certificate"]["days_left"] <= 1
        for wrong in ("source=shop/none&destination=10.0.0.2:80", "source=10.0.0.1&destination=10.0.0.2&x=1"):
            answer = await harness.ask("admin", f"/explain?{wrong}")
            assert answer.status == 400
            assert answer.text.endswith("\n")
            assert "usage: /explain?source=" in answer.text
        bad = await harness.ask("admin", "/explain?source=10.0.0.1&destination=10.0.0.2:80&identity=bob")
        assert bad.status == 400
        inbound = "source=10.0.0.1:9&destination=10.0.0.2:8080&direction=inbound"
        told = json.loads((await harness.ask("admin", f"/explain?{inbound}")).text)
        assert sorted(told) == ["destination", "inbound", "source", "verdict"]
        bad = await harness.ask("admin", f"/explain?{inbound}s")
        assert (bad.status, bad.text.splitlines()[0]) == (
            400,
            "direction: 'inbounds' is none of inbound, outbound",
        )

    async def check_calico(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, BACK])
        told = json.loads(
            (await harness.ask("admin", "/explain?source=shop/client&destination=10.0.0.2:8080")).text
        )
        assert told["ways"][0]["calico"]["lines"][0] == "egress of 10.0.0.1"

    served(check)
    served(check_calico, {"CALICO_POLICY_DIR": str(tmp_path)})


# Readiness


def test_readiness_names_what_is_pending() -> None:
    async def check(harness: Harness) -> None:
        readiness = harness.proxy.readiness
        live = await harness.ask("readiness", "/healthz/live")
        assert (live.status, live.text) == (200, "live\n")
        answer = await harness.ask("readiness", "/healthz/ready")
        assert (answer.status, answer.text) == (
            500,
            "not ready, pending: certificates, state manager, workload proxy manager\n",
        )
        assert answer.headers["content-type"] == "text/plain"
        readiness.done("state manager")
        readiness.done("certificates")
        assert (await harness.ask("readiness", "/healthz/ready")).text == (
            "not ready, pending: workload proxy manager\n"
        )
        readiness.set("workload proxy manager", ready=True)
        answer = await harness.ask("readiness", "/healthz/ready")
        assert (answer.status, answer.text) == (200, "ready\n")
        readiness.set("workload proxy manager", ready=False)
        assert (await harness.ask("readiness", "/healthz/ready")).status == 500
        for method in ("POST", "PUT", "HEAD"):
            assert (await harness.ask("readiness", "/healthz/ready", method)).status == 405
        for path in ("/", "/healthz", "/metrics"):
            answer = await harness.ask("readiness", path)
            assert (answer.status, answer.text) == (
                404,
                "no such page; this port has /healthz/ready, /healthz/live\n",
            )

    served(check)


@pytest.mark.parametrize(
    ("env", "pending"),
    [
        ({}, {"certificates", "state manager", "workload proxy manager"}),
        (
            {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c"},
            {"certificates", "state manager", "proxy", "dns proxy"},
        ),
        (
            {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c", "ENABLE_PROXY": "false"},
            {"state manager", "dns proxy"},
        ),
        (
            {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c", "ISTIO_META_DNS_CAPTURE": "false"},
            {"certificates", "state manager", "proxy"},
        ),
    ],
)
def test_pending_readiness_conditions_follow_the_environment(env: dict[str, str], pending: set[str]) -> None:
    async def check(harness: Harness) -> None:
        assert harness.proxy.readiness.pending == pending

    served(check, env)


# Metrics


OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"


def test_metrics_answer_under_two_names() -> None:
    async def check(harness: Harness) -> None:
        for path in ("/metrics", "/stats/prometheus"):
            answer = await harness.ask("stats", path, Accept="application/openmetrics-text;version=1.0.0")
            assert answer.status == 200
            assert answer.headers["content-type"] == OPENMETRICS
            assert answer.headers["vary"] == "accept, accept-encoding"
            assert answer.text.startswith("# HELP istio_build Istio component build info.\n")
            assert 'istio_build{component="ztunnel",tag="1.30.1"} 1.0\n' in answer.text
            assert "workload_manager_active_proxy_count 0.0\n" in answer.text
            assert "workload_manager_proxies_started_total 0.0\n" in answer.text
            assert answer.text.endswith("# EOF\n")
        assert (await harness.ask("stats", "/metrics", "POST")).status == 200
        unknown = await harness.ask("stats", "/")
        assert (unknown.status, unknown.text) == (
            404,
            "no such page; this port has /metrics, /stats/prometheus\n",
        )

    served(check, {"ISTIO_META_ISTIO_VERSION": "1.30.1"})


# Admin


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("", 200, f"current log level is {ALWAYS},info\n"),
        ("?level=debug", 200, f"current log level is {ALWAYS},debug\n"),
        ("?level=access=off", 200, f"current log level is {ALWAYS},access=off,info\n"),
        ("?level=a=debug,b=warn", 200, f"current log level is {ALWAYS},a=debug,b=warn,info\n"),
        ("?level=%20debug%20", 200, f"current log level is {ALWAYS},debug\n"),
        ("?reset", 200, f"current log level is {ALWAYS},info\n"),
        ("?reset=anything&level=trace", 200, f"current log level is {ALWAYS},trace\n"),
        ("?other=x", 200, f"current log level is {ALWAYS},info\n"),
        ("?level=loud", 400, "Invalid level provided: loud\nusage: POST /logging\t"),
        ("?level=access:debug", 400, "Invalid level provided: access:debug\nusage: POST /logging\t"),
        ("?level=debug,a=loud", 400, "Invalid level provided: a=loud\nusage: POST /logging\t"),
    ],
)
def test_logging_page_shows_and_changes_levels(path: str, status: int, body: str) -> None:
    async def check(harness: Harness) -> None:
        answer = await harness.ask("admin", f"/logging{path}", "POST")
        assert answer.status == status
        assert answer.text.startswith(body)
        if status != 200:
            current = await harness.ask("admin", "/logging", "POST")
            assert current.text == f"current log level is {ALWAYS},info\n"

    served(check)


def test_log_level_reset_restores_the_initial_filter() -> None:
    async def check(harness: Harness) -> None:
        await harness.ask("admin", "/logging?level=trace,dns=debug", "POST")
        answer = await harness.ask("admin", "/logging?reset=true&level=access=off", "POST")
        assert answer.text == f"current log level is {ALWAYS},access=off,warn\n"

    served(check, {"RUST_LOG": "warn"})


def test_admin_pages_and_their_methods() -> None:
    async def check(harness: Harness) -> None:
        home = await harness.ask("admin", "/")
        assert home.status == 200
        assert home.headers["content-type"].startswith("text/html")
        assert "/config_dump" in home.text
        usage = await harness.ask("admin", "/logging")
        assert usage.status == 405
        assert "usage: POST /logging?level=<level>" in usage.text
        quit_ = await harness.ask("admin", "/quitquitquit")
        assert (quit_.status, quit_.text) == (405, "")
        assert not harness.proxy._stop.is_set()
        quit_ = await harness.ask("admin", "/quitquitquit", "POST")
        assert (quit_.status, quit_.text) == (200, "shutdown now\n")
        assert harness.proxy._stop.is_set()
        unknown = await harness.ask("admin", "/nothing")
        assert unknown.status == 404
        home = await harness.ask("admin", "/")
        for path in ("/", "/config_dump", "/connections", "/logging", "/quitquitquit"):
            assert path in unknown.text
            assert path in home.text
        for query in (
            "seconds=0",
            "seconds=301",
            "seconds=x",
            "seconds=" + "9" * 5000,
            "frequency=0",
            "frequency=1001",
        ):
            name, largest = ("seconds", 300) if query.startswith("seconds") else ("frequency", 1000)
            answer = await harness.ask("admin", f"/debug/pprof/profile?{query}")
            assert (answer.status, answer.text) == (400, f"invalid {name} value; expected 1-{largest}\n")
        assert (await harness.ask("admin", "/debug/pprof/profile?seconds=300&frequency=1")).status == 500
        for path in ("heap", "heap/profiling?activate=true"):
            answer = await harness.ask("admin", f"/debug/pprof/{path}")
            assert (answer.status, answer.text) == (500, "jemalloc not enabled\n")

    served(check)


def test_a_taken_port_is_named() -> None:
    async def check(harness: Harness) -> None:
        with socket.create_server(("127.0.0.1", 0)) as somebody:
            taken = SocketAddress(*somebody.getsockname())
            harness.proxy.config = replace(harness.proxy.config, admin_port=taken.port)
            with pytest.raises(TproxyError, match=f"failed to bind to address {taken}"):
                async with Servers(harness.proxy):
                    pass

    served(check)


# The dump

#: The Rust ztunnel's, and ``denials``, in order.
TOP = [
    *(
        "certificates",
        "config",
        "controlPlane",
        "denials",
        "noPolicyMatched",
        "pending",
        "policies",
        "services",
        "stagedServices",
        "staticConfig",
    ),
    *("version", "workloads"),
]
CONFIG_KEYS = """
    proxy dnsProxy windowSize connectionWindowSize frameSize poolMaxStreamsPerConn poolUnusedReleaseTimeout
    socks5Addr adminAddr statsAddr readinessAddr inboundAddr inboundPlaintextAddr outboundAddr dnsProxyAddr
    illegalPorts network localNode proxyMode proxyWorkloadInformation clusterId clusterDomain caAddress caRootCert
    altCaHostname xdsAddress xdsRootCert altXdsHostname preferedServiceNamespace secretTtl xdsOnDemand fakeCa
    fakeSelfInbound selfTerminationDeadline proxyMetadata numWorkerThreads requireOriginalSource proxyArgs
    dnsResolverCfg dnsResolverOpts inpodUds inpodPortReuse packetMark socketConfig xdsHeaders caHeaders
    localhostAppTunnel ztunnelIdentity ztunnelWorkload ipv6Enabled crlPath enableEnhancedBaggage
"""


def sorted_everywhere(value: Any) -> bool:
    if isinstance(value, dict):
        return list(value) == sorted(value) and all(map(sorted_everywhere, value.values()))
    return all(map(sorted_everywhere, value)) if isinstance(value, list) else True


def test_the_dump_of_a_shared_proxy() -> None:
    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([LOCAL])
        await harness.proxy.certificates.fetch(LOCAL.identity)
        answer = await harness.ask("admin", "/config_dump")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        dump = json.loads(answer.text)
        assert list(dump) == [*TOP[:-1], "workloadState", "workloads"]
        assert sorted_everywhere(dump)
        assert answer.text.startswith('{\n  "certificates": [\n    {\n      "certChain": [')
        assert [type(dump[key]) for key in ("workloads", "services", "policies", "certificates")] == [list] * 4
        assert (dump["workloadState"], dump["stagedServices"]) == ({}, {})
        assert json.loads((await harness.ask("admin", "/connections")).text) == dump["workloadState"]
        for key in ("workloads", "config", "pending", "version"):
            assert json.loads((await harness.ask("admin", f"/config_dump?part={key}")).text) == {key: dump[key]}
        one = await harness.ask("admin", f"/config_dump?part=workloads&name={LOCAL.namespace}/{LOCAL.name}")
        assert json.loads(one.text) == {"workloads": dump["workloads"]}
        none = await harness.ask("admin", "/config_dump?part=workloads&name=nobody")
        assert json.loads(none.text) == {"workloads": []}
        key = await harness.ask("admin", "/config_dump?part=config&name=network")
        assert json.loads(key.text) == {"config": {"network": ""}}
        unknown = await harness.ask("admin", "/config_dump?part=listeners")
        assert (unknown.status, unknown.text.partition(";")[0]) == (404, "no part 'listeners'")
        assert dump["denials"] == json.loads((await harness.ask("admin", "/denials")).text) == []
        asked = Pair(
            "inbound", "client.shop", "spiffe://td/ns/shop/sa/client", "cart.shop:80", "denied by: shop/p"
        )
        harness.proxy.metrics.ledger.denials.note(asked, "10.0.0.1:4000", 1_000_000_000.5)
        (denial,) = json.loads((await harness.ask("admin", "/denials")).text)
        assert denial == {
            **asked._asdict(),
            "count": 1,
            "lastAddress": "10.0.0.1:4000",
            "lastTime": "2001-09-09T01:46:40Z",
        }
        enforced = AuthorizationPolicy(
            name="p", namespace="shop", scope=PolicyScope.NAMESPACE, action=Action.DENY, condition=Always()
        )
        harness.proxy.mesh.apply([enforced, replace(enforced, name="trial", dry_run=True)])
        harness.proxy.metrics.ledger.own.note("shop/p", Use.DENIED, 1_000_000_000.5)
        for use in (Use.WOULD_DENY, Use.WOULD_NOT_ALLOW):
            harness.proxy.metrics.ledger.own.note("shop/trial", use, 1_000_000_001.5)
        policies = json.loads((await harness.ask("admin", "/config_dump")).text)["policies"]
        assert [policy["decisions"] for policy in policies] == [
            {"allowed": 0, "denied": 1, "ended": 0, "lastTime": "2001-09-09T01:46:40Z"},
            {"denied": 2, "lastTime": "2001-09-09T01:46:41Z"},
        ]
        assert dump["staticConfig"] == {"policies": [], "services": [], "workloads": []}
        (entry,) = dump["certificates"]
        assert entry["identity"] == "spiffe://cluster.local/ns/default/sa/default"
        assert entry["state"] == "Available"
        for certificate in (*entry["certChain"], *entry["rootCerts"]):
            assert sorted(certificate) == ["expirationTime", "pem", "serialNumber", "validFrom"]
            assert certificate["serialNumber"].isdigit()
            assert certificate["validFrom"].endswith("Z")
            assert len(certificate["validFrom"]) == len("2026-11-22T11:25:15Z")
            assert certificate["pem"].startswith("LS0tLS1CRUdJTi")
        assert dump["workloads"][0]["uid"] == LOCAL.uid
        assert sorted(dump["version"]) == [
            "buildProfile",
            "buildStatus",
            "cryptoProvider",
            "gitRevision",
            "istioVersion",
            "rustVersion",
            "version",
        ]

    served(check)


def test_the_dump_of_a_dedicated_proxy_has_no_pods() -> None:
    async def check(harness: Harness) -> None:
        assert list(json.loads((await harness.ask("admin", "/config_dump")).text)) == TOP

    served(check, {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c"})


def entry_of(env: Mapping[str, str]) -> Mapping[str, Any]:
    return config_entry(config_from(env, cpus=8, arguments="proxy ztunnel", read_file=lambda path: None))


def test_every_key_of_the_configuration() -> None:
    assert sorted(entry_of({})) == sorted(CONFIG_KEYS.split())


OWN = {"POD_NAME": "z", "POD_NAMESPACE": "istio-system", "SERVICE_ACCOUNT": "ztunnel"}


@pytest.mark.parametrize(
    ("env", "key", "value"),
    [
        ({}, "proxy", True),
        ({"ISTIO_META_DNS_CAPTURE": "false"}, "dnsProxy", False),
        ({}, "windowSize", 4194304),
        ({}, "connectionWindowSize", 16777216),
        ({}, "frameSize", 1048576),
        ({}, "poolMaxStreamsPerConn", 100),
        ({}, "poolUnusedReleaseTimeout", {"nanos": 0, "secs": 300}),
        ({"POOL_UNUSED_RELEASE_TIMEOUT": "1500ms"}, "poolUnusedReleaseTimeout", {"nanos": 500000000, "secs": 1}),
        ({}, "socks5Addr", None),
        ({"UNSTABLE_ENABLE_SOCKS5": "true"}, "socks5Addr", "127.0.0.1:15080"),
        ({}, "adminAddr", {"Localhost": [True, 15000]}),
        ({"IPV6_ENABLED": "false"}, "adminAddr", {"Localhost": [False, 15000]}),
        ({}, "statsAddr", {"SocketAddr": "[::]:15020"}),
        ({"IPV6_ENABLED": "false"}, "readinessAddr", {"SocketAddr": "0.0.0.0:15021"}),
        ({}, "inboundAddr", "[::]:15008"),
        ({}, "inboundPlaintextAddr", "[::]:15006"),
        ({}, "outboundAddr", "[::]:15001"),
        ({}, "dnsProxyAddr", {"Localhost": [True, 15053]}),
        ({"ISTIO_META_DNS_PROXY_ADDR": "[::1]:53"}, "dnsProxyAddr", {"SocketAddr": "[::1]:53"}),
        ({}, "illegalPorts", [15001, 15006, 15008]),
        ({"NETWORK": "n"}, "network", "n"),
        ({}, "localNode", None),
        ({"NODE_NAME": "w"}, "localNode", "w"),
        ({}, "proxyMode", "Shared"),
        ({"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c"}, "proxyMode", "Dedicated"),
        (
            {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "a/b/c"},
            "proxyWorkloadInformation",
            {"name": "b", "namespace": "a", "serviceAccount": "c"},
        ),
        ({}, "clusterId", "Kubernetes"),
        ({}, "clusterDomain", "cluster.local"),
        ({}, "caAddress", "https://localhost:15012"),
        ({"FAKE_CA": "true"}, "caAddress", None),
        ({"FAKE_CA": "true"}, "fakeCa", True),
        ({"XDS_ADDRESS": ""}, "xdsAddress", None),
        ({"CA_ROOT_CA": "/p"}, "caRootCert", {"File": "/p"}),
        ({"XDS_ROOT_CA": "-----BEGIN CERTIFICATE-----"}, "xdsRootCert", "Static"),
        ({"XDS_ROOT_CA": "SYSTEM"}, "xdsRootCert", "Default"),
        ({}, "altCaHostname", None),
        ({"ALT_XDS_HOSTNAME": "h"}, "altXdsHostname", "h"),
        ({"PREFERED_SERVICE_NAMESPACE": "p"}, "preferedServiceNamespace", "p"),
        ({}, "secretTtl", {"nanos": 0, "secs": 86400}),
        ({}, "xdsOnDemand", False),
        ({}, "selfTerminationDeadline", {"nanos": 0, "secs": 5}),
        ({"ISTIO_META_X": "y"}, "proxyMetadata", {"X": "y"}),
        ({}, "numWorkerThreads", 2),
        ({}, "requireOriginalSource", None),
        ({"ENABLE_ORIG_SRC": "true"}, "requireOriginalSource", True),
        ({"ENABLE_ORIG_SRC": "false"}, "requireOriginalSource", False),
        ({}, "proxyArgs", "proxy ztunnel"),
        ({}, "inpodUds", "/var/run/ztunnel/ztunnel.sock"),
        ({}, "inpodPortReuse", True),
        ({}, "packetMark", 1337),
        ({"XDS_HEADER_x-foo": "bar"}, "xdsHeaders", [["x-foo", "bar"]]),
        ({}, "caHeaders", []),
        ({}, "localhostAppTunnel", True),
        ({}, "ztunnelIdentity", None),
        (OWN, "ztunnelIdentity", "spiffe://cluster.local/ns/istio-system/sa/ztunnel"),
        (OWN, "ztunnelWorkload", {"name": "z", "namespace": "istio-system", "serviceAccount": "ztunnel"}),
        ({}, "ipv6Enabled", True),
        ({"CRL_PATH": "/c"}, "crlPath", "/c"),
        ({"ENABLE_RESPONSE_BAGGAGE": "false"}, "enableEnhancedBaggage", False),
    ],
)
def test_configuration_dump_shows_the_environment(env: dict[str, str], key: str, value: Any) -> None:
    assert entry_of(env)[key] == value


def test_the_log_gets_no_values_of_headers() -> None:
    env = {"XDS_HEADER_x-foo": "hush", "CA_HEADER_y": "hush", "AUTH_TOKEN": "hush"}
    config = config_from(env, cpus=8, read_file=lambda path: None)
    shown = logged_config(config)
    assert (shown["xdsHeaders"], shown["caHeaders"]) == (["x-foo"], ["y"])
    assert "hush" not in json.dumps(shown)


def test_version_line_has_upstreams_form() -> None:
    line = build_info("1.30")
    assert line.startswith('version.BuildInfo{Version:"')
    names = [part.partition(":")[0] for part in line.removeprefix("version.BuildInfo{")[:-1].split(", ")]
    assert names == [
        "Version",
        "GitRevision",
        "RustVersion",
        "BuildProfile",
        "BuildStatus",
        "IstioVersion",
        "CryptoProvider",
    ]
    assert 'IstioVersion:"1.30"' in line
    assert "\n" not in line


def test_the_resolver_is_in_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("nameserver 10.96.0.10\nsearch a.test b.test\n")
    entry = config_entry(config_from({}, cpus=1, read_file=lambda path: None), path)
    servers = entry["dnsResolverCfg"]["name_servers"]
    assert [(each["socket_addr"], each["protocol"]) for each in servers] == [
        ("10.96.0.10:53", "udp"),
        ("10.96.0.10:53", "tcp"),
    ]
    assert entry["dnsResolverCfg"]["search"] == ["a.test", "b.test"]
    assert entry["dnsResolverOpts"] == {"timeout": {"secs": 5, "nanos": 0}, "attempts": 3}
    nothing = config_entry(config_from({}, cpus=1, read_file=lambda path: None), tmp_path / "none")
    assert nothing["dnsResolverCfg"]["name_servers"] == []
