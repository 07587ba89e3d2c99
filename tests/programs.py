"""Programs that a test asks for a second opinion; a machine need not have them."""

import shutil

import pytest


def needed(name: str) -> str:
    """The path of a program; without it the test is skipped, loudly."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"NOT TESTED: no {name} here")
    return found
