"""The table of accepted fields and the scenarios that set them, run by Envoy and by this proxy: ``make
envoy-diff``.

Accepted fields are what the compiler obeys when they are set one by one (`tests/xds/dialects/field_walk.py`). A
field has a scenario if a bootstrap that ran in both proxies sets it, and what happened there was compared. That
is no proof of the field's every value: a scenario compares who is reached, with which bytes, and what logs say,
not each thing that a field could change. The table says how a field is in a scenario:

``observed``
    What happened was compared, as above.
``served``
    Both accept a cluster that sets it, and serve with it (`scenario_clusters.SERVED`). A client does not see its
    effect.
``judged``
    No proxy ran with it, but both accept, or both refuse, a bootstrap that sets it.

The status is 1 if a scenario ends otherwise than Envoy's, if a field has no scenario and stands not in
:data:`WITHOUT`, and if one stands there that has a scenario.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf.message import Message

from tests.interop import authorization, beside, loopback, scenario_clusters, scenarios, sources
from tests.interop.__main__ import print_table, run_table
from tests.interop.loopback import COLUMNS, Running
from tests.interop.proxies import ENVOY
from tests.interop.refusals import ROWS, Row, accepted
from tests.interop.tables import LOOPBACK
from tests.interop.test_log_services import Logging
from tests.xds.dialects.field_walk import walk
from tests.xds.dialects.walked import RESOURCES
from tests.ztunnel.proxy.envoy.harness import Json
from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from xds.proto.json import parse_value
from xds.proto.well_known import Any as AnyMessage

_NO_PATH = "a connection has no path: refused here, where Envoy accepts a rule that matches no connection"
_NO_INPUT = "this Envoy has no such input for filter chains: refused there, and without a value here"
#: Accepted fields without a scenario, and why.
WITHOUT = {
    "envoy.config.core.v3.HealthCheck.HttpHealthCheck.codec_client_type": (
        "only HTTP1 is accepted, and a message that says the default looks like one that says nothing"
    ),
    "envoy.config.rbac.v3.Permission.url_path": _NO_PATH,
    "envoy.config.rbac.v3.Principal.url_path": _NO_PATH,
    "envoy.extensions.matching.common_inputs.network.v3.DynamicMetadataInput.PathSegment.key": _NO_INPUT,
    "envoy.extensions.matching.common_inputs.network.v3.DynamicMetadataInput.filter": _NO_INPUT,
}


def accepted_fields() -> set[str]:
    """Return the fields that are obeyed, ``message.field``."""
    found: set[str] = set()
    for message, compile_it in RESOURCES.values():
        found |= {f"{each.message}.{each.field}" for each in walk(message, compile_it) if each.result == "obeyed"}
    return found


def fields_of(bootstrap: Json) -> set[str]:
    """Return the fields that a bootstrap sets. Empty if our reader refuses it."""
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
    """Records which scenarios set which fields.

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
        """Count a bootstrap for the scenario that runs. Its node is for a control plane: no client sees it."""
        static = bootstrap.get("static_resources", {})
        clusters = [each for each in static.get("clusters", ()) if each["name"] not in scenario_clusters.SERVED]
        seen = {**bootstrap, "static_resources": {**static, "clusters": clusters}}
        for field in fields_of({name: value for name, value in seen.items() if name != "node"}):
            self.scenarios[field].add(self.name)
        self.served |= fields_of(bootstrap)

    def note_file(self, path: Path) -> None:
        """Count the resources of a file that discovery reads."""
        message = parse_value(json.loads(path.read_text()), DiscoveryResponse).message
        for field in _fields(message):
            self.scenarios[field].add(self.name)

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
            for path in running.folder.glob("*.xds.json"):
                self.note_file(path)
            start(running, bootstrap, ports)

        def judge(row: Row, kind: str) -> str:
            with tempfile.TemporaryDirectory() as folder:
                return accepted(row, kind, Path(folder))

        def judged(row: Row, kind: str, _: Path) -> str:
            if row.envoy is row.ours:
                self.judged |= fields_of(row.make())
            return verdicts[row, kind].result()

        with (
            ThreadPoolExecutor(2) as pool,
            mock.patch.object(Running, "start", noted),
            mock.patch.object(loopback, "accepted", judged),
        ):
            verdicts = {(row, kind): pool.submit(judge, row, kind) for row in ROWS.values() for kind in COLUMNS}
            yield


def _print_differences(found: Mapping[str, tuple[object, object]]) -> int:
    for name, (envoy, ours) in found.items():
        print(f"{name}\n   envoy {envoy}\n   ours  {ours}")
    return len(found)


def unexplained(accepted: set[str], recorder: Recorder) -> list[str]:
    """Return the accepted fields without a scenario or a reason, and those with both."""
    without = {field for field in accepted if recorder.kind(field) == "-"}
    return sorted(without ^ WITHOUT.keys())


def run_scenarios(recorder: Recorder) -> int:
    """Run all scenarios; return how many end in an unexpected way."""
    failures = 0
    with recorder.recording():
        for name, suite in (("one field each", scenarios.SUITE), ("requests and sources", sources.SUITE)):
            recorder.name = name
            failures += _print_differences(beside.compared(suite))
        recorder.name = "log services"
        with Logging("envoy") as first, Logging("ours") as second:
            theirs, mine = first.seen(), second.seen()
        logs = {name: (str(theirs.get(name)), str(mine.get(name))) for name in theirs.keys() | mine.keys()}
        failures += _print_differences({f"log {name}": both for name, both in logs.items() if both[0] != both[1]})
        recorder.name = "authorization"
        rules = authorization.policies(40)
        with (
            authorization.verdicts("envoy", rules) as first_verdicts,
            authorization.verdicts("ours", rules) as second_verdicts,
        ):
            pairs = zip(rules, first_verdicts, second_verdicts, strict=True)
            failures += _print_differences({str(rule): (one, other) for rule, one, other in pairs if one != other})
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
    wrong = unexplained(accepted, recorder)
    print(
        f"\n{len(accepted)} accepted fields, {kinds['observed']} observed in a scenario, {kinds['served']} served "
        f"in one, {kinds['judged']} judged alike; the table is in {path}"
    )
    print("without a scenario:", *(f"{field}: {why}" for field, why in WITHOUT.items()), sep="\n  ")
    if wrong:
        print("without a scenario and a reason, or with both:", *wrong, sep="\n  ")
    print(f"{failures} scenarios end otherwise than expected")
    return 1 if failures or wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
