"""An open upstream: the end that a relay copies to, and what must close after it."""

from collections.abc import Callable

from hbone.aio.end import End


class Upstream:
    """One open upstream of one connection; the path that opened it closes it.

    Closing follows ``contextlib.ExitStack``: the end first, because closing it is what the peer sees, then every
    callback of :meth:`on_close`, the last one registered first.

    Args:
        closing: the first such callback.

    Attributes:
        end: for the relay.
    """

    __slots__ = ("_closed", "_closing", "end")

    def __init__(self, end: End, *closing: Callable[[], object]) -> None:
        self.end = end
        self._closed = False
        self._closing: list[Callable[[], object]] = list(closing)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, after the end has closed."""
        self._closing.append(callback)

    def close(self, error: Exception | None = None) -> None:
        """Close the end, with ``error`` as its reason if there is one, and run the callbacks; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.end.close(error)
        while self._closing:
            self._closing.pop()()
