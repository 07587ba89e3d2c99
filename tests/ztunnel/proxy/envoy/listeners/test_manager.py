"""Big listeners are compiled aside, with the same outcome."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.envoy import test_proxy
from ztunnel.proxy.envoy.listeners import manager as listener_manager


@pytest.mark.parametrize("limit", ["_BIG_BYTES", "_MANY_CHAINS"])
def test_an_update_compiled_in_a_thread_keeps_unchanged_chains(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside: list[str] = []
    to_thread = asyncio.to_thread

    async def noting(function: Callable[..., Any], *args: Any) -> Any:
        aside.append(function.__name__)
        return await to_thread(function, *args)

    monkeypatch.setattr(listener_manager, limit, 0)
    monkeypatch.setattr(asyncio, "to_thread", noting)
    test_proxy.test_a_change_of_chains_keeps_connections_of_unchanged_ones(tmp_path)
    assert "_compile" in aside
