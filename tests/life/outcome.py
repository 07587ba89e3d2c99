"""The expectations of the walks of the life table: the outcome for a connection, and its access line."""

from enum import Enum

from ztunnel.proxy.dataplane.life_table import TABLE, Action, Event, State


class Outcome(Enum):
    """The fate of a connection after an event, once it is allowed to continue."""

    WORKS = "bytes flow, the line has no error"
    REFUSED = "it never opens: the verdict is made by what the event has changed"
    DENIED = "closed because a policy changed"
    REVOKED = "closed because its peer was revoked"
    UNKNOWN = "refused: the control plane does not describe the pod"
    FINISHED = "closed in order at the end of the grace period"
    CLOSED = "closed at once"


#: Events that deny, in these walks.
DENYING = {Event.POLICIES: Outcome.DENIED, Event.REVOCATIONS: Outcome.REVOKED}


def expected(state: State, event: Event) -> Outcome:
    """Return the outcome that the table promises for an event that denies wherever one can."""
    match TABLE[state, event]:
        case Action.KEEP | Action.LEAVE:
            return Outcome.WORKS
        case Action.AWAIT_FACTS:
            return Outcome.REFUSED
        case Action.JUDGE:
            return DENYING.get(event, Outcome.DENIED)
        case Action.FINISH:
            return Outcome.FINISHED
        case Action.CLOSE:
            return Outcome.CLOSED
