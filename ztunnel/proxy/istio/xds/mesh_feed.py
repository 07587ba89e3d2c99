"""Applies resources of control planes and local files to the :class:`~xds.model.mesh.Mesh`.

An unreadable resource does not affect other resources: the rest of its response is applied, and then the NACK
names the unreadable resource. If there is no earlier version of an unreadable workload or service, connections to
its addresses are refused. A small response is one batch. A big response, such as the whole mesh at the start,
is compiled and applied in pieces, and the event loop runs other work between the pieces. Services are applied
before workloads, and removals last. So an address that one workload loses and another one gets is never unknown:
connections to unknown addresses are passed through as plain text.

A local file and a control plane can be used together. If both contain a name, the last update wins.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar

from xds.aio.inotify import RenameWatcher
from xds.dialects.istio.addresses import compile_address, refused_addresses
from xds.dialects.istio.authorization import compile_authorization
from xds.dialects.istio.local_file import LocalMesh, parse_local_file
from xds.errors import ConfigError
from xds.model.mesh import Mesh
from xds.model.refused import RefusedResource
from xds.model.service import Service
from xds.model.workload import Workload
from xds.protocol.resource import Resource, Update, UpdateRejected
from ztunnel.runtime.formats.file_kinds import FileKind, belongs_elsewhere
from ztunnel.runtime.text_file import read_text

log = logging.getLogger(__name__)

Value = TypeVar("Value")

#: The number of resources per piece. A piece takes 1 ms to compile and 0.5 ms to apply, which delays all pods'
#: connections.
_PIECE = 50
#: A log line names at most this many faults.
_NAMED = 10
#: The number of refused resources that are remembered per type.
_MOST_REFUSED = 200


class MeshFeed:
    """Receives workloads, services, policies and the local file, and applies them to the mesh.

    Attributes:
        refused_addresses, refused_policies: why the last version of a resource was refused, by the resource's
            name. An entry is removed when a readable version arrives or the resource is removed. Only the first
            200 entries are kept.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._local = LocalMesh()
        self.refused_addresses: dict[str, str] = {}
        self.refused_policies: dict[str, str] = {}

    @property
    def local(self) -> LocalMesh:
        """The current local file."""
        return self._local

    async def receive_addresses(self, update: Update) -> None:
        """Apply workloads and services (``istio.workload.Address``).

        Raises:
            UpdateRejected: names the unreadable resources, after all others were applied.
        """
        values, faults = await _compiled(update.resources, compile_address)
        # Services come first. The sort is stable, so services and workloads each keep their order in the response.
        values.sort(key=lambda value: isinstance(value, Workload))
        put: list[Workload | Service | RefusedResource] = [*_without_version(update, faults), *values]
        removed: Sequence[str] = update.removed
        if len(put) + len(removed) <= _PIECE:
            self._mesh.apply(put, removed)
        else:
            for piece in _pieces(put):
                self._mesh.apply(piece)
                await asyncio.sleep(0)
            there = {_name(value) for value in put} if removed else ()
            for names in _pieces([name for name in removed if name not in there]):
                self._mesh.apply((), names)
                await asyncio.sleep(0)
        _note(self.refused_addresses, update, faults)
        _reject(faults)

    async def receive_authorizations(self, update: Update) -> None:
        """Apply policies (``istio.security.Authorization``).

        All policies of an update are applied at once, even if there are many. Otherwise a connection could be
        decided when a new ALLOW policy is applied, but the DENY policy that restricts it is not.

        Raises:
            UpdateRejected: see :meth:`receive_addresses`.
        """
        policies, faults = await _compiled(update.resources, lambda data, _: compile_authorization(data))
        for policy in policies:
            if policy.faults:
                log.warning(
                    "policy has parts that are not understood; they allow no connection policy=%s faults=%s",
                    policy.key,
                    "; ".join(policy.faults[:_NAMED]),
                )
        self._mesh.apply(policies, removed_policies=update.removed)
        _note(self.refused_policies, update, faults)
        _reject(faults)

    def apply_local(self, local: LocalMesh) -> None:
        """Apply a local file in place of its previous version. Entries missing from the file are removed."""
        before, self._local = self._local, local
        addresses = {workload.uid for workload in local.workloads} | {service.key for service in local.services}
        policies = {policy.key for policy in local.policies}
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
            removed_policies=[policy.key for policy in before.policies if policy.key not in policies],
        )


async def _compiled(
    resources: Iterable[Resource], compile_one: Callable[[bytes, str], Value]
) -> tuple[list[Value], dict[str, str]]:
    """Return the compiled values, and the reasons why other resources could not be compiled, by resource name."""
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


def _without_version(update: Update, faults: Mapping[str, str]) -> Iterator[RefusedResource]:
    """Yield the addresses of refused resources. The mesh ignores resources that have an earlier version."""
    if faults:  # rarely
        for resource in update.resources:
            reason = faults.get(resource.name)
            if reason is not None:
                refused = refused_addresses(resource.body.value, resource.name, reason)
                if refused is not None:
                    yield refused


def _name(value: Workload | Service | RefusedResource) -> str:
    match value:
        case Workload():
            return value.uid
        case Service():
            return value.key
        case RefusedResource():
            return value.name


def _note(refused: dict[str, str], update: Update, faults: Mapping[str, str]) -> None:
    """Update the table of refused resources with the faults of one xDS update."""
    if refused:  # rarely
        for name in (*update.removed, *(resource.name for resource in update.resources)):
            refused.pop(name, None)
    for name, reason in faults.items():
        if len(refused) < _MOST_REFUSED:
            refused[name] = reason


def _reject(faults: dict[str, str]) -> None:
    if faults:
        raise UpdateRejected("; ".join(f"{name}: {reason}" for name, reason in faults.items()), faults.keys())


def _pieces(values: Sequence[Value]) -> Iterable[list[Value]]:
    left = iter(values)
    while piece := list(islice(left, _PIECE)):
        yield piece


class LocalFile:
    """Feeds a local file and its changes while entered.

    The file is read again when any file is renamed into its directory. Editors save files this way, and Kubernetes
    replaces the content of mounted volumes this way. While the file is faulty or missing, its last good content
    stays in use.

    Args:
        path: the file's path.
        feed: receives the file's content.
    """

    def __init__(self, path: str, feed: MeshFeed) -> None:
        self._path = path
        self._feed = feed
        self._watcher = RenameWatcher()

    async def __aenter__(self) -> Self:
        """Read the file.

        Raises:
            ConfigError: the file cannot be read. At the start, there is no earlier content to use instead.
        """
        try:
            local = read_local_file(self._path)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from None
        self._feed.apply_local(local)
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
        # A rename to any name counts: in a mounted volume, the file is a symbolic link whose path contains the
        # renamed entry.
        try:
            local = read_local_file(self._path)
        except ConfigError as error:
            log.warning("local file refused, the last good one stays active path=%s error=%s", self._path, error)
            return
        if local != self._feed.local:
            self._feed.apply_local(local)
            log.info(
                "local file applied path=%s workloads=%d services=%d policies=%d",
                self._path,
                len(local.workloads),
                len(local.services),
                len(local.policies),
            )


def read_local_file(path: str) -> LocalMesh:
    """Read a local file.

    Raises:
        ConfigError: the file cannot be read, or is not a mesh. The text does not contain the path.
    """
    try:
        text = read_text(Path(path))
        return parse_local_file(text)
    except ConfigError as error:
        elsewhere = belongs_elsewhere(text, FileKind.LOCAL_MESH)
        raise ConfigError(elsewhere) if elsewhere else error from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
