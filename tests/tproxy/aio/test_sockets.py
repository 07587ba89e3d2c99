"""Outgoing connections: what happens while the peer's answer is awaited."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tproxy.aio import sockets
from tproxy.errors import ConnectTimedOut


def test_work_is_done_only_while_the_answer_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[bool] = []
    calls: list[int] = []
    real = sockets._connects_at_once

    def observed(*arguments: Any) -> bool:
        at_once.append(real(*arguments))
        return at_once[-1]

    async def main() -> None:
        opened: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
            try:
                with pytest.raises(ConnectTimedOut):
                    await connect_until_one_fails(server.getsockname(), opened)
            finally:
                for each in opened:
                    each.close()

    async def connect_until_one_fails(address: tuple[str, int], opened: list[socket.socket]) -> None:
        for number in range(100):  # until the backlog is full, and the kernel drops the SYN
            sock = await sockets.connect(
                address, meanwhile=lambda number=number: calls.append(number), timeout_s=0.01
            )
            opened.append(sock)

    monkeypatch.setattr(sockets, "_connects_at_once", observed)
    asyncio.run(main())
    assert calls == [number for number, done in enumerate(at_once) if not done]
    assert not at_once[-1]
