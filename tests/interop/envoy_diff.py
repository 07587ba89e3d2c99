"""The table of accepted fields and the scenarios that set them, run by Envoy and by this proxy: ``make
envoy-diff``.

Accepted fields are what the compiler obeys when they are set one by one (`tests/xds/dialects/field_walk.py`). A
field has a scenario if a bootstrap that ran in both proxies sets it, and what happened there was compared. That
is no proof of the field's every value: a scenario compares who is reached, with which bytes, and what logs say,
not each thing that a field could change.

The status is 1 if a scenario ends otherwise than Envoy's, and, once every field has one, if one has none.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.message import Message

from tests.interop import authorization, beside
from tests.interop.__main__ import print_table, run_table
from tests.interop.loopback import Running
from tests.interop.proxies import ENVOY
from tests.interop.tables import LOOPBACK
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
    """Which scenarios set which fields."""

    def __init__(self) -> None:
        self.scenarios: dict[str, set[str]] = defaultdict(set)
        self.name = ""

    def note(self, bootstrap: Json) -> None:
        """Count a bootstrap for the scenario that runs."""
        for field in fields_of(bootstrap):
            self.scenarios[field].add(self.name)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note every bootstrap that a proxy is started with."""
        start = Running.start

        def noted(running: Running, bootstrap: Json, ports: list[int]) -> None:
            self.note(bootstrap)
            start(running, bootstrap, ports)

        with mock.patch.object(Running, "start", noted):
            yield


def run_scenarios(recorder: Recorder) -> int:
    """Run everything; how many scenarios end otherwise than expected."""
    failures = 0
    with recorder.recording():
        recorder.name = "one field each"
        with beside.observed("envoy") as envoy, beside.observed("ours") as ours:
            for name in envoy:
                if envoy[name] != ours[name]:
                    failures += 1
                    print(f"{name}\n   envoy {envoy[name]}\n   ours  {ours[name]}")
        recorder.name = "authorization"
        rules = authorization.policies(40)
        with authorization.verdicts("envoy", rules) as theirs, authorization.verdicts("ours", rules) as mine:
            failures += sum(one != other for one, other in zip(theirs, mine, strict=True))
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
        f"| {field} | {', '.join(sorted(recorder.scenarios.get(field, ()))) or '-'} |"
        for field in sorted(accepted)
    ]
    table = "\n".join(("| accepted field | scenarios |", "|---|---|", *lines))
    path = Path(".run/envoy-diff.md")
    path.parent.mkdir(exist_ok=True)
    path.write_text(table + "\n")
    without = sorted(field for field in accepted if field not in recorder.scenarios)
    print(
        f"\n{len(accepted)} accepted fields, {len(accepted) - len(without)} in a scenario; the table is in {path}"
    )
    print("without a scenario:", *without, sep="\n  ")
    print(f"{failures} scenarios end otherwise than expected")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
