"""A cluster for benches of network policy: namespaces, pods and policies as the API server has them."""

from collections.abc import Iterator
from typing import Any

NODES = 40


def namespace(number: int) -> dict[str, Any]:
    """Return a namespace, one of ten teams'."""
    name = f"ns-{number}"
    labels = {"kubernetes.io/metadata.name": name, "team": f"team-{number % 10}"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def pod(number: int, namespaces: int) -> dict[str, Any]:
    """Return a pod; there are 20 applications, and every fortieth pod is on one node."""
    address = f"10.{number >> 16 & 63}.{number >> 8 & 255}.{number & 255}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"pod-{number}",
            "namespace": f"ns-{number % namespaces}",
            "uid": f"u-{number}",
            "labels": {"app": f"app-{number // namespaces % 20}", "tier": "front" if number % 3 else "back"},
        },
        "spec": {
            "nodeName": f"node-{number // namespaces % NODES}",
            "containers": [{"name": "main", "ports": [{"name": "http", "containerPort": 8080}]}],
        },
        "status": {"phase": "Running", "podIPs": [{"ip": address}]},
    }


def policy(number: int, namespaces: int) -> dict[str, Any]:
    """Return one of four kinds of policy for an application of a namespace."""
    app = {"matchLabels": {"app": f"app-{number // namespaces % 20}"}}
    other = {"matchLabels": {"app": f"app-{(number // namespaces + 1) % 20}"}}
    team = {"matchLabels": {"team": f"team-{number % 10}"}}
    rules: list[dict[str, Any]] = [
        {"from": [{"podSelector": other}], "ports": [{"port": 8080}]},
        {"from": [{"podSelector": other, "namespaceSelector": team}], "ports": [{"port": "http"}]},
        {"from": [{"ipBlock": {"cidr": "192.0.2.0/24", "except": [f"192.0.2.{number % 250}/32"]}}]},
        {"from": [{"podSelector": {}}], "ports": [{"port": 80, "endPort": 90}, {"protocol": "UDP", "port": 53}]},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"policy-{number}", "namespace": f"ns-{number % namespaces}"},
        "spec": {"podSelector": app, "policyTypes": ["Ingress"], "ingress": [rules[number % 4], rules[0]]},
    }


def cluster(pods: int, policies: int, namespaces: int = 100) -> Iterator[dict[str, Any]]:
    """Yield all objects of a cluster."""
    yield from map(namespace, range(namespaces))
    yield from (pod(number, namespaces) for number in range(pods))
    yield from (policy(number, namespaces) for number in range(policies))
