"""Replays the connections of an access log against an addon that is not loaded, and collects its verdicts.

Each access line becomes the facts that the hook would have got: of ``connecting`` for a line of the source's
proxy, of ``accepting`` for one of the destination's. All lines go to the same instance of the addon in their
order, so that its counters work. An addon that reads the clock sees the time of the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from xds.model.address import canonical
from xds.model.workload import Workload
from ztunnel.addons import Deny, Direction, Facts, Path, Verdict
from ztunnel.addons import Workload as Side
from ztunnel.ask.inspect.seen import fields_of
from ztunnel.ask.simulate.changes import Change, Row, Simulation
from ztunnel.ask.simulate.seen import MESSAGE, split
from ztunnel.proxy.addons.decide import fault_of, in_words
from ztunnel.proxy.addons.load import LoadedAddon, where
from ztunnel.proxy.istio.path.addon_labels import addon_labels

_ORDER = {change: place for place, change in enumerate(Change)}


class ReplayFailed(Exception):
    """A hook of the replayed addon failed; the text says at which line of the log."""


class Replay(NamedTuple):
    """The result of a replay.

    Attributes:
        simulation: the verdicts by pair of workloads.
        unread: number of access lines without the facts that a hook needs.
        others: number of lines that are not access lines.
    """

    simulation: Simulation
    unread: int
    others: int


def replay(loaded: LoadedAddon, lines: Iterable[str], workloads: Iterable[Workload]) -> Replay:
    """Return an addon's verdicts on the connections of a log.

    Args:
        loaded: the addon.
        lines: the log's lines.
        workloads: the workloads of the mesh, because access lines do not have the workloads' labels.

    Raises:
        ReplayFailed: a hook raised, or its result is not a verdict.
    """
    at = {address: each for each in workloads for address in each.addresses}
    found: dict[tuple[Change, str, str, str, str], int] = {}
    unread = others = 0
    for number, line in enumerate(lines, 1):
        if MESSAGE not in line:
            others += 1
            continue
        fields = fields_of(line)
        try:
            facts = _facts(fields, at, number)
        except (KeyError, ValueError):
            unread += 1
            continue
        hook = "connecting" if facts.direction is Direction.OUTBOUND else "accepting"
        function = loaded.hooks.get(hook)
        if function is None:
            continue
        words, denies = _said(loaded, hook, function, facts, number)
        was_refused = bool(fields.get("error"))
        if denies:
            change = Change.STILL_REFUSED if was_refused else Change.NEWLY_REFUSED
        else:
            change = Change.STILL_REFUSED if was_refused else Change.STILL_ALLOWED
        there = _called(facts.destination, facts.destination_address)
        pair = (_called(facts.source, facts.source_address), facts.source_identity)
        key = (change, *pair, f"{there}:{facts.destination_port}", words)
        found[key] = found.get(key, 0) + 1
    rows = [Row(*key[:4], times, key[4]) for key, times in found.items()]
    rows.sort(key=lambda row: (_ORDER[row.change], -row.times, row.source, row.destination))
    return Replay(Simulation(rows, 0), unread, others)


def _said(
    loaded: LoadedAddon, hook: str, function: Callable[..., object], facts: Facts, number: int
) -> tuple[str, bool]:
    if hook in loaded.waits:
        raise ReplayFailed(f"addon {loaded.name}: its hook {hook} is asynchronous and cannot be replayed")
    try:
        verdict = function(facts)
    except (Exception, SystemExit) as error:
        text = f"addon {loaded.name}: line {number} of the log: its hook {hook} raised {where(error)}"
        raise ReplayFailed(text) from error
    fault = fault_of(hook, verdict)
    if fault:
        raise ReplayFailed(f"addon {loaded.name}: line {number} of the log: its hook {hook} {fault}")
    assert verdict is None or isinstance(verdict, Verdict)
    return f"addon {loaded.name}: {in_words(verdict)}", isinstance(verdict, Deny)


def _facts(fields: Mapping[str, str], at: Mapping[str, Workload], number: int) -> Facts:
    outbound = fields["direction"] == "outbound"
    host, port = split(fields["src.addr"])
    there, there_port = split(fields["dst.addr"])
    endpoint = fields["dst.addr"] if outbound else ""
    authority = fields.get("dst.hbone_addr", "")
    if authority:
        named, there_port = split(authority)
        there = _address(named) or there
    return Facts(
        connection=number,
        direction=Direction.OUTBOUND if outbound else Direction.INBOUND,
        path=Path.TUNNEL if authority else Path.DIRECT,
        source=_side(fields, "src", at.get(canonical(host))),
        source_address=canonical(host),
        source_port=port,
        source_identity=fields.get("src.identity", ""),
        destination=_side(fields, "dst", at.get(canonical(there))),
        destination_address=canonical(there),
        destination_port=there_port,
        destination_identity=fields.get("dst.identity", ""),
        endpoint=endpoint,
        service=fields.get("dst.service", ""),
    )


def _side(fields: Mapping[str, str], prefix: str, known: Workload | None) -> Side:
    name, namespace = fields.get(f"{prefix}.workload", ""), fields.get(f"{prefix}.namespace", "")
    account = fields.get(f"{prefix}.identity", "").rpartition("/")[2]
    if known is None:
        return Side(name=name, namespace=namespace, service_account=account)
    return Side(
        name or known.name,
        namespace or known.namespace,
        account or known.service_account,
        known.node,
        known.cluster_id,
        addon_labels(known),
    )


def _called(side: Side, address: str) -> str:
    return f"{side.name}.{side.namespace}" if side.name else address


def _address(host: str) -> str | None:
    try:
        return canonical(host)
    except ValueError:
        return None
