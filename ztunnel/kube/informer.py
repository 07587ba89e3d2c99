"""Follows objects of an API server: a list, then a watch from the list's version. Implements ObjectSource.

For each kind the list is read in pages. Known objects missing from the list have been deleted. Then a watch
starts, which the API server ends after some minutes, and which continues from the version of the last event or
bookmark. A new list is read if the API server does not have that version, because it was compacted (410 Gone) or
the server was restored from a backup, or if it ends two watches from this version with another error. Every
failure is retried, with growing random waits. Known objects stay known meanwhile.

The reader gets the latest state of each changed object, so a slow reader costs one entry per object. An object
that was added and removed between two reads is not reported.
"""

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from ztunnel.kube.client import PAGE, Client, WatchEvent
from ztunnel.kube.errors import ApiRefused, KubeError, WatchFailed
from ztunnel.kube.kinds import Kind, Selection
from ztunnel.kube.objects import Changes, Object, ObjectKey
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.heap import expect_growth
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.2
_LONGEST_RETRY_S: Final = 30.0
_SPREAD: Final = 0.5
#: The API server ends a watch after one to two times this period, so that the watches of many nodes do not end
#: together, like in client-go.
_WATCH_S: Final = 300
#: Seconds until a kind that the API does not have is tried again. It can be installed later.
_MISSING_KIND_S: Final = 60.0
#: The number of objects handled per iteration of the event loop. They take some milliseconds.
_SLICE: Final = 100


@dataclass(frozen=True, slots=True)
class Known:
    """Identifies the state of an object. An object is only reported if this has changed."""

    uid: str
    version: str
    api_version: str


class _Restart(Exception):
    """A watch cannot start at the known resource version, so the kind must be listed again."""


class Informer:
    """Follows the objects of some kinds while entered.

    Args:
        client: from :func:`ztunnel.kube.client.connect`.
        kinds: the objects to follow, as kinds or selections. A kind stands for all its objects.
        page: objects in a page of a list.
        first_retry_s: the first wait after a failure; later ones double up to 30 s.
        random: returns numbers in [0, 1), for the waits.
    """

    def __init__(
        self,
        client: Client,
        kinds: Iterable[Kind | Selection],
        *,
        page: int = PAGE,
        first_retry_s: float = _FIRST_RETRY_S,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._selections = [Selection(kind) if isinstance(kind, Kind) else kind for kind in kinds]
        self._page = page
        self._first_retry_s = first_retry_s
        self._random = random
        self._known: list[dict[ObjectKey, Known]] = [{} for _ in self._selections]
        self._listed = [False] * len(self._selections)
        self._faults: dict[int, str] = {}
        #: For each selection, the version at which the last watch started, if that watch ended with an error
        #: event.
        self._failed_from: dict[int, str] = {}
        #: For each selection, the version up to which the last watch had come.
        self._newest: dict[int, str] = {}
        self._pending: dict[ObjectKey, Object | None] = {}
        self._told: set[ObjectKey] = set()
        self._synced_told = False
        self._news = asyncio.Event()
        self._tasks = Tasks("informer")

    async def __aenter__(self) -> Self:
        # With Python's default thresholds, full collections while 20,000 pods arrive cause the longest stalls of
        # the loop: 65 ms each (python -m bench.kube).
        expect_growth()
        for index, selection in enumerate(self._selections):
            self._tasks.keep(functools.partial(self._follow, index), selection.kind.plural)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()

    @property
    def synced(self) -> bool:
        """Whether every kind has been listed once."""
        return all(self._listed)

    @property
    def faults(self) -> Mapping[str, str]:
        """The reasons why kinds are currently not followed, by their plural names. Empty if all are followed."""
        return {self._selections[index].kind.plural: fault for index, fault in self._faults.items()}

    def known(self, key: ObjectKey) -> Known | None:
        """Return the uid and version of an object's latest state. None if there is no such object."""
        return next((known[key] for known in self._known if key in known), None)

    async def next(self) -> Changes:
        """Wait for changes, or until the source is in sync, and return all changes."""
        await self._news.wait()
        self._news.clear()
        objects, self._pending = self._pending, {}
        for key, value in objects.items():
            if value is None:
                self._told.discard(key)
            else:
                self._told.add(key)
        self._synced_told = self.synced
        return Changes(objects, self.synced)

    async def _follow(self, index: int) -> None:
        backoff = Backoff(self._first_retry_s, _LONGEST_RETRY_S, _SPREAD)
        version = ""
        while True:
            try:
                if not version:
                    # A successful list does not reset the back-off, because a watch from its version can fail
                    # again, and a list of the whole cluster is the most expensive request.
                    version = await self._list(index)
                    self._recovered(index)
                version = await self._watch(index, version, backoff)
            except _Restart:
                version = ""
                # The waits grow, because a server whose lists are older than its watches would otherwise be
                # overloaded.
                await asyncio.sleep(backoff.next(self._random()))
            except ApiRefused as error:
                if error.status == 404 and self._selections[index].optional:
                    self._absent(index)
                    version = ""
                    await asyncio.sleep(_MISSING_KIND_S)
                    continue
                self._failed(index, error)
                if error.status == 403 and self._selections[index].dispensable:
                    self._has_listed(index)
                await asyncio.sleep(backoff.next(self._random()))
            except KubeError as error:
                self._failed(index, error)
                await asyncio.sleep(backoff.next(self._random()))

    async def _list(self, index: int) -> str:
        """List all pages, report the differences from the known objects, and return the version to watch from."""
        selection, known = self._selections[index], self._known[index]
        seen: set[ObjectKey] = set()
        continued = ""
        while True:
            try:
                page = await self._client.list_page(selection, continued, self._page)
            except ApiRefused as error:
                if error.status == 410 and continued:
                    raise _Restart from error
                raise
            if not continued and _is_older(page.resource_version, self._newest.get(index, "")):
                # After a restore from a backup, the server counts from an earlier version again, so that an
                # object's version can stand for another state than before.
                log.info("kube: the server's version of %s is older than before", selection.kind.plural)
                known.update({key: replace(state, version="") for key, state in known.items()})
                self._newest[index] = page.resource_version
            for number, item in enumerate(page.items):
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
                key = self._changed(index, item)
                if key is not None:
                    seen.add(key)
            continued = page.continued
            if not continued:
                break
        for key in [key for key in known if key not in seen]:
            self._gone(index, key)
        self._has_listed(index)
        return page.resource_version

    async def _watch(self, index: int, version: str, backoff: Backoff) -> str:
        """Report events until the stream ends. Return the version to continue from."""
        began_s = asyncio.get_running_loop().time()
        timeout_s = int(_WATCH_S * (1 + self._random()))
        first = True
        try:
            stream = self._client.watch(self._selections[index], version, timeout_s)
            async with contextlib.aclosing(stream):
                async for event in stream:
                    if first:
                        first = False
                        self._recovered(index)
                        backoff.reset()
                    self._happened(index, event)
                    version = _version(event.object) or version
                    self._newest[index] = version
        except ApiRefused as error:
            too_new = error.status == 504 and "resource version" in error.message.lower()
            # A new list is needed, because an event that cannot be delivered blocks every watch from this version.
            # client-go lists again after any error event (ListAndWatch of tools/cache/reflector.go).
            stuck = (
                isinstance(error, WatchFailed) and error.status != 429 and self._failed_from.get(index) == version
            )
            if isinstance(error, WatchFailed):
                self._failed_from[index] = version
            if error.status in (400, 404, 410) or too_new or stuck:
                log.info("kube: %s; list again", error)
                raise _Restart from error
            self._failed(index, error)
            await asyncio.sleep(backoff.next(self._random()))
        except KubeError as error:
            self._failed(index, error)
            await asyncio.sleep(backoff.next(self._random()))
        else:
            # A stream normally ends after some minutes. If each one ends at once, a proxy in between is the cause.
            if first and asyncio.get_running_loop().time() - began_s < 1:
                await asyncio.sleep(backoff.next(self._random()))
        return version

    def _happened(self, index: int, event: WatchEvent) -> None:
        match event.type:
            case "ADDED" | "MODIFIED":
                self._changed(index, event.object)
            case "DELETED":
                key = self._key(index, event.object)
                if key is not None:
                    self._gone(index, key)
            case _:
                pass  # BOOKMARK, and types of later releases: only their version counts

    def _key(self, index: int, item: Object) -> ObjectKey | None:
        metadata = item.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if not isinstance(metadata, dict) or not isinstance(name, str):
            log.error("kube: an object of %s has no name", self._selections[index].kind.plural)
            return None
        return ObjectKey(self._selections[index].kind.called, str(metadata.get("namespace") or ""), name)

    def _changed(self, index: int, item: Object) -> ObjectKey | None:
        key = self._key(index, item)
        if key is None:
            return None
        selection = self._selections[index]
        metadata = item["metadata"]
        state = Known(
            str(metadata.get("uid", "")), str(metadata.get("resourceVersion", "")), selection.kind.api_version
        )
        if self._known[index].get(key) == state and state.version:
            return key
        self._known[index][key] = state
        # The items of a list lack ``apiVersion`` and ``kind``.
        kept: Object = {**item, "apiVersion": selection.kind.api_version, "kind": selection.kind.name}
        if selection.keep is not None:
            try:
                kept = selection.keep(kept)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                log.error("kube: %s has an unexpected form (%s), and is passed on whole", key, error)
        self._pending[key] = kept
        self._news.set()
        return key

    def _gone(self, index: int, key: ObjectKey) -> None:
        if self._known[index].pop(key, None) is None:
            return
        if key in self._told:
            self._pending[key] = None
            self._news.set()
        else:
            # The reader never received this object, so its entry is dropped. Otherwise short-lived objects would
            # accumulate for a slow reader.
            self._pending.pop(key, None)

    def _has_listed(self, index: int) -> None:
        self._listed[index] = True
        if self.synced and not self._synced_told:
            self._news.set()

    def _absent(self, index: int) -> None:
        """Treat a kind that the API server does not have as a kind without objects."""
        for key in list(self._known[index]):
            self._gone(index, key)
        self._recovered(index)
        self._has_listed(index)

    def _failed(self, index: int, error: KubeError) -> None:
        """Log a failure once, not at every attempt."""
        fault = str(error)
        if self._faults.get(index) != fault:
            kept = "; the last known objects stay" if self._listed[index] else ""
            log.warning("kube: cannot follow %s: %s%s", self._selections[index].kind.plural, fault, kept)
        self._faults[index] = fault

    def _recovered(self, index: int) -> None:
        if self._faults.pop(index, None) is not None:
            log.info("kube: follows %s again", self._selections[index].kind.plural)


def _version(item: Object) -> str:
    metadata = item.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) else ""


def _is_older(version: str, newest: str) -> bool:
    """Return whether a version is lower than another. If one is not a decimal number, they are not compared.

    Versions of objects of one kind can be compared ("Resource versions" in Kubernetes' API concepts).
    """
    if not all(text.isascii() and text.isdigit() for text in (version, newest)):
        return False
    return (len(version), version) < (len(newest), newest)
