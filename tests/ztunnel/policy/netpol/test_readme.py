"""The table of defects names tests and scenarios that there are."""

import re
from pathlib import Path

from tests.netns.netpol_scenarios import SCENARIOS

TESTS = Path(__file__).parents[3]
TEXT = Path(__file__).with_name("README.md").read_text()


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    written = {
        name
        for folder in ("ztunnel/policy/netpol", "netns")
        for path in (TESTS / folder).glob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named - written == set()


def test_all_nineteen_are_there() -> None:
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)] == list(range(1, 20))


def test_scenarios_that_are_named_are_there() -> None:
    numbers = {int(number) for name in SCENARIOS for number in re.findall(r"\d+", name.partition(" ")[0])}
    for text in re.findall(r"scenarios? ([\d, to]+)", TEXT):
        first = {int(number) for number in re.findall(r"\d+", text)}
        assert first - numbers == set()
