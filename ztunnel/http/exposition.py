"""OpenMetrics text, made from families as values, in pieces of bounded size.

For pages that are made of counters already at hand: the client library's registry would be three more mebibytes in
every node proxy, and make a page of many thousand series in one go.
"""

import math
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: A slice takes well under a millisecond.
_SAMPLES_PER_PIECE = 200


class Sample(NamedTuple):
    """One number; ``labels`` in the order they are printed."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(slots=True)
class Family:
    """Samples under one name.

    Attributes:
        name: without ``_total`` for counters.
        help: as printed.
        kind: ``counter``, ``gauge`` or ``histogram``.
        unit: part of the name, too; empty: none.
    """

    name: str
    help: str
    kind: str
    unit: str = ""
    samples: list[Sample] = field(default_factory=list)

    def add(self, name: str, labels: dict[str, str], value: float) -> None:
        """Add a sample."""
        self.samples.append(Sample(name, labels, value))


def number(value: float) -> str:
    """A value as Envoy prints it: whole numbers without a fraction."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
        if not value.is_integer():
            return repr(value)
    return str(int(value))


def lines(families: Iterable[Family]) -> Iterator[str]:
    """The page, ``# EOF`` included."""
    for family in families:
        yield f"# HELP {family.name} {_escaped(family.help)}\n# TYPE {family.name} {family.kind}\n"
        if family.unit:
            yield f"# UNIT {family.name} {family.unit}\n"
        for start in range(0, len(family.samples), _SAMPLES_PER_PIECE):
            yield "".join(
                f"{name}{_labels(labels)} {number(value)}\n"
                for name, labels, value in family.samples[start : start + _SAMPLES_PER_PIECE]
            )
    yield "# EOF\n"


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def process_families(others: Sequence[int] = ()) -> Iterator[Family]:
    """``process_*``, of this process, under the names all client libraries use.

    Args:
        others: ids of processes that are parts of it: what they use is added.
    """
    cpu_s, resident, virtual, files = _used("self")
    files -= 1  # the one that reads the list
    for other in others:
        try:
            used = _used(str(other))
        except OSError:
            continue  # gone this moment, or not ours to look into
        cpu_s, resident, virtual, files = cpu_s + used[0], resident + used[1], virtual + used[2], files + used[3]
    numbers = (
        ("process_cpu_seconds", "counter", "Total user and system CPU time spent in seconds", cpu_s),
        ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes", resident),
        ("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes", virtual),
        ("process_open_fds", "gauge", "Number of open file descriptors", files),
        (
            "process_max_fds",
            "gauge",
            "Maximum number of open file descriptors",
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ),
    )
    for name, kind, text, value in numbers:
        family = Family(name, text, kind)
        family.add(f"{name}_total" if kind == "counter" else name, {}, value)
        yield family


def _used(process: str) -> tuple[float, int, int, int]:
    """CPU seconds, resident and virtual bytes, open files."""
    with open(f"/proc/{process}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    files = len(os.listdir(f"/proc/{process}/fd"))
    return seconds, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), int(fields[20]), files
