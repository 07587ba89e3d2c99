"""Objects of a Kubernetes API server as values, and the interface of their sources. Pure.

Readers of objects (policy, enrolment) depend only on this module. The API client and the reader of files implement
:class:`ObjectSource`, so that a reader is tested with dictionaries, and works without a cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

#: An object as the API server writes it in JSON: ``apiVersion``, ``kind``, ``metadata``, ``spec``, ``status``.
Object: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """The key of an object. Kinds of different groups never share a name here.

    Attributes:
        kind: such as ``Pod``. If two groups have a kind of this name, a dot and the API group follow.
        namespace: empty for objects outside namespaces.
    """

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return "/".join(part for part in (self.kind, self.namespace, self.name) if part)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes since the last read: the latest state of each object, without intermediate ones.

    Attributes:
        objects: the objects by key. None for a deleted object.
        synced: every object that existed when the source started has been reported, now or before. Once true, it
            stays true: while the API server is unreachable the last known state is used.
    """

    objects: Mapping[ObjectKey, Object | None] = field(default_factory=dict)
    synced: bool = False


class ObjectSource(Protocol):
    """A source of Kubernetes objects.

    A deletion that was missed (while the stream was down) is reported when the source next lists the objects.
    """

    async def next(self) -> Changes:
        """Wait for changes, or until the source is in sync, and return all changes.

        Changes are merged by key while the reader is busy, so a slow reader costs one entry per object. There can
        be one reader at a time. Cancelling loses no changes.
        """
        ...


class WatchedSource(ObjectSource, Protocol):
    """A source that reports the kinds it cannot follow."""

    @property
    def faults(self) -> Mapping[str, str]:
        """The plurals of kinds, or paths of files, that cannot be followed now, with the reason."""
        ...


def not_read(faults: Mapping[str, str]) -> str:
    """Return why not every object has been read yet, for a readiness page.

    Args:
        faults: see :attr:`WatchedSource.faults`.
    """
    return "; ".join(f"{what}: {fault}" for what, fault in faults.items()) or "not all objects have been read yet"


class EventSink(Protocol):
    """Reports faults of an object to its owner, as Events that ``kubectl describe`` shows."""

    def event(self, key: ObjectKey, reason: str, message: str) -> None:
        """Record a warning about an object. Repeats are merged. Never waits, never raises.

        Args:
            reason: one CamelCase word, such as ``PolicyNotApplied``.
            message: one sentence.
        """
        ...
