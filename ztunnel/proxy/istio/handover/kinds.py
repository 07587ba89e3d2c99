"""Builds the functions that :class:`ztunnel.proxy.dataplane.handover.service.Handover` calls to move Istio
connections.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

from ztunnel.proxy.dataplane.handover import messages
from ztunnel.proxy.dataplane.handover.service import Kinds
from ztunnel.proxy.istio.handover.messages import from_giver
from ztunnel.proxy.istio.handover.taker import Pending, make
from ztunnel.proxy.istio.handover.units import movable_units
from ztunnel.proxy.istio.path.node import pod_key
from ztunnel.proxy.istio.path.pod import PodProxy


def kinds_of(pods: Callable[[], Iterable[PodProxy]]) -> Kinds:
    """Return the functions that move pods' connections. ``pods`` returns the pods that this process
    carries now.
    """

    async def made(offer: messages.Offer, socks: list[socket.socket]) -> Pending:
        return await make({pod_key(pod.name): pod for pod in pods()}, offer, socks)

    return Kinds(
        dialect="istio",
        read=from_giver,
        movable_units=lambda: movable_units(pods()),
        make=made,
        carried=lambda: len(list(pods())),
    )
