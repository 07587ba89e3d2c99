"""Tables show ages in the largest suitable unit. JSON keeps the value of the proxy's page."""

import io
import json

import pytest

from ztunnel.ask.inspect.ages import shown_age, shown_span
from ztunnel.ask.inspect.kinds import ENVOY_CONNECTION, EnvoyConnection
from ztunnel.ask.inspect.watch import watch
from ztunnel.runtime.console.output import JSON, TABLE, Answer, Format


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


@pytest.mark.parametrize(("text", "shown"), [("7400s", "2h3m"), ("s", "s"), ("-5s", "-5s"), ("1e999s", "1e999s")])
def test_only_spans_in_seconds_are_changed(text: str, shown: str) -> None:
    assert shown_span(text) == shown


@pytest.mark.parametrize(("form", "expected"), [(JSON, 666.769), (TABLE, "11m6s")])
def test_a_watch_shows_ages_to_people_and_seconds_in_json(form: Format, expected: object) -> None:
    found = EnvoyConnection(id="1", age_seconds=666.769, source="10.0.0.1:1", destination="10.0.0.2:2")
    out = io.StringIO()
    answer = Answer(kind=ENVOY_CONNECTION, items=[found])
    watch(lambda: answer, 1.0, form, command="connections", out=out, pause=_ends)
    first = out.getvalue().splitlines()[0 if form.is_json else 1]
    assert (json.loads(first)["ageSeconds"] if form.is_json else first.split()[1]) == expected


def _ends(_: float) -> None:
    raise KeyboardInterrupt
