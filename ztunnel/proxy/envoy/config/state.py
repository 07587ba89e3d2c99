"""The states of a proxy process, from its start to its end."""

from enum import StrEnum


class State(StrEnum):
    """The states of Envoy's ``/ready`` and ``/server_info``, in their order."""

    PRE_INITIALIZING = "PRE_INITIALIZING"
    INITIALIZING = "INITIALIZING"
    LIVE = "LIVE"
    DRAINING = "DRAINING"
