"""Creates a pod's sockets in advance, several at a time, because entering the pod's network namespace and leaving
it costs two system calls.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

from hbone.aio.poller import Poller

_FEWEST: Final = 2
_MOST: Final = 16
#: The stock is closed after no socket was taken for this long. The timer can delay this to twice the time.
_IDLE_S: Final = 10.0
#: If a batch is used up within this time, the next batch is twice as large.
_SHORT_S: Final = 0.1

#: A function that creates sockets. Its arguments are their number and the IP version.
Make = Callable[[int, int], list[socket.SocketType]]


class SocketStock:
    """A stock of unconnected sockets, by IP version. The owner closes it when the pod ends.

    Args:
        poller: provides the clock and the timer.
        make: creates sockets. :meth:`take` raises its errors unchanged.
    """

    def __init__(self, poller: Poller, make: Make) -> None:
        self._poller = poller
        self._make = make
        self._ready: dict[int, list[socket.SocketType]] = {4: [], 6: []}
        self._batch = {4: _FEWEST, 6: _FEWEST}
        self._filled_s = {4: 0.0, 6: 0.0}
        self._taken = False
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._ready.values()))

    def take(self, version: int) -> socket.SocketType:
        """Return a socket, which belongs to the caller."""
        ready = self._ready[version]
        self._taken = True
        if ready:
            return ready.pop()
        if self._closed:
            return self._make(1, version)[0]
        now_s = self._poller.now_s
        lasted_s, self._filled_s[version] = now_s - self._filled_s[version], now_s
        count = self._batch[version] * 2 if lasted_s < _SHORT_S else _FEWEST
        count = self._batch[version] = min(count, _MOST)
        ready += self._make(count, version)
        self._poller.interval_timer(_IDLE_S).register(self, now_s)
        return ready.pop()

    def on_interval(self) -> None:
        """Close sockets unused for an interval; see :class:`hbone.aio.interval_timer.Member`."""
        if not self._taken:
            self._drop()
        self._taken = False

    def _drop(self) -> None:
        self._poller.interval_timer(_IDLE_S).unregister(self)
        for ready in self._ready.values():
            while ready:
                ready.pop().close()

    def close(self) -> None:
        """Close all sockets in stock, and create none from now on; idempotent."""
        self._closed = True
        self._drop()
