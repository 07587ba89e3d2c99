"""Programs that some tests use; a machine need not have them."""

import shutil
import subprocess
from pathlib import Path

import pytest

#: The tools that ``make promtool`` and similar targets have built.
TOOLS = Path(__file__).parents[1] / ".tools"


def needed(name: str) -> str:
    """Return the path of a program; without it the test is skipped, loudly."""
    found = shutil.which(name, path=str(TOOLS)) or shutil.which(name)
    if found is None:
        pytest.skip(f"NOT TESTED: no {name} here")
    return found


def metrics_lint(page: str) -> list[str]:
    """Return the output of ``promtool check metrics`` about a page in text format. Fail if the page is not
    metrics.
    """
    checked = subprocess.run(
        [needed("promtool"), "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # 0: no remarks; 3: the page can be parsed, with remarks about names and texts.
    assert checked.returncode in (0, 3), checked.stderr
    return checked.stderr.splitlines()
