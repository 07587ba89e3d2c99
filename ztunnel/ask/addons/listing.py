"""The command ``ztunnel addons``: lists the addons of running proxies with calls, time, denials and faults.

Exit status: 0; 1 if an addon is suspended or its changed file is not used; 2 if a proxy does not answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from ztunnel.ask.inspect.fleet import Found, gather, items_of
from ztunnel.ask.inspect.source import AskFailed, Pages, add_source, failed
from ztunnel.runtime.console.output import Answer, Column, Item, Kind, emit


class HookItem(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The calls of one addon's hook. ``results`` has the number of calls by result."""

    name: str
    calls: int
    seconds: float
    over_budget: int
    results: dict[str, int]


class AddonItem(Item, frozen=True, kw_only=True):
    """An addon of a proxy, summed over the proxy's processes. In a table row, ``hook`` is the hook that the row is
    about.
    """

    name: str
    source: str
    sha256: str | None = None
    state: str
    problem: str | None = None
    on_error: str
    processes: int
    calls: int
    seconds: float
    over_budget: int
    denials: int
    faults: int
    hooks: tuple[HookItem, ...] = ()
    hook: str | None = None


def _by_hook(item: AddonItem) -> Iterator[AddonItem]:
    """Yield a table row for the addon, and one for each of its hooks."""
    yield item
    for hook in item.hooks:
        faults = hook.results.get("fault", 0) + hook.results.get("timeout", 0)
        yield msgspec.structs.replace(
            item,
            hook=hook.name,
            calls=hook.calls,
            seconds=hook.seconds,
            over_budget=hook.over_budget,
            denials=hook.results.get("deny", 0),
            faults=faults,
        )


def _mean(item: AddonItem) -> str | None:
    return f"{item.seconds * 1e6 / item.calls:.1f}us" if item.calls else None


def _state(item: AddonItem) -> str:
    if item.hook is not None:
        return ""
    return item.state + (f"; its changed file is not used: {item.problem}" if item.problem else "")


ADDON: Final[Kind[AddonItem]] = Kind(
    name="Addon", several="addons", item=AddonItem, rows=_by_hook, identity=lambda item: item.name,
    columns=(
        Column("ADDON", lambda item: item.name if item.hook is None else ""),
        Column("HOOK", lambda item: item.hook or ""),
        Column("CALLS", "calls"),
        Column("MEAN", _mean),
        Column("OVER BUDGET", "over_budget"),
        Column("DENIED", "denials"),
        Column("FAULTS", "faults"),
        Column("STATE", _state),
        Column("SOURCE", "source", wide=True),
        Column("ON ERROR", "on_error", wide=True),
        Column("SHA256", "sha256", wide=True),
    ),
)  # fmt: skip
KINDS: Final = {ADDON.name: ADDON}


def add_arguments(subparsers: Any) -> None:
    """Add ``addons``."""
    command = subparsers.add_parser(
        "addons",
        help="list the addons of running proxies: calls, time, denials, faults",
        description="List the addons of a running proxy, or with -A of all proxies, in their order, with the "
        "calls of each hook.",
    )
    add_source(command, across=True)
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        found = gather(args, _look)
    except AskFailed as error:
        return failed(args, str(error))
    items = items_of(Found(found.by_node, found.silent, found.across))
    bad = any(item.state != "active" or item.problem for item in items)
    return emit(Answer(kind=ADDON, items=items, silent=found.silent, across=found.across, bad=bad), args.output)


def _look(pages: Pages) -> list[AddonItem]:
    page = pages.json("/addons")
    try:
        return [_item(each) for each in page]
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        raise AskFailed(f"{pages.name}: /addons is no list of addons: {error}") from None


def _item(entry: Mapping[str, Any]) -> AddonItem:
    hooks = [{"name": name, **hook} for name, hook in entry["hooks"].items()]
    over = sum(hook["overBudget"] for hook in hooks)
    values = {key: value if value != "" else None for key, value in entry.items()}
    return msgspec.convert({**values, "hooks": hooks, "overBudget": over}, AddonItem)
