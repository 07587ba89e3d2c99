"""Where ``etcd`` and ``kube-apiserver`` are; a machine need not have them."""

import pytest

from deploy.apiserver import cache, found

__all__ = ["cache", "found", "needed"]


def needed(name: str, made_by: str = "`make kube`") -> str:
    """Return the path of a program; without it the test is skipped, loudly."""
    path = found(name)
    if path is None:
        pytest.skip(f"NOT TESTED: no {name} here; {made_by} makes it")
    return path
