"""Answers ``/healthz/live``: whether the event loop and the data path in it still run.

A kubelet restarts a container that fails this probe, which ends every connection of the node. So the page only
checks conditions that a restart repairs. It does not check the control plane, the node agent or any pod. Any
answer proves that the event loop runs. The data path uses another epoll, so the page also waits for an iteration
of the data path's poller.
"""

from __future__ import annotations

import asyncio
from typing import Final

from hbone.aio.poller import Poller
from ztunnel.runtime.http.page import PLAIN, Page, PageRequest, text
from ztunnel.runtime.turns import turned

PATH: Final = "/healthz/live"
#: The time limit for the poller's step. It is less than the ``timeoutSeconds`` of our charts, so that kubelet's
#: event shows this page's text.
_TURN_S: Final = 3.0


async def page(poller: Poller, request: PageRequest) -> Page:
    """Answer GET and HEAD: 200 once ``poller`` has run a step, or 500 if it has not within 3 s."""
    if request.method not in ("GET", "HEAD"):
        return text("", 405, PLAIN)
    try:
        async with asyncio.timeout(_TURN_S):
            await turned(poller)
    except TimeoutError:
        return text(f"the data path did not turn within {_TURN_S:g} s\n", 500, PLAIN)
    return text("live\n", content_type=PLAIN)
