"""What a plain socket does besides relaying."""

import asyncio
import socket
import tracemalloc

from hbone.aio.poller import Poller
from hbone.aio.socket import LASTING_S, PlainSocket
from tests.hbone import virtual_time
from tests.hbone.aio.harness import polling, run, tcp_pair


def test_the_lasting_callback_runs_once_and_only_for_long_connections() -> None:
    async def main() -> None:
        poller = Poller()
        seen: list[socket.socket] = []
        pairs = [socket.socketpair() for _ in range(2)]
        short, lasting = (PlainSocket(near, poller) for near, _ in pairs)
        short.when_lasting(seen.append)
        lasting.when_lasting(seen.append)
        await asyncio.sleep(LASTING_S / 2)
        short.close()
        assert seen == []
        await asyncio.sleep(LASTING_S)
        assert seen == [lasting.sock]
        assert not len(poller.interval_timer(LASTING_S))
        await asyncio.sleep(2 * LASTING_S)
        assert seen == [lasting.sock]  # once
        lasting.close()
        for _, far in pairs:
            far.close()
        poller.close()

    virtual_time.run(main)


def test_discarding_unread_bytes_at_the_end_takes_no_memory() -> None:
    """An allocation as large as any receive buffer can fail (RLIMIT_AS, vm.overcommit_memory)."""

    async def main() -> None:
        with polling() as poller:
            near, far = tcp_pair()
            with near:
                for size in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                    for sock in (near, far):
                        sock.setsockopt(socket.SOL_SOCKET, size, 1 << 20)
                end = PlainSocket(far, poller)
                sent = near.send(bytes(1 << 19))
                assert sent > len(poller.ciphertext)
                tracemalloc.start()
                try:
                    end.end_in_order()
                    _, peak = tracemalloc.get_traced_memory()
                finally:
                    tracemalloc.stop()
                assert peak < 1 << 20
                end.close()
                assert near.recv(1) == b""  # an unread byte would have reset the connection

    run(main)
