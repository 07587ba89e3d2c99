"""The states of an enrolled pod. Pure."""

from enum import Enum


class Phase(Enum):
    """The state of an enrolled pod."""

    PENDING = "pending"  # its rules are applied, no proxy listens in it
    ENABLED = "enabled"
    LEAVING = "leaving"
