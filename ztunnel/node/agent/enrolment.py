"""Decides which of a node's pods are in the mesh, and what to do next about one. Pure.

A label states the intent, an annotation the status: ``istio.io/dataplane-mode`` on a pod or its namespace requests
the mesh, and the agent writes ``ambient.istio.io/redirection`` once the pod is enrolled. Control planes send
tunnels to a pod only while that annotation is ``enabled``. Labels, annotations and their meaning are istio-cni's.

:func:`decide` returns whether a pod belongs to the mesh. :func:`step` compares that with the annotation and with
the node agent's state, and returns one action. It is called again until no action is left; then label, annotation
and agent agree. Both functions are stateless, so they treat a restarted agent, a rebooted node, and an annotation
changed by a person alike.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from ipaddress import ip_address
from typing import Any, Final

from tproxy.resources import IpAddress
from ztunnel.kube.objects import Object
from ztunnel.node.agent.description import PodDescription
from ztunnel.node.agent.phase import Phase
from ztunnel.proxy.istio.zds.messages import AddPod, request_bytes
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid
from ztunnel.runtime.formats.config_reader import ConfigReader
from ztunnel.runtime.formats.go_values import parse_bool

MODE: Final = "istio.io/dataplane-mode"
REDIRECTION: Final = "ambient.istio.io/redirection"
SIDECAR: Final = "sidecar.istio.io/status"
BYPASS_INBOUND: Final = "ambient.istio.io/bypass-inbound-capture"
DNS_CAPTURE: Final = "ambient.istio.io/dns-capture"
VIRTUAL_INTERFACES: Final = "istio.io/reroute-virtual-interfaces"
#: The annotation with the kubelet's id of a static pod. The pod's mirror in the API has another uid.
_STATIC_ID: Final = "kubernetes.io/config.hash"


class Reason(StrEnum):
    """The row of the decision table that matched. Used in logs."""

    ENDED = "ended"
    HOST_NETWORK = "host-network"
    SIDECAR = "sidecar"
    PROXY = "proxy"
    EXCLUDED_NAMESPACE = "excluded-namespace"
    POD_IN = "pod-label"
    POD_OUT = "pod-opted-out"
    NAMESPACE_IN = "namespace-label"
    NAMESPACE_UNKNOWN = "namespace-unknown"
    NOT_ASKED = "not-asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The configured part of the decision table.

    Attributes:
        excluded: namespaces whose pods are never in the mesh, regardless of their labels.
        system_namespace: the proxies' namespace. They are labelled ``app: ztunnel``. Empty if there are none.
        dns: whether to capture DNS of pods whose annotations do not decide it.
        new_connections_only: see :class:`~tproxy.inpod.Capture`.
    """

    excluded: frozenset[str] = frozenset({"kube-system"})
    system_namespace: str = "istio-system"
    dns: bool = True
    new_connections_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The attributes of a pod that a node agent needs.

    Attributes:
        ids: the uid, and for a static pod also the id in its cgroup.
        addresses: its IPs; none until the kubelet has reported them.
        ended: whether the pod has run to completion, and will not run again.
        ending: whether it is being deleted. Its sandbox can be gone before the API server removes it.
        annotation: the value of ``REDIRECTION``, None without one.
    """

    uid: PodUid
    info: PodInfo
    ids: frozenset[str] = frozenset()
    addresses: frozenset[IpAddress] = frozenset()
    ended: bool = False
    ending: bool = False
    host_network: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, Any] = field(default_factory=dict)

    @property
    def annotation(self) -> str | None:
        """The value of the annotation that says whether the pod is in the mesh."""
        value = self.annotations.get(REDIRECTION)
        return value if isinstance(value, str) else None


class Misshapen(ValueError):
    """The agent cannot handle an object as a pod; the text says why."""


def read_pod(value: Object) -> Pod:
    """Read a pod as the API server wrote it.

    Raises:
        Misshapen: it has no name or uid, or they are too long for the protocol to proxies.
    """
    metadata, spec, status = (_mapping(value, name) for name in ("metadata", "spec", "status"))
    name, namespace, uid = (metadata.get(key) for key in ("name", "namespace", "uid"))
    if not (isinstance(name, str) and name and isinstance(namespace, str) and namespace):
        raise Misshapen("it has no name or namespace")
    if not (isinstance(uid, str) and uid):
        raise Misshapen("it has no uid")
    account = spec.get("serviceAccountName")
    info = PodInfo(
        name=name,
        namespace=namespace,
        service_account=account if isinstance(account, str) and account else "default",
    )
    try:
        request_bytes(AddPod(PodUid(uid), info))
    except ValueError:
        raise Misshapen("its names and uid are too long to be announced") from None
    annotations = _mapping(metadata, "annotations")
    static = annotations.get(_STATIC_ID)
    listed = status.get("podIPs")
    ips = [entry.get("ip") for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    return Pod(
        uid=PodUid(uid),
        info=info,
        ids=frozenset({uid, static} if isinstance(static, str) and static else {uid}),
        addresses=frozenset(_addresses([status.get("podIP"), *ips])),
        ended=status.get("phase") in ("Succeeded", "Failed"),
        ending=bool(metadata.get("deletionTimestamp")),
        host_network=spec.get("hostNetwork") is True,
        labels=_mapping(metadata, "labels"),
        annotations=annotations,
    )


def kept(value: Object) -> Object:
    """Return the part of a pod that :func:`read_pod` uses. An informer stores only this part."""
    metadata, spec, status = (_mapping(value, name) for name in ("metadata", "spec", "status"))
    return {
        "kind": value.get("kind"),
        "metadata": {
            key: metadata[key]
            for key in ("name", "namespace", "uid", "labels", "annotations", "deletionTimestamp")
            if key in metadata
        },
        "spec": {key: spec[key] for key in ("serviceAccountName", "hostNetwork") if key in spec},
        "status": {key: status[key] for key in ("phase", "podIP", "podIPs") if key in status},
    }


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a pod: whether it must be in the mesh, and the row of the table that matched."""

    enrol: bool
    reason: Reason


def decide(pod: Pod, namespace: Mapping[str, Any] | None, settings: Settings) -> Decision:
    """Decide whether a pod must be in the mesh. The first matching row of the table decides.

    Args:
        pod: the pod.
        namespace: the labels of its namespace. None if they are unknown. If they would decide, the reason is
            ``NAMESPACE_UNKNOWN``, and the pod must stay as it is until they are known.
        settings: the configuration.
    """
    mode = pod.labels.get(MODE)
    if pod.host_network:
        # The pod is in the host network: its connections are the node's, and no rule may redirect those.
        return Decision(False, Reason.HOST_NETWORK)
    if SIDECAR in pod.annotations:
        return Decision(False, Reason.SIDECAR)
    if pod.info.namespace == settings.system_namespace and pod.labels.get("app") == "ztunnel":
        return Decision(False, Reason.PROXY)
    if pod.info.namespace in settings.excluded:
        return Decision(False, Reason.EXCLUDED_NAMESPACE)
    if pod.ended:
        return Decision(False, Reason.ENDED)
    if mode == "ambient":
        return Decision(True, Reason.POD_IN)
    if mode == "none":
        return Decision(False, Reason.POD_OUT)
    # An unknown value on a pod is ignored, like in Istio, and the namespace's label counts.
    if namespace is None:
        return Decision(False, Reason.NAMESPACE_UNKNOWN)
    if namespace.get(MODE) == "ambient":
        return Decision(True, Reason.NAMESPACE_IN)
    return Decision(False, Reason.NOT_ASKED)


def describe(pod: Pod, netns: str | int, settings: Settings) -> tuple[PodDescription, list[str]]:
    """Return the description that the node agent uses to enrol a pod, and a line for each ignored annotation."""
    ignored = ConfigReader()

    def flag(key: str, default: bool) -> bool:
        value = pod.annotations.get(key)
        if value is None:
            return default
        try:
            return parse_bool(value if isinstance(value, str) else "")
        except ValueError:
            ignored.fault(f"annotation {key}", f"is ignored: it must be true or false, not {value!r}")
            return default

    listed = pod.annotations.get(VIRTUAL_INTERFACES)
    devices = []
    for name in str(listed).split(",") if listed else ():
        before = len(ignored.faults)
        device = ignored.interface(name.strip(), f"annotation {VIRTUAL_INTERFACES}")
        if len(ignored.faults) == before:
            devices.append(device)
    description = PodDescription(
        uid=pod.uid,
        info=pod.info,
        netns=netns,
        dns=flag(DNS_CAPTURE, settings.dns),
        inbound=not flag(BYPASS_INBOUND, False),
        virtual_interfaces=tuple(dict.fromkeys(devices)),
        new_connections_only=settings.new_connections_only,
    )
    return description, ignored.faults


class Step(Enum):
    """The next action for a pod. Each action can be repeated safely."""

    NOTHING = "nothing"
    ENROL = "enrol"  # rules, then the proxy
    SAY_ENABLED = "say enabled"
    SAY_PENDING = "say pending"
    SAY_OUT = "say out"  # remove the annotation
    RELEASE = "release"  # let its connections end, then remove the rules
    DROP = "drop"  # its processes have ended, so there are no connections to wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The known state of one pod at one time.

    Attributes:
        enrol: the decision.
        undecided: whether the decision depends on a namespace that is not known yet.
        ended: whether it is gone from the API, or will not run again.
        reachable: whether it has an address, or the container runtime has named its namespace.
        annotation: in the API. None also for a deleted pod.
        phase: with the node agent. None if the agent has no known rules in the pod.
        left_over: whether an earlier agent put rules into it, and this agent has not examined it yet.
        current: whether its rules match its annotations, in its present namespace.
        failing: whether enrolment has failed more than once, and no rule redirects to a proxy.
    """

    enrol: bool
    undecided: bool = False
    ended: bool = False
    reachable: bool = True
    annotation: str | None = None
    phase: Phase | None = None
    left_over: bool = False
    current: bool = True
    failing: bool = False


def step(at: Situation) -> Step:
    """Return the next action for a pod in a given situation."""
    held = at.phase is not None or at.left_over
    if at.ended:
        if held:
            return Step.DROP
        return Step.SAY_OUT if at.annotation is not None else Step.NOTHING
    if at.undecided:
        return Step.NOTHING
    if not at.enrol:
        # This is the first step, so that peers stop sending tunnels while the proxy still accepts them.
        if at.annotation is not None:
            return Step.SAY_OUT
        return Step.RELEASE if held and at.phase is not Phase.LEAVING else Step.NOTHING
    if at.phase is None or at.phase is Phase.LEAVING or not at.current:
        if at.failing and at.phase is None and at.annotation is not None:
            # The pod accepts no tunnels, so its annotation must not ask peers to send them.
            return Step.SAY_OUT
        return Step.ENROL if at.reachable else Step.NOTHING
    if at.phase is Phase.ENABLED:
        return Step.NOTHING if at.annotation == "enabled" else Step.SAY_ENABLED
    # The pod is pending. The annotation ``enabled`` stays: a proxy can be serving the pod while it is disconnected
    # from this agent.
    return Step.NOTHING if at.annotation in ("pending", "enabled") else Step.SAY_PENDING


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = value.get(name)
    return inner if isinstance(inner, Mapping) else {}


def _addresses(texts: Collection[object]) -> list[IpAddress]:
    found = []
    for text in texts:
        try:
            found.append(ip_address(text if isinstance(text, str) else ""))
        except ValueError:
            pass
    return found
