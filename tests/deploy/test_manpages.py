"""Manual pages: one for each command, with each of its options, in roff that its reader accepts."""

import re
import shutil
import subprocess

import pytest

from deploy.manpages import pages
from ztunnel.cli import COMMANDS

PAGES = pages()


def test_each_command_has_a_page_and_the_program_lists_them() -> None:
    names = {"proxy", "version", *(name for added in COMMANDS.values() for name in added)}
    assert set(PAGES) == {"ztunnel.1", *(f"ztunnel-{name}.1" for name in names)}
    found = re.findall(r"^\.BR ztunnel(\S+) \(1\)$", PAGES["ztunnel.1"], re.MULTILINE)
    listed = {name.replace(r"\-", "-").removeprefix("-") for name in found}
    assert listed == names


def test_options_are_those_of_the_command() -> None:
    page = PAGES["ztunnel-check.1"]
    for option in (r"\-\-only", r"\-\-wait", r"\-A", r"\-o", r"\-\-context"):
        assert rf"\fB{option}\fR" in page
    assert ".SH EXIT STATUS" in page


@pytest.mark.skipif(shutil.which("groff") is None, reason="NOT TESTED: no groff here")
def test_groff_has_no_warning() -> None:
    for name, page in PAGES.items():
        command = ["groff", "-man", "-ww", "-z", "-T", "utf8"]
        done = subprocess.run(command, input=page, capture_output=True, text=True, check=False, timeout=30)
        assert (done.returncode, [each for each in done.stderr.splitlines() if "line" not in each]) == (0, []), (
            name
        )


@pytest.mark.parametrize("name", sorted(PAGES))
def test_no_line_of_text_begins_like_a_groff_request(name: str) -> None:
    requests = {line.split()[0] for line in PAGES[name].splitlines() if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".TP", ".B", ".BR"}
