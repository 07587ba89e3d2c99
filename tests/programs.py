"""Programs of the system that some tests use; a machine need not have them."""

import shutil

import pytest


def needed(name: str) -> str:
    """The path of a program; without it the test is skipped, loudly."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"NOT TESTED: no {name} here")
    return found
