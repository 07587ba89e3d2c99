"""The facts of a healthy cluster of two nodes, for checks: objects, dumps, pages and kernels."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from tests.hbone.certificates import Authority
from ztunnel.ask.check.rules.model import Facts, NodeFacts

NOW = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)


NOW_S = NOW.timestamp()


TD = "cluster.local"


def at(**ago: float) -> str:
    return (NOW - timedelta(**ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def item(
    name: str, namespace: str = "", *, labels: Any = None, annotations: Any = None, **more: Any
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    metadata |= {"namespace": namespace} if namespace else {}
    return {"metadata": metadata | more.pop("metadata", {}), **more}


def pod(name: str, namespace: str, node: str, **more: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True"}]
    spec = {
        "nodeName": node,
        "containers": [{"name": "app", "ports": [{"containerPort": 8080}]}],
        **more.pop("spec", {}),
    }
    return item(name, namespace, spec=spec, status={"phase": "Running", "conditions": conditions}, **more)


def daemon_set(app: str, **status: Any) -> dict[str, Any]:
    numbers = {"desiredNumberScheduled": 2, "numberReady": 2, "updatedNumberScheduled": 2}
    template = {"metadata": {"labels": {"app": app}}}
    return item(app, "istio-system", spec={"template": template}, status=numbers | status)


@cache
def authority(which: int = 0) -> Authority:
    return Authority()


def encoded(pem: bytes) -> str:
    return base64.b64encode(pem).decode()


@cache
def leaf(identity: str, which: int = 0) -> str:
    return encoded(authority(which).issue(identity).chain_pem)


def certificate(identity: str, which: int = 0) -> dict[str, Any]:
    root = {"pem": encoded(authority(which).pem), "serialNumber": str(which), "validFrom": at(days=30)}
    return {
        "identity": identity,
        "state": "Available",
        "certChain": [
            {
                "pem": leaf(identity, which),
                "serialNumber": "7",
                "validFrom": at(hours=2),
                "expirationTime": at(hours=-22),
            }
        ],
        "rootCerts": [{**root, "expirationTime": at(days=-3000)}],
    }


def workload(name: str, node: str, address: str, **more: Any) -> dict[str, Any]:
    found = {"name": name, "namespace": "shop", "node": node, "workloadIps": [address], "protocol": "HBONE"}
    return found | {"status": "Healthy"} | more


def dump(name: str) -> dict[str, Any]:
    return {
        "version": {"version": "0.9.0", "gitRevision": "abc", "istioVersion": "1.30.0"},
        "config": {"localNode": name},
        "controlPlane": {"address": "istiod:15012", "connected": True, "awaySeconds": 0.0},
        "certificates": [certificate(f"spiffe://{TD}/ns/shop/sa/web-{name}")],
        "policies": [
            {
                "name": "allow",
                "namespace": "shop",
                "action": "Allow",
                "rules": [[[{"namespaces": [{"Exact": "shop"}]}]]],
            }
        ],
        "services": [
            {"namespace": "shop", "hostname": "wp.shop.svc.cluster.local", "vips": ["/10.96.0.9"], "name": "wp"}
        ],
        "workloads": [workload("web-n1", "n1", "10.0.1.1"), workload("web-n2", "n2", "10.0.2.1")],
        "denials": [],
        "workloadState": {
            "uid": {
                "info": {"name": f"web-{name}", "namespace": "shop"},
                "state": "Up",
                "connections": {
                    "inbound": [],
                    "outbound": [{"actualDst": "10.0.9.9:80", "protocol": "TCP", "ageSeconds": 1.0}],
                },
            }
        },
    }


def kernel(**more: Any) -> dict[str, Any]:
    process = {
        "descriptors": 10,
        "descriptorLimit": 1000,
        "memoryBytes": 10,
        "memoryLimitBytes": 1000,
        "capabilities": "000001ffffffffff",
        "throttling": {"periods": 100, "throttled": 1},
    }
    return {
        "ipForward": 1,
        "rpFilter": {"all": 0, "lo": 0, "eth0": 1},
        "disableIpv6": {"all": 0, "lo": 0, "eth0": 0},
        "localPortRange": [32768, 60999],
        "reservedPorts": "",
        "conntrack": {"count": 10, "maximum": 1000},
        "cgroupVersion": 2,
        "process": process,
    } | more


def check(name: str) -> dict[str, Any]:
    mesh = {"number": 2, "hash": "00ff00ff00ff00ff"}
    return {
        "node": name,
        "drainSeconds": 5.0,
        "ipv6": True,
        "pending": [],
        "controlPlane": {"refused": []},
        "token": {"present": True, "audiences": ["istio-ca"], "expires": NOW_S + 3600},
        "mesh": {"workloads": mesh, "services": mesh, "policies": mesh},
        "kernel": kernel(),
    }


def node(name: str) -> NodeFacts:
    other = "n2" if name == "n1" else "n1"
    return NodeFacts(
        dump=dump(name),
        check=check(name),
        clock_s=0.1,
        reached=[
            {"place": f"node {other}", "address": "10.0.0.9", "seconds": 0.01, "error": "", "largeArrives": True}
        ],
        agent={
            "kernel": kernel(),
            "rulesRefused": "",
            "iptables": {"legacy": [], "nft": ["filter", "nat"]},
            "probes": {"fault": "", "ebpf": ""},
            "cni": {
                "taken": "10-net.conflist",
                "plugins": ["bridge", "ztunnel-cni"],
                "program": True,
                "setAside": [],
            },
        },
        audit={"pods": [{"pod": f"shop/web-{name}", "findings": []}]},
    )


def healthy() -> Facts:
    ambient = {"istio.io/dataplane-mode": "ambient"}
    enabled = {"ambient.istio.io/redirection": "enabled"}
    scraped = {"prometheus.io/scrape": "true"}
    proxies = [
        pod(f"ztunnel-{n}", "istio-system", n, labels={"app": "ztunnel"}, annotations=scraped)
        for n in ("n1", "n2")
    ]
    webs = [pod(f"web-{n}", "shop", n, labels={"app": "web"}, annotations=enabled) for n in ("n1", "n2")]
    waypoint = pod("wp-1", "edge", "n1", labels={"gateway.networking.k8s.io/gateway-name": "wp"})
    injector = {
        "name": "x",
        "clientConfig": {"caBundle": encoded(authority().pem)},
        "namespaceSelector": {"matchExpressions": []} | {"matchLabels": {"a": "b"}},
    }
    objects: dict[str, Any] = {
        "Pod": [*proxies, *webs, waypoint, pod("istiod-1", "istio-system", "n1", labels={"app": "istiod"},
                spec={"containers": [{"name": "discovery", "image": "pilot:1.30.1"}]})],
        "Namespace": [
            item("shop", labels=ambient), item("istio-system"),
            item("edge", labels={"istio.io/use-waypoint": "wp"}),
        ],
        "Node": [item("n1"), item("n2")],
        "Service": [
            item("web", "shop", spec={
                "clusterIP": "10.96.0.1", "selector": {"app": "web"},
                "ports": [{"port": 80, "targetPort": 8080, "protocol": "TCP", "name": "http"}],
            }),
        ],
        "DaemonSet": [daemon_set("ztunnel"), daemon_set("ztunnel-agent")],
        "NetworkPolicy": [],
        "MutatingWebhookConfiguration": [item("ztunnel-injector", webhooks=[injector])],
        "AuthorizationPolicy": [
            item("allow", "shop", spec={
                "selector": {"matchLabels": {"app": "web"}},
                "rules": [{"from": [{"source": {"principals": [f"{TD}/ns/shop/sa/web"]}}],
                           "to": [{"operation": {"ports": ["8080"]}}]}],
            }),
        ],
        "PeerAuthentication": [], "ServiceEntry": [], "Sidecar": [], "EnvoyFilter": [], "Telemetry": [],
        "Gateway": [item("wp", "edge", spec={"gatewayClassName": "istio-waypoint"})],
        "PodMonitor": [], "PrometheusRule": [item("alerts", "istio-system", spec={"groups": "ztunnel_up"})],
        "CustomResourceDefinition": [
            item("gateways.gateway.networking.k8s.io",
                 annotations={"gateway.networking.k8s.io/bundle-version": "v1.3.0"}),
        ],
    }  # fmt: skip
    return Facts(
        now_s=NOW_S,
        version={"major": "1", "minor": "32+"},
        clock_s=0.0,
        objects=objects,
        access={"list pods": True},
        nodes={"n1": node("n1"), "n2": node("n2")},
    )
