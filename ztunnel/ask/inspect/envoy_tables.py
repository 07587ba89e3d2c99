"""Builds tables of a proxy in Envoy's dialect from its admin pages. Envoy has some of these pages, too. Pure.

Pages are untrusted JSON: a missing value is shown as ``-``, and rows that need a missing page are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ztunnel.ask.inspect import kinds
from ztunnel.ask.inspect.ages import shown_span
from ztunnel.ask.inspect.tables import (
    Dump,
    addon_facts,
    cell,
    control_plane,
    counted,
    decisions,
    denials,
    fact,
    number,
    seconds,
    shown_denial,
    text_of,
)
from ztunnel.runtime.console.output import Kind

#: Admin pages by path; ``None`` if the proxy does not have the page.
Pages = Mapping[str, Any]

#: The most names of one kind that ``status`` lists. Of more, only the number is shown.
_MOST_TOLD: Final = 8
_CONNECTED: Final = "control_plane.connected_state"
_LISTENERS, _CLUSTERS, _SECRETS = "ListenersConfigDump", "ClustersConfigDump", "SecretsConfigDump"


def connections(pages: Pages) -> Iterator[kinds.EnvoyConnection]:
    """Yield the live connections."""
    for each in pages["/connections"].get("connections") or []:
        inner = each.get("inner_hops") or []
        last = inner[-1] if inner else each
        peers = [*(each.get("peer_identities") or []), *(last.get("upstream_identities") or [])]
        yield kinds.EnvoyConnection(
            id=cell(each, "id"),
            age_seconds=seconds(each, "age_s"),
            source=cell(each, "source"),
            destination=cell(each, "destination"),
            listener=text_of(each, "listener"),
            cluster=text_of(last, "cluster"),
            upstream_host=text_of(last, "upstream_host"),
            peers=tuple(map(str, peers)),
        )


def policies(pages: Pages) -> Iterator[kinds.EnvoyPolicy]:
    """Yield the policies of RBAC filters, with the numbers of connections that they decided about."""
    for each in pages["/rbac"].get("policies") or []:
        made = each.get("decisions") or {}
        shadow = not any(made.get(key) for key in ("allowed", "denied", "ended"))
        before = "shadow_" if shadow and any(key.startswith("shadow_") for key in made) else ""
        yield kinds.EnvoyPolicy(
            name=cell(each, "policy"),
            action=text_of(each, "action"),
            mode=text_of(each, "mode"),
            chains=number(each, "chains"),
            **decisions(made, before),
        )


def certificates(pages: Pages) -> Iterator[kinds.Certificate]:
    """Yield the certificates of TLS contexts, each once: the proxy's own leaves, then roots."""
    found: dict[kinds.Certificate, None] = {}
    for kind, key in (("Leaf", "cert_chain"), ("Root", "ca_cert")):
        for context in pages["/certs"].get("certificates") or []:
            for held in context.get(key) or []:
                sans = held.get("subject_alt_names") or []
                names = ", ".join(str(name) for san in sans for name in san.values())
                certificate = kinds.Certificate(
                    identity=names or None,
                    type=kind,
                    serial_number=text_of(held, "serial_number"),
                    not_after=text_of(held, "expiration_time"),
                    not_before=text_of(held, "valid_from"),
                )
                found[certificate] = None
    yield from found


def status(pages: Pages) -> Iterator[kinds.Fact]:
    """Yield the lines of ``ztunnel status``: the server, its active and refused configuration, and denials."""
    connected = connected_to_ads(pages.get("/stats"))  # a saved dump has no statistics
    if connected is not None:
        yield control_plane("ADS", None, connected=connected)
    server = pages["/server_info"]
    for name, key in (("version", "version"), ("state", "state"), ("up for", "uptime_current_epoch")):
        yield fact(name, shown_span(cell(server, key)) if name == "up for" else cell(server, key))
    yield fact("node", cell(server.get("node") or {}, "id"))
    dump = pages["/config_dump"]
    listeners = list(_entries(dump, _LISTENERS, "static_listeners", "dynamic_listeners"))
    states = [_states(each) for each in listeners]
    yield fact("listeners", counted(state for found in states for state in found))
    clusters = (pages["/clusters"] or {}).get("cluster_statuses") or []
    yield fact("clusters", str(len(clusters)))
    if pages["/connections"] is not None:
        yield fact("connections", str(len(pages["/connections"].get("connections") or [])))
    yield from addon_facts(pages.get("/addons") or [])
    leaves = [each for each in certificates(pages) if each.type == "Leaf"]
    first = f", the first ends {min(each.not_after or '-' for each in leaves)}" if leaves else ""
    yield fact("certificates", f"{len(leaves)}{first}")
    yield from _few("not accepted", _refused(dump, listeners), "error")
    yield from _few("not ready", _waiting(pages["/init_dump"]), "error")
    down = (cell(each, "name") for each in clusters if _is_down(each))
    yield from _few("no healthy endpoint", down, "error")
    denied = (shown_denial(each, _place(each)) for each in denials(pages["/denials"]))
    yield from _few("denied", denied, "warning", "/denials")


def _place(each: kinds.Denial) -> str:
    return f" at {each.listener or '-'}/{each.chain or '-'}"


def connected_to_ads(stats: Any) -> bool | None:
    """Return the statistic that shows whether the ADS stream is connected; ``None`` if the proxy has no such
    stream.
    """
    for each in (stats or {}).get("stats") or []:
        if each.get("name") == _CONNECTED:
            return bool(each.get("value"))
    return None


def _few(
    name: str, texts: Iterator[str], severity: Literal["warning", "error"], page: str = ""
) -> Iterator[kinds.Fact]:
    listed = list(texts)
    for each in listed[:_MOST_TOLD]:
        yield fact(name, each, severity)
    if len(listed) > _MOST_TOLD:
        more = f": see {page}" if page else ""
        yield fact(name, f"and {len(listed) - _MOST_TOLD} more{more}", severity)


def _entries(dump: Dump, kind: str, *keys: str) -> Iterator[Dump]:
    for section in dump.get("configs") or []:
        if str(section.get("@type")).endswith(kind):
            for key in keys:
                yield from section.get(key) or []


def _states(listener: Dump) -> list[str]:
    found = [name for name in ("active", "warming", "draining") if listener.get(f"{name}_state")]
    # A dump shows no states for a static listener, and only the error for a listener without an accepted version.
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
    """Return whether a cluster has endpoints, but no healthy one. A cluster without endpoints can be intended."""
    hosts = cluster.get("host_statuses") or []
    return bool(hosts) and not any(_is_healthy(each.get("health_status") or {}) for each in hosts)


def _is_healthy(health: Dump) -> bool:
    failed = any(value is True for key, value in health.items() if key.startswith("failed_"))
    return not failed and health.get("eds_health_status", "HEALTHY") in ("HEALTHY", "UNKNOWN", "DEGRADED")


@dataclass(frozen=True, slots=True)
class EnvoyTable:
    """A table that comes from admin pages.

    Attributes:
        paths: the pages that it needs.
        optional: pages that an Envoy does not have. Without such a page, its rows are left out.
        items: makes the table's items from the pages.
        kind: the items' kind.
    """

    paths: tuple[str, ...]
    items: Callable[[Pages], Iterator[Any]]
    kind: Kind[Any]
    optional: tuple[str, ...] = ()


ENVOY_TABLES: Final = {
    "connections": EnvoyTable(("/connections",), connections, kinds.ENVOY_CONNECTION),
    "policies": EnvoyTable(("/rbac",), policies, kinds.ENVOY_POLICY),
    "certificates": EnvoyTable(("/certs",), certificates, kinds.ENVOY_CERTIFICATE),
    "denials": EnvoyTable(("/denials",), lambda pages: denials(pages["/denials"]), kinds.DENIAL),
    "status": EnvoyTable(
        ("/server_info", "/clusters", "/certs", "/init_dump"),
        status,
        kinds.FACT,
        optional=("/connections", "/denials", "/stats", "/addons"),
    ),
}

#: Query parameters that select a page's JSON form.
PARAMETERS: Final[Mapping[str, Mapping[str, str | None]]] = {
    "/clusters": {"format": "json"},
    "/stats": {"format": "json", "filter": f"^{_CONNECTED}$"},
}
