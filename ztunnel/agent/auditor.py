"""Compares, once a minute, each pod with what it should be: repaired, or said why, in an Event of the pod.

Label and annotation are compared by :meth:`~ztunnel.agent.enroller.Enroller.recheck`, rules by the node agent.
Here are the listeners in the pod's namespace, which are asked for anew, and what the node's proxies say of
workloads and certificates on their admin port. That port is open on loopback only, so the agent asks from inside
the network namespace of each proxy's pod.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Self, TypeVar

from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect
from tproxy.errors import TproxyError
from ztunnel.agent.comparison import LISTENER_MISSING, Finding, ProxyView, ebpf_hint, findings, read_dump
from ztunnel.agent.enroller import Enroller
from ztunnel.agent.enrolment import Reason
from ztunnel.agent.namespaces import device_names, foreign_rules, listening_ports
from ztunnel.agent.phase import Phase
from ztunnel.istio.zds.pods import PodUid
from ztunnel.kube.kinds import NODE, POD
from ztunnel.kube.objects import EventSink, ObjectKey
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)
T = TypeVar("T")

_ADMIN_PORT: Final = 15000
_ASK_S: Final = 10.0
#: The dump of a mesh with 100,000 workloads is smaller.
_MOST_BYTES: Final = 128 * 1024 * 1024


class Auditor:
    """Compares pods while entered.

    Args:
        enroller: whose pods.
        events: is told what cannot be repaired.
        node: name of this node.
        interval_s: between two comparisons. A finding is said when two in a row have it.

    Attributes:
        findings: what the last comparison found, by pod.
    """

    def __init__(self, enroller: Enroller, events: EventSink, node: str, *, interval_s: float = 60.0) -> None:
        self._enroller = enroller
        self._events = events
        self._node = node
        self._interval_s = interval_s
        self._tasks = Tasks("auditor")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")
        self._said: dict[PodUid, frozenset[Finding]] = {}
        self.findings: dict[PodUid, frozenset[Finding]] = {}

    async def __aenter__(self) -> Self:
        self._tasks.keep(self._run, "audit")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self) -> None:
        try:
            hint = ebpf_hint(await self._in_thread(device_names))
        except (TproxyError, OSError) as error:
            log.warning("the node's devices are not known error=%s", error)
        else:
            if hint:
                log.warning("kubelet's probes of captured pods are at risk: %s", hint)
                self._events.event(ObjectKey(NODE.name, "", self._node), "MeshProbesAtRisk", hint)
        while True:
            await asyncio.sleep(self._interval_s)
            await self.compare()

    async def compare(self) -> None:
        """Compare every pod once."""
        if not self._enroller.synced:
            return
        self._enroller.recheck()
        views = await self._views()
        agent = self._enroller.agent
        before, self.findings = self.findings, {}
        for uid, (pod, decision, _) in self._enroller.pods().items():
            status, netns = agent.pod(uid), agent.netns(uid)
            settled = status is not None and status.phase is Phase.ENABLED and pod.annotation == "enabled"
            if not (decision.enrol and settled) or netns is None:
                continue
            try:
                # A duplicate: the pod may leave while the thread looks.
                with netns.duplicate() as space:
                    listening = await self._in_thread(partial(listening_ports, space))
                    foreign = await self._in_thread(partial(foreign_rules, space))
            except (TproxyError, OSError) as error:
                log.warning("pod not compared uid=%s error=%s", uid, error)
                continue
            found = frozenset(findings(pod, listening, foreign, views))
            if not found:
                continue
            self.findings[uid] = found
            lasting = found & before.get(uid, frozenset())
            for finding in sorted(lasting - self._said.get(uid, frozenset()), key=lambda each: each.reason):
                log.warning(
                    "%s uid=%s pod=%s/%s: %s", finding.reason, uid, pod.info.namespace, pod.info.name, finding.text
                )
                key = ObjectKey(POD.name, pod.info.namespace, pod.info.name)
                self._events.event(key, finding.reason, finding.text)
            if any(finding.reason == LISTENER_MISSING for finding in lasting):
                await agent.announce_anew(uid)
            self._said[uid] = lasting
        for uid in set(self._said) - set(self.findings):
            del self._said[uid]

    async def _views(self) -> list[ProxyView]:
        """Return what the proxies of the node say; one that does not answer is left out, with a line."""
        views = []
        for uid, (_, decision, _) in self._enroller.pods().items():
            if decision.reason is not Reason.PROXY:
                continue
            try:
                async with asyncio.timeout(_ASK_S):
                    path = await self._enroller.find(uid)
                    if path is None:
                        continue
                    with Netns.open(path) as netns:
                        body = await _get(netns, _ADMIN_PORT, "/config_dump")
                views.append(await self._in_thread(partial(read_dump, body)))
            except (TproxyError, OSError, ValueError, TimeoutError) as error:
                log.warning("the proxy's dump cannot be read uid=%s error=%s", uid, error or "no answer in time")
        return views

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _get(netns: Netns, port: int, path: str) -> bytes:
    """Return the body of a page in another network namespace.

    Raises:
        ValueError: another status than 200, or too long.
        TproxyError, OSError: no connection.
    """
    sock = await connect(("127.0.0.1", port), netns=netns)
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        # HTTP/1.0, so that the body ends with the connection.
        writer.write(f"GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n".encode())
        pieces, size = [], 0
        while data := await reader.read(1 << 18):
            pieces.append(data)
            size += len(data)
            if size > _MOST_BYTES:
                raise ValueError(f"{path} is longer than {_MOST_BYTES >> 20} MiB")
    finally:
        writer.close()
    head, _, body = b"".join(pieces).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split(b" ")
    if len(status) < 2 or status[1] != b"200":
        raise ValueError(f"{path}: {status[1:2] or 'no answer'}")
    return body
