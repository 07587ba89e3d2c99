"""What closes with an upstream, in which order, and how often."""

from typing import Any, cast

from hbone.aio.end import End
from ztunnel.proxy.dataplane.upstream import Upstream


class _End:
    """Notes how it was closed."""

    def __init__(self, closed: list[object]) -> None:
        self._closed = closed

    def close(self, error: Exception | None = None) -> None:
        self._closed.append(error)


def an_upstream(closed: list[object]) -> Upstream:
    return Upstream(cast(End, cast(Any, _End(closed))))


def test_close_closes_the_end_then_runs_callbacks_in_reverse_order() -> None:
    closed: list[object] = []
    upstream = an_upstream(closed)
    upstream.on_close(lambda: closed.append("first"))
    upstream.on_close(lambda: closed.append("second"))
    upstream.close()
    assert closed == [None, "second", "first"]


def test_closing_is_idempotent_and_passes_the_error_on() -> None:
    closed: list[object] = []
    upstream = an_upstream(closed)
    error = OSError("gone")
    upstream.on_close(lambda: closed.append("counted"))
    upstream.close(error)
    upstream.close()
    assert closed == [error, "counted"]
