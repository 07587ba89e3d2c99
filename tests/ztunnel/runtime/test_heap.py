import asyncio
import ctypes
import gc
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hbone import virtual_time
from ztunnel.runtime import heap


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_free_pages_between_used_blocks_are_returned() -> None:
    block = 64 * 1024  # below the size that gets a mapping of its own
    blocks = [ctypes.create_string_buffer(b"x" * (block - 1)) for _ in range(1000)]
    stays = blocks[::50]
    blocks.clear()
    before = resident_kib()
    assert heap.trim()
    assert before - resident_kib() > 30 * 1024
    assert all(each.value for each in stays)


_IN_A_THREAD = """
import ctypes, threading
from ztunnel.runtime import heap
libc = ctypes.CDLL(None)
heap.expect_growth()
thread = threading.Thread(target=libc.malloc, args=(100,))
thread.start()
thread.join()
libc.malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_stats is glibc's")
def test_threads_have_no_heap_of_their_own() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", _IN_A_THREAD], capture_output=True, text=True, check=True
    ).stderr
    assert "Arena 0:" in printed
    assert "Arena 1:" not in printed


def test_growth_and_calm_set_the_collector() -> None:
    before = gc.get_threshold()
    try:
        heap.expect_growth()
        assert gc.get_threshold() > before
        heap.settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] == 10_000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_collections_are_suspended_until_the_start_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with heap.growing():
            assert not gc.isenabled()
            heap.settle()
            assert gc.isenabled()
        with heap.growing():
            assert not gc.isenabled()
        assert gc.isenabled(), "the process ended before its start was over"
        monkeypatch.setattr(heap, "_GROWTH_S", 0)
        with heap.growing():
            while not gc.isenabled():
                await asyncio.sleep(0)

    before = gc.get_threshold()
    try:
        asyncio.run(main())
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


class _Sockets:
    """The part of a poller that a trimmer uses."""

    def __init__(self) -> None:
        self.registered = 0
        self.buffers = 0
        self._most = 0

    def peak(self) -> int:
        most, self._most = self._most, self.registered
        return most

    def drop_buffers(self) -> int:
        dropped, self.buffers = self.buffers, 0
        return dropped

    def have(self, *counts: int) -> None:
        for count in counts:
            self.registered = count
            self._most = max(self._most, count)


@pytest.mark.parametrize(
    ("looks", "collected", "given"),
    [
        pytest.param([(0,), (0,)], 0, 0, id="nothing happens"),
        pytest.param([(1000,), (500,), (260,)], 0, 0, id="much is left"),
        pytest.param([(1000,), (250,), (200,)], 1, 1, id="load has gone"),
        pytest.param([(1000, 0), (0,)], 1, 1, id="between two looks"),
        pytest.param([(10_000,), (1000,), (900,)], 0, 1, id="too many left for a collection"),
        pytest.param([(10_000,), (1000,), (10,), (0,)], 1, 2, id="in two steps"),
        pytest.param([(31,), (0,)], 0, 0, id="never many"),
        pytest.param([(1000,), (0,), (1000,), (0,)], 2, 2, id="and again"),
    ],
)
def test_memory_is_returned_after_the_load_has_ended(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, ...]], collected: int, given: int
) -> None:
    done: list[str] = []
    monkeypatch.setattr(heap, "trim", lambda: done.append("given"))
    monkeypatch.setattr(heap.gc, "collect", lambda: done.append("collected"))
    monkeypatch.setattr(heap, "_SHARE", 1e9)

    async def main() -> None:
        sockets = _Sockets()
        trimmer = heap.MemoryTrimmer(sockets)  # type: ignore[arg-type]
        for counts in looks:
            sockets.have(*counts)
            trimmer._check()
        trimmer.close()

    asyncio.run(main())
    assert (done.count("collected"), done.count("given")) == (collected, given)


def test_returning_memory_takes_at_most_a_thousandth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    given: list[float] = []

    def slow() -> None:
        nonlocal now_s
        now_s += 0.1
        given.append(now_s)

    monkeypatch.setattr(heap, "trim", slow)
    monkeypatch.setattr(heap.gc, "collect", lambda: None)
    monkeypatch.setattr(heap.time, "monotonic", lambda: now_s)

    async def main() -> None:
        nonlocal now_s
        sockets = _Sockets()
        trimmer = heap.MemoryTrimmer(sockets)  # type: ignore[arg-type]
        for _ in range(50):
            sockets.have(100, 0)
            trimmer._check()
            now_s += 5.0
        trimmer.close()

    asyncio.run(main())
    assert given == pytest.approx([100.1, 200.2, 300.3])


def test_memory_of_unused_buffers_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(heap, "trim", lambda: done.append("given"))

    async def main() -> None:
        sockets = _Sockets()
        trimmer = heap.MemoryTrimmer(sockets)  # type: ignore[arg-type]
        sockets.buffers = 5
        trimmer._check()
        trimmer._check()
        trimmer.close()

    asyncio.run(main())
    assert done == ["given"]


def test_memory_is_returned_once_after_a_burst_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(heap, "_CALM_S", 60.0)
    monkeypatch.setattr(heap, "trim", lambda: given.append(asyncio.get_running_loop().time()))

    async def main() -> None:
        trimmer = heap.MemoryTrimmer(_Sockets())  # type: ignore[arg-type]
        for _ in range(3):
            trimmer.changed()
            await asyncio.sleep(20)
        last = asyncio.get_running_loop().time()
        await asyncio.sleep(100)
        assert len(given) == 1
        assert given[0] > last
        trimmer.changed()
        trimmer.close()
        await asyncio.sleep(100)
        assert len(given) == 1

    virtual_time.run(main)


def test_the_start_ends_without_a_collection() -> None:
    """It would take as long as the imports of a small program, while the pods wait, and find nothing."""
    before = gc.get_threshold()
    phases: list[str] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(noted)
    try:
        heap.settle()
        assert phases == []
    finally:
        gc.callbacks.remove(noted)
        gc.unfreeze()
        gc.set_threshold(*before)
