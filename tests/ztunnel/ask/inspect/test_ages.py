"""Ages in tables for people: in the units that say most; JSON keeps what the proxy's page has."""

import io
import json

import pytest

from ztunnel.ask.inspect.ages import for_people, shown_age
from ztunnel.ask.inspect.watch import watch

ROWS = [("ID", "AGE", "UPSTREAM HOST"), ("1", "666.769s", "5s"), ("2", "-", "-")]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0s"),
        (0.999, "0s"),
        (59.9, "59s"),
        (60.0, "1m"),
        (666.769, "11m6s"),
        (3600.0, "1h"),
        (3661.0, "1h1m"),
        (86399.0, "23h59m"),
        (86400.0, "1d"),
        (9_000_000.0, "104d4h"),
    ],
)
def test_the_two_largest_units_are_shown(seconds: float, shown: str) -> None:
    assert shown_age(seconds) == shown


def test_only_ages_are_changed() -> None:
    assert list(for_people(ROWS)) == [ROWS[0], ("1", "11m6s", "5s"), ("2", "-", "-")]
    assert list(for_people([("version", "90s"), ("up for", "7400s"), ("node", "90s")])) == [
        ("version", "90s"),
        ("up for", "2h3m"),
        ("node", "90s"),
    ]
    assert list(for_people([])) == []


def test_what_is_no_number_of_seconds_stays() -> None:
    assert list(for_people([("AGE",), ("s",), ("1e999s",), ("-5s",), ("soon",)])) == [
        *(("AGE",), ("s",), ("1e999s",), ("-5s",), ("soon",)),
    ]


@pytest.mark.parametrize(("as_json", "expected"), [(True, "666.769s"), (False, "11m6s")])
def test_a_watch_shows_ages_to_people_and_seconds_in_json(as_json: bool, expected: str) -> None:
    out = io.StringIO()
    watch(lambda: ROWS, 1.0, as_json=as_json, out=out, pause=_ends)
    first = out.getvalue().splitlines()[0 if as_json else 1]
    assert (json.loads(first)["age"] if as_json else first.split()[1]) == expected


def _ends(_: float) -> None:
    raise KeyboardInterrupt
