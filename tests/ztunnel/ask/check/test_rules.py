"""Each check is tested with the state that fails it: healthy facts of two nodes, with one thing changed."""

from __future__ import annotations

import copy
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.hbone.certificates import Authority, of_unknown_version
from tests.ztunnel.ask.check.healthy import NOW_S, TD, at, certificate, daemon_set, healthy, item, pod
from xds.dialects.istio.rules import shown
from ztunnel.ask.check.catalogue import CATALOGUE, UnknownCheck, chosen
from ztunnel.ask.check.command import answer_of
from ztunnel.ask.check.rules.model import CheckResult, Facts, NodeFacts, run

PAGE = Path(__file__).parents[4] / "docs" / "check.md"


def test_a_healthy_cluster_has_no_finding() -> None:
    assert [(each.id, each.fact) for each in run(CATALOGUE, healthy()) if each.severity != "ok"] == []


# What fails each


def added(kind: str, *items: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, objects={**facts.objects, kind: [*facts.objects[kind], *items]})


def instead(kind: str, *items: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, objects={**facts.objects, kind: list(items)})


def on_node(change: Callable[[NodeFacts], Any], name: str = "n1") -> Callable[[Facts], Facts]:
    """Change a deep copy of a node's facts; ``change`` returns new facts, or alters them in place."""

    def changed(facts: Facts) -> Facts:
        found = copy.deepcopy(facts.nodes[name])
        answer = change(found)
        return replace(facts, nodes={**facts.nodes, name: answer if isinstance(answer, NodeFacts) else found})

    return changed


def declares(*ports: int) -> dict[str, Any]:
    return {"containers": [{"name": "app", "ports": [{"containerPort": port} for port in ports]}]}


def in_page(page: str, *path: Any, value: Any, name: str = "n1") -> Callable[[Facts], Facts]:
    def change(found: NodeFacts) -> None:
        place: Any = getattr(found, page)
        for each in path[:-1]:
            place = place[each]
        place[path[-1]] = value

    return on_node(change, name)


def policy(**spec: Any) -> dict[str, Any]:
    return item("p", "shop", spec=spec)


UNKNOWN = b64encode(of_unknown_version(Authority().pem)).decode()
METHODS = {"to": [{"operation": {"methods": ["GET"]}}]}
ACCOUNT = {"from": [{"source": {"principals": [f"{TD}/ns/shop/sa/web"]}}]}
STRICT_CLIENT = {
    "direction": "inbound", "identity": "", "source": "10.0.0.9", "destination": "web.shop:8080", "count": 3,
    "reason": "explicitly denied by: istio_converted_static_strict", "lastTime": at(minutes=5),
}  # fmt: skip
WEB_SELECTOR = {"selector": {"matchLabels": {"app": "web"}}}
IDENTITY = f"spiffe://{TD}/ns/shop/sa/x"


def isolating(**entry: Any) -> dict[str, Any]:
    return item(
        "np", "shop", spec={"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [entry] if entry else []}
    )


PROBED = pod("web-n1", "shop", "n1", labels={"app": "web"},
             annotations={"ambient.istio.io/redirection": "enabled"},
             spec={"containers": [{"name": "a", "readinessProbe": {"httpGet": {"port": 80}}}]})  # fmt: skip
RESTARTED = pod("ztunnel-n1", "istio-system", "n1", labels={"app": "ztunnel"},
                annotations={"prometheus.io/scrape": "true"})  # fmt: skip
RESTARTED["status"]["containerStatuses"] = [
    {
        "name": "proxy",
        "lastState": {"terminated": {"finishedAt": at(minutes=3), "reason": "OOMKilled", "exitCode": 137}},
    }
]


def far_waypoint(admitted: str) -> Callable[[Facts], Facts]:
    """A namespace behind a waypoint of namespace ``gates``, and a policy that admits ``wp`` of a namespace."""
    labels = {"istio.io/use-waypoint": "wp", "istio.io/use-waypoint-namespace": "gates"}
    rule = {"from": [{"source": {"principals": [f"{TD}/ns/{admitted}/sa/wp"]}}]}

    def change(facts: Facts) -> Facts:
        facts = added("Namespace", item("far", labels=labels))(facts)
        return added("AuthorizationPolicy", item("p", "far", spec={"rules": [rule]}))(facts)

    return change


def probed(allowed: str, *, address: str = "", besides: tuple[str, ...] = ()) -> Callable[[Facts], Facts]:
    """A probed pod, and a NetworkPolicy that allows a block."""
    block = {"cidr": allowed, "except": list(besides)}
    found = {**PROBED, "status": {**PROBED["status"], "podIP": address}}
    return lambda facts: instead(
        "Pod", found, *(p for p in facts.listed("Pod") if p["metadata"]["name"] == "istiod-1")
    )(added("NetworkPolicy", isolating(**{"from": [{"ipBlock": block}]}))(facts))


def bundle(*to_days: float) -> Callable[[Facts], Facts]:
    """The injector's webhook with a CA certificate for each number of days from now until its end."""
    pem = b"".join(Authority().reissued(days).pem for days in to_days)
    hook = {
        "name": "x",
        "namespaceSelector": {"matchLabels": {"a": "b"}},
        "clientConfig": {"caBundle": b64encode(pem).decode()},
    }
    change = instead("MutatingWebhookConfiguration", item("ztunnel", webhooks=[hook]))
    return lambda facts: replace(change(facts), now_s=time.time())


def istiods(*versions: str) -> Callable[[Facts], Facts]:
    return lambda facts: instead(
        "Pod",
        *(p for p in facts.listed("Pod") if p["metadata"]["name"] != "istiod-1"),
        *(
            pod(f"istiod-{version}", "istio-system", "n1", labels={"app": "istiod"},
                spec={"containers": [{"name": "discovery", "image": f"pilot:{version}"}]})
            for version in versions
        ),
    )(facts)  # fmt: skip


CASES: list[tuple[str, Callable[[Facts], Facts], str, str]] = [
    ("ACC1", lambda facts: replace(facts, cluster_error="GET /version: Unauthorized"), "error", "Unauthorized"),
    ("ACC2", lambda facts: replace(facts, access={"list pods": False}), "warning", "not allowed: list pods"),
    ("ACC3", lambda facts: replace(facts, version={"minor": "24"}), "error", "older than 1.28"),
    ("ACC3", lambda facts: replace(facts, version={"minor": "99"}), "warning", "was not tested"),
    (
        "ACC3",
        instead(
            "CustomResourceDefinition",
            item(
                "gateways.gateway.networking.k8s.io",
                annotations={"gateway.networking.k8s.io/bundle-version": "v0.8.0"},
            ),
        ),
        "warning",
        "Gateway API v0.8.0",
    ),
    ("DEP1", instead("DaemonSet", daemon_set("ztunnel", numberReady=1)), "warning", "1 of 2 pods are ready"),
    ("DEP1", instead("DaemonSet"), "error", "no DaemonSet with the label app=ztunnel"),
    ("DEP1", added("Pod", pod("lonely", "shop", "n3")), "error", "1 pods of the mesh run here, and no proxy"),
    ("DEP1", added("Pod", pod("windows", "shop", "n3", spec={"os": {"name": "windows"}})), "", ""),
    ("DEP1", lambda facts: replace(facts, silent={"n2": "no answer"}), "error", "does not answer: no answer"),
    (
        "DEP2",
        instead("Namespace", item("istio-system", labels={"pod-security.kubernetes.io/enforce": "baseline"})),
        "error",
        "enforces 'baseline'",
    ),
    (
        "DEP2",
        added(
            "Pod",
            pod("a", "istio-system", "n1", labels={"app": "ztunnel-agent"}),
            pod("b", "istio-system", "n1", labels={"k8s-app": "istio-cni-node"}),
        ),
        "error",
        "both enrol pods here",
    ),
    ("DEP3", in_page("dump", "version", "version", value="0.8.0"), "warning", "proxies of 2 versions"),
    ("DEP3", in_page("dump", "version", "istioVersion", value="1.27.1"), "error", "of Istio 1.27, istiod of 1.30"),
    ("DEP3", istiods("1.33.0", "1.30.2"), "", ""),
    ("DEP3", istiods("1.33.0", "1.32.0"), "warning", "of Istio 1.30, istiod of 1.32"),
    ("DEP4", bundle(-0.5, 300), "", ""),
    ("DEP4", bundle(-0.5, 3), "warning", "its CA certificate ends on"),
    ("DEP4", bundle(-0.5), "error", "its CA certificate ended on"),
    (
        "DEP4",
        instead("MutatingWebhookConfiguration", item("ztunnel", webhooks=[{"name": "x"}])),
        "error",
        "no CA bundle",
    ),
    (
        "DEP4",
        instead(
            "MutatingWebhookConfiguration", item("ztunnel", webhooks=[{"clientConfig": {"caBundle": UNKNOWN}}])
        ),
        "error",
        "its CA bundle cannot be read",
    ),
    ("KRN1", in_page("agent", "rulesRefused", value="add redirect: ENOENT"), "error", "add redirect: ENOENT"),
    (
        "KRN2",
        in_page("check", "kernel", "process", "capabilities", value="0000000000003000"),
        "error",
        "the proxy lacks SYS_ADMIN",
    ),
    ("KRN3", in_page("agent", "kernel", "cgroupVersion", value=1), "warning", "version 1"),
    ("KRN4", in_page("check", "kernel", "rpFilter", value={"all": 1}), "warning", "rp_filter is strict for lo"),
    ("KRN4", in_page("agent", "kernel", "ipForward", value=0), "warning", "ip_forward is 0"),
    ("KRN5", in_page("check", "kernel", "disableIpv6", value={"lo": 1, "eth0": 0}), "warning", "lo has not"),
    ("KRN6", in_page("check", "kernel", "conntrack", value={"count": 750, "maximum": 1000}), "warning", "75%"),
    ("KRN6", in_page("agent", "kernel", "conntrack", value={"count": 950, "maximum": 1000}), "error", "95%"),
    ("KRN7", in_page("check", "kernel", "localPortRange", value=[10000, 60999]), "warning", "15000-15090"),
    (
        "KRN7",
        in_page("check", "kernel", "localPortRange", value=[50000, 50000]),
        "error",
        "1 local ports are in use",
    ),
    (
        "KRN8",
        in_page("check", "kernel", "process", "descriptors", value=900),
        "warning",
        "90% of its limit of desc",
    ),
    (
        "KRN8",
        in_page("agent", "kernel", "process", "memoryBytes", value=900),
        "warning",
        "90% of its limit of memory",
    ),
    (
        "KRN8",
        in_page("check", "kernel", "process", "throttling", value={"periods": 100, "throttled": 20}),
        "warning",
        "throttled the proxy in 20%",
    ),
    (
        "NET1",
        on_node(lambda f: replace(f, reached=[{"place": "node n2", "address": "10.0.0.9", "error": "timeout"}])),
        "error",
        "no TLS handshake with 10.0.0.9:15008, node n2: timeout",
    ),
    (
        "NET1",
        on_node(
            lambda f: replace(
                f, reached=[{"place": "node n2", "address": "10.0.0.9", "seconds": 0.5, "error": ""}]
            )
        ),
        "warning",
        "took 0.500 s",
    ),
    ("NET3", on_node(lambda f: replace(f, clock_s=-9.0)), "warning", "9.0 s behind the API server's"),
    ("NET3", on_node(lambda f: replace(f, clock_s=90.0)), "error", "90.0 s ahead of the API server's"),
    ("NET2", in_page("reached", 0, "largeArrives", value=False), "error", "packets of full size do not"),
    ("NET4", added("Pod", pod("tls", "shop", "n1", spec=declares(15008))), "error", "it declares port 15008,"),
    (
        "NET4",
        instead(
            "Pod",
            pod("zt", "istio-system", "n1", labels={"app": "ztunnel"}, spec={"hostNetwork": True}),
            pod("exporter", "edge", "n1", spec={"hostNetwork": True, **declares(15020, 15021)}),
            pod("elsewhere", "edge", "n2", spec={"hostNetwork": True, **declares(15020)}),
        ),
        "error",
        "it declares ports 15020, 15021 of the node",
    ),
    (
        "NET5",
        added("Pod", pod("linked", "shop", "n1", spec={"initContainers": [{"name": "linkerd-proxy"}]})),
        "error",
        "a proxy of Linkerd",
    ),
    (
        "NET5",
        in_page("agent", "iptables", "legacy", value=["nat"]),
        "warning",
        "nat of iptables-legacy, filter, nat of iptables-nft",
    ),
    ("NET6", in_page("agent", "cni", "plugins", value=["bridge"]), "error", "does not have the plugin"),
    ("NET6", in_page("agent", "cni", "plugins", value=[]), "error", "no CNI configuration"),
    ("NET6", in_page("agent", "cni", value={"error": "no folder"}), "error", "cannot be read: no folder"),
    ("NET6", in_page("agent", "cni", "program", value=False), "error", "is missing"),
    ("NET6", in_page("agent", "cni", "plugins", value=["ztunnel-cni", "portmap"]), "warning", "not the last"),
    ("NET6", in_page("agent", "cni", "setAside", value=["10-a.cilium_bak"]), "warning", "10-a.cilium_bak"),
    ("NET7", in_page("agent", "probes", "fault", value="EPERM"), "error", "not in place: EPERM"),
    ("NET7", in_page("agent", "probes", "ebpf", value="Cilium: drops"), "warning", "Cilium: drops"),
    (
        "IDN1",
        in_page("dump", "certificates", 0, "state", value="Unavailable: no way"),
        "error",
        "no certificate: no way",
    ),
    (
        "IDN1",
        in_page("dump", "certificates", 0, "certChain", 0, "expirationTime", value=at(hours=-1)),
        "warning",
        "33% of its certificate's life",
    ),
    (
        "IDN1",
        in_page("dump", "certificates", 0, "certChain", 0, "expirationTime", value=at(hours=1)),
        "error",
        "ended at",
    ),
    (
        "IDN2",
        in_page("dump", "certificates", 0, "rootCerts", 0, "expirationTime", value=at(days=-30)),
        "warning",
        "root 0",
    ),
    (
        "IDN2",
        in_page("dump", "certificates", 0, "rootCerts", 0, "expirationTime", value=at(days=-3)),
        "error",
        "root 0",
    ),
    (
        "IDN2",
        on_node(
            lambda f: f.dump["certificates"][0]["rootCerts"].append(  # type: ignore[index]  # it is there
                {"serialNumber": "0", "expirationTime": at(days=-3)}  # another root with the same number
            )
        ),
        "error",
        "root 0 ends at 2026-11-29T12:00:00Z; 1 nodes have it",
    ),
    ("IDN3", in_page("dump", "certificates", 0, value=certificate(IDENTITY, 1)), "error", "not trusted on n2"),
    (
        "IDN3",
        on_node(
            lambda f: f.dump["certificates"][0]["rootCerts"].append(  # type: ignore[index]  # it is there
                certificate(IDENTITY, 1)["rootCerts"][0]
            )
        ),
        "warning",
        "2 different sets of roots",
    ),
    ("IDN4", in_page("check", "token", "expires", value=NOW_S - 60), "error", "its token has expired 60 s ago"),
    ("IDN4", in_page("check", "token", value={"error": "token file /t is empty"}), "error", "/t is empty"),
    ("IDN4", in_page("check", "token", "audiences", value=["x"]), "warning", "audience is x, not istio-ca"),
    (
        "XDS1",
        in_page("dump", "controlPlane", value={"address": "i:1", "connected": False, "awaySeconds": 70}),
        "warning",
        "not connected to i:1 for 70 s",
    ),
    (
        "XDS1",
        in_page("dump", "controlPlane", value={"address": "i:1", "connected": False, "awaySeconds": 999}),
        "error",
        "for 999 s",
    ),
    ("XDS1", in_page("check", "pending", value=["state manager"]), "error", "waits for state manager"),
    (
        "XDS2",
        in_page("check", "controlPlane", "refused", value=[{"type": "policy", "name": "a/b", "reason": "x"}]),
        "warning",
        "refused by 1 proxies: x",
    ),
    (
        "XDS3",
        in_page("check", "mesh", "policies", value={"number": 3, "hash": "11"}),
        "warning",
        "policies where 1 nodes have",
    ),
    ("XDS4", in_page("dump", "workloadState", value={}), "error", "the node's proxy does not serve it"),
    (
        "XDS4",
        in_page("audit", "pods", 0, "findings", value=[{"reason": "MeshRulesChanged", "text": "2 differences"}]),
        "error",
        "2 differences (MeshRulesChanged)",
    ),
    (
        "XDS5",
        in_page("dump", "workloads", 0, "authorizationPolicies", value=["shop/gone"]),
        "error",
        "named by workload",
    ),
    (
        "XDS5",
        in_page("dump", "services", 0, "waypoint", value={"destination": "shop/gone.shop.svc"}),
        "error",
        "named by service",
    ),
    (
        "POL1",
        added("AuthorizationPolicy", policy(action="DENY", rules=[METHODS])),
        "error",
        "not enforced at the node",
    ),
    ("POL1", added("AuthorizationPolicy", policy(rules=[{**METHODS, **ACCOUNT}])), "warning", "allows less"),
    (
        "POL2",
        in_page(
            "dump",
            "policies",
            0,
            value={"name": "d", "namespace": "shop", "action": "Deny", "rules": [[[shown({})]]]},
        ),
        "error",
        "it denies nothing",
    ),
    (
        "POL3",
        added("AuthorizationPolicy", policy(selector={"matchLabels": {"app": "none"}})),
        "warning",
        "matches no pod",
    ),
    (
        "POL3",
        added(
            "PeerAuthentication", item("pa", "istio-system", spec={"selector": {"matchLabels": {"app": "web"}}})
        ),
        "",
        "",
    ),
    (
        "POL3",
        added("AuthorizationPolicy", item("p", "istio-system", spec={"selector": {"matchLabels": {"app": "no"}}})),
        "warning",
        "matches no pod",
    ),
    (
        "POL3",
        added("PeerAuthentication", item("pa", "edge", spec={"selector": {"matchLabels": {"app": "web"}}})),
        "warning",
        "pods of namespace shop have these labels",
    ),
    ("POL4", added("AuthorizationPolicy", policy(action="CUSTOM")), "error", "action CUSTOM is ignored"),
    (
        "POL4",
        added("AuthorizationPolicy", policy(rules=[{"from": [{"source": {"principals": [IDENTITY]}}]}])),
        "error",
        "begins with spiffe://",
    ),
    (
        "POL4",
        added("AuthorizationPolicy", policy(rules=[{"from": [{"source": {"principals": ["td/ns/a/sa/b"]}}]}])),
        "warning",
        "not of the mesh's trust domain",
    ),
    (
        "POL4",
        added("AuthorizationPolicy", policy(rules=[{"to": [{"operation": {"ports": ["15008"]}}]}])),
        "error",
        "15008 is the tunnel's",
    ),
    (
        "POL4",
        added("AuthorizationPolicy", policy(rules=[{"to": [{"operation": {"ports": ["81"]}}]}])),
        "warning",
        "no selected pod declares port 81",
    ),
    (
        "POL4",
        added(
            "AuthorizationPolicy",
            item(
                "p", "istio-system", spec=WEB_SELECTOR | {"rules": [{"to": [{"operation": {"ports": ["8080"]}}]}]}
            ),
        ),
        "",
        "",
    ),
    (
        "POL4",
        added(
            "AuthorizationPolicy",
            item("p", "istio-system", spec=WEB_SELECTOR | {"rules": [{"to": [{"operation": {"ports": ["81"]}}]}]}),
        ),
        "warning",
        "no selected pod declares port 81",
    ),
    *(
        (
            "POL5",
            added("AuthorizationPolicy", item("p", "edge", spec={"rules": [{"from": [{"source": each}]}]})),
            "",
            "",
        )
        for each in (
            {"principals": [f"{TD}/ns/edge/*"]},
            {"principals": ["*/sa/wp"]},
            {"serviceAccounts": ["wp"]},
            {"serviceAccounts": ["edge/wp"]},
            {"namespaces": ["ed*"]},
        )
    ),
    *(
        (
            "POL5",
            added("AuthorizationPolicy", item("p", "edge", spec={"rules": [{"from": [{"source": each}]}]})),
            "error",
            "the waypoint edge/wp is in front",
        )
        for each in ({"principals": [f"{TD}/ns/shop/*"]}, {"serviceAccounts": ["shop/wp"]}, {"namespaces": ["e"]})
    ),
    ("POL5", far_waypoint("gates"), "", ""),
    ("POL5", far_waypoint("far"), "error", "the waypoint gates/wp is in front"),
    (
        "POL5",
        added("AuthorizationPolicy", item("p", "edge", spec={"rules": [ACCOUNT]})),
        "error",
        "the waypoint edge/wp is in front, and no rule allows its account",
    ),
    (
        "POL5",
        added(
            "AuthorizationPolicy",
            item(
                "p",
                "edge",
                spec={"action": "DENY", "rules": [{"from": [{"source": {"ipBlocks": ["10.0.0.0/8"]}}]}]},
            ),
        ),
        "warning",
        "these are the waypoint's",
    ),
    (
        "POL6",
        in_page("dump", "denials", value=[STRICT_CLIENT]),
        "warning",
        "3 connections without mTLS from 10.0.0.9",
    ),
    ("POL7", added("NetworkPolicy", isolating()), "error", "does not allow TCP port 15008"),
    (
        "POL7",
        added("NetworkPolicy", isolating(ports=[{"port": 80, "endPort": 90}])),
        "error",
        "does not allow TCP port",
    ),
    (
        "POL7",
        lambda facts: added("NetworkPolicy", isolating(**{"from": [{"podSelector": {}}]}))(
            added("Pod", PROBED)(facts)
        ),
        "warning",
        "does not allow probes",
    ),
    ("POL7", probed("169.254.0.0/16", address="10.0.1.1"), "", ""),
    ("POL7", probed("fd16:9254::/32", address="fd00::1"), "", ""),
    ("POL7", probed("fd16:9254::/32", address="10.0.1.1"), "warning", "whose source is 169.254.7.127"),
    ("POL7", probed("0.0.0.0/0", address="fd00::1"), "warning", "whose source is fd16:9254:7127:1337:"),
    (
        "POL7",
        probed("0.0.0.0/0", address="10.0.1.1", besides=("169.254.0.0/16",)),
        "warning",
        "does not allow probes",
    ),
    (
        "OBJ1",
        lambda facts: added("ServiceEntry", item("out", "edge", labels={"istio.io/use-waypoint": "wp"}))(
            instead("Namespace", item("shop"), item("istio-system"), item("edge"))(facts)
        ),
        "",
        "",
    ),
    (
        "OBJ1",
        instead("Gateway", item("unused", "edge", spec={"gatewayClassName": "istio-waypoint"})),
        "warning",
        "no namespace, service, service entry or pod",
    ),
    ("OBJ1", added("Namespace", item("far", labels={"istio.io/use-waypoint": "w2"})), "", ""),
    (
        "OBJ1",
        lambda facts: instead("Pod", *[p for p in facts.listed("Pod") if p["metadata"]["name"] != "wp-1"])(facts),
        "error",
        "none of its pods is ready",
    ),
    (
        "OBJ2",
        added("Pod", pod("h", "shop", "n1", spec={"hostNetwork": True})),
        "warning",
        "h use the host's network",
    ),
    (
        "OBJ2",
        added("Pod", pod("w", "shop", "n9", spec={"nodeSelector": {"kubernetes.io/os": "windows"}})),
        "warning",
        "w do not run on Linux",
    ),
    ("OBJ2", added("Service", item("bare", "shop", spec={"clusterIP": "None"})), "warning", "headless"),
    (
        "OBJ3",
        added("Service", item("dns", "shop", spec={"ports": [{"port": 53, "protocol": "UDP"}]})),
        "warning",
        "UDP",
    ),
    (
        "OBJ3",
        added("Service", item("s", "shop", spec={"selector": {"app": "web"}, "ports": [{"port": 9}]})),
        "warning",
        "no selected pod declares target port 9",
    ),
    ("OBJ4", added("EnvoyFilter", item("ef", "shop", spec={})), "warning", "node proxies do not read it"),
    ("OPS1", added("Pod", RESTARTED), "warning", "restarted 3 minutes ago: OOMKilled, exit status 137"),
    (
        "OPS2",
        in_page("dump", "workloadState", "uid", "connections", "outbound", 0, "ageSeconds", value=99.0),
        "warning",
        "can cut 1 connections",
    ),
    ("OPS3", instead("PrometheusRule"), "warning", "no PrometheusRule names ztunnel"),
    (
        "OPS3",
        lambda facts: instead(
            "Pod", *[{**p, "metadata": {**p["metadata"], "annotations": {}}} for p in facts.listed("Pod")]
        )(facts),
        "warning",
        "nothing reads the proxies' metrics",
    ),
]


def results_of(facts: Facts, name: str) -> list[CheckResult]:
    return [each for each in run(CATALOGUE, facts) if each.id == name]


@pytest.mark.parametrize(("name", "change", "severity", "fact"), CASES, ids=[f"{c[0]}-{c[3][:30]}" for c in CASES])
def test_each_faulty_state_fails_its_check(
    name: str, change: Callable[[Facts], Facts], severity: str, fact: str
) -> None:
    found = results_of(change(healthy()), name)
    if not severity:
        assert [each.severity for each in found] == ["ok"]
        return
    matching = [each for each in found if fact in each.fact]
    assert [each.severity for each in matching[:1]] == [severity], found
    assert matching[0].remedy


def test_every_check_has_a_state_that_fails_it() -> None:
    assert {check.id for check in CATALOGUE} == {name for name, _, severity, _ in CASES if severity}


def test_a_missing_fact_skips_and_says_why() -> None:
    facts = Facts(now_s=NOW_S, cluster_error="the kubeconfig: not found", no_nodes="no ztunnel runs")
    for each in run(CATALOGUE, facts):
        assert each.severity == ("error" if each.id == "ACC1" else "skipped"), each
        assert "not found" in each.fact or "no ztunnel runs" in each.fact


def test_a_rust_ztunnel_is_judged_by_its_dump() -> None:
    def rust(found: NodeFacts) -> NodeFacts:
        dump = dict(found.dump or {})
        for ours in ("controlPlane", "denials"):
            dump.pop(ours)
        return NodeFacts(dump=dump)

    facts = healthy()
    for name in ("n1", "n2"):
        facts = on_node(rust, name)(facts)
    severities = {each.id: each.severity for each in run(CATALOGUE, facts)}
    skipped = {name for name, severity in severities.items() if severity == "skipped"}
    kernels = {f"KRN{number}" for number in range(1, 9)}
    assert skipped == kernels | {"NET1", "NET2", "NET3", "NET6", "NET7", "IDN4", "XDS1", "XDS2", "POL6", "OPS2"}
    assert set(severities.values()) == {"ok", "skipped"}


def test_a_check_that_is_skipped_keeps_what_it_has_found() -> None:
    facts = added("Pod", pod("h", "shop", "n1", spec={"hostNetwork": True}))(healthy())
    facts = replace(facts, objects={**facts.objects, "Service": "services is forbidden"})
    found = [(each.severity, each.fact) for each in results_of(facts, "OBJ2")]
    assert [severity for severity, _ in found] == ["skipped", "warning"]
    assert "not known: services is forbidden" in found[0][1]
    odd = in_page("check", "kernel", "process", "capabilities", value="all", name="n2")
    lacking = in_page("check", "kernel", "process", "capabilities", value="0")
    found = [(each.severity, each.fact) for each in results_of(odd(lacking(healthy())), "KRN2")]
    assert [severity for severity, _ in found] == ["skipped", "error"]
    assert "unexpected form: ValueError" in found[0][1]


def test_lists_that_are_not_permitted_are_no_fault_of_the_cluster() -> None:
    facts = replace(healthy(), objects={**healthy().objects, "PrometheusRule": "prometheusrules is forbidden"})
    (found,) = results_of(facts, "OPS3")
    assert (found.severity, "forbidden" in found.fact) == ("skipped", True)
    bare = [{**each, "metadata": {**each["metadata"], "annotations": {}}} for each in facts.listed("Pod")]
    facts = replace(facts, objects={**facts.objects, "Pod": bare, "PodMonitor": "podmonitors is forbidden"})
    assert [each.severity for each in results_of(facts, "OPS3")] == ["skipped"]


def test_references_are_not_known_if_proxies_load_resources_on_demand() -> None:
    named = in_page("dump", "workloads", 0, "waypoint", value={"destination": "shop/other.example"})
    assert [each.severity for each in results_of(named(healthy()), "XDS5")] == ["error"]
    demand = in_page("dump", "config", "xdsOnDemand", value=True)
    assert [each.severity for each in results_of(demand(named(healthy())), "XDS5")] == ["skipped"]


def test_objects_of_another_shape_are_skipped_not_fatal() -> None:
    facts = healthy()
    broken = replace(facts, objects={kind: [{"metadata": 7}, {"spec": [1]}] for kind in facts.objects})
    assert {each.severity for each in run(CATALOGUE, broken)} <= {"ok", "skipped", "warning", "error"}


# Choice and summary


def test_checks_are_chosen_by_id_and_category() -> None:
    def names(only: str = "", skip: str = "", *, before: bool = False) -> set[str]:
        return {check.id for check in chosen(only.split(), skip.split(), before=before)}

    assert names("net3 IDN") == {"NET3", "IDN1", "IDN2", "IDN3", "IDN4"}
    assert names("IDN", "IDN2") == {"IDN1", "IDN3", "IDN4"}
    assert {"ACC1", "POL1"} < names(before=True) < names()
    with pytest.raises(UnknownCheck, match="NET99"):
        chosen(["NET99"], [], before=False)


def test_checks_before_installation_need_no_proxy_or_agent() -> None:
    facts = replace(healthy(), nodes={}, no_nodes="before installation")
    results = run(chosen([], [], before=True), facts)
    assert [each.id for each in results if each.severity == "skipped"] == []


def test_a_sentence_sums_up_and_warnings_fail_only_if_asked() -> None:
    results = run(CATALOGUE, on_node(lambda f: replace(f, clock_s=-9.0))(healthy()))
    answer = answer_of(results)
    assert (answer.status, answer_of(results, fail_on="warning").status) == (0, 1)
    number = len(CATALOGUE)
    assert answer.notes[-1] == f"{number} checks: 0 errors, 1 warning, {number - 1} ok, 0 skipped"
    assert answer_of(results, {"n2": "no answer"}).status == 2


def test_ids_are_documented_and_used_once() -> None:
    def headings() -> Iterator[str]:
        yield from re.findall(r"^### ([A-Z]{3}\d)$", PAGE.read_text(), re.MULTILINE)

    ids = [check.id for check in CATALOGUE]
    assert len(ids) == len(set(ids))
    assert list(headings()) == ids


@pytest.mark.parametrize(("policy", "severity"), [("Always", "ok"), (None, "warning")])
def test_ports_of_native_sidecars_are_ports_of_the_pod(policy: str | None, severity: str) -> None:
    """An init container with restartPolicy Always runs as long as the pod; others end before it serves."""
    spec = declares(8080)
    starting = {"name": "proxy", "restartPolicy": policy, "ports": [{"containerPort": 4180}]}
    spec["initContainers"] = [starting]
    service = item("s", "shop", spec={"selector": {"app": "auth"}, "ports": [{"port": 80, "targetPort": 4180}]})
    facts = added("Pod", pod("auth", "shop", "n1", labels={"app": "auth"}, spec=spec))(healthy())
    assert {each.severity for each in results_of(added("Service", service)(facts), "OBJ3")} == {severity}


def test_versions_that_the_readme_names_are_tested_versions() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text()
    (minor,) = re.findall(r"it ran on a two-node Kubernetes 1\.(\d+) cluster", readme)
    ran = replace(healthy(), version={"minor": minor})
    assert {each.severity for each in results_of(ran, "ACC3")} == {"ok"}
    assert f"above 1.{minor}, the highest version" in PAGE.read_text()
