"""``ztunnel nodes``: prints a line about each node's proxy.

Exit status: 0; 1 if a proxy is not ready, has lost its control plane or lacks a certificate; 2 if a proxy does not
    answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ztunnel.ask.inspect.ages import shown_age
from ztunnel.ask.inspect.envoy_tables import PARAMETERS, certificates, connected_to_ads, connections
from ztunnel.ask.inspect.fleet import Found, gather, items_of
from ztunnel.ask.inspect.kinds import age_cell
from ztunnel.ask.inspect.source import AskFailed, Pages, add_source, failed, page_or_none, query_all_by_default
from ztunnel.ask.inspect.tables import cell, is_envoy_dump, mesh_dump
from ztunnel.ask.inspect.watch import add_watch, watch
from ztunnel.runtime.console.output import Answer, Column, Item, Kind, emit


class NodeStatus(Item, frozen=True, kw_only=True):
    """The proxy of a node. A value that this kind of proxy does not report is ``None``.

    ``last_update_seconds`` is the age of the control plane's last message, ``away_seconds`` how long its stream
    has been lost, ``first_expiry`` the earliest expiry of a certificate, ``oldest_seconds`` the age of the oldest
    connection, which a restart would cut first.
    """

    version: str | None = None
    build: str | None = None
    ready: bool | None = None
    pods_up: int = 0
    pods: int = 0
    connected: bool | None = None
    away_seconds: float | None = None
    last_update_seconds: float | None = None
    certificates: int = 0
    certificates_missing: int = 0
    first_expiry: str | None = None
    denials: int | None = None
    connections: int = 0
    oldest_seconds: float | None = None
    oldest: str | None = None


def _plane(item: NodeStatus) -> str | None:
    if item.connected is None:
        return None
    if item.connected:
        return "connected"
    return "LOST" if item.away_seconds is None else f"LOST {shown_age(item.away_seconds)} ago"


def _certificates(item: NodeStatus) -> str:
    missing = f", {item.certificates_missing} missing" if item.certificates_missing else ""
    return f"{item.certificates}{missing}"


NODE_STATUS: Final[Kind[NodeStatus]] = Kind(
    name="NodeStatus",
    several="nodes",
    item=NodeStatus,
    identity=lambda item: item.node or "-",
    volatile=("away_seconds", "last_update_seconds", "oldest_seconds"),
    columns=(
        Column("VERSION", "version"),
        Column("BUILD", "build", wide=True),
        Column("READY", "ready"),
        Column("PODS UP", lambda item: f"{item.pods_up}/{item.pods}"),
        Column("CONTROL PLANE", _plane),
        Column("UPDATED", lambda item: age_cell(item.last_update_seconds)),
        Column("CERTIFICATES", _certificates),
        Column("FIRST ENDS", "first_expiry"),
        Column("DENIALS", "denials"),
        Column("CONNECTIONS", "connections"),
        Column("OLDEST", lambda item: age_cell(item.oldest_seconds)),
        Column("OLDEST IS", "oldest", wide=True),
    ),
)


def add_arguments(subparsers: Any) -> None:
    """Add the command to ``argparse``'s sub-commands; ``args.run`` runs it."""
    nodes = subparsers.add_parser(
        "nodes",
        help="list the proxies of all nodes: version, pods, last update, certificates, oldest connection",
        description="Show a line for the proxy of each node, or for the proxy of --node, --pod or --address.",
    )
    add_source(nodes, across=True, all_by_default=True, saved=True)
    add_watch(nodes)
    nodes.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    query_all_by_default(args)
    try:
        if args.watch is not None:
            return watch(lambda: _answer(args), args.watch, args.output, command="nodes")
        return emit(_answer(args), args.output)
    except AskFailed as error:
        return failed(args, str(error))


def _answer(args: argparse.Namespace) -> Answer[NodeStatus]:
    found = gather(args, look)
    items = items_of(Found({node: [each] for node, each in found.by_node.items()}, found.silent, across=True))
    items = [each if each.node else msgspec.structs.replace(each, node=None) for each in items]
    bad = any(each.ready is False or each.connected is False or each.certificates_missing for each in items)
    return Answer(kind=NODE_STATUS, items=items, silent=found.silent, across=True, bad=bad)


def look(pages: Pages) -> NodeStatus:
    """Return the table row of one proxy.

    Raises:
        AskFailed: it does not answer.
    """
    dump = pages.json("/config_dump")
    try:
        if is_envoy_dump(dump):
            paths = ("/server_info", "/certs", "/connections", "/denials", "/stats")
            return of_envoy({path: page_or_none(pages, path, PARAMETERS.get(path)) for path in paths})
        return of_mesh(mesh_dump(dump), page_or_none(pages, "/check"))
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise AskFailed(f"{pages.name}: not a config_dump: {error}") from None


def of_envoy(pages: Mapping[str, Any]) -> NodeStatus:
    """Return the row of a proxy in Envoy's dialect, which does not know its pods.

    Args:
        pages: the pages of the proxy by path; ``None`` for a page that an Envoy or an archive lacks.
    """
    server, denied = pages["/server_info"] or {}, pages["/denials"]
    held = certificates(pages) if pages["/certs"] else ()
    ends = [each.not_after for each in held if each.type == "Leaf" and each.not_after]
    live = list(connections(pages)) if pages["/connections"] else []
    oldest = max(live, key=lambda each: each.age_seconds or 0.0, default=None)
    return NodeStatus(
        version=cell(server, "version"),
        ready=server.get("state") == "LIVE",
        connected=connected_to_ads(pages["/stats"]),
        certificates=len(ends),
        first_expiry=min(ends, default=None),
        denials=sum(int(each.get("count") or 0) for each in denied) if denied is not None else None,
        connections=len(live),
        oldest_seconds=oldest.age_seconds if oldest is not None else None,
        oldest=f"{oldest.source} to {oldest.destination}" if oldest is not None else None,
    )


def of_mesh(dump: Mapping[str, Any], check: Mapping[str, Any] | None) -> NodeStatus:
    """Return the row of a proxy in an Istio mesh.

    Args:
        dump: the proxy's ``/config_dump``.
        check: the proxy's ``/check``; ``None`` for the Rust ztunnel.
    """
    version, plane = dump.get("version") or {}, dump.get("controlPlane") or {}
    pods = list((dump.get("workloadState") or {}).values())
    held = dump.get("certificates") or []
    ends = [str(leaf["expirationTime"]) for each in held for leaf in (each.get("certChain") or ())[:1]]
    number, oldest, name = 0, None, None
    for state in pods:
        info = state.get("info") or {}
        for entries in (state.get("connections") or {}).values():
            for each in entries:
                number += 1
                age = each.get("ageSeconds")
                if age is not None and (oldest is None or age > oldest):
                    oldest = float(age)
                    name = (
                        f"{info.get('namespace')}/{info.get('name')} {each.get('src')} to {each.get('actualDst')}"
                    )
    checked = check or {}
    return NodeStatus(
        version=version.get("version"),
        build=version.get("gitRevision"),
        ready=checked.get("ready"),
        pods_up=sum(1 for state in pods if state.get("state", "Up") == "Up"),
        pods=len(pods),
        connected=bool(plane.get("connected")) if plane.get("address") else None,
        away_seconds=plane.get("awaySeconds") if plane.get("address") else None,
        last_update_seconds=(checked.get("controlPlane") or {}).get("updatedSecondsAgo"),
        certificates=len(ends),
        certificates_missing=sum(1 for each in held if str(each.get("state")).startswith("Unavailable")),
        first_expiry=min(ends, default=None),
        denials=sum(int(each.get("count") or 0) for each in dump["denials"]) if "denials" in dump else None,
        connections=number,
        oldest_seconds=oldest,
        oldest=name,
    )
