"""Programs that some tests use; a machine need not have them."""

import shutil
import subprocess
from pathlib import Path

import pytest

#: What ``make promtool`` and the like have built.
TOOLS = Path(__file__).parents[1] / ".tools"


def needed(name: str) -> str:
    """Return the path of a program; without it the test is skipped, loudly."""
    found = shutil.which(name, path=str(TOOLS)) or shutil.which(name)
    if found is None:
        pytest.skip(f"NOT TESTED: no {name} here")
    return found


def metrics_lint(page: str) -> list[str]:
    """Return what ``promtool check metrics`` says about a page in text format; a page that is no metrics fails."""
    checked = subprocess.run(
        [needed("promtool"), "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # 0: nothing to say; 3: it parses, and there is something to say about names and texts.
    assert checked.returncode in (0, 3), checked.stderr
    return checked.stderr.splitlines()
