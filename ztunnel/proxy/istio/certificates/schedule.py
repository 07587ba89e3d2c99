"""Decides when each identity's certificate is fetched. Pure: time is an argument, in seconds since the epoch.

While an identity is in use, it has either a running fetch, or a time at which the next fetch is due. After a
successful fetch, the next fetch is due at half of the lifetime, up to a tenth earlier, so that a node's identities
do not renew in step. After a failure, it is due after a back-off, or at the expiry of the current certificate,
whichever is sooner. Due fetches start by priority, then by due time. At most ``concurrency`` fetches run at once.

A certificate stays in use until it expires, even if its renewal fails. Requests for an identity without a valid
certificate fail at once with the last error, until a retry succeeds. When an authority that could not be reached
answers again, all identities whose attempts did not reach it are due at once.

The wall clock can be set. If it jumps forward, renewals come early, but not in a loop: between two fetches there
is at least a quarter of the lifetime or a minute, whichever is shorter. If the clock jumps back, retries are due
at once rather than after the length of the jump.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from xds.model.identity import SpiffeId

_FIRST_BACKOFF_S: Final = 1.0
_LONGEST_BACKOFF_S: Final = 150.0
_BACKOFF_SPREAD: Final = 0.2
_REFRESH_SPREAD: Final = 0.1
_SOONEST_REFRESH_S: Final = 60.0
_LEAST_WAIT_S: Final = 1.0
_AT_ONCE: Final = 0.0  # earlier than any clock's time


class Priority(IntEnum):
    """The urgency of a fetch. Fetches with smaller values start first."""

    REAL_TIME = 0
    WARMUP = 1
    BACKGROUND = 2


class Phase(Enum):
    """The state of an identity, which decides whether a request for its certificate waits, succeeds or fails."""

    INITIALIZING = "Initializing"
    """There is no certificate yet, so the request waits."""
    AVAILABLE = "Available"
    UNAVAILABLE = "Unavailable"
    """Fetching has failed, so the request fails at once with the last error."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One attempt to fetch a certificate. ``number`` is unique, so that the result of a forgotten attempt is not
    mistaken for the result of a newer attempt.
    """

    identity: SpiffeId
    number: int


@dataclass(slots=True)
class _Entry:
    priority: Priority
    due_s: float
    fetch: Fetch | None = None
    expires_s: float | None = None
    error: str | None = None
    unreachable: bool = False
    failures: int = 0


class Schedule:
    """The state machine described in the module. Each method takes time proportional to the number of identities.
    A node has at most one identity per pod.
    """

    def __init__(self, *, concurrency: int = 8) -> None:
        self._concurrency = concurrency
        self._entries: dict[SpiffeId, _Entry] = {}
        self._fetches = 0

    def __iter__(self) -> Iterator[SpiffeId]:
        return iter(self._entries)

    def __contains__(self, identity: SpiffeId) -> bool:
        return identity in self._entries

    def want(self, identity: SpiffeId, priority: Priority) -> None:
        """Add an identity, whose certificate is kept available from now on. Further calls can only raise the
        priority.
        """
        entry = self._entries.get(identity)
        if entry is None:
            self._entries[identity] = _Entry(priority, _AT_ONCE)
        else:
            entry.priority = min(entry.priority, priority)

    def forget(self, identity: SpiffeId) -> None:
        """Drop an identity; idempotent. The result of a fetch under way will be ignored."""
        self._entries.pop(identity, None)

    def start(self, now_s: float) -> list[Fetch]:
        """Return the fetches to start now, most urgent first.

        The caller reports the result of each fetch by :meth:`succeeded` or :meth:`failed`.
        """
        running = 0
        due: list[tuple[Priority, float, SpiffeId]] = []
        for identity, entry in self._entries.items():
            if entry.fetch is not None:
                running += 1
                continue
            if entry.failures and entry.due_s > now_s + _LONGEST_BACKOFF_S:
                entry.due_s = now_s  # the wall clock was set back
            if entry.due_s <= now_s:
                due.append((entry.priority, entry.due_s, identity))
        due.sort(key=lambda item: item[:2])
        begun = []
        for _, _, identity in due[: max(0, self._concurrency - running)]:
            self._fetches += 1
            fetch = self._entries[identity].fetch = Fetch(identity, self._fetches)
            begun.append(fetch)
        return begun

    def succeeded(
        self, fetch: Fetch, not_before_s: float, not_after_s: float, now_s: float, jitter: float
    ) -> bool:
        """Record that a fetch returned a certificate. Return False if the identity is no longer in use.

        Args:
            fetch: the fetch returned by :meth:`start`.
            not_before_s: the beginning of the certificate's validity.
            not_after_s: the end of the certificate's validity, after ``now_s``.
            now_s: the time.
            jitter: a random number in [0, 1).
        """
        entry = self._ended(fetch)
        if entry is None:
            return False
        half_s = max(0.0, not_after_s - not_before_s) / 2
        entry.expires_s, entry.error, entry.unreachable, entry.failures = not_after_s, None, False, 0
        # If our clock is far ahead of the authority's, half the lifetime of a new certificate has already passed.
        # To prevent a loop of renewals, the renewal then waits a minute, or a quarter of a short lifetime. It is
        # never later than the expiry, and never sooner than a second from now.
        refresh_s = not_before_s + half_s * (1 - _REFRESH_SPREAD * jitter)
        sensible_s = max(refresh_s, now_s + min(_SOONEST_REFRESH_S, half_s / 2))
        entry.due_s = max(min(sensible_s, not_after_s), now_s + _LEAST_WAIT_S)
        return True

    def failed(self, fetch: Fetch, error: str, now_s: float, jitter: float, *, unreachable: bool = False) -> bool:
        """Record that a fetch failed. Return False if the identity is no longer in use.

        The arguments are as for :meth:`succeeded`.

        Args:
            unreachable: whether the authority did not answer.
        """
        entry = self._ended(fetch)
        if entry is None:
            return False
        entry.unreachable = unreachable
        exponent = min(entry.failures, 16)  # beyond the longest backoff; keeps the number small
        spread = 1 - _BACKOFF_SPREAD + 2 * _BACKOFF_SPREAD * jitter
        backoff_s = min(_FIRST_BACKOFF_S * 2**exponent * spread, _LONGEST_BACKOFF_S)
        entry.error, entry.failures = error, entry.failures + 1
        # Connections start to fail when the certificate expires. An attempt at that time, even during a long
        # back-off, shortens the outage if the authority has recovered.
        entry.due_s = now_s + backoff_s
        if entry.expires_s is not None and entry.expires_s > now_s:
            entry.due_s = min(entry.due_s, entry.expires_s)
        return True

    def renew(self, identity: SpiffeId) -> None:
        """Make the next fetch of an identity due at once, because peers refuse its certificate. Idempotent."""
        entry = self._entries.get(identity)
        if entry is not None and entry.fetch is None:
            entry.due_s = _AT_ONCE

    def authority_answered(self) -> None:
        """Retry at once for all identities whose last attempt did not reach the authority, because it answers
        again.
        """
        for entry in self._entries.values():
            if entry.unreachable and entry.fetch is None:
                entry.due_s = _AT_ONCE

    def _ended(self, fetch: Fetch) -> _Entry | None:
        entry = self._entries.get(fetch.identity)
        if entry is None or entry.fetch != fetch:
            return None
        entry.fetch = None
        entry.priority = Priority.BACKGROUND
        return entry

    def next_due_s(self, now_s: float) -> float | None:
        """Return when to call :meth:`start` next. None: only after a running fetch has ended."""
        waiting = [entry.due_s for entry in self._entries.values() if entry.fetch is None]
        if not waiting or len(self._entries) - len(waiting) >= self._concurrency:
            return None
        return max(now_s, min(waiting))

    def phase(self, identity: SpiffeId, now_s: float) -> Phase | None:
        """Return the phase of an identity, or None if it is not in use."""
        entry = self._entries.get(identity)
        if entry is None:
            return None
        if entry.expires_s is not None and entry.expires_s > now_s:
            return Phase.AVAILABLE
        return Phase.INITIALIZING if entry.error is None else Phase.UNAVAILABLE

    def is_refused(self, identity: SpiffeId) -> bool:
        """Return whether the authority answered the identity's last attempt with an error."""
        entry = self._entries.get(identity)
        return entry is not None and entry.error is not None and not entry.unreachable

    def error(self, identity: SpiffeId) -> str | None:
        """Return the error of the last attempt, or None if it succeeded."""
        entry = self._entries.get(identity)
        return entry.error if entry is not None else None
