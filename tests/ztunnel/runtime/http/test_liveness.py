"""Liveness: fails only when the data path does not turn."""

import asyncio

import pytest

from hbone.aio.poller import Poller
from ztunnel.runtime.http import liveness
from ztunnel.runtime.http.page import Page, PageRequest, Query

GET = PageRequest(method="GET", path="/healthz/live", target="/healthz/live", query=Query.parse(""))


def _answer(poller_of: "type[Poller]", request: PageRequest = GET) -> Page:
    async def main() -> Page:
        poller = poller_of()
        try:
            return await liveness.page(poller, request)
        finally:
            poller.close()
            await asyncio.sleep(0)

    return asyncio.run(main())


def test_a_poller_that_turns_is_alive() -> None:
    assert _answer(Poller).status == 200


def test_a_poller_that_does_not_turn_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Poller):
        def _turn(self) -> None:
            pass

    monkeypatch.setattr(liveness, "_TURN_S", 0.01)
    page = _answer(Stuck)
    assert page.status == 500
    assert "did not turn" in "".join(map(str, page.body))


def test_only_reading_is_allowed() -> None:
    assert (
        _answer(Poller, PageRequest(method="POST", path=GET.path, target=GET.target, query=GET.query)).status
        == 405
    )
