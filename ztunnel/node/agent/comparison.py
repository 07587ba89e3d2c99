"""Compares a pod that is in the mesh with what its namespace, its proxy and the control plane show. Pure.

Peers send tunnels to a pod with the annotation ``enabled``. This module finds silent faults of such a pod (a proxy
without its listeners, a control plane that lacks the pod or has it outside the mesh, a missing certificate, a
second agent's rules) and describes them for the owner of the pod.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

import msgspec

from tproxy.inpod import INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, TUNNEL_PORT
from tproxy.resources import IpAddress
from ztunnel.node.agent.enrolment import Pod

#: The ports on which a proxy listens in every pod that it serves.
PORTS: Final = (OUTBOUND_PORT, INBOUND_PLAINTEXT_PORT, TUNNEL_PORT)
LISTENER_MISSING, NOT_SERVED, WORKLOAD_WRONG, NO_CERTIFICATE, TWO_AGENTS = (
    "MeshListenerMissing",
    "MeshNotServed",
    "MeshWorkloadWrong",
    "MeshCertificateMissing",
    "MeshTwoAgents",
)

#: The kinds of findings that become Events of the pod if they last. Events about failures of the agent itself have
#: the reason ``MeshEnrollFailed``.
TOLD: Final = frozenset({LISTENER_MISSING, NOT_SERVED, WORKLOAD_WRONG, NO_CERTIFICATE, TWO_AGENTS})


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a pod: its kind, which is the Event's reason, and a sentence."""

    reason: str
    text: str


class _Workload(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    protocol: str = ""
    addresses: list[str] = msgspec.field(name="workloadIps", default_factory=list)


class _Certificate(msgspec.Struct):
    identity: str = ""
    state: Any = ""


class _Dump(msgspec.Struct):
    workloads: list[_Workload] = msgspec.field(default_factory=list)
    certificates: list[_Certificate] = msgspec.field(default_factory=list)
    pods: dict[str, dict[str, Any]] = msgspec.field(name="workloadState", default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProxyView:
    """The parts of a proxy's ``/config_dump``, ours or the Rust ztunnel's, that are compared.

    Attributes:
        pods: the state of each pod that the proxy serves, by uid; ``Up`` is good.
        workloads: protocol and addresses by namespace and name.
        certificates: state by the namespace and account of the identity; ``Available`` is good.
    """

    pods: Mapping[str, str]
    workloads: Mapping[tuple[str, str], tuple[str, frozenset[IpAddress]]]
    certificates: Mapping[tuple[str, str], str]


def read_dump(body: bytes) -> ProxyView:
    """Return the compared parts of a proxy's dump.

    Raises:
        ValueError: the page is not a ztunnel's dump.
    """
    try:
        dump = msgspec.json.decode(body, type=_Dump)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a dump of a ztunnel: {error}") from None
    certificates = {}
    for certificate in dump.certificates:
        parts = certificate.identity.split("/")  # spiffe://<domain>/ns/<namespace>/sa/<account>
        if len(parts) == 7 and (parts[3], parts[5]) == ("ns", "sa"):
            certificates[parts[4], parts[6]] = str(certificate.state)
    return ProxyView(
        {uid: str(entry.get("state", "")) for uid, entry in dump.pods.items()},
        {(each.namespace, each.name): (each.protocol, _addresses(each.addresses)) for each in dump.workloads},
        certificates,
    )


def findings(
    pod: Pod, listening: Collection[int], foreign: Collection[str], proxies: Collection[ProxyView]
) -> list[Finding]:
    """Return the findings about a pod whose annotation says that it is in the mesh.

    Args:
        pod: the pod.
        listening: ports with a listener in its namespace.
        foreign: tables and chains of another mesh agent in its namespace.
        proxies: the node's proxies. Empty if none answered, which is no fault of the pod.
    """
    found = []
    missing = [str(port) for port in PORTS if port not in listening]
    if missing:
        found.append(
            Finding(LISTENER_MISSING, f"nothing listens on port {', '.join(missing)}: connections are refused")
        )
    if foreign:
        what = ", ".join(sorted(foreign))
        found.append(
            Finding(
                TWO_AGENTS,
                f"another mesh agent has rules in this pod ({what}): restart it; a node must have only one agent",
            )
        )
    serving = [proxy for proxy in proxies if pod.uid in proxy.pods]
    if proxies and not any(proxy.pods[pod.uid] == "Up" for proxy in serving):
        states = ", ".join(sorted({proxy.pods[pod.uid] for proxy in serving})) or "unknown to it"
        found.append(Finding(NOT_SERVED, f"the node's proxy does not serve this pod: {states}"))
    if serving:
        proxy = serving[-1]
        found += _workload(pod, proxy)
        if not found:
            found += _certificate(pod, proxy)
    return found


def _workload(pod: Pod, proxy: ProxyView) -> Iterable[Finding]:
    known = proxy.workloads.get((pod.info.namespace, pod.info.name))
    if known is None:
        yield Finding(WORKLOAD_WRONG, "the control plane has not described this pod to its proxy")
        return
    protocol, addresses = known
    if protocol != "HBONE":
        yield Finding(
            WORKLOAD_WRONG,
            f"the control plane describes this pod as {protocol}, so peers send plaintext to it",
        )
    if pod.addresses and not addresses & pod.addresses:
        listed = ", ".join(sorted(map(str, addresses))) or "no address"
        yield Finding(WORKLOAD_WRONG, f"the control plane lists addresses that this pod does not have: {listed}")


def _certificate(pod: Pod, proxy: ProxyView) -> Iterable[Finding]:
    state = proxy.certificates.get((pod.info.namespace, pod.info.service_account))
    if state != "Available":
        account = f"{pod.info.namespace}/{pod.info.service_account}"
        yield Finding(
            NO_CERTIFICATE, f"the proxy has no certificate for account {account}: {state or 'not asked'}"
        )


def ebpf_hint(devices: Iterable[str]) -> str:
    """Return a sentence about network devices of data planes that can block kubelet's probes of captured pods.
    Empty without such devices.

    Args:
        devices: names of the node's network devices.
    """
    names = set(devices)
    if "cilium_host" in names:
        return (
            "Cilium: with BPF masquerading or kube-proxy replacement it drops probes from 169.254.7.127; "
            "set bpf.masquerade=false, socketLB.hostNamespaceOnly=true and cni.exclusive=false"
        )
    if any(name.startswith(("bpfin.cali", "bpfout.cali")) for name in names):
        return "Calico's eBPF data plane: it may drop probes from 169.254.7.127; allow that source in its policies"
    return ""


def _addresses(texts: Iterable[str]) -> frozenset[IpAddress]:
    found = set()
    for text in texts:
        try:
            found.add(ip_address(text))
        except ValueError:
            pass
    return frozenset(found)
