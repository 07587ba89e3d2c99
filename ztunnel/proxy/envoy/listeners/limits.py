"""Limits the number of a filter chain's open connections, and the rate of new connections."""

from collections.abc import Callable

from xds.model.listener import ConnectionLimit, LocalRateLimit
from ztunnel.proxy.envoy.stats.stats import Scopes, Stats
from ztunnel.proxy.envoy.stream.outcome import TooMany
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo


class LiveConnectionLimit:
    """A connection limit with its counters (``connection_limit.<stat prefix>.``).

    Like in Envoy, a rejected connection stays in the gauge of active connections until its delayed close, but does
    not count towards the limit.
    """

    def __init__(self, model: ConnectionLimit, stats: Stats | Scopes) -> None:
        self.model = model
        scope = stats.scope(f"connection_limit.{model.stat_prefix}")
        self._limited = scope.counter("limited_connections")
        self._active = scope.gauge("active_connections")
        self._held = 0

    def check(self, info: StreamInfo) -> None:
        """Count a new connection towards the limit until it ends.

        Raises:
            TooMany: the limit is reached.
        """
        if not self.model.enabled:
            return
        self._active.stored += 1
        if self._held >= self.model.most:
            info.held = (*info.held, self._ended)
            self._limited.value += 1
            raise TooMany(delay_s=self.model.delay_s)
        self._held += 1
        info.held = (*info.held, self._release)

    def hold(self, info: StreamInfo) -> None:
        """Count a connection that another process has admitted, even if this exceeds the limit."""
        if self.model.enabled:
            self._active.stored += 1
            self._held += 1
            info.held = (*info.held, self._release)

    def _ended(self) -> None:
        self._active.stored -= 1

    def _release(self) -> None:
        self._held -= 1
        self._ended()


class LiveRateLimit:
    """A local rate limit of new connections, with its counter (``local_rate_limit.<stat prefix>.``)."""

    def __init__(self, model: LocalRateLimit, stats: Stats | Scopes, now: Callable[[], float]) -> None:
        self.model = model
        self._limited = stats.scope(f"local_rate_limit.{model.stat_prefix}").counter("rate_limited")
        self._now = now
        self._tokens = float(model.most_tokens)
        self._filled_at = now()

    def check(self, info: StreamInfo) -> None:
        """Take a token from the rate limit's bucket for a new connection.

        Raises:
            TooMany: no token is available.
        """
        model = self.model
        if not model.enabled:
            return
        now = self._now()
        gained = (now - self._filled_at) / model.fill_interval_s * model.tokens_per_fill
        self._tokens = min(float(model.most_tokens), self._tokens + gained)
        self._filled_at = now
        if self._tokens < 1:
            self._limited.value += 1
            info.flags.add(Flag.UPSTREAM_RETRY_EXHAUSTED)  # an odd flag, but the one that Envoy's filter sets
            raise TooMany()
        self._tokens -= 1

    def hold(self, info: StreamInfo) -> None:
        """Take no token, because the process that admitted the connection has already taken one."""


def live_limit(
    model: ConnectionLimit | LocalRateLimit, stats: Stats | Scopes, now: Callable[[], float]
) -> LiveConnectionLimit | LiveRateLimit:
    """Create the run-time object for a configured connection limit or rate limit."""
    if isinstance(model, ConnectionLimit):
        return LiveConnectionLimit(model, stats)
    return LiveRateLimit(model, stats, now)
