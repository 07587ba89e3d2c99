"""The table of scenarios names tests that there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[3]
README = Path(__file__).with_name("README.md").read_text()


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", README))
    folders = ("ztunnel/policy", "ztunnel/proxy", "netns", "xds")
    written = {
        name
        for folder in folders
        for path in (TESTS / folder).rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named - written == set()
    assert len(named) > 40


def test_every_defect_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| `test_\w+`", README, re.MULTILINE)
    assert list(map(int, rows)) == list(range(1, 13))
