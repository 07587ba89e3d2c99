"""A client with another certificate that asks 100 times a second, and connects anew ten times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hbone import frames
from hbone.frames import frame
from tests.hostile.target import BYSTANDER, Target, take_precedence
from tests.hostile.wire import Ended, Wire

_PER_S = 100
_NEW_PER_S = 10
_SIZE = 512
_LIMIT_S = 20.0


@dataclass(slots=True)
class Latencies:
    """What a bystander has measured, in seconds, and how it failed."""

    requests: list[float] = field(default_factory=list)
    connections: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def p(self, share: float) -> float:
        """Latency of requests that this share does not exceed."""
        return _quantile(self.requests, share)

    def new_p(self, share: float) -> float:
        """The same of new connections with their first request."""
        return _quantile(self.connections, share)


class Bystander:
    """Measures in two threads, as a context manager.

    Args:
        target: the server.
        precedence: see :func:`tests.hostile.target.take_precedence`.
    """

    def __init__(self, target: Target, *, precedence: bool = False) -> None:
        self._target = target
        self._precedence = precedence
        self._over = threading.Event()
        self.seen = Latencies()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in (self._ask, self._connect)]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, measure: Callable[[], None]) -> None:
        if self._precedence:
            take_precedence(over_target=True)
        measure()

    def _wire(self) -> Wire:
        target = self._target
        return Wire(target.bystander_port, target.folder, BYSTANDER, time.monotonic() + _LIMIT_S)

    def _request(self, wire: Wire, stream_id: int) -> None:
        wire.until_s = time.monotonic() + _LIMIT_S
        wanted = wire.received[stream_id] + _SIZE
        if wire.credit[stream_id] < _SIZE or wire.credit[0] < _SIZE:
            wire.wait(lambda: wire.credit[stream_id] >= _SIZE and wire.credit[0] >= _SIZE)
        wire.credit[stream_id] -= _SIZE
        wire.credit[0] -= _SIZE
        wire.send(frame(frames.DATA, 0, stream_id, bytes(_SIZE)))
        wire.wait(lambda: wire.received[stream_id] >= wanted)

    def _ask(self) -> None:
        try:
            wire = self._wire()
            stream_id = wire.open("echo:1")
            due_s = time.monotonic()
            while not self._over.is_set():
                begun_s = time.monotonic()
                self._request(wire, stream_id)
                now_s = time.monotonic()
                self.seen.requests.append(now_s - begun_s)
                due_s = max(due_s + 1 / _PER_S, now_s - 0.1)
                self._over.wait(max(0.0, due_s - now_s))
            wire.close()
        except (Ended, OSError) as error:
            self.seen.failures.append(f"request {len(self.seen.requests)}: {error!r}")

    def _connect(self) -> None:
        while not self._over.wait(1 / _NEW_PER_S):
            begun_s = time.monotonic()
            try:
                wire = self._wire()
                self._request(wire, wire.open("echo:1"))
                wire.close()
            except (Ended, OSError) as error:
                self.seen.failures.append(f"connection {len(self.seen.connections)}: {error!r}")
            else:
                self.seen.connections.append(time.monotonic() - begun_s)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")
