"""The table of scenarios names tests that there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[3]
TEXT = Path(__file__).with_name("README.md").read_text()


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    written = {
        name
        for folder in ("ztunnel/node/agent", "ztunnel/proxy/istio/zds", "netns", "apiserver", "tproxy")
        for path in (TESTS / folder).rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named - written == set()


def test_every_scenario_of_the_agent_is_there() -> None:
    found: set[int] = set()
    for row in re.findall(r"^\| ([\d, to]+) \|", TEXT, re.MULTILINE):
        for part in row.split(","):
            first, _, last = part.partition(" to ")
            found.update(range(int(first), int(last or first) + 1))
    assert found >= set(range(1, 85))
