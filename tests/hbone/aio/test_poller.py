"""What a poller has for its sockets: interval timers, buffers, and the peak of sockets."""

from __future__ import annotations

import socket

from tests.hbone.aio.harness import polling, run


class Quiet:
    """A handler, and a member of an interval timer, that does nothing."""

    def on_event(self, mask: int) -> None: ...

    def on_bug(self, error: Exception) -> None: ...

    def on_interval(self) -> None: ...


def test_a_poller_has_one_per_interval_and_ends_them() -> None:
    async def main() -> None:
        with polling() as poller:
            timer = poller.interval_timer(0.02)
            assert poller.interval_timer(0.02) is timer
            assert poller.interval_timer(0.03) is not timer
            timer.register(Quiet(), poller.now_s)
        assert not len(timer)
        assert poller.interval_timer(0.02) is not timer

    run(main)


def test_buffers_that_nobody_took_for_a_while_go_but_for_a_few() -> None:
    async def main() -> None:
        with polling() as poller:
            for buffer in [poller.acquire() for _ in range(10)]:
                poller.release(buffer)
            assert poller.drop_buffers() == 0  # all ten were in use since
            for buffer in [poller.acquire() for _ in range(3)]:
                poller.release(buffer)
            assert poller.drop_buffers() == 3
            assert poller.drop_buffers() == 3
            assert poller.drop_buffers() == 0

    run(main)


def test_the_peak_is_that_since_it_was_last_asked() -> None:
    async def main() -> None:
        with polling() as poller:
            socks = [sock for _ in range(3) for sock in socket.socketpair()]
            for sock in socks:
                poller.register(sock.fileno(), Quiet())
            for sock in socks[:5]:
                poller.unregister(sock.fileno())
            assert (poller.peak(), poller.peak(), poller.registered) == (6, 1, 1)
            for sock in socks:
                poller.unregister_closing(sock.fileno())
                sock.close()

    run(main)
