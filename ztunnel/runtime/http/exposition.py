"""Makes Prometheus pages in the format that the scraper accepts, compressed if it accepts compression.

The Prometheus client library negotiates and encodes. It is called per family and per slice of samples, so that a
page of many thousand series never blocks the event loop for long. Import this module at the first scrape, not when
the proxy starts: the library takes 3.5 MiB and 45 ms.
"""

import os
import resource
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from ztunnel.runtime.http.page import Page, PageRequest
from ztunnel.runtime.http.prometheus import Metric, Sample, choose_encoder

#: The most samples in one piece of a page. They take about a millisecond to encode.
_SLICE: Final = 100
_EOF: Final = b"# EOF\n"

Encoder = Callable[["_Registry"], bytes]


class UnsuffixedCounter(Metric):
    """A counter whose name does not end in ``_total``, like many of Envoy's.

    The text format permits such counters. OpenMetrics does not. In that format the type is ``unknown`` and the
    samples keep their name, because a name must not depend on the format.
    """

    def __init__(self, name: str, documentation: str) -> None:
        super().__init__(name, documentation, "unknown")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family of a page.

    Attributes:
        description: name, help, type and unit; its own samples are not used.
        samples: read once, slice by slice, while the page is sent. A generator spreads the work of a long family.
    """

    description: Metric
    samples: Iterable[Sample]


#: One sample: the values of its labels, and its number.
LabelledValue = tuple[tuple[str, ...], float]


def family(
    name: str, kind: str, text: str, samples: Iterable[LabelledValue], labels: tuple[str, ...], unit: str = ""
) -> Family:
    """Return a family from values by labels. Counters are named without ``_total``."""
    sample_name = f"{name}_total" if kind == "counter" else name
    return Family(
        Metric(name, text + ".", kind, unit),
        (Sample(sample_name, dict(zip(labels, values, strict=False)), value) for values, value in samples),
    )


def page(families: Iterable[Family], request: PageRequest) -> Page:
    """Return the page for one scrape. ``Accept`` decides the format, and ``Accept-Encoding`` the compression."""
    encode, content_type = choose_encoder(request.accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    pieces = encoded(families, encode, openmetrics=openmetrics)
    headers = [("vary", "accept, accept-encoding")]
    for coding, window_bits in (("gzip", 31), ("deflate", 15)):
        if accepts(request.accept_encoding, coding):
            headers.append(("content-encoding", coding))
            pieces = _compressed(pieces, window_bits)
            break
    return Page(content_type=content_type, headers=tuple(headers), body=pieces)


def encoded(families: Iterable[Family], encode: Encoder, *, openmetrics: bool) -> Iterator[bytes]:
    """Yield the page in pieces. A family without samples yields an empty piece, so that other work can run between
    the pieces.

    The library encodes whole registries, so each slice is encoded as a registry of one family. The lines that
    describe the family (HELP, TYPE, UNIT) are the encoding of a family without samples: they precede the first
    slice and are cut from later slices.
    """
    for family in families:
        described, samples = family.description, iter(family.samples)
        described.samples = []
        first = list(islice(samples, _SLICE))
        if not first:
            yield b""
            continue
        samples = chain(first, samples)
        description = encode(_Registry(described)).removesuffix(_EOF)
        shown = description
        if isinstance(described, UnsuffixedCounter) and not openmetrics:
            shown = description.replace(b" untyped\n", b" counter\n")
        while some := list(islice(samples, _SLICE)):
            described.samples = some
            yield shown + encode(_Registry(described)).removeprefix(description).removesuffix(_EOF)
            shown = b""
    if openmetrics:
        yield _EOF


class _Registry:
    """A registry with one family. It has only the method that the encoders call."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """Yield the only family."""
        yield self._family


def accepts(accept_encoding: str, coding: str) -> bool:
    """Return whether a content coding is acceptable (RFC 9110, 12.5.3). Only codings that the header names
    count.
    """
    for item in accept_encoding.split(","):
        name, _, weight = item.replace(" ", "").partition(";q=")
        if name.lower() == coding:
            return not weight or weight.strip("0.") != ""
    return False


def _compressed(pieces: Iterable[bytes], window_bits: int) -> Iterator[bytes]:
    compressor = zlib.compressobj(1, zlib.DEFLATED, window_bits)
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()


def process_families(others: Sequence[int] = ()) -> Iterator[Family]:
    """Yield the ``process_*`` metrics of this process, with the names that all client libraries use.

    The client library's own collector supports only one process.

    Args:
        others: ids of its child processes, whose use is added.
    """
    cpu_s, resident, virtual, files = _used("self")
    files -= 1  # the descriptor that lists the directory
    for other in others:
        try:
            used = _used(str(other))
        except OSError:
            continue  # the process has just ended, or we may not read it
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
        sample = Sample(f"{name}_total" if kind == "counter" else name, {}, value)
        yield Family(Metric(name, text + ".", kind), (sample,))


def _used(process: str) -> tuple[float, int, int, int]:
    """Return CPU seconds, resident and virtual bytes, and the number of open files of a process.

    Raises:
        OSError: the process has ended, or reading is not permitted.
    """
    with open(f"/proc/{process}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    files = len(os.listdir(f"/proc/{process}/fd"))
    return seconds, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), int(fields[20]), files
