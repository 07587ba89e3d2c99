"""What control planes and local files say of an Istio mesh, put into the :class:`~xds.model.mesh.Mesh`.

A resource that cannot be read rejects itself: all others of its response are applied first, and the refusal
names what is not. A small response is one batch. A big one, such as the whole mesh at the start, is compiled and
put in pieces between which the loop runs other work; what it removes goes first and services come before
workloads, so that in between there is less of the mesh than there will be, never a stale half of it.

A local file and a control plane may be used together. Whoever spoke last of a name is right.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Self, TypeVar

from xds.aio.inotify import RenameWatcher
from xds.dialects.istio.addresses import compile_address
from xds.dialects.istio.authorization import compile_authorization
from xds.dialects.istio.local_file import LocalMesh, parse_local_file
from xds.errors import ConfigError
from xds.model.mesh import Mesh
from xds.model.workload import Workload
from xds.protocol.resource import Resource, Update, UpdateRejected

log = logging.getLogger(__name__)

Value = TypeVar("Value")

#: Resources between two turns of the loop: some five milliseconds to compile, two to apply.
_PIECE = 250
#: Faults named in one log line.
_NAMED = 10


class MeshFeed:
    """Receivers for both types of resources, and for a local file.

    Args:
        mesh: what they put it into.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._local = LocalMesh()

    @property
    def local(self) -> LocalMesh:
        """The current local file."""
        return self._local

    async def receive_addresses(self, update: Update) -> None:
        """Apply workloads and services (``istio.workload.Address``).

        Raises:
            UpdateRejected: names what was not understood, after all else is applied.
        """
        values, faults = await _compiled(update.resources, compile_address)
        # Stable: otherwise in the order in which they came.
        values.sort(key=lambda value: isinstance(value, Workload))
        removed: Sequence[str] = update.removed
        if len(values) + len(removed) <= _PIECE:
            self._mesh.apply(values, removed)
        else:
            for names in _pieces(removed):
                self._mesh.apply((), names)
                await asyncio.sleep(0)
            for piece in _pieces(values):
                self._mesh.apply(piece)
                await asyncio.sleep(0)
        _reject(faults)

    async def receive_authorizations(self, update: Update) -> None:
        """Apply policies (``istio.security.Authorization``).

        Policies are put all at once, however many they are: a new deny and the allow that relies on it belong
        together.

        Raises:
            UpdateRejected: as :meth:`receive_addresses`.
        """
        policies, faults = await _compiled(update.resources, lambda data, _: compile_authorization(data))
        for policy in policies:
            if policy.faults:
                log.warning(
                    "policy holds what is not understood, which lets nobody in policy=%s faults=%s",
                    policy.key,
                    "; ".join(policy.faults[:_NAMED]),
                )
        self._mesh.remove_policies(update.removed)
        self._mesh.apply(policies)
        _reject(faults)

    def apply_local(self, local: LocalMesh) -> None:
        """Apply a local file in place of the one before: what it no longer has is removed."""
        before, self._local = self._local, local
        addresses = {workload.uid for workload in local.workloads} | {service.key for service in local.services}
        policies = {policy.key for policy in local.policies}
        self._mesh.remove_policies([policy.key for policy in before.policies if policy.key not in policies])
        self._mesh.apply(
            [*local.services, *local.workloads, *local.policies],
            [
                name
                for name in (
                    *(workload.uid for workload in before.workloads),
                    *(service.key for service in before.services),
                )
                if name not in addresses
            ],
        )


async def _compiled(
    resources: Iterable[Resource], compile_one: Callable[[bytes, str], Value]
) -> tuple[list[Value], dict[str, str]]:
    """What could be compiled, and reasons by name for the rest."""
    values: list[Value] = []
    faults: dict[str, str] = {}
    for number, resource in enumerate(resources, start=1):
        if number % _PIECE == 0:
            await asyncio.sleep(0)
        try:
            if not resource.body.type_url and not resource.body.value:
                raise ConfigError("XDS payload without resource")
            values.append(compile_one(resource.body.value, resource.name))
        except ConfigError as error:
            faults[resource.name] = str(error)
    return values, faults


def _reject(faults: dict[str, str]) -> None:
    if faults:
        raise UpdateRejected("; ".join(f"{name}: {reason}" for name, reason in faults.items()), faults.keys())


def _pieces(values: Sequence[Value]) -> Iterable[list[Value]]:
    left = iter(values)
    while piece := list(islice(left, _PIECE)):
        yield piece


class LocalFile:
    """A local file and its changes; ``async with`` owns the watch.

    It is read again when something is renamed into its directory, which is how editors save and how Kubernetes
    swaps the content of a mounted volume. A file that is faulty or gone leaves the last good one current.

    Args:
        path: of the file.
        feed: gets what the file holds.
    """

    def __init__(self, path: str, feed: MeshFeed) -> None:
        self._path = path
        self._feed = feed
        self._watcher = RenameWatcher()

    async def __aenter__(self) -> Self:
        """Read the file.

        Raises:
            ConfigError: it cannot be read; at the start there is no good one to go on with.
        """
        self._feed.apply_local(self._read())
        await self._watcher.__aenter__()
        try:
            self._watcher.watch(os.path.dirname(self._path) or ".", self._moved)
        except OSError as error:
            await self._watcher.__aexit__(None, None, None)
            raise ConfigError(f"cannot watch the directory of {self._path}: {error.strerror}") from error
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._watcher.__aexit__(*exception)

    def _moved(self, name: str | None) -> None:
        # Any name: the file may be a link through what was renamed, as in a mounted volume.
        try:
            local = self._read()
        except ConfigError as error:
            log.warning("local file refused, the last good one stays in force path=%s error=%s", self._path, error)
            return
        if local != self._feed.local:
            self._feed.apply_local(local)
            log.info(
                "local file in force path=%s workloads=%d services=%d policies=%d",
                self._path,
                len(local.workloads),
                len(local.services),
                len(local.policies),
            )

    def _read(self) -> LocalMesh:
        try:
            with open(self._path, encoding="utf-8") as file:
                return parse_local_file(file.read())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}") from None
