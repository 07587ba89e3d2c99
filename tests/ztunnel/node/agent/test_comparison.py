"""What is wrong with a pod that says it is in the mesh."""

import json
from ipaddress import ip_address
from typing import Any

import pytest

from ztunnel.node.agent.comparison import PORTS, ebpf_hint, findings, read_dump
from ztunnel.node.agent.enrolment import Pod
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

INFO = PodInfo(name="web", namespace="shop", service_account="till")
POD = Pod(uid=PodUid("u"), info=INFO, addresses=frozenset({ip_address("10.0.0.1"), ip_address("fd00::1")}))
WORKLOAD = {
    "name": "web",
    "namespace": "shop",
    "protocol": "HBONE",
    "workloadIps": ["10.0.0.1"],
    "status": "Healthy",
}
CERTIFICATE = {"identity": "spiffe://cluster.local/ns/shop/sa/till", "state": "Available", "certChain": []}


def dump(
    served: str = "Up", workload: dict[str, Any] | None = WORKLOAD, certificate: dict[str, Any] | None = None
) -> bytes:
    return json.dumps(
        {
            "workloadState": {"u": {"state": served, "connections": {}}} if served else {},
            "workloads": [workload] if workload else [],
            "certificates": [CERTIFICATE | (certificate or {})],
            "services": [{"name": "anything"}],
        }
    ).encode()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (dump(), ""),
        (dump("Draining"), "MeshNotServed: the node's proxy does not serve this pod: Draining"),
        (dump(""), "MeshNotServed: the node's proxy does not serve this pod: unknown to it"),
        (dump(workload=None), "MeshWorkloadWrong: the control plane has not described this pod"),
        (
            dump(workload=WORKLOAD | {"protocol": "TCP"}),
            "MeshWorkloadWrong: the control plane describes this pod as TCP",
        ),
        (
            dump(workload=WORKLOAD | {"workloadIps": ["10.9.9.9", "x"]}),
            "MeshWorkloadWrong: the control plane lists addresses",
        ),
        (
            dump(certificate={"identity": "spiffe://d/ns/shop/sa/other"}),
            "MeshCertificateMissing: the proxy has no certificate for account shop/till: not asked",
        ),
        (
            dump(certificate={"state": "Unavailable: no CA"}),
            "MeshCertificateMissing: the proxy has no certificate for account shop/till: Unavailable: no CA",
        ),
    ],
)
def test_differences_between_a_pod_and_its_proxy_are_found(page: bytes, said: str) -> None:
    found = [f"{each.reason}: {each.text}" for each in findings(POD, PORTS, (), [read_dump(page)])]
    assert len(found) == bool(said)
    assert all(line.startswith(said) for line in found)


def test_listeners_and_other_agents() -> None:
    [listener] = findings(POD, {15001, 15008}, (), [read_dump(dump())])
    assert listener.text == "nothing listens on port 15006: connections are refused"
    [two] = findings(POD, PORTS, {"istio-ambient-nat output"}, [])
    assert "another mesh agent has rules in this pod (istio-ambient-nat output)" in two.text
    # Without a proxy's answer there are no findings about it. With two proxies, one that serves the pod is enough.
    assert findings(POD, PORTS, (), []) == []
    assert findings(POD, PORTS, (), [read_dump(dump("")), read_dump(dump())]) == []


@pytest.mark.parametrize("page", [b"", b"[]", b'{"workloads": 7}', b'{"workloadState": {"u": 1}}'])
def test_what_is_no_dump_is_refused(page: bytes) -> None:
    with pytest.raises(ValueError, match="not a dump of a ztunnel"):
        read_dump(page)


def test_networks_that_disturb_probes_are_named() -> None:
    assert ebpf_hint(["lo", "eth0", "cali123"]) == ""
    assert "bpf.masquerade=false" in ebpf_hint(["lo", "cilium_host"])
    assert "Calico" in ebpf_hint(["bpfin.cali"])
