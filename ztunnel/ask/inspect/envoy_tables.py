"""Tables of a proxy in Envoy's dialect, made from its admin pages. An Envoy has some of them. Pure.

Pages are JSON of any origin: missing values are shown as ``-``, and rows about a page that the proxy does not have
are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ztunnel.ask.inspect.tables import (
    Dump,
    Row,
    cell,
    control_plane,
    counted,
    shown_denial,
)

#: Pages by path; ``None``: the proxy does not have it.
Pages = Mapping[str, Any]

#: Names of one kind in the status; of more, only their number.
_MOST_TOLD: Final = 8
_CONNECTED: Final = "control_plane.connected_state"
_LISTENERS, _CLUSTERS, _SECRETS = "ListenersConfigDump", "ClustersConfigDump", "SecretsConfigDump"


def connections(pages: Pages) -> Iterator[Row]:
    """Yield a row per live connection."""
    yield ("ID", "AGE", "SOURCE", "DESTINATION", "LISTENER", "CLUSTER", "UPSTREAM HOST", "PEER")
    for each in pages["/connections"].get("connections") or []:
        inner = each.get("inner_hops") or []
        last = inner[-1] if inner else each
        peers = [*(each.get("peer_identities") or []), *(last.get("upstream_identities") or [])]
        yield (
            cell(each, "id"),
            f"{cell(each, 'age_s')}s",
            cell(each, "source"),
            cell(each, "destination"),
            cell(each, "listener"),
            cell(last, "cluster"),
            cell(last, "upstream_host"),
            ", ".join(peers) or "-",
        )


def policies(pages: Pages) -> Iterator[Row]:
    """Yield a row per policy of RBAC filters, with the connections that it decided about."""
    yield ("POLICY NAME", "ACTION", "MODE", "CHAINS", "ALLOWED", "DENIED", "LAST")
    for each in pages["/rbac"].get("policies") or []:
        made = each.get("decisions") or {}
        shadow = not any(made.get(key) for key in ("allowed", "denied", "ended"))
        before = "shadow_" if shadow and any(key.startswith("shadow_") for key in made) else ""
        denied = cell(made, f"{before}denied") + (f", {made['ended']} ended" if made.get("ended") else "")
        counts = (cell(made, f"{before}allowed"), denied, cell(made, "lastTime"))
        yield (*(cell(each, key) for key in ("policy", "action", "mode", "chains")), *counts)


def certificates(pages: Pages) -> Iterator[Row]:
    """Yield a row per certificate of the TLS contexts, each once: own leaves, then roots."""
    yield ("CERTIFICATE NAME", "TYPE", "SERIAL NUMBER", "NOT AFTER", "NOT BEFORE")
    found: dict[Row, None] = {}
    for kind, key in (("Leaf", "cert_chain"), ("Root", "ca_cert")):
        for context in pages["/certs"].get("certificates") or []:
            for held in context.get(key) or []:
                sans = held.get("subject_alt_names") or []
                names = ", ".join(str(name) for san in sans for name in san.values())
                times = (cell(held, "expiration_time"), cell(held, "valid_from"))
                found[names or "-", kind, cell(held, "serial_number"), *times] = None
    yield from found


def status(pages: Pages) -> Iterator[Row]:
    """Yield the most important rows: the server, its active and refused configuration, and denials."""
    connected = _connected(pages.get("/stats"))  # a saved dump has no statistics
    if connected is not None:
        yield control_plane("ADS", None, connected=connected)
    server = pages["/server_info"]
    for name, key in (("version", "version"), ("state", "state"), ("up for", "uptime_current_epoch")):
        yield (name, cell(server, key))
    yield ("node", cell(server.get("node") or {}, "id"))
    dump = pages["/config_dump"]
    listeners = list(_entries(dump, _LISTENERS, "static_listeners", "dynamic_listeners"))
    states = [_states(each) for each in listeners]
    yield ("listeners", counted(state for found in states for state in found))
    clusters = (pages["/clusters"] or {}).get("cluster_statuses") or []
    yield ("clusters", str(len(clusters)))
    if pages["/connections"] is not None:
        yield ("connections", str(len(pages["/connections"].get("connections") or [])))
    leaves = [row for row in certificates(pages) if row[1] == "Leaf"]
    first = f", the first ends {min(row[3] for row in leaves)}" if leaves else ""
    yield ("certificates", f"{len(leaves)}{first}")
    yield from _few("not accepted", _refused(dump, listeners))
    yield from _few("not ready", _waiting(pages["/init_dump"]))
    yield from _few("no healthy endpoint", (cell(each, "name") for each in clusters if _is_down(each)))
    yield from _few("denied", (_denied(each) for each in pages["/denials"] or []), "/denials")


def _connected(stats: Any) -> bool | None:
    """Return the value of a statistic that a proxy with an ADS stream has; ``None``: it has none."""
    for each in (stats or {}).get("stats") or []:
        if each.get("name") == _CONNECTED:
            return bool(each.get("value"))
    return None


def _few(name: str, texts: Iterator[str], page: str = "") -> Iterator[Row]:
    listed = list(texts)
    for each in listed[:_MOST_TOLD]:
        yield (name, each)
    if len(listed) > _MOST_TOLD:
        more = f": see {page}" if page else ""
        yield (name, f"and {len(listed) - _MOST_TOLD} more{more}")


def _entries(dump: Dump, kind: str, *keys: str) -> Iterator[Dump]:
    for section in dump.get("configs") or []:
        if str(section.get("@type")).endswith(kind):
            for key in keys:
                yield from section.get(key) or []


def _states(listener: Dump) -> list[str]:
    found = [name for name in ("active", "warming", "draining") if listener.get(f"{name}_state")]
    # A static listener has no states. A listener without an accepted version has its error only.
    return found if found or "error_state" in listener else ["active"]


def _refused(dump: Dump, listeners: list[Dump]) -> Iterator[str]:
    """Yield the refused updates. The previous version stays in use."""
    clusters = _entries(dump, _CLUSTERS, "dynamic_active_clusters", "dynamic_warming_clusters")
    secrets = _entries(dump, _SECRETS, "dynamic_active_secrets", "dynamic_warming_secrets")
    for kind, entries in (("listener", iter(listeners)), ("cluster", clusters), ("secret", secrets)):
        for each in entries:
            state = each.get("error_state")
            if state:
                name = each.get("name") or (each.get("cluster") or {}).get("name")
                yield f"{kind}{f' {name}' if name else ''}: {cell(state, 'details')}"


def _waiting(page: Any) -> Iterator[str]:
    for dump in (page or {}).get("unready_targets_dumps") or []:
        for target in dump.get("target_names") or []:
            yield str(target)


def _is_down(cluster: Dump) -> bool:
    """Return whether a cluster has endpoints and none is healthy. A cluster without endpoints can be intended."""
    hosts = cluster.get("host_statuses") or []
    return bool(hosts) and not any(_is_healthy(each.get("health_status") or {}) for each in hosts)


def _is_healthy(health: Dump) -> bool:
    failed = any(value is True for key, value in health.items() if key.startswith("failed_"))
    return not failed and health.get("eds_health_status", "HEALTHY") in ("HEALTHY", "UNKNOWN", "DEGRADED")


def _denied(each: Dump) -> str:
    where = f"{cell(each, 'listener')}/{cell(each, 'chain')}"
    return shown_denial(each, f"{cell(each, 'destination')} at {where}")


@dataclass(frozen=True, slots=True)
class EnvoyTable:
    """A table that comes from admin pages.

    Attributes:
        paths: that it needs.
        optional: that an Envoy does not have; their rows are left out then.
        rows: makes it.
    """

    paths: tuple[str, ...]
    rows: Callable[[Pages], Iterator[Row]]
    optional: tuple[str, ...] = ()


ENVOY_TABLES: Final = {
    "connections": EnvoyTable(("/connections",), connections),
    "policies": EnvoyTable(("/rbac",), policies),
    "certificates": EnvoyTable(("/certs",), certificates),
    "status": EnvoyTable(
        ("/server_info", "/clusters", "/certs", "/init_dump"),
        status,
        optional=("/connections", "/denials", "/stats"),
    ),
}

#: Parameters that select the JSON form of a page.
PARAMETERS: Final[Mapping[str, Mapping[str, str | None]]] = {
    "/clusters": {"format": "json"},
    "/stats": {"format": "json", "filter": f"^{_CONNECTED}$"},
}
