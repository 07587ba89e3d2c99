"""The table of scenarios names tests that there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[3]
FOLDERS = (
    "ztunnel/sidecar/inject",
    "ztunnel/sidecar/init",
    "ztunnel/proxy/istio/admin",
    "tproxy",
    "netns",
    "apiserver",
    "deploy",
)


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", Path(__file__).with_name("README.md").read_text()))
    written = {
        name
        for folder in FOLDERS
        for path in (TESTS / folder).glob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named
    assert named - written == set()
