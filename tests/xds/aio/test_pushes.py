"""A control plane is no peer to be throttled: no number of pushes ends the stream."""

import asyncio

import pytest

from bench.pushes import push_all, receive

LIMIT_S = 60.0
COUNT = 2000


@pytest.mark.parametrize("delta", [False, True])
def test_a_server_that_pushes_as_fast_as_it_can_keeps_its_stream(delta: bool) -> None:
    """The connection once ended after 822 of 2,000 pushes. Simultaneous pushes can be one update."""
    server, port, streams = push_all(COUNT, 0.0)
    try:
        got = asyncio.run(asyncio.wait_for(receive(port, COUNT, delta=delta), LIMIT_S))
    finally:
        server.stop(None).wait()
    assert (got.last, got.ended) == (str(COUNT - 1), 0)
    assert len(streams) == 1
