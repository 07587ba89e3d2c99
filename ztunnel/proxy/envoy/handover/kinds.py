"""The Envoy front end's functions for :class:`ztunnel.proxy.dataplane.handover.service.Handover`."""

from __future__ import annotations

import socket

from ztunnel.proxy.dataplane.handover import messages
from ztunnel.proxy.dataplane.handover.service import Kinds
from ztunnel.proxy.envoy.handover.messages import from_giver
from ztunnel.proxy.envoy.handover.taker import Parts, Pending, make
from ztunnel.proxy.envoy.handover.units import movable_units


def kinds_of(parts: Parts) -> Kinds:
    """Return the Envoy-specific functions that a hand-over uses to move this process's connections."""

    async def made(offer: messages.Offer, socks: list[socket.socket]) -> Pending:
        return await make(parts, offer, socks)

    return Kinds(
        dialect="envoy",
        read=from_giver,
        movable_units=lambda: movable_units(parts.connections, parts.connector),
        make=made,
        carried=lambda: len(parts.listeners),
    )
