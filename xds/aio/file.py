"""Configuration from watched files (``path_config_source``).

A file is read on the first subscription and whenever a file is renamed onto its path. With a watched directory, it
is read whenever a file is renamed inside that directory. (This is how Kubernetes replaces the ``..data`` link of a
mounted volume.) Writing in place has no effect, because half a file would be read. If a file is faulty or missing,
the last good configuration stays current, and counters and one log line report it.

Many subscriptions can share one file. It is read and parsed once per change.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

from xds.aio.initial_fetch import InitialFetch
from xds.aio.inotify import RenameWatcher
from xds.errors import ConfigError
from xds.protocol.file import FileContent, parse_file, update_of
from xds.protocol.resource import Receive, SubscriptionStats, UpdateRejected

logger = logging.getLogger(__name__)

#: Called when a file is refused because of unknown fields, with the number of these fields.
OnUnknownFields = Callable[[int], None]


class FileSubscription:
    """A :class:`xds.protocol.resource.Subscription` to resources of a file."""

    def __init__(
        self,
        file: "_File",
        type_url: str,
        names: Iterable[str] | None,
        receive: Receive,
        initial_fetch_timeout_s: float,
        on_initial_timeout: Callable[[], None] | None,
    ) -> None:
        self.stats = SubscriptionStats()
        self.type_url = type_url
        self.names = None if names is None else frozenset(names)
        self.receive = receive
        self.initial_fetch = InitialFetch(self.stats, on_initial_timeout, initial_fetch_timeout_s)
        self._file = file

    def set_names(self, names: Iterable[str]) -> None:
        """Replace the requested names, which are looked up in the last valid content of the file."""
        self.names = frozenset(names)
        self._file.read_for(self)

    def close(self) -> None:
        self.initial_fetch.over()
        self._file.remove(self)


class _File:
    """One watched file: its path, its subscriptions, and the task that reads it."""

    def __init__(
        self, path: str, on_unknown_fields: OnUnknownFields | None, on_unused: Callable[[], None]
    ) -> None:
        self.path = path
        self.stop_watching: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._on_unknown_fields = on_unknown_fields
        self._on_unused = on_unused
        self._content: FileContent | ConfigError | None = None
        self._due: dict[FileSubscription, None] = {}
        self._subscriptions: dict[FileSubscription, None] = {}
        self._changed = True
        self._wake = asyncio.Event()

    def add(self, subscription: FileSubscription) -> None:
        self._subscriptions[subscription] = None
        self.read_for(subscription)

    def remove(self, subscription: FileSubscription) -> None:
        self._subscriptions.pop(subscription, None)
        self._due.pop(subscription, None)
        if not self._subscriptions:
            self._on_unused()

    def read_for(self, subscription: FileSubscription) -> None:
        self._due[subscription] = None
        self._wake.set()

    def moved(self, name: str | None) -> None:
        """Handle a changed directory entry. ``name`` is None if the kernel did not say which."""
        if name is None or name == os.path.basename(self.path):
            self.reload()

    def moved_any(self, name: str | None) -> None:
        """Handle a rename into the watched directory."""
        self.reload()

    def reload(self) -> None:
        self._changed = True
        self._due.update(self._subscriptions)
        self._wake.set()

    async def deliver_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due:
                if self._changed:
                    self._changed = False
                    self._content = self._read()
                subscription = next(iter(self._due))
                del self._due[subscription]
                await self._hand_over(subscription)

    def _read(self) -> FileContent | ConfigError:
        try:
            with open(self.path, "rb") as file:
                content = parse_file(self.path, file.read())
        except OSError as error:
            failure = ConfigError(f"cannot be read: {error.strerror}")
        except ConfigError as error:
            failure = error
        except Exception as error:
            # This error is a bug of ours or of a library. It must not leave this task, because the task group and
            # then the process would end.
            logger.exception("configuration file not read path=%s", self.path)
            failure = ConfigError(f"internal error: {type(error).__name__}")
        else:
            unknown = content.unknown_fields
            if not unknown:
                return content
            if self._on_unknown_fields is not None:
                self._on_unknown_fields(len(unknown))
            # Refuse a file with unknown fields, like Envoy with --reject-unknown-dynamic-fields. If the fields
            # were ignored, the file would have another meaning.
            failure = ConfigError(", ".join(map(str, unknown[:10])))
        logger.warning("configuration file refused path=%s error=%s", self.path, failure)
        return failure

    async def _hand_over(self, subscription: FileSubscription) -> None:
        stats = subscription.stats
        stats.update_attempt += 1
        content = self._content
        assert content is not None, "read before the first hand-over"
        if isinstance(content, ConfigError):
            stats.update_failure += 1
            subscription.initial_fetch.failed()
            return
        try:
            try:
                update = update_of(content.response, subscription.type_url, subscription.names)
            except ConfigError as refused:
                subscription.initial_fetch.failed()
                raise UpdateRejected(str(refused)) from None
            await subscription.receive(update)
        except UpdateRejected as rejected:
            stats.update_rejected += 1
            logger.warning(
                "configuration refused path=%s type=%s error=%s", self.path, subscription.type_url, rejected
            )
            return
        except Exception:  # a bug of ours must not remove the last good configuration
            stats.update_rejected += 1
            subscription.initial_fetch.failed()
            logger.exception("configuration not applied path=%s type=%s", self.path, subscription.type_url)
            return
        subscription.initial_fetch.over()  # a refused update does not end the wait, which continues to its limit
        stats.accepted(update.version, time.time())


class FileSource:
    """Configuration sources that read watched files. :meth:`at` returns the
    :class:`xds.protocol.resource.ResourceSource` of one path.

    ``async with`` owns the watches and tasks.
    """

    def __init__(self, *, on_unknown_fields: OnUnknownFields | None = None) -> None:
        self._on_unknown_fields = on_unknown_fields
        self._watcher = RenameWatcher()
        self._files: dict[tuple[str, str | None], _File] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._watcher.__aenter__()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        for file in self._files.values():
            if file.task is not None:
                file.task.cancel()
        try:
            await self._tasks.__aexit__(*exception)
        finally:
            await self._watcher.__aexit__(*exception)

    def at(self, path: str, watched_directory: str | None = None) -> "FileAt":
        return FileAt(self, path, watched_directory)

    def file(self, path: str, watched_directory: str | None) -> _File:
        """Return the state of a path, which its subscriptions share. The path is watched from now on.

        Raises:
            ConfigError: its directory cannot be watched.
        """
        key = (os.path.abspath(path), watched_directory and os.path.abspath(watched_directory))
        file = self._files.get(key)
        if file is None:
            file = _File(path, self._on_unknown_fields, lambda: self._forget(key))
            directory = watched_directory or os.path.dirname(path) or "."
            try:
                file.stop_watching = self._watcher.watch(
                    directory, file.moved if watched_directory is None else file.moved_any
                )
            except OSError as error:
                raise ConfigError(f"cannot watch {directory}: {error.strerror}") from error
            file.task = self._tasks.create_task(file.deliver_forever(), name=f"xds file {path}")
            self._files[key] = file
        return file

    def _forget(self, key: tuple[str, str | None]) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            if file.stop_watching is not None:
                file.stop_watching()
            if file.task is not None:
                file.task.cancel()


class FileAt:
    """The configuration source for one path of a :class:`FileSource`; see
    :class:`xds.protocol.resource.ResourceSource`.
    """

    def __init__(self, source: FileSource, path: str, watched_directory: str | None) -> None:
        self._source = source
        self._path = path
        self._watched_directory = watched_directory

    def subscribe(
        self,
        type_url: str,
        names: Iterable[str] | None,
        receive: Receive,
        *,
        initial_fetch_timeout_s: float = 15.0,
        on_initial_timeout: Callable[[], None] | None = None,
    ) -> FileSubscription:
        """Subscribe, inside ``async with`` of the source.

        Raises:
            ConfigError: the directory cannot be watched.
        """
        file = self._source.file(self._path, self._watched_directory)
        subscription = FileSubscription(
            file, type_url, names, receive, initial_fetch_timeout_s, on_initial_timeout
        )
        file.add(subscription)
        return subscription
