"""Tests of the choice of the worker that accepts the next connection."""

import os

from ztunnel.proxy.istio.workers.connection_counts import ConnectionCounts


def test_the_worker_with_most_connections_accepts_last() -> None:
    connection_counts, descriptor = ConnectionCounts.create(3)
    there = ConnectionCounts(descriptor, 3)  # as another process sees it
    os.close(descriptor)
    connection_counts.set(0, 0)
    there.set(1, 0)
    # A worker that does not run is not waited for.
    assert (connection_counts.is_turn_of(0), there.is_turn_of(1)) == (True, True)
    connection_counts.set(0, 1)
    assert (connection_counts.is_turn_of(0), there.is_turn_of(1)) == (False, True)
    there.set(1, 2)
    assert (connection_counts.is_turn_of(0), there.is_turn_of(1)) == (True, False)
    # The third starts without connections, and ends again.
    connection_counts.set(2, 0)
    assert (connection_counts.is_turn_of(0), there.is_turn_of(1)) == (False, False)
    there.remove(2)
    assert connection_counts.is_turn_of(0)
    # The last running worker always accepts.
    there.remove(1)
    connection_counts.set(0, 100)
    assert connection_counts.is_turn_of(0)
    connection_counts.close()
    there.close()
