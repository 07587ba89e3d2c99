"""Replicates the main process's mesh in a worker. A batch of changes is sent in parts, but applied
at once. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from xds.model.mesh import Changes, Mesh
from ztunnel.proxy.istio.workers.messages import MeshChange, Resource, pickled

#: The number of changed and removed resources per message. Encoding, decoding or applying a message takes two
#: milliseconds on average.
BATCH: Final = 250


def snapshot(mesh: Mesh) -> Iterator[MeshChange]:
    """Yield the whole mesh as messages: first all policies in one batch, then services, workloads and refused
    resources in parts.
    """
    yield from _parts(list(mesh.policies()), (), ())
    for values in (list(mesh.services()), list(mesh.workloads()), list(mesh.refused_resources())):
        for start in range(0, len(values), BATCH):
            yield MeshChange(pickled=pickled(tuple(values[start : start + BATCH])))


def delta(changes: Changes, mesh: Mesh) -> Iterator[MeshChange]:
    """Yield the messages for a batch of changes that has just been applied to ``mesh``."""
    put: list[Resource] = []
    removed: list[str] = []
    removed_policies: list[str] = []
    look_ups: tuple[tuple[Iterable[str], Callable[[str], Resource | None], list[str]], ...] = (
        (changes.policies, mesh.policy, removed_policies),
        (changes.services, mesh.service, removed),
        (changes.workloads, mesh.workload, removed),
        (changes.refused, mesh.refused, removed),
    )
    for names, look_up, gone in look_ups:
        for name in names:
            value = look_up(name)
            if value is None:
                gone.append(name)
            else:
                put.append(value)
    yield from _parts(put, removed, removed_policies)


def _parts(
    put: Sequence[Resource], removed: Sequence[str], removed_policies: Sequence[str]
) -> Iterator[MeshChange]:
    parts = max(1, *(-(-len(values) // BATCH) for values in (put, removed, removed_policies)))
    for part in range(parts):
        here = slice(part * BATCH, (part + 1) * BATCH)
        yield MeshChange(
            pickled=pickled(tuple(put[here])),
            removed=tuple(removed[here]),
            removed_policies=tuple(removed_policies[here]),
            more=part < parts - 1,
        )


class MeshReplica:
    """Applies the received batches of changes to a worker's mesh.

    Args:
        mesh: the worker's mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._parts: list[MeshChange] = []

    def receive(self, part: MeshChange) -> None:
        """Store one part of a batch. The last part applies the whole batch."""
        self._parts.append(part)
        if part.more:
            return
        parts, self._parts = self._parts, []
        self._mesh.apply(
            [value for part in parts for value in part.put],
            [name for part in parts for name in part.removed],
            removed_policies=[key for part in parts for key in part.removed_policies],
        )
