"""Opens tunnel connections to new endpoints of the services that a pod uses, before the pod needs them.

The first connection to an endpoint waits for TCP and TLS handshakes, and takes ten times as long to open as later
connections. After a rollout or a scale-up, every client has to connect to new endpoints. With
``ZTUNNEL_OPEN_AHEAD=N`` a pod's proxy dials the new endpoints soon after the mesh has changed, one at a time,
while fewer than N of the pod's tunnel connections are idle. The pool closes unused ones after its usual idle
timeout.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from hbone.aio.pool import Pool
from hbone.errors import HboneError, PoolClosed
from tproxy.errors import TproxyError
from xds.model.workload import Workload
from ztunnel.proxy.istio.path.plans import Plans
from ztunnel.proxy.istio.path.pod_context import PodContext

log = logging.getLogger(__name__)

#: The longest delay between a mesh change and the first dial. The actual delay is random, from half of this: all
#: clients of a service receive a new endpoint at the same time, and must not dial it simultaneously.
_SPREAD_S: Final = 1.0


class OpenAhead:
    """Opens tunnel connections ahead of use, for one pod.

    Args:
        pod: the shared state of the pod.
        plans: the plans of the pod's connections.
        pool: the pool of the pod's tunnel connections.
        most: no connections are opened ahead while the pod has this many idle tunnel connections.
    """

    def __init__(self, pod: PodContext, plans: Plans, pool: Pool, most: int) -> None:
        self._pod = pod
        self._plans = plans
        self._pool = pool
        self._most = most
        self._timer: asyncio.TimerHandle | None = None
        self._runs = False
        self._runs_again = False  # after the mesh has changed during a run
        self._closed = False
        pod.local.watch(self._mesh_changed)

    def _mesh_changed(self, workload: Workload) -> None:
        self._run_soon()

    def _run_soon(self) -> None:
        if self._timer is None and not self._closed:
            wait_s = _SPREAD_S * (0.5 + self._pod.node.rng.random() / 2)
            self._timer = self._pod.node.poller.loop.call_later(wait_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._runs:
            self._runs_again = True
        else:
            self._runs = True
            self._pod.tasks.run(self._pod.node.poller, self._open(), "open ahead")

    async def _open(self) -> None:
        node, pool = self._pod.node, self._pool
        try:
            for plan in self._plans.reachable():
                certificate = node.certificates.current(plan.labels.identity)
                if certificate is None or pool.statistics.idle >= self._most:
                    return
                key = plan.key(certificate)
                if pool.has(key) or (plan.here is not None and plan.here in node.pods):
                    continue
                try:
                    await pool.prepare(key)
                except PoolClosed:
                    return
                except (HboneError, TproxyError, OSError) as error:
                    # This line is at level debug, because the first connection to this endpoint will report the
                    # error anyway.
                    log.debug("not opened ahead target=%s error=%s", plan.target, error)
        finally:
            self._runs = False
            if self._runs_again:
                self._runs_again = False
                self._run_soon()

    def close(self) -> None:
        """Stop opening connections ahead; idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
