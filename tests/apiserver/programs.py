"""Where ``etcd`` and ``kube-apiserver`` are; a machine need not have them."""

import os
import shutil
from pathlib import Path

import pytest


def cache() -> Path:
    """Return the folder that ``make kube`` fills: below $XDG_CACHE_HOME, outside the repository."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ztunnel-py" / "kube"


def found(name: str) -> str | None:
    """Return the path of a program, or None: from ETCD or KUBE_APISERVER, from the cache, from PATH."""
    named = os.environ.get(name.upper().replace("-", "_"))
    if named:
        return named
    return shutil.which(name, path=str(cache())) or shutil.which(name)


def needed(name: str) -> str:
    """Return the path of a program; without it the test is skipped, loudly."""
    path = found(name)
    if path is None:
        pytest.skip(f"NOT TESTED: no {name} here; `make kube` makes it")
    return path
