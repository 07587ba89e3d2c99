"""``ztunnel netpol run`` against an API server: its requests, its output, and its errors without permission."""

import asyncio
import io
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.kube.fake_api import FakeApi
from ztunnel.policy.netpol import add_arguments
from ztunnel.policy.netpol.command import DONE, FAILED
from ztunnel.policy.policysync.kinds import kept_pod

POD: dict[str, Any] = {
    "metadata": {
        "name": "a",
        "namespace": "x",
        "uid": "u",
        "labels": {"app": "web"},
        "annotations": {"ambient.istio.io/redirection": "enabled", "long": "text"},
        "managedFields": [{}],
    },
    "spec": {
        "nodeName": "n1",
        "serviceAccountName": "web",
        "containers": [
            {"name": "main", "env": [], "ports": [{"name": "http", "containerPort": 80}]},
            {"name": "no"},
        ],
    },
    "status": {"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}], "conditions": []},
}


async def _run(*words: str) -> tuple[int, str]:
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    out = io.StringIO()
    async with asyncio.timeout(WAIT_S):
        return await (args := parser.parse_args(["netpol", *words])).run(args, out, out), out.getvalue()


def test_the_table_of_an_api_servers_objects(tmp_path: Path) -> None:
    async def main() -> tuple[int, str]:
        api = FakeApi()
        async with api.serve():
            await api.put("namespaces", "", "x")
            await api.put("pods", "x", "a", spec=POD["spec"], status=POD["status"])
            await api.put("networkpolicies", "x", "deny", spec={"podSelector": {}, "ingress": []})
            config = str(api.kubeconfig(tmp_path))
            return await _run("run", "--kubeconfig", config, "--node", "n1", "--print")

    status, text = asyncio.run(main())
    assert status == DONE, text
    assert '10.0.0.1 comment "x/a" : goto pod-in-' in text
    assert "KubernetesNetworkPolicy/x/deny" in text


@pytest.mark.parametrize("follows", [True, False])
def test_calicos_policies_are_followed_where_they_are_asked_for(tmp_path: Path, follows: bool) -> None:
    async def main() -> tuple[int, str]:
        api = FakeApi()
        api.versions |= {"v3"}
        async with api.serve():
            await api.put("namespaces", "", "x")
            await api.put("pods", "x", "a", spec=POD["spec"], status=POD["status"])
            spec = {"selector": "all()", "ingress": [{"action": "Deny", "protocol": "UDP"}]}
            await api.put("globalnetworkpolicies.v3", "", "guard", spec=spec)
            await api.put("networkpolicies.v3", "x", "one", spec={"ingress": [{"action": "Allow"}]})
            await api.put("networkpolicies", "x", "one", spec={"podSelector": {}, "ingress": []})
            words = ["--calico"] if follows else []
            return await _run(
                "run", "--kubeconfig", str(api.kubeconfig(tmp_path)), "--node", "n1", "--print", *words
            )

    status, text = asyncio.run(main())
    assert status == DONE, text
    assert "KubernetesNetworkPolicy/x/one" in text
    assert ('"GlobalNetworkPolicy/guard' in text) is follows
    assert ('"NetworkPolicy/x/one' in text) is follows


@pytest.mark.parametrize("follows", [True, False])
def test_nodes_are_followed_where_they_are_asked_for(tmp_path: Path, follows: bool) -> None:
    rule = {"action": "Deny", "to": [{"nodes": {"matchLabels": {"role": "edge"}}}]}
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule]}

    async def main() -> tuple[int, str]:
        api = FakeApi()
        api.versions |= {"v1alpha1", "v1alpha2"}
        async with api.serve():
            await api.put("namespaces", "", "x")
            await api.put("pods", "x", "a", spec=POD["spec"], status=POD["status"])
            addresses = [{"type": "Hostname", "address": "n9"}, {"type": "InternalIP", "address": "192.168.0.9"}]
            await api.put("nodes", "", "n9", labels={"role": "edge"}, status={"addresses": addresses})
            await api.put("clusternetworkpolicies", "", "guard", spec=spec)
            words = ["--node-peers"] if follows else []
            return await _run(
                "run", "--kubeconfig", str(api.kubeconfig(tmp_path)), "--node", "n1", "--print", *words
            )

    status, text = asyncio.run(main())
    assert status == DONE, text
    assert ("192.168.0.9" in text) is follows
    assert ("egress: a rule about nodes" in text) is not follows


def test_a_kubeconfig_that_is_none_is_one_line(tmp_path: Path) -> None:
    status, text = asyncio.run(_run("run", "--kubeconfig", str(tmp_path / "none"), "--print"))
    assert status == FAILED
    assert text.count("\n") == 1
    assert "none" in text


def test_the_ranges_of_the_node_are_those_of_its_object(tmp_path: Path) -> None:
    async def main(**spec: Any) -> tuple[int, str]:
        api = FakeApi()
        async with api.serve():
            await api.put("nodes", "", "n1", spec=spec)
            config = str(api.kubeconfig(tmp_path))
            return await _run("run", "--kubeconfig", config, "--node", "n1", "--pod-cidr", "node", "--print")

    status, text = asyncio.run(main(podCIDR="10.1.0.0/24", podCIDRs=["10.1.0.0/24", "fd00:1::/64"]))
    assert status == DONE, text
    assert "10.1.0.0-10.1.0.255" in text
    assert "fd00:1::-fd00:1::ffff:ffff:ffff:ffff" in text
    assert asyncio.run(main()) == (
        FAILED,
        "ztunnel netpol: --pod-cidr node: Node n1 has no spec.podCIDRs; give its ranges instead\n",
    )


def test_the_ranges_of_a_node_need_an_api_server(tmp_path: Path) -> None:
    status, text = asyncio.run(_run("run", "--objects", str(tmp_path), "--pod-cidr", "node"))
    assert (status, text) == (FAILED, "ztunnel netpol: --pod-cidr node: needs the API server, not --objects\n")


def test_a_range_that_is_none_is_one_line(tmp_path: Path) -> None:
    status, text = asyncio.run(_run("run", "--objects", str(tmp_path), "--pod-cidr", "10.0.0.0/33"))
    assert (status, text) == (FAILED, "ztunnel netpol: --pod-cidr: '10.0.0.0/33' is no network\n")


def test_a_socket_for_proxies_that_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    status, text = asyncio.run(_run("run", "--objects", str(tmp_path), "--policy-sync", f"{tmp_path}/no/socket"))
    assert status == FAILED
    assert text.startswith(f"ztunnel netpol: --policy-sync: cannot serve on unix:{tmp_path}/no/socket: ")
    assert text.count("\n") == 1


def test_once_ends_at_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """It may hold the policy that closes a pod. A command that runs once cannot wait until it is mended."""
    (tmp_path / "good.yaml").write_text("kind: Namespace\nmetadata: {name: x}\n")
    (tmp_path / "bad.yaml").write_text("kind: {")
    status, text = asyncio.run(_run("run", "--objects", str(tmp_path), "--once"))
    assert status == FAILED
    assert text.startswith(f"ztunnel netpol: {tmp_path}/bad.yaml: ")


def test_of_a_pod_the_part_that_policies_are_about_is_kept() -> None:
    assert kept_pod({"apiVersion": "v1", "kind": "Pod", **POD}) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "a",
            "namespace": "x",
            "uid": "u",
            "labels": {"app": "web"},
            "annotations": {"ambient.istio.io/redirection": "enabled"},
        },
        "spec": {
            "nodeName": "n1",
            "serviceAccountName": "web",
            "containers": [{"ports": [{"name": "http", "containerPort": 80}]}],
        },
        "status": {"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}]},
    }


@pytest.mark.parametrize("part", ["metadata", "spec", "status"])
def test_a_pod_without_a_part_is_kept_without_it(part: str) -> None:
    pod = {key: value for key, value in POD.items() if key != part}
    assert kept_pod(pod)[part] == {}
