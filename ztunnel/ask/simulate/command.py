"""``ztunnel simulate``: reads a mesh, policies and connections, and prints which connections would be affected.

Exit status: 0 if no connection would be newly refused, 1 if one would, 2 if there is no answer.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from xds.dialects.istio.local_file import LocalMesh
from xds.errors import ConfigError
from xds.model.workload import Protocol
from ztunnel.ask.inspect.fleet import saved_proxy
from ztunnel.ask.inspect.source import AskFailed, LivePages, add_source, reaching
from ztunnel.ask.inspect.tables import NotAMesh, is_envoy_dump, mesh_dump
from ztunnel.ask.simulate.changes import Change, Simulation, allowed, simulate
from ztunnel.ask.simulate.policies import applied, mesh_of, read_policies
from ztunnel.ask.simulate.seen import Log, Seen, open_now, read_log
from ztunnel.ask.simulate.suggest import suggest
from ztunnel.runtime.console.output import Answer, Column, Item, Kind, emit
from ztunnel.runtime.console.terminal import complain, progress
from ztunnel.runtime.settings import duration_s, plain_reason
from ztunnel.runtime.text_file import read_text

#: Seconds between two reads of the live connections. Shorter connections can be missed, which the help mentions.
_LOOK_S: Final = 0.5
_OTHER_DIALECT: Final = (
    "simulates the policies of an Istio mesh; in Envoy's dialect shadow_rules of an RBAC filter show what others "
    "would do, and `ztunnel policies` counts that"
)


class _Failed(Exception):
    """The command has no answer; the text says why."""


def add_arguments(subparsers: Any) -> None:
    """Add ``simulate`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run`."""
    command = subparsers.add_parser(
        "simulate",
        help="show the effect of changed authorization policies",
        description="Evaluate observed connections twice: by the authorization policies of a running proxy of "
        "an Istio mesh, and by these policies with changes. Show for each pair of workloads which connections "
        "would be newly refused or newly allowed. The exit status is 1 if a connection would be newly refused.",
    )
    changes = command.add_argument_group("changes")
    changes.add_argument(
        *("-p", "--policy"),
        action="append",
        default=[],
        metavar="FILE",
        help="AuthorizationPolicies in YAML, which replace those of the same name; repeatable",
    )
    changes.add_argument(
        "--remove", action="append", default=[], metavar="NAMESPACE/NAME", help="a policy to leave out; repeatable"
    )
    changes.add_argument(
        *("--enforce",),
        action="append",
        default=[],
        metavar="NAMESPACE/NAME",
        help="a dry-run policy to enforce; repeatable",
    )
    changes.add_argument(
        *("--same-selector",),
        action="append",
        default=[],
        metavar="NAMESPACE/NAME",
        help="this policy selects the same workloads as its active version (the mesh does not have its labels); "
        "repeatable",
    )
    changes.add_argument(
        "--addon",
        metavar="FILE",
        help="show an addon's verdicts about the log's connections instead (FILE.py[:Class])",
    )
    changes.add_argument(
        "--addon-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an option of the addon, like that of ztunnel proxy",
    )
    changes.add_argument(
        "--suggest", action="store_true", help="instead print the narrowest policies for the allowed connections"
    )
    seen = command.add_argument_group("connections").add_mutually_exclusive_group(required=True)
    seen.add_argument(
        "--from-log", metavar="FILE", help="an access log of the destinations' proxies; - is standard input"
    )
    seen.add_argument(
        "--live",
        metavar="DURATION",
        help="observe the proxy's inbound connections for this time; some shorter than 0.5 s are missed",
    )
    mesh = command.add_argument_group("mesh")
    mesh.add_argument(
        "--root-namespace",
        default="istio-system",
        metavar="NAME",
        help="namespace of policies for the whole mesh: those without selector (default istio-system)",
    )
    add_source(command, saved=True)
    command.set_defaults(run=reaching(run))


def run(args: argparse.Namespace) -> int:
    """Run the simulation, and return the exit status."""
    try:
        pages = saved_proxy(args) if args.file else LivePages(args.address, args.request_timeout)
        found = pages.json("/config_dump")
        if is_envoy_dump(found):
            raise _Failed(f"{args.file or args.address}: {_OTHER_DIALECT}")
        dump = mesh_dump(found)
        before = mesh_of(dump)
        if args.addon:
            return _replayed(args, before)
        proposals = [
            each for file in args.policy for each in read_policies(_read(file), file, args.root_namespace)
        ]
        after = applied(
            before,
            proposals,
            removed=args.remove,
            enforced=args.enforce,
            same_selector=args.same_selector,
        )
        if not (proposals or args.remove or args.enforce or args.suggest):
            raise _Failed("nothing to simulate: give --policy, --remove, --enforce or --suggest")
        log = _logged(args.from_log) if args.from_log else _watched(args, before)
    except (AskFailed, NotAMesh, ConfigError, _Failed) as error:
        complain(f"ztunnel simulate: {error}")
        return 2
    if args.suggest:
        if not log.seen:
            print("ztunnel simulate: no connection was seen, so there is nothing to suggest", file=sys.stderr)
        print(suggest(allowed(after, log.seen)), end="")
        return 0
    answer = simulate(before, after, log.seen)
    return emit(_answer(answer, log), args.output)


def _replayed(args: argparse.Namespace, mesh: LocalMesh) -> int:
    """Replay the log against an addon, and return the exit status.

    Raises:
        _Failed: there is no answer.
    """
    from ztunnel.ask.simulate.addon_replay import ReplayFailed, replay
    from ztunnel.proxy.addons.load import AddonError, load
    from ztunnel.proxy.addons.settings import ADDONS, OPTION, addon_settings

    if not args.from_log or args.policy or args.remove or args.enforce or args.suggest:
        raise _Failed("--addon goes with --from-log, and not with policies")
    options = "\n".join(args.addon_option)
    settings, faults = addon_settings({ADDONS: args.addon, OPTION: options})
    if settings is None or faults:
        raise _Failed("; ".join(faults) or f"--addon {args.addon}: no addon")
    try:
        loaded = load(settings.specs[0], settings.options)
        found = replay(loaded, _read(args.from_log).splitlines(), mesh.workloads)
    except (AddonError, ReplayFailed) as error:
        raise _Failed(str(error)) from None
    return emit(_answer(found.simulation, Log({}, found.unread, found.others)), args.output)


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else read_text(Path(file))
    except OSError as error:
        raise _Failed(plain_reason(error)) from None
    except UnicodeDecodeError:  # of a file, read_text names the place
        raise _Failed("standard input: not text") from None


def _logged(file: str) -> Log:
    lines = _read(file).splitlines()
    log = read_log(lines)
    if lines and log.others == len(lines):
        raise _Failed(f"{file}: none of its {len(lines)} lines is an access line of a ztunnel")
    return log


def _watched(args: argparse.Namespace, mesh: LocalMesh) -> Log:
    """Read the live connections repeatedly for a limited time, and count each connection once."""
    try:
        limit_s = duration_s(args.live)
    except ValueError as error:
        raise _Failed(f"--live {args.live}: {error}") from None
    if args.file:
        raise _Failed("--live asks a running proxy: not with --file")
    identities = {
        address: str(workload.identity)
        for workload in mesh.workloads
        if workload.protocol is Protocol.HBONE
        for address in workload.addresses
    }
    sockets: dict[tuple[str, str, str], Seen] = {}
    began_s = time.monotonic()
    with progress("watching connections", limit_s) as advance:
        while True:
            pods: Mapping[str, Any] = LivePages(args.address, args.request_timeout).json("/connections")
            try:
                for uid, state in pods.items():
                    for each in (state.get("connections") or {}).get("inbound") or []:
                        alone = {uid: {"connections": {"inbound": [each]}}}
                        for seen in open_now(alone, identities):
                            sockets[uid, str(each.get("src")), str(each.get("actualDst"))] = seen
            except (ValueError, KeyError, TypeError, AttributeError):
                raise _Failed(f"{args.address}: /connections has another form than a ztunnel's") from None
            passed_s = time.monotonic() - began_s
            advance(passed_s, f"{len(sockets)} seen")
            if passed_s >= limit_s:
                break
            time.sleep(min(_LOOK_S, limit_s - passed_s))
    found: dict[Seen, int] = {}
    for seen in sockets.values():
        found[seen] = found.get(seen, 0) + 1
    return Log(found, 0, 0)


class SimulatedPair(Item, frozen=True, kw_only=True):
    """The connections between a pair of workloads, evaluated by the current and by the changed policies."""

    change: str
    source: str
    identity: str | None = None
    destination: str
    connections: int
    because: str


PAIR: Final = Kind(
    name="SimulatedPair", several="pairs", item=SimulatedPair,
    identity=lambda item: f"{item.source}-{item.destination}",
    columns=(
        Column("CHANGE", "change"),
        Column("SOURCE", "source"),
        Column("IDENTITY", "identity"),
        Column("DESTINATION", "destination"),
        Column("CONNECTIONS", "connections"),
        Column("BECAUSE", "because"),
    ),
)  # fmt: skip


def _answer(found: Simulation, log: Log) -> Answer[SimulatedPair]:
    counts = ", ".join(f"{found.total(change)} {change.value}" for change in Change)
    notes = [f"{_judged(found)} connections: {counts}"]
    if found.unknown:
        notes.append(f"{found.unknown} went to addresses that are no workload of the mesh: not judged")
    if log.unread:
        notes.append(f"lines of the log that do not say enough, not judged: {log.unread}")
    if log.others:
        notes.append(f"lines of the log that are no access lines: {log.others}")
    bad = bool(found.total(Change.NEWLY_REFUSED))
    return Answer(kind=PAIR, items=_pairs(found), bad=bad, notes=notes, summary=_summary(found, log))


def _judged(found: Simulation) -> int:
    """Return a sentence with the numbers of evaluated connections, and of connections to unknown workloads."""
    return sum(found.total(change) for change in Change) + found.unknown


def _pairs(found: Simulation) -> list[SimulatedPair]:
    return [
        SimulatedPair(
            change=each.change.value,
            source=each.source,
            identity=each.identity or None,
            destination=each.destination,
            connections=each.times,
            because=each.because,
        )
        for each in found.rows
    ]


def _summary(answer: Simulation, log: Log) -> dict[str, Any]:
    return {
        "connections": _judged(answer),
        "totals": {change.value: answer.total(change) for change in Change},
        "unknownDestinations": answer.unknown,
        "unreadLines": log.unread,
        "otherLines": log.others,
    }
