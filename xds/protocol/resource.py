"""The values that sources of configuration deliver, over any transport.

A source is an ADS stream (state of the world or delta), a per-type stream over a Unix socket, or a
watched file. Receivers use only the values and interfaces below, and see no gRPC, files or nonces.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from xds.proto.well_known import Any as AnyMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One named resource as received from its source.

    ``name`` comes from the wrapper if there is one (delta, ``envoy.service.discovery.v3.Resource``), otherwise
    from the message's own name field. ``version`` is the resource's own version in delta, and the response's
    version in state of the world. ``body`` is stored as sent, with unknown fields, so that dumps can print it
    unchanged. ``aliases`` are other names for requesting the resource (delta).
    """

    name: str
    version: str
    body: AnyMessage
    ttl_s: float | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One response of one type, unwrapped.

    Attributes:
        version: ``version_info`` (state of the world) or ``system_version_info`` (delta).
        complete: whether resources missing from ``resources`` were removed. True for state-of-the-world LDS and
            CDS only.
        removed: names deleted by the server, expired by TTL, or subscribed but not existing (delta).
    """

    type_url: str
    version: str
    resources: tuple[Resource, ...]
    removed: tuple[str, ...] = ()
    complete: bool = False


class UpdateRejected(Exception):
    """A receiver refuses a whole update or one part. The source answers with a NACK that has this text.

    Raised after all valid resources of the update were applied if the type allows that (LDS, CDS). For other types
    (EDS, SDS, RDS, ECDS) it is raised before any resource was applied.

    Attributes:
        rejected: names of the refused resources, if all others were applied and count as accepted. None refuses
            the whole update.
    """

    def __init__(self, reason: str, rejected: Collection[str] | None = None) -> None:
        super().__init__(reason)
        self.rejected = rejected


class Settling(Protocol):
    """Stands for an applied update with resources that are still warming."""

    def then(self, call: Callable[[], None], /) -> None:
        """Call ``call`` once, as soon as no resource of the update is warming. This can be immediately."""


#: Applies one update. Returning causes an ACK, and raising :class:`UpdateRejected` a NACK. Calls for one
#: subscription never overlap, and until a call returns, no other update of the type is delivered. So a receiver
#: must not wait for warming resources. It returns :class:`Settling` instead, and the source delays the ACK for a
#: limited time. Thus a resource that never warms delays no update.
Receive = Callable[[Update], Awaitable[Settling | None]]


@dataclass(slots=True)
class SubscriptionStats:
    """The counters of one subscription, named like in Envoy (``<scope>.update_attempt`` and so on)."""

    update_attempt: int = 0
    update_success: int = 0
    update_failure: int = 0
    update_rejected: int = 0
    init_fetch_timeout: int = 0
    version_text: str = ""
    update_time: int = 0
    """The time of the last accepted update, in milliseconds since 1970."""

    def accepted(self, version_text: str, at_s: float) -> None:
        """Count an update that was applied at the time ``at_s``, in seconds since 1970."""
        self.update_success += 1
        self.version_text = version_text
        self.update_time = int(at_s * 1000)

    @property
    def version(self) -> int:
        """The XxHash64 (seed 0) of :attr:`version_text`, or 0 before the first accepted update."""
        import xxhash

        return xxhash.xxh64_intdigest(self.version_text.encode()) if self.update_success else 0


class Subscription(Protocol):
    """A subscription to resources of one type. Closing it ends the subscription."""

    stats: SubscriptionStats

    def set_names(self, names: Iterable[str]) -> None:
        """Replace the requested names. Not valid for wildcard subscriptions."""

    def close(self) -> None:
        """Unsubscribe. ``receive`` is not called again."""


class ResourceSource(Protocol):
    """A source of configuration: a control plane, or a watched file."""

    def subscribe(
        self,
        type_url: str,
        names: Iterable[str] | None,
        receive: Receive,
        *,
        initial_fetch_timeout_s: float = 15.0,
        on_initial_timeout: Callable[[], None] | None = None,
    ) -> Subscription:
        """Subscribe to ``names`` of ``type_url``, or to all (``None``, the wildcard of LDS and CDS).

        Args:
            type_url: the full type URL, ``type.googleapis.com/...``.
            names: resource names. ``None`` means the wildcard.
            receive: see :data:`Receive`.
            initial_fetch_timeout_s: the time limit for the first update. 0: no limit.
            on_initial_timeout: called once if no update arrived in that time.
        """
