"""Serves the admin page ``/handover``, which shows whether open connections can be handed over. A POST hands them
over.
"""

import json
from collections.abc import Callable
from typing import Any, Protocol

from ztunnel.runtime.http.page import JSON, PLAIN, Page, PageRequest, text


class Shown(Protocol):
    """Moves open connections between processes; see :class:`ztunnel.proxy.dataplane.handover.service.Handover`."""

    def status(self) -> dict[str, Any]:
        """The state of the hand-over, as the admin page shows it."""

    @property
    def successor_waits(self) -> bool:
        """Whether a successor process is connected."""


def page(handover: Shown | None, shut_down: Callable[[], object], request: PageRequest) -> Page:
    """Return the hand-over state. A POST makes the process hand its connections over to the waiting successor, and
    exit.

    Args:
        handover: the process's hand-over. ``None`` if hand-overs are off.
        shut_down: begins the process's shutdown, which hands over its connections.
        request: the request to the admin server.
    """
    if handover is None:
        return text("open connections do not move: ZTUNNEL_HANDOVER_DIR names no folder\n", 404, PLAIN)
    if request.method != "POST":
        return text(json.dumps(handover.status(), indent=2) + "\n", content_type=JSON)
    if not handover.successor_waits:
        return text("no successor waits: start it, and it takes over when it is ready\n", 409, PLAIN)
    shut_down()
    return text("handing over, and ending\n", content_type=PLAIN)
