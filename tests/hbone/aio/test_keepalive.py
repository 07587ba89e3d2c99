"""With the default times, how soon a vanished peer is detected, and how long a paused peer is kept."""

import asyncio

import pytest

from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.keepalive import Keepalive
from hbone.aio.poller import Poller
from tests.hbone import virtual_time

#: Peers of a proxy that died without a FIN should see an end within this time.
NOTICED_S = 20.0
#: A peer may stand still for this long, stopped or migrated, and lose nothing.
STOPPED_S = 10.0


class _Connection:
    """Answers PINGs, except between two times; notes when it was given up."""

    def __init__(self, from_s: float, until_s: float) -> None:
        self._silent = from_s, until_s
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self.keepalive: Keepalive | None = None
        self.ended_s: float | None = None
        self.received_bytes = 0

    def now_s(self) -> float:
        return self._loop.time() - self._began_s

    def send_ping(self, payload: bytes) -> None:
        from_s, until_s = self._silent
        if self.now_s() < from_s:
            self._loop.call_soon(self._answer, payload)
        else:  # a stopped process answers queued PINGs when it resumes
            self._loop.call_later(max(0.0, until_s - self.now_s()), self._answer, payload)

    def _answer(self, payload: bytes) -> None:
        if self.keepalive is not None:
            self.keepalive.answered(payload)

    def on_silence(self) -> None:
        if self.ended_s is None:
            self.ended_s = self.now_s()

    def receives(self, every_s: float, until_s: float) -> None:
        """Receive bytes again and again, until a time."""
        if self.now_s() < until_s:
            self.received_bytes += 1
            self._loop.call_later(every_s, self.receives, every_s, until_s)


def _ended(from_s: float, until_s: float, receives: tuple[float, float] | None = None) -> float | None:
    """Return when a peer is given up that answers no PING between two times.

    ``receives``: the interval at which it sends other bytes, and when it stops to.
    """
    found: list[float | None] = []

    async def main() -> None:
        settings = ConnectionSettings()
        assert settings.ping_interval_s is not None
        poller, connection = Poller(), _Connection(from_s, until_s)
        keepalive = connection.keepalive = Keepalive(
            connection, poller, interval_s=settings.ping_interval_s, timeout_s=settings.ping_timeout_s
        )
        if receives is not None:
            connection.receives(*receives)
        await asyncio.sleep(80.0)
        keepalive.stop()
        poller.close()
        found.append(connection.ended_s)

    virtual_time.run(main)
    return found[0]


@pytest.mark.parametrize("vanished_s", [0.5, 5.1, 9.9, 10.1, 11.0, 12.4, 13.7, 17.3, 20.1])
def test_a_peer_that_vanished_is_noticed_in_time(vanished_s: float) -> None:
    ended_s = _ended(vanished_s, 1000.0)
    assert ended_s is not None
    assert ended_s - vanished_s <= NOTICED_S


@pytest.mark.parametrize("stopped_s", [0.5, 5.1, 9.9, 10.1, 12.4, 17.3])
def test_a_peer_that_was_stopped_for_a_while_loses_nothing(stopped_s: float) -> None:
    assert _ended(stopped_s, stopped_s + STOPPED_S) is None


@pytest.mark.parametrize("every_s", [1.0, 5.0, 10.0])
def test_a_peer_that_sends_is_kept_although_its_answer_waits_behind_its_data(every_s: float) -> None:
    """Like Envoy's ``connection_keepalive.timeout``. A slow link can need more than 12 s for what is queued."""
    assert _ended(3.0, 70.0, receives=(every_s, 70.0)) is None


@pytest.mark.parametrize("vanished_s", [30.2, 35.1, 41.0])
def test_a_peer_that_vanishes_while_its_answer_waits_is_noticed_in_time(vanished_s: float) -> None:
    ended_s = _ended(3.0, 1000.0, receives=(0.5, vanished_s))
    assert ended_s is not None
    assert vanished_s < ended_s <= vanished_s + NOTICED_S
