"""Compares each pod with its desired state once a minute. Repairs it, or reports the fault in an Event.

:meth:`~ztunnel.node.agent.enroller.Enroller.recheck` compares label and annotation, and the node agent compares
rules. This module checks the listeners in the pod's namespace, and the workloads and certificates that the node's
proxies report on their admin port. That port is open on loopback only, so the agent connects from inside the
network namespace of each proxy's pod.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Self, TypeVar

from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect
from tproxy.errors import TproxyError
from ztunnel.kube.kinds import NODE, POD
from ztunnel.kube.objects import EventSink, ObjectKey
from ztunnel.node.agent.audit import RULES_CHANGED, Audited, own_findings, page, repaired
from ztunnel.node.agent.comparison import (
    LISTENER_MISSING,
    TOLD,
    Finding,
    ProxyView,
    ebpf_hint,
    findings,
    read_dump,
)
from ztunnel.node.agent.enroller import Enroller
from ztunnel.node.agent.enrolment import Decision, Pod, Reason
from ztunnel.node.agent.namespaces import device_names, foreign_rules, listening_ports, wrong_rules
from ztunnel.node.agent.phase import Phase
from ztunnel.proxy.istio.zds.pods import PodUid
from ztunnel.runtime.http.client import ask
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)
T = TypeVar("T")

_ADMIN_PORT: Final = 15000
_ASK_S: Final = 10.0
#: The time limit for a requested repair. Unfinished steps continue in the background.
_REPAIR_S: Final = 10.0
#: The longest page that is read, which is larger than the dump of a mesh with 100,000 workloads.
_MOST_BYTES: Final = 128 * 1024 * 1024


class Auditor:
    """Compares pods while entered.

    Args:
        enroller: follows the pods.
        events: reports findings that cannot be repaired.
        node: name of this node.
        interval_s: the time between two comparisons. A finding is reported if two comparisons in a row have it.

    Attributes:
        audited: the result of the last comparison for every pod of the node.
        findings: by pod, the findings of the last periodic comparison. Those that last are reported.
    """

    def __init__(self, enroller: Enroller, events: EventSink, node: str, *, interval_s: float = 60.0) -> None:
        self._enroller = enroller
        self._events = events
        self._node = node
        self._interval_s = interval_s
        self._tasks = Tasks("auditor")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit")
        self._said: dict[PodUid, frozenset[Finding]] = {}
        self._turn = asyncio.Lock()
        self._asked = 0
        #: The devices of other data planes on the node that can block kubelet's probes of captured pods, as text.
        self.hint = ""
        self.audited: dict[PodUid, Audited] = {}
        self.findings: dict[PodUid, frozenset[Finding]] = {}

    async def __aenter__(self) -> Self:
        self._tasks.keep(self._run, "audit")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run(self) -> None:
        try:
            self.hint = hint = ebpf_hint(await self._in_thread(device_names))
        except (TproxyError, OSError) as error:
            log.warning("the node's devices are not known error=%s", plain_reason(error))
        else:
            if hint:
                log.warning("kubelet's probes of captured pods are at risk: %s", hint)
                self._events.event(ObjectKey(NODE.name, "", self._node), "MeshProbesAtRisk", hint)
        while True:
            await asyncio.sleep(self._interval_s)
            await self.compare()

    async def compare(self) -> None:
        """Compare every pod once, start repairs of the parts that the agent writes, and report lasting
        findings.
        """
        if not self._enroller.synced:
            return
        async with self._turn:
            await self._examine()
            self._enroller.recheck()
            agent = self._enroller.agent
            before, self.findings = self.findings, {}
            for uid, audited in self.audited.items():
                pod, found = audited.pod, frozenset(each for each in audited.findings if each.reason in TOLD)
                if not found:
                    continue
                self.findings[uid] = found
                lasting = found & before.get(uid, frozenset())
                for finding in sorted(lasting - self._said.get(uid, frozenset()), key=lambda each: each.reason):
                    name = f"{pod.info.namespace}/{pod.info.name}"
                    log.warning("%s uid=%s pod=%s: %s", finding.reason, uid, name, finding.text)
                    key = ObjectKey(POD.name, pod.info.namespace, pod.info.name)
                    self._events.event(key, finding.reason, finding.text)
                if any(finding.reason == LISTENER_MISSING for finding in lasting):
                    await agent.announce_anew(uid)
                self._said[uid] = lasting
            for uid in set(self._said) - set(self.findings):
                del self._said[uid]

    async def report(self, *, repair: bool = False) -> dict[str, Any]:
        """Compare every pod now, and return the page :func:`ztunnel.node.agent.audit.page`.

        Args:
            repair: repair the parts that the agent writes, then compare again.
        """
        async with self._turn:
            await self._examine()
            if not repair:
                return page(self._node, self._asked, self.audited.values())
            before = dict(self.audited)
            await self._repair()
            await self._examine()
            done = []
            for uid, audited in before.items():
                named = f"{audited.pod.info.namespace}/{audited.pod.info.name}"
                done += [(named, each) for each in repaired(audited, self.audited.get(uid))]
            return page(self._node, self._asked, self.audited.values(), done)

    async def _repair(self) -> None:
        """Repair the parts that the agent writes. Return when all steps are done, or after ``_REPAIR_S``."""
        enroller, agent = self._enroller, self._enroller.agent
        for uid, audited in self.audited.items():
            reasons = {finding.reason for finding in audited.findings}
            if RULES_CHANGED in reasons:
                await agent.repair(uid)
            if LISTENER_MISSING in reasons:
                await agent.announce_anew(uid)
        enroller.recheck()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPAIR_S):
                # This polls, because the steps have no common event. A failing step is repeated without limit, so
                # the time is limited.
                while True:
                    if not enroller.waiting:
                        break
                    await asyncio.sleep(0.05)

    async def _examine(self) -> None:
        """Compare every pod of the node, without changes."""
        views = await self._views()
        audited = {}
        for uid, (pod, decision, fault) in self._enroller.pods().items():
            status = self._enroller.agent.pod(uid)
            looked = await self._look(uid, pod, decision, views)
            compared, changes, found = looked if looked is not None else (False, 0, [])
            found += own_findings(pod, self._enroller.next_step(uid), changes, fault)
            audited[uid] = Audited(
                pod=pod,
                decision=decision,
                phase=status.phase if status is not None else None,
                compared=compared,
                asked=bool(views),
                findings=frozenset(found),
                fault=fault,
            )
        self._asked = len(views)
        self.audited = audited

    async def _look(
        self, uid: PodUid, pod: Pod, decision: Decision, views: list[ProxyView]
    ) -> tuple[bool, int, list[Finding]] | None:
        """Examine the namespace of an enrolled pod. Return ``None`` for any other pod.

        Returns:
            Whether the namespace could be examined, the number of wrong rules, and the other findings.
        """
        agent = self._enroller.agent
        status, netns = agent.pod(uid), agent.netns(uid)
        if status is None or netns is None or not decision.enrol or status.phase is not Phase.ENABLED:
            return None
        try:
            # The thread works on a duplicate of the namespace's descriptor, because the pod can leave and close it
            # meanwhile.
            with netns.duplicate() as space:
                listening = await self._in_thread(partial(listening_ports, space))
                foreign = await self._in_thread(partial(foreign_rules, space))
                changes = await self._in_thread(partial(wrong_rules, space, status.description))
        except (TproxyError, OSError) as error:
            log.warning("pod not compared uid=%s error=%s", uid, plain_reason(error))
            return False, 0, []
        # Before the annotation is set, the pod is not expected to work.
        settled = pod.annotation == "enabled"
        return True, changes, findings(pod, listening, foreign, views) if settled else []

    async def _views(self) -> list[ProxyView]:
        """Return the answers of the node's proxies. A proxy that does not answer is left out, with a log line."""
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
                log.warning("the proxy's dump cannot be read uid=%s error=%s", uid, plain_reason(error))
        return views

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def _get(netns: Netns, port: int, path: str) -> bytes:
    """Return the body of a page in another network namespace.

    Raises:
        ValueError: the status is not 200, or the page is too long.
        TproxyError, OSError: the connection failed.
    """
    sock = await connect(("127.0.0.1", port), netns=netns)
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        headers = [("host", "localhost"), ("connection", "close")]
        status, body = await ask(writer.write, reader.read, "GET", path, headers, most_bytes=_MOST_BYTES)
    finally:
        writer.close()
    if status != 200:
        raise ValueError(f"{path}: {status}")
    return body
