"""The source of the tunnel proxy's Calico policies, with the settings that both dialects share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xds.grpc.address import host_and_port
from ztunnel.policy.ledger import TierPolicy, Uses
from ztunnel.runtime.clock import Clock

if TYPE_CHECKING:
    from ztunnel.policy.calico.live import LivePolicies

#: The environment variables that both dialects read.
DIRECTORY, SYNC, UNKNOWN_PODS = "CALICO_POLICY_DIR", "POLICY_SYNC", "CALICO_UNKNOWN_PODS"
#: This variable exists in Istio's dialect only, because Envoy's dialect does not mark waypoints.
HTTP_WAYPOINTS = "CALICO_HTTP_WAYPOINTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of a proxy that obeys Calico's policies.

    Attributes:
        directory: a folder of YAML files, or one file. Empty if ``sync`` is given.
        sync: the PolicySync server of the node, as gRPC spells it.
        allow_unknown: see :mod:`ztunnel.policy.calico.guard`.
        http_waypoints: the waypoints that evaluate requests by the same policies, each ``namespace/account``. A
            rule with an HTTP clause allows connections only to these waypoints.
    """

    directory: str = ""
    sync: str = ""
    allow_unknown: bool = False
    http_waypoints: frozenset[str] = frozenset()


def policy_settings(
    directory: str, sync: str, unknown_pods: str, http_waypoints: frozenset[str] = frozenset()
) -> PolicySettings | None:
    """Parse the settings from three texts that can be empty. Return None if they name no source of policies.

    Raises:
        ValueError: the settings contradict each other.
    """
    if directory and sync:
        raise ValueError(f"{DIRECTORY} and {SYNC} exclude each other")
    if unknown_pods and not (directory or sync):
        raise ValueError(f"{UNKNOWN_PODS} needs {DIRECTORY} or {SYNC}")
    if http_waypoints and not (directory or sync):
        raise ValueError(f"{HTTP_WAYPOINTS} needs {DIRECTORY} or {SYNC}")
    if not (directory or sync):
        return None
    return PolicySettings(
        directory=directory, sync=sync, allow_unknown=unknown_pods == "allow", http_waypoints=http_waypoints
    )


def waypoints(text: str) -> frozenset[str]:
    """Parse a comma-separated list of service accounts, each ``namespace/name``.

    Raises:
        ValueError: an entry is not ``namespace/name``.
    """
    found = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for each in found:
        namespace, _, name = each.partition("/")
        if not namespace or not name or "/" in name:
            raise ValueError(f"{each!r} is no namespace/account")
    return found


def sync_target(text: str) -> str:
    """Return an address in gRPC's spelling: a bare path and ``unix:///path`` become ``unix:/path``.

    Raises:
        ValueError: it is neither a path nor ``host:port``.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path:
            raise ValueError(f"{text!r} has no path")
        return f"unix:{path}"
    if "/" in text:
        return f"unix:{text}"
    host_and_port(text)
    return text


def unknown_pods(text: str) -> str:
    """Parse ``deny`` or ``allow``. An empty text stays empty.

    Raises:
        ValueError: the text is neither ``deny`` nor ``allow`` nor empty.
    """
    if text not in ("", "deny", "allow"):
        raise ValueError("must be deny or allow")
    return text


def live_policies(
    settings: PolicySettings, clock: Clock, uses: Uses[TierPolicy], waited: Callable[[float], object]
) -> "LivePolicies":
    """Create the live policies that the settings describe. The caller must keep their ``run()`` task running.

    Args:
        clock: timestamps decisions and the source's updates.
        uses: counts decisions by policy.
        waited: see :class:`~ztunnel.policy.calico.live.LivePolicies`.
    """
    # Imported here, so that proxies without policies save the memory. YAML is needed for files only.
    from ztunnel.policy.calico.live import LivePolicies

    if settings.directory:
        from ztunnel.policy.calico.files import Files

        return LivePolicies(
            lambda changed: Files(Path(settings.directory), clock, changed),
            clock,
            uses=uses,
            allow_unknown=settings.allow_unknown,
            http_waypoints=settings.http_waypoints,
            waited=waited,
        )
    from ztunnel.policy.calico.follower import Follower

    return LivePolicies(
        lambda changed: Follower(settings.sync, clock, connections_only=True, changed=changed),
        clock,
        uses=uses,
        allow_unknown=settings.allow_unknown,
        http_waypoints=settings.http_waypoints,
        waited=waited,
    )
