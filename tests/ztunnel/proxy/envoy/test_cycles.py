"""Connections leave no reference cycles: the garbage collector is told to look rarely."""

import gc
import tracemalloc
from collections import Counter
from pathlib import Path

from tests.ztunnel.proxy.envoy.harness import Harness, Identities, access_log, application, ask, run, tunnel

_OURS = ("hbone", "tproxy", "xds", "ztunnel")


def test_connections_through_a_tunnel_leave_none(tmp_path: Path) -> None:
    """Plain in, mTLS tunnel, plain out, all in one process: both ends of every connection."""

    async def body(harness: Harness) -> None:
        async with application() as port:
            await tunnel(harness, port, Identities(), access_log=access_log(tmp_path))
            assert await ask(harness.port("l")) == b"ping"  # opens the tunnel's connection
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                for _ in range(50):
                    assert await ask(harness.port("l")) == b"ping"
                gc.collect()
            finally:
                gc.set_debug(0)
                garbage = Counter(
                    getattr(each, "__qualname__", type(each).__qualname__)
                    for each in gc.garbage
                    # The module of an object is its class's; that of a function (and of its closure) is its own.
                    if str(getattr(each, "__module__", "")).partition(".")[0] in _OURS
                )
                gc.garbage.clear()
            # A connection that is still closing can leave an object or two. One object per connection is a cycle.
            assert not {name: count for name, count in garbage.items() if count >= 10}

    run(tmp_path, body)


def test_connections_leave_no_memory_behind(tmp_path: Path) -> None:
    """One small object that outlives each connection keeps a page of whatever was made around it.

    So did the names that Python 3.11 makes anew for each positional pattern of a class (``case Reset(code)``)
    and keeps in its cache of methods.
    """

    async def body(harness: Harness) -> None:
        async with application() as port:
            await tunnel(harness, port, Identities(), access_log=access_log(tmp_path))
            for _ in range(20):
                assert await ask(harness.port("l")) == b"ping"
            tracemalloc.start()
            try:
                for _ in range(20):
                    assert await ask(harness.port("l")) == b"ping"
                before = _allocated(harness)
                for _ in range(100):
                    assert await ask(harness.port("l")) == b"ping"
                after = _allocated(harness)
            finally:
                tracemalloc.stop()
            left = [str(each) for each in after.compare_to(before, "lineno") if each.count_diff >= 50]
            assert not left

    run(tmp_path, body)


def _allocated(harness: Harness) -> tracemalloc.Snapshot:
    harness.proxy.logs.writer.flush()
    gc.collect()
    ours = [tracemalloc.Filter(True, f"*/{package}/*") for package in _OURS]
    return tracemalloc.take_snapshot().filter_traces(ours)
