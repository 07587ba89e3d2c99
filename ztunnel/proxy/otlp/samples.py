"""Cuts metric families into slices for sending them to the collector."""

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from ztunnel.runtime.http.exposition import Family, UnsuffixedCounter
from ztunnel.runtime.http.prometheus import Sample

#: Samples per slice, which take well below a millisecond of the loop's time.
_SLICE: Final = 200


class Slice(NamedTuple):
    """Neighbouring samples of one metric family.

    Attributes:
        name: the name on the page. Most counters end in ``_total``.
        kind: ``counter``, ``gauge`` or ``histogram``.
        text: the family's help.
        unit: OpenMetrics' unit, such as ``seconds``, or empty.
        samples: a part of the family's samples. Histograms are never split.
    """

    name: str
    kind: str
    text: str
    unit: str
    samples: list[Sample]


def slices(family: Family) -> Iterator[Slice]:
    """Yield a family's samples slice by slice, so that the caller can run other work in between. The family is
    read only once.
    """
    described, samples = family.description, iter(family.samples)
    kind = "counter" if isinstance(described, UnsuffixedCounter) else described.type
    while some := list(islice(samples, _SLICE)):
        name = some[0].name
        if kind == "histogram":
            name = described.name
            while not some[-1].name.endswith("_count"):  # a histogram ends with its count
                some.append(next(samples))
        yield Slice(name, kind, described.documentation, described.unit, some)
