"""Which finished hops a filter of an access log chooses."""

import pytest

from tests.ztunnel.proxy.envoy.telemetry.test_format import info
from xds.model.access_log import (
    AllFilters,
    AnyFilter,
    Comparison,
    DurationFilter,
    FlagFilter,
    LogFilter,
    StatusFilter,
)
from ztunnel.proxy.envoy.stream.stream_info import Flag
from ztunnel.proxy.envoy.telemetry.access_log_filter import chooser

SLOW = info(response_code=503, duration_s=1.5, flags={Flag.UPSTREAM_CONNECT_FAILURE})
PLAIN = info(response_code=0, duration_s=0.0009)
OPEN = info(response_code=200, duration_s=None)
NEVER = FlagFilter(frozenset({"RLSE"}))


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (StatusFilter(Comparison.AT_LEAST, 200), "SLOW OPEN"),
        (StatusFilter(Comparison.EQUAL, 0), "PLAIN"),
        (StatusFilter(Comparison.DIFFERENT, 0), "SLOW OPEN"),
        (DurationFilter(Comparison.AT_LEAST, 1500), "SLOW"),
        (DurationFilter(Comparison.AT_MOST, 0), "PLAIN"),
        (FlagFilter(frozenset()), "SLOW"),
        (FlagFilter(frozenset({"UF", "UH"})), "SLOW"),
        (NEVER, ""),
        (AllFilters(), "SLOW PLAIN OPEN"),
        (AllFilters((FlagFilter(frozenset()), StatusFilter(Comparison.AT_MOST, 400))), ""),
        (AnyFilter((NEVER, StatusFilter(Comparison.EQUAL, 0))), "PLAIN"),
    ],
)
def test_access_log_filter_selects_hops(wanted: LogFilter, chosen: str) -> None:
    chooses = chooser(wanted)
    hops = {"SLOW": SLOW, "PLAIN": PLAIN, "OPEN": OPEN}
    assert " ".join(name for name, hop in hops.items() if chooses(hop)) == chosen
