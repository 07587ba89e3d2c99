"""Who may accept when descriptors run out."""

import os
import resource
import subprocess
import sys

from ztunnel.runtime.descriptors import Descriptors, lowest_free


class Process:
    """Has the number of descriptors in use that a test sets."""

    def __init__(self, limit: int = 512) -> None:
        self.used = 0
        self.sheddable = 0
        self.descriptors = Descriptors(limit, self._shed, lambda: self.used)

    def _shed(self) -> bool:
        self.sheddable -= 1
        return self.sheddable >= 0

    def uses(self, number: int) -> None:
        self.used = number
        self.descriptors.note(number)


def test_all_listeners_accept_while_descriptors_are_plentiful() -> None:
    process = Process()
    greedy = process.descriptors.share("greedy", lambda: 400)
    process.uses(447)
    assert greedy.admits()
    assert not process.descriptors.short


def test_in_the_reserve_a_pod_with_more_than_its_share_waits() -> None:
    process = Process()
    greedy = process.descriptors.share("greedy", lambda: 400)
    modest = process.descriptors.share("modest", lambda: 20)
    process.uses(448)
    assert (greedy.admits(), modest.admits()) == (False, True)
    assert process.descriptors.short
    assert process.descriptors.paused == 1
    process.uses(480)
    assert not modest.admits()
    process.uses(300)
    assert greedy.admits()
    assert modest.admits()
    assert not process.descriptors.short


def test_sheddable_connections_make_room_before_a_pod_must_wait() -> None:
    process = Process()
    greedy = process.descriptors.share("greedy", lambda: 400)
    process.descriptors.share("other", lambda: 0)
    process.uses(450)
    process.sheddable = 2
    assert [greedy.admits() for _ in range(3)] == [True, True, False]


def test_a_pod_that_ends_holds_back_nothing() -> None:
    process = Process()
    greedy = process.descriptors.share("greedy", lambda: 400)
    other = process.descriptors.share("other", lambda: 300)
    process.uses(450)
    assert not greedy.admits()
    greedy.close()
    assert not process.descriptors.short
    assert other.admits()


def test_the_lowest_free_descriptor_tells_how_many_are_in_use() -> None:
    first = lowest_free()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    try:
        assert lowest_free() > first
        assert first in opened
    finally:
        for each in opened:
            os.close(each)
    assert lowest_free() == first


def test_no_descriptor_makes_the_kernels_table_grow_under_running_threads() -> None:
    """In a process with threads, each growth would hold up the event loop for 5 to 15 ms."""
    print_size = (
        "import re, resource; from pathlib import Path; from ztunnel.runtime.descriptors import raise_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, {limit})); raise_limit();"
        "print(re.search('FDSize:\\t(\\\\d+)', Path('/proc/self/status').read_text())[1],"
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(list(Path('/proc/self/fd').iterdir())))"
    )
    for limit, size in ((600, 600), (20_000, 16_384)):
        command = [sys.executable, "-c", print_size.format(limit=limit)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        table, soft, used = map(int, printed.split())
        assert table >= size  # more, where this process has had more
        assert (soft, used) == (limit, 4)


def test_without_any_the_limit_is_in_use() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(), hard))
    try:
        assert lowest_free() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
