import ctypes
import gc
import platform
from pathlib import Path

import pytest

from ztunnel import heap


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_free_pages_between_blocks_that_stay_go_back() -> None:
    block = 64 * 1024  # below the size that gets a mapping of its own
    blocks = [ctypes.create_string_buffer(b"x" * (block - 1)) for _ in range(1000)]
    stays = blocks[::50]
    blocks.clear()
    before = resident_kib()
    assert heap.give_back()
    assert before - resident_kib() > 30 * 1024
    assert all(each.value for each in stays)


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
