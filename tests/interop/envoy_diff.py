"""The table of accepted fields and the scenarios that set them, run by Envoy and by this proxy: ``make
envoy-diff``.

Accepted fields are what the compiler obeys when they are set one by one (`tests/xds/dialects/field_walk.py`). A
field has a scenario if a bootstrap that ran in both proxies sets it, and what happened there was compared. That
is no proof of the field's every value: a scenario compares who is reached, with which bytes, and what logs say,
not each thing that a field could change. The table says how a field is in a scenario:

``observed``
    What happened was compared, as above.
``served``
    Both accept a cluster that sets it, and serve with it; its effect is not seen by a client (`beside.SERVED`).
``judged``
    No proxy ran with it, but both accept, or both refuse, a bootstrap that sets it.

The status is 1 if a scenario ends otherwise than Envoy's, and, once every field has one, if one has none.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.message import Message

from tests.interop import authorization, beside, loopback
from tests.interop.__main__ import print_table, run_table
from tests.interop.loopback import Running
from tests.interop.proxies import ENVOY
from tests.interop.refusals import Row, accepted
from tests.interop.tables import LOOPBACK
from tests.interop.test_log_services import Logging
from tests.xds.dialects.field_walk import walk
from tests.xds.dialects.walked import RESOURCES
from tests.ztunnel.proxy.envoy.rig import Json
from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.json import parse_value
from xds.proto.well_known import Any as AnyMessage


def accepted_fields() -> set[str]:
    """Return the fields that are obeyed, ``message.field``."""
    found: set[str] = set()
    for message, compile_it in RESOURCES.values():
        found |= {f"{each.message}.{each.field}" for each in walk(message, compile_it) if each.result == "obeyed"}
    return found


def fields_of(bootstrap: Json) -> set[str]:
    """Return the fields that a bootstrap sets; none of one that our reader refuses."""
    try:
        message = parse_value(bootstrap, Bootstrap).message
    except ConfigError:
        return set()
    return set(_fields(message))


def _fields(message: Message) -> Iterator[str]:
    if isinstance(message, AnyMessage):
        with contextlib.suppress(registry.UnknownType, registry.MalformedMessage):
            yield from _fields(registry.unpack(message))
        return
    for field, value in message.ListFields():
        yield f"{message.DESCRIPTOR.full_name}.{field.name}"
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            inner: list[Any] = [each for each in value.values() if isinstance(each, Message)]
        else:
            inner = list(value) if field.is_repeated else [value]
        for each in inner:
            if not each.DESCRIPTOR.full_name.startswith("google.protobuf.") or isinstance(each, AnyMessage):
                yield from _fields(each)


class Recorder:
    """Which scenarios set which fields.

    Attributes:
        served: fields of clusters whose settings both accept and serve with, while no client sees a difference.
        judged: fields of bootstraps that both accept, or that both refuse.
    """

    def __init__(self) -> None:
        self.scenarios: dict[str, set[str]] = defaultdict(set)
        self.served: set[str] = set()
        self.judged: set[str] = set()
        self.name = ""

    def note(self, bootstrap: Json) -> None:
        """Count a bootstrap for the scenario that runs."""
        static = bootstrap.get("static_resources", {})
        clusters = [each for each in static.get("clusters", ()) if each["name"] not in beside.SERVED]
        for field in fields_of({**bootstrap, "static_resources": {**static, "clusters": clusters}}):
            self.scenarios[field].add(self.name)
        self.served |= fields_of(bootstrap)

    def kind(self, field: str) -> str:
        """Return how a field is in a scenario: ``observed``, ``served``, ``judged``, or ``-`` if it is in none."""
        kinds = {"observed": self.scenarios, "served": self.served, "judged": self.judged}
        return next((kind for kind, fields in kinds.items() if field in fields), "-")

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note every bootstrap that a proxy is started with, or that both judge alike."""
        start = Running.start

        def noted(running: Running, bootstrap: Json, ports: list[int]) -> None:
            self.note(bootstrap)
            start(running, bootstrap, ports)

        def judged(row: Row, kind: str, folder: Path) -> str:
            if row.envoy is row.ours:
                self.judged |= fields_of(row.make())
            return accepted(row, kind, folder)

        with mock.patch.object(Running, "start", noted), mock.patch.object(loopback, "accepted", judged):
            yield


def run_scenarios(recorder: Recorder) -> int:
    """Run everything; how many scenarios end otherwise than expected."""
    failures = 0
    with recorder.recording():
        recorder.name = "one field each"
        with beside.observed("envoy") as envoy, beside.observed("ours") as ours:
            for name, (theirs, mine) in beside.differences(envoy, ours).items():
                failures += 1
                print(f"{name}\n   envoy {theirs}\n   ours  {mine}")
        recorder.name = "log services"
        with Logging("envoy") as first, Logging("ours") as second:
            failures += first.seen() != second.seen()
        recorder.name = "authorization"
        rules = authorization.policies(40)
        with (
            authorization.verdicts("envoy", rules) as first_verdicts,
            authorization.verdicts("ours", rules) as second_verdicts,
        ):
            failures += sum(one != other for one, other in zip(first_verdicts, second_verdicts, strict=True))
        for table in LOOPBACK:
            recorder.name = table.title
            failures += print_table(table, run_table(table, []))
    return failures


def main() -> int:
    """Run the scenarios and print the table; see the module."""
    if not ENVOY.exists():
        print("cannot run: no Envoy here", file=sys.stderr)
        return 2
    recorder = Recorder()
    failures = run_scenarios(recorder)
    accepted = accepted_fields()
    lines = [
        f"| {field} | {recorder.kind(field)} | {', '.join(sorted(recorder.scenarios.get(field, ()))) or '-'} |"
        for field in sorted(accepted)
    ]
    table = "\n".join(("| accepted field | how | scenarios |", "|---|---|---|", *lines))
    path = Path(".run/envoy-diff.md")
    path.parent.mkdir(exist_ok=True)
    path.write_text(table + "\n")
    kinds = Counter(recorder.kind(field) for field in accepted)
    without = sorted(field for field in accepted if recorder.kind(field) == "-")
    print(
        f"\n{len(accepted)} accepted fields, {kinds['observed']} observed in a scenario, {kinds['served']} served "
        f"in one, {kinds['judged']} judged alike; the table is in {path}"
    )
    print("without a scenario:", *without, sep="\n  ")
    print(f"{failures} scenarios end otherwise than expected")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
