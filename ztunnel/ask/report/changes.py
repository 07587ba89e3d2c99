"""``ztunnel changes``: compares the current state with an archive of ``ztunnel bug-report``.

Exit status: 0 without a difference, 1 with one, 2 without an answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from ztunnel.ask.inspect import tables
from ztunnel.ask.inspect.fleet import gather
from ztunnel.ask.inspect.source import AskFailed, Pages, add_source, failed, query_all_by_default
from ztunnel.runtime.console.output import Answer, Column, Item, Kind, emit


class Difference(Item, frozen=True, kw_only=True):
    """The difference of one object: added, removed or changed. ``fields`` has the old and new values of changed
    fields.
    """

    change: str
    kind: str
    object: str
    fields: dict[str, str]


def _fields(item: Difference) -> str:
    return "; ".join(f"{name}: {change}" for name, change in item.fields.items())


DIFFERENCE: Final[Kind[Difference]] = Kind(
    name="Difference",
    several="differences",
    item=Difference,
    identity=lambda item: f"{item.kind}/{item.object}",
    columns=(
        Column("CHANGE", "change"),
        Column("KIND", "kind"),
        Column("OBJECT", "object"),
        Column("FIELDS", _fields),
    ),
)

#: The compared fields of every object, by kind and name.
State = Mapping[tuple[str, str], Mapping[str, Any]]
ByNode = Mapping[str, Mapping[tuple[str, str], dict[str, Any]]]
#: Fields of tables that traffic or time alone changes. They are not compared.
_MOVING: Final = frozenset(("node", "seen_by", "allowed", "denied", "ended", "last_time"))


def add_arguments(subparsers: Any) -> None:
    """Add the command to ``argparse``'s sub-commands; ``args.run`` runs it."""
    changes = subparsers.add_parser(
        "changes",
        help="list the differences from an archive of bug-report",
        description="Compare workloads, services, policies, pods, certificates' authorities and versions in an "
        "archive with those of the running proxies, or with --file of another archive.",
    )
    changes.add_argument("archive", metavar="ARCHIVE", help="the archive with the earlier state")
    add_source(changes, across=True, all_by_default=True, saved=True)
    changes.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    earlier = argparse.Namespace(**{**vars(args), "file": args.archive, "pod": None, "all_nodes": False})
    query_all_by_default(args)
    try:
        before, after = gather(earlier, state_of), gather(args, state_of)
        compared = before.by_node if after.across else _of_proxy(before.by_node, after.by_node)
    except AskFailed as error:
        return failed(args, str(error))
    # The state of a node that is silent once is unknown: its pods were neither added nor removed.
    silent = {each.node: each for each in (*before.silent, *after.silent)}
    earlier_state, later_state = (
        merged({node: state for node, state in states.items() if node not in silent})
        for states in (compared, after.by_node)
    )
    items = list(differences(earlier_state, later_state))
    answer = Answer(kind=DIFFERENCE, items=items, silent=list(silent.values()), bad=bool(items))
    return emit(answer, args.output)


def _of_proxy(before: ByNode, after: ByNode) -> ByNode:
    """Return the earlier state of the one proxy whose later state is known, or of all if its node is not there."""
    proxies = {key for state in after.values() for key in state if key[0] == "proxy"}
    return {node: state for node, state in before.items() if not proxies.isdisjoint(state)} or before


def state_of(pages: Pages) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the state of one proxy.

    Raises:
        AskFailed: the proxy does not answer, or has Envoy's dialect.
    """
    try:
        dump = tables.mesh_dump(pages.json("/config_dump"))
        return dict(_objects(dump))
    except tables.NotAMesh as error:
        raise AskFailed(f"{pages.name}: {error}") from None
    except (TypeError, AttributeError, KeyError) as error:
        raise AskFailed(f"{pages.name}: not a config_dump: {error}") from None


def _objects(dump: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    makers: tuple[tuple[str, Callable[..., Iterator[Any]]], ...] = (
        ("workload", tables.workloads),
        ("service", tables.services),
        ("policy", tables.policies),
    )
    for kind, make in makers:
        for item in make(dump):
            if item.namespace is not None:
                fields = msgspec.structs.asdict(item)
                yield (
                    (kind, f"{item.namespace}/{item.name}"),
                    {name: value for name, value in fields.items() if name not in _MOVING},
                )
    services = dump.get("services") or ()
    for each in services.values() if isinstance(services, Mapping) else services:
        yield ("ports", f"{each.get('namespace')}/{each.get('name')}"), {"ports": each.get("ports")}
    for each in dump.get("policies") or ():
        yield ("rules", f"{each.get('namespace')}/{each.get('name')}"), {"rules": each.get("rules")}
    for item in tables.certificates(dump):
        if item.type == "Root":
            yield ("root", str(item.serial_number)), {"not_after": item.not_after}
        elif item.type is None:
            yield ("certificate", str(item.identity)), {"state": item.state}
    node = str((dump.get("config") or {}).get("localNode") or "node")
    version = dump.get("version") or {}
    yield ("proxy", node), {"version": version.get("version"), "build": version.get("gitRevision")}
    for state in (dump.get("workloadState") or {}).values():
        info = state.get("info") or {}
        yield ("pod", f"{info.get('namespace')}/{info.get('name')}"), {"node": node, "state": state.get("state")}


def merged(by_node: ByNode) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the state of all nodes, merged into one."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for state in by_node.values():
        found |= state
    return found


def differences(before: State, after: State) -> Iterator[Difference]:
    """Yield the differences by kind and name."""
    for key in sorted({*before, *after}):
        kind, name = key
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if old is None or new is None:
            yield Difference(change="added" if old is None else "removed", kind=kind, object=name, fields={})
            continue
        fields = {
            field: f"{_shown(old.get(field))} -> {_shown(new.get(field))}"
            for field in sorted({*old, *new})
            if old.get(field) != new.get(field)
        }
        yield Difference(change="changed", kind=kind, object=name, fields=fields)


def _shown(value: object) -> str:
    text = ", ".join(map(str, value)) or "none" if isinstance(value, tuple | list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
