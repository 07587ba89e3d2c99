"""Whole numbers in texts."""

import pytest

from xds.digits import whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("65535", 65535),
        ("65536", None),
        ("99999", None),
        ("0" * 5000 + "80", 80),
        ("000", 0),
        ("9" * 5000, None),
        ("", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1_0", None),
        ("\u0661", None),
        ("\u00b2", None),
        ("1.0", None),
    ],
)
def test_only_ascii_digits_up_to_the_largest_number_are_a_number(text: str, number: int | None) -> None:
    assert whole_number(text, 65535) == number
