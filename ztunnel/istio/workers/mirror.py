"""The mesh of the main process, in a worker too: a batch is said in pieces, and put in force as one. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from xds.model.mesh import Changes, Mesh
from ztunnel.istio.workers.link import MeshChange, Resource

#: Resources and names of one piece: on average two milliseconds to write, to read or to put in force.
PIECE: Final = 250


def everything(mesh: Mesh) -> Iterator[MeshChange]:
    """What is in force: policies at once, then what they are about, piece by piece."""
    yield from _batch(list(mesh.policies()), (), ())
    for values in (list(mesh.services()), list(mesh.workloads())):
        for start in range(0, len(values), PIECE):
            yield MeshChange(put=tuple(values[start : start + PIECE]))


def since(changes: Changes, mesh: Mesh) -> Iterator[MeshChange]:
    """A batch that has just been put in force."""
    put: list[Resource] = []
    removed: list[str] = []
    removed_policies: list[str] = []
    look_ups: tuple[tuple[Iterable[str], Callable[[str], Resource | None], list[str]], ...] = (
        (changes.policies, mesh.policy, removed_policies),
        (changes.services, mesh.service, removed),
        (changes.workloads, mesh.workload, removed),
    )
    for names, look_up, gone in look_ups:
        for name in names:
            value = look_up(name)
            if value is None:
                gone.append(name)
            else:
                put.append(value)
    yield from _batch(put, removed, removed_policies)


def _batch(
    put: Sequence[Resource], removed: Sequence[str], removed_policies: Sequence[str]
) -> Iterator[MeshChange]:
    parts = max(1, *(-(-len(values) // PIECE) for values in (put, removed, removed_policies)))
    for part in range(parts):
        here = slice(part * PIECE, (part + 1) * PIECE)
        yield MeshChange(
            put=tuple(put[here]),
            removed=tuple(removed[here]),
            removed_policies=tuple(removed_policies[here]),
            more=part < parts - 1,
        )


class Mirror:
    """Puts batches in force.

    Args:
        mesh: where.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._parts: list[MeshChange] = []

    def receive(self, part: MeshChange) -> None:
        """Take a part; with the last one the batch is in force."""
        self._parts.append(part)
        if part.more:
            return
        parts, self._parts = self._parts, []
        removed_policies = [key for part in parts for key in part.removed_policies]
        if removed_policies:
            self._mesh.remove_policies(removed_policies)
        put: list[Resource] = [value for part in parts for value in part.put]
        removed = [name for part in parts for name in part.removed]
        if put or removed:
            self._mesh.apply(put, removed)
