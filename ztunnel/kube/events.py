"""Writes Events about objects, where ``kubectl describe`` shows them. Implements EventSink.

An event is identified by object, reason and message. Repetitions before the write are one event with a count, and
later repetitions increase the count of the same Event, at most once a minute. All writes of a process share one
rate. Events only inform people: if an Event cannot be written, it is dropped, which is logged once.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

from ztunnel.kube.client import Client
from ztunnel.kube.errors import ApiRefused, ApiUnreachable, KubeError
from ztunnel.kube.informer import Known
from ztunnel.kube.kinds import EVENT
from ztunnel.kube.objects import ObjectKey
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.clock import Clock, SystemClock, utc
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: The most different events that wait to be written, and the most events whose count is remembered. A guess, for a
#: day with many faults.
_MOST: Final = 1000
#: The API's limit for a message (validateEventMessage).
_MAX_MESSAGE: Final = 1024
#: Events about cluster-scoped objects are written to this namespace, like the events of Kubernetes' own
#: controllers.
_CLUSTER_NAMESPACE: Final = "default"

_What: TypeAlias = tuple[ObjectKey, str, str]


@dataclass(slots=True)
class _Written:
    name: str
    first: str
    count: int
    again_s: float = field(default=0.0)


class EventWriter:
    """Writes events while entered. Events that wait at the end are dropped.

    Args:
        client: the API server's client. Its role needs ``create`` and ``patch`` of events.
        component: the reporting program, such as ``ztunnel-netpol``.
        instance: distinguishes writers of the same component, for example the node's name.
        known: the method of an informer that returns an object's uid and version. ``kubectl describe`` does not
            find an Event without the object's uid.
        interval_s: the shortest time between two writes.
        repeat_s: the shortest time between two writes of the same event.
    """

    def __init__(
        self,
        client: Client,
        component: str,
        instance: str,
        known: Callable[[ObjectKey], Known | None],
        *,
        interval_s: float = 0.1,
        repeat_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._component = component
        self._instance = instance
        self._known = known
        self._interval_s = interval_s
        self._repeat_s = repeat_s
        self._clock = clock or SystemClock()
        self._waiting: dict[_What, int] = {}
        self._written: dict[_What, _Written] = {}
        self._news = asyncio.Event()
        self._fault = ""
        self._tasks = Tasks("events")

    async def __aenter__(self) -> Self:
        self._tasks.keep(self._write_all, "writer")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()

    def event(self, key: ObjectKey, reason: str, message: str) -> None:
        """Record a warning about an object. It is written later; this never waits or raises. Repeats are
        merged.
        """
        what = (key, reason, message[:_MAX_MESSAGE])
        if what not in self._waiting and len(self._waiting) >= _MOST:
            self._say(f"more than {_MOST} events wait to be written; {key}: {reason}: {message}")
            return
        self._waiting[what] = self._waiting.get(what, 0) + 1
        self._news.set()

    async def _write_all(self) -> None:
        backoff = Backoff(max(self._interval_s, 0.2), 30.0)
        while True:
            now_s = self._clock.monotonic()
            due_s = {what: self._written[what].again_s for what in self._waiting if what in self._written}
            what = next((what for what in self._waiting if due_s.get(what, 0.0) <= now_s), None)
            if what is None:
                self._news.clear()
                # Without a due event, wait for new ones.
                wait_s = min(due_s.values()) - now_s if due_s else None
                try:
                    async with asyncio.timeout(wait_s):
                        await self._news.wait()
                except TimeoutError:
                    pass
                continue
            try:
                await self._write(what, self._waiting[what])
                self._fault = ""
            except ApiUnreachable as error:
                self._say(str(error))
                await asyncio.sleep(backoff.next())
                continue
            except KubeError as error:
                self._say(str(error))
                self._waiting.pop(what, None)
            backoff.reset()
            await asyncio.sleep(self._interval_s)

    async def _write(self, what: _What, count: int) -> None:
        key, reason, message = what
        namespace = key.namespace or _CLUSTER_NAMESPACE
        now = utc("%Y-%m-%dT%H:%M:%SZ", int(self._clock.wall()))
        written = self._written.get(what)
        if written is not None:
            patch = {"count": written.count + count, "lastTimestamp": now}
            try:
                await self._client.merge_patch(EVENT, namespace, written.name, patch)
            except ApiRefused as error:
                if error.status != 404:
                    raise
                # The event is gone, because the API server forgets events after an hour.
                written = None
        if written is None:
            # The name is derived from content and time. If the answer to a write is lost, repeating it does not
            # create a second event.
            digest = hashlib.sha256(f"{what}{self._instance}{now}".encode()).hexdigest()[:16]
            # A name must not have a dot or hyphen before a dot (RFC 1123), which a cut can leave.
            written = _Written(f"{key.name[:200].rstrip('.-')}.{digest}", now, 0)
            body = self._body(key, reason, message, written, count, now)
            try:
                await self._client.create(EVENT, namespace, body)
            except ApiRefused as error:
                if error.status != 409:
                    raise
        self._written.pop(what, None)
        self._written[what] = _Written(
            written.name, written.first, written.count + count, self._clock.monotonic() + self._repeat_s
        )
        if len(self._written) > _MOST:
            del self._written[next(iter(self._written))]
        left = self._waiting.pop(what) - count
        if left:
            self._waiting[what] = left

    def _body(
        self, key: ObjectKey, reason: str, message: str, written: _Written, count: int, now: str
    ) -> dict[str, Any]:
        involved = {"kind": key.kind.partition(".")[0], "name": key.name}
        if key.namespace:
            involved["namespace"] = key.namespace
        if (known := self._known(key)) is not None:
            involved |= {"uid": known.uid, "apiVersion": known.api_version, "resourceVersion": known.version}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": written.name, "namespace": key.namespace or _CLUSTER_NAMESPACE},
            "involvedObject": involved,
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": self._component, "host": self._instance},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": count,
        }

    def _say(self, fault: str) -> None:
        if fault != self._fault:
            log.warning("kube: events are not written: %s", fault)
        self._fault = fault
