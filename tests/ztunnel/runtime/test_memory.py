"""The memory that a process may have, from files as kernels write them."""

from pathlib import Path

import pytest

from ztunnel.runtime.memory import memory_limit_bytes, waiting_bytes

MIB = 1 << 20
MEMINFO = "MemTotal:        2097152 kB\nMemFree: 1 kB\n"


def limit(folder: Path, cgroup: str, **files: str) -> int:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(MEMINFO)
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = folder / "cgroup" / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit_bytes(folder / "cgroup", folder / "proc")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"memory_max": "268435456\n"}, 256 * MIB),
        ("0::/pods/a\n", {"pods__a__memory_max": "max\n", "pods__memory_max": "536870912\n"}, 512 * MIB),
        ("0::/pods/a\n", {"pods__a__memory_max": "268435456\n", "pods__memory_max": "536870912\n"}, 256 * MIB),
        ("0::/gone\n", {"memory_max": "268435456\n"}, 256 * MIB),
        ("0::/\n", {"memory_max": "max\n"}, 2048 * MIB),
        ("0::/\n", {"memory_max": str(1 << 50)}, 2048 * MIB),
        ("", {}, 2048 * MIB),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert limit(tmp_path, cgroup, **files) == expected


def test_the_limit_of_cgroup_version_1_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cgroup/memory/pods"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("268435456\n")
    assert limit(tmp_path, "5:cpu:/pods\n4:memory,x:/pods\n") == 256 * MIB


def test_this_process_has_a_limit() -> None:
    assert memory_limit_bytes() > MIB


def test_pods_and_process_get_shares_of_the_memory_limit() -> None:
    assert waiting_bytes(512 * MIB) == (128 * MIB, 32 * MIB)
    assert waiting_bytes(1) == (16 * MIB, 8 * MIB)
