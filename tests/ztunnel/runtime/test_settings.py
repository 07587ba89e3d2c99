"""Durations and booleans as flags and environment variables spell them."""

import pytest

from ztunnel.runtime.settings import boolean, duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("1.5", 1.5),
        ("10s", 10),
        ("1500ms", 1.5),
        ("500us", 0.0005),
        ("250ns", 2.5e-7),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("24hour", 86400),
        ("2 min", 120),
        ("1d", 86400),
        ("1w", 604800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1x", "1h,30m", "10 s ago", "1e3s", "١s", "nan", "1h30"])
def test_malformed_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        duration_s(text)


@pytest.mark.parametrize("text", ["yes", "True", "1", ""])
def test_only_true_and_false_are_booleans(text: str) -> None:
    with pytest.raises(ValueError, match="must be true or false"):
        boolean(text)
