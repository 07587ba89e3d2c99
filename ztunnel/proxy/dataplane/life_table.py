"""Defines the states of a connection, and what each external event does to a connection in each state. Pure.

A *life* is any live part of a connection: an accepted socket, a tunnel connection in either direction, a request
on a tunnel connection, each half of a node-local tunnel, a relay. A life moves through :class:`State` from top to
bottom and skips states that it does not need. :data:`TABLE` has one :class:`Action` for each state and event.
``docs/life.md`` prints the table, and ``make life`` tests it in both front ends.

The table ensures that **an open connection is allowed by the current policies and revocation lists**, or is within
a grace period stated by its :class:`Verdict`. To *judge* a life means to check it against the current policies:

* Once all *facts* read by policies (for example the peer's identity) are known, a life is judged at each event
  that can change its verdict (:attr:`Action.JUDGE`).
* Before that, events have no effect on the life. It is judged when the facts are complete, by the policies that
  are current *then* (:attr:`Action.AWAIT_FACTS`). So no life keeps a policy, a filter chain or a revocation list
  while it waits for facts.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final, NamedTuple

from hbone.enums import Key


class State(Key):
    """The states of a connection (a life), in order."""

    ACCEPTED = "accepted"
    """A socket was accepted. Its destination is not known yet, until listener filters, SOCKS or a look-up have
    determined it.
    """
    FILTERED = "filtered"
    """The destination and, in Envoy's dialect, the filter chain are known. The handshake is queued."""
    HANDSHAKE = "handshake"
    """The TLS handshake with the peer is running, so the peer's identity is not known yet."""
    IDENTIFIED = "identified"
    """All facts that policies read are known. The first verdict waits for a policy that has not arrived."""
    HELD = "held"
    """The connection waits for an addon's answer, or for a delay set by an addon. Policy allows it, or will judge
    it later.
    """
    DIALING = "dialing"
    """Policy allows the connection. The connection to the next hop is being opened."""
    OPEN = "open"
    """The connection relays bytes, or the tunnel connection serves requests."""
    JOINED = "joined"
    """Like open, for the inbound half of a node-local tunnel, which does not use the network."""
    DRAINING = "draining"
    """Like open, but the peer has been sent GOAWAY, and a grace period runs."""
    CLOSED = "closed"
    """The connection has ended. All its resources are released, and it is in no table."""


class Event(Key):
    """An external event that can affect open connections, such as a policy change or a drain."""

    POLICIES = "policies"
    """Policies of the mesh, of Calico, or of a filter received by ECDS have changed."""
    REVOCATIONS = "revocations"
    """The revocation lists have changed."""
    CERTIFICATE = "certificate"
    """The certificate that this side presents was renewed."""
    WORKLOAD_REMOVED = "workload removed"
    """The control plane does not describe the pod any more."""
    WORKLOAD_RESTORED = "workload restored"
    """The control plane describes the pod again, or differently."""
    CONFIGURATION = "configuration"
    """The listener, or the filter chain, was replaced by a new version."""
    DRAIN = "drain"
    """The grace period of the process, the pod, the listener, or a replaced filter chain begins."""
    DEADLINE = "deadline"
    """The grace period is over."""
    STOP = "stop"
    """The pod or the process ends at once."""


class Action(Enum):
    """The effect of an event on a connection (a life)."""

    KEEP = "keep"
    """No action, so the life continues unchanged."""
    AWAIT_FACTS = "judge when the facts are complete"
    """No action yet. Once the facts are complete, the connection is judged by the policies current then."""
    JUDGE = "judge now"
    """Judge the life by the current policies. Then end it with the verdict's reason, or keep it until the
    verdict's time.
    """
    LEAVE = "ask to leave"
    """Send GOAWAY if the protocol has it. The connection can then end by itself before the deadline."""
    FINISH = "close in order"
    """Close with END_STREAM, close_notify and FIN, so that an application can distinguish the close from a crash.
    """
    CLOSE = "close"
    """Close at once."""


_BEFORE_FACTS: Final = {
    Event.POLICIES: Action.AWAIT_FACTS,
    Event.REVOCATIONS: Action.AWAIT_FACTS,
    Event.CERTIFICATE: Action.KEEP,
    Event.WORKLOAD_REMOVED: Action.AWAIT_FACTS,
    Event.WORKLOAD_RESTORED: Action.AWAIT_FACTS,
    Event.CONFIGURATION: Action.AWAIT_FACTS,
    Event.DRAIN: Action.LEAVE,
    Event.DEADLINE: Action.CLOSE,
    Event.STOP: Action.CLOSE,
}
_WITH_FACTS: Final = _BEFORE_FACTS | {
    Event.POLICIES: Action.JUDGE,
    Event.REVOCATIONS: Action.JUDGE,
    Event.WORKLOAD_REMOVED: Action.KEEP,  # judged by the workload's last description; new connections are refused
    Event.WORKLOAD_RESTORED: Action.JUDGE,
    Event.CONFIGURATION: Action.JUDGE,
}
_OPEN: Final = _WITH_FACTS | {Event.DEADLINE: Action.FINISH}

#: The action for each event, in each state of a connection.
TABLE: Final[dict[tuple[State, Event], Action]] = {
    (state, event): action
    for state, row in {
        State.ACCEPTED: _BEFORE_FACTS,
        State.FILTERED: _BEFORE_FACTS,
        State.HANDSHAKE: _BEFORE_FACTS,
        # In this state the verdict is pending. The life is judged when the missing policy arrives or the grace
        # period ends.
        State.IDENTIFIED: _BEFORE_FACTS,
        State.HELD: _WITH_FACTS,
        State.DIALING: _WITH_FACTS,
        State.OPEN: _OPEN,
        State.JOINED: _OPEN,
        State.DRAINING: _OPEN | {Event.DRAIN: Action.KEEP},
        State.CLOSED: dict.fromkeys(Event, Action.KEEP),
    }.items()
    for event, action in row.items()
}


class Verdict(NamedTuple):
    """Whether policy allows a connection now.

    Attributes:
        reason: why the connection must end, for its access log line. Empty if it is allowed.
        until_s: the event-loop time at which the connection is checked again, because a policy named by the
            workload has not arrived. Infinite if no policy is missing.
    """

    reason: str = ""
    until_s: float = math.inf


ALLOWED: Final = Verdict()


def markdown() -> str:
    """Return the table in Markdown, as in ``docs/life.md``."""
    lines = [
        "| state | " + " | ".join(event.value for event in Event) + " |",
        "|---" * (1 + len(Event)) + "|",
    ]
    for state in State:
        cells = [TABLE[state, event].value for event in Event]
        lines.append(f"| {state.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
