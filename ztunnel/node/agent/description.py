"""The YAML file that describes the pods of a node to ``ztunnel agent``.

::

    pods:
      productpage:                        # a name, or namespace/name
        netns: cni-5c2e                   # name below /run/netns, or path ...
        pid: 4711                         # ... or a process in it
        service_account: bookinfo-productpage    # default: default
        uid: 0b2c...                      # default: namespace/name
        dns: true                         # false: DNS is not captured
        inbound: true                     # false: plaintext to the pod is not captured
        virtual_interfaces: [tap0]        # their connections count as sent by the pod
        new_connections_only: false       # true: connections open at enrolment bypass the proxy until they end

Names without a namespace are in ``default``. All faults are reported together, each with its place.
No input or output here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tproxy.inpod import Capture
from tproxy.resources import Version
from ztunnel.proxy.istio.zds.messages import AddPod, request_bytes
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid
from ztunnel.runtime.formats.config_reader import ConfigReader, Faults
from ztunnel.runtime.formats.file_kinds import FileKind, explained

_KEYS = (
    "netns",
    "pid",
    "service_account",
    "uid",
    "dns",
    "inbound",
    "virtual_interfaces",
    "new_connections_only",
)


class PodFaults(Faults):
    """A description of a node's pods is unusable; this lists all its faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDescription:
    """A pod to enrol in the mesh.

    Attributes:
        netns: the name below /run/netns, the path, or the process id.
        dns, inbound, virtual_interfaces, new_connections_only: see :class:`~tproxy.inpod.Capture`.
    """

    uid: PodUid
    info: PodInfo
    netns: str | int
    dns: bool = True
    inbound: bool = True
    virtual_interfaces: tuple[str, ...] = ()
    new_connections_only: bool = False

    def capture(self, versions: tuple[Version, ...], *, draining: bool = False) -> Capture:
        """Return what to capture in the pod's namespace, given the namespace's IP versions."""
        return Capture(
            versions=versions,
            dns=self.dns,
            inbound=self.inbound,
            virtual_interfaces=self.virtual_interfaces,
            new_connections_only=self.new_connections_only,
            draining=draining,
        )


def parse_pods(text: str) -> tuple[PodDescription, ...]:
    """Parse a description of the node's pods.

    Raises:
        PodFaults: with every fault.
    """
    reader = _Reader()
    pods = reader.pods(reader.document(text, ("pods",)))
    if reader.faults:
        raise PodFaults(explained(reader.faults, text, FileKind.PODS))
    return pods


class _Reader(ConfigReader):
    def pods(self, document: Mapping[str, Any]) -> tuple[PodDescription, ...]:
        found = []
        for name, value in self.mapping(document.get("pods"), "pods", None).items():
            pod = self.pod(str(name), value)
            if pod is not None:
                found.append(pod)
        for what in ("uid", "netns"):
            seen: dict[object, PodDescription] = {}
            for pod in found:
                other = seen.setdefault(getattr(pod, what), pod)
                if other is not pod:
                    names = f"{other.info.namespace}/{other.info.name}"
                    self.fault(f"pods.{pod.info.name}.{what}", f"is {names}'s already")
        return tuple(found)

    def pod(self, name: str, value: object) -> PodDescription | None:
        place = f"pods.{name}"
        before = len(self.faults)
        entry = self.mapping(value, place, _KEYS)
        namespace, slash, short = name.partition("/")
        if not slash:
            namespace, short = "default", name
        account = self.text(entry, "service_account", place, "default")
        for part in (namespace, short):
            self.plain_name(part, place)
        self.plain_name(account, f"{place}.service_account")
        uid = PodUid(self.text(entry, "uid", place, f"{namespace}/{short}"))
        if not uid:
            self.fault(f"{place}.uid", "must not be empty")
        pod = PodDescription(
            uid=uid,
            info=PodInfo(name=short, namespace=namespace, service_account=account),
            netns=self.where(entry, place),
            dns=self.flag(entry, "dns", place, default=True),
            inbound=self.flag(entry, "inbound", place, default=True),
            virtual_interfaces=self.interfaces(entry, place),
            new_connections_only=self.flag(entry, "new_connections_only", place, default=False),
        )
        if len(self.faults) > before:
            return None
        try:
            request_bytes(AddPod(pod.uid, pod.info))
        except ValueError:
            self.fault(place, "names and uid are too long to be announced")
        return pod

    def where(self, entry: Mapping[str, Any], place: str) -> str | int:
        netns, pid = entry.get("netns"), entry.get("pid")
        if (netns is None) == (pid is None):
            self.fault(place, "needs netns or pid, and not both")
        elif netns is not None:
            if isinstance(netns, str) and netns:
                return netns
            self.fault(f"{place}.netns", f"must be a name or a path, not {netns!r}")
        elif isinstance(pid, int) and not isinstance(pid, bool) and pid > 0:
            return pid
        else:
            self.fault(f"{place}.pid", f"must be a process id, not {pid!r}")
        return ""

    def interfaces(self, entry: Mapping[str, Any], place: str) -> tuple[str, ...]:
        listed = self.items(entry, "virtual_interfaces", place)
        return tuple(self.interface(name, f"{place}.virtual_interfaces") for name in listed)
