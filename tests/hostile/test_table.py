"""Which rows of the table of attacks are measured again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.hostile import __main__ as table
from tests.hostile.attacks import ATTACKS
from tests.hostile.target import ours

SLOW, OK = "slow", "ok"


@pytest.mark.parametrize(
    ("verdicts", "others_s", "runs", "last"),
    [
        ([OK], 1000.0, 1, OK),
        ([SLOW, OK], 1000.0, 2, OK),
        ([SLOW, SLOW, SLOW, OK], 1000.0, 3, SLOW),
        ([SLOW, OK], 0.0, 1, SLOW),
        (["slow, not told", OK], 1000.0, 1, "slow, not told"),
        (["not told", OK], 1000.0, 1, "not told"),
    ],
)
def test_only_a_slow_bystander_beside_other_processes_is_measured_again(
    verdicts: list[str], others_s: float, runs: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Iterator[str] = iter(verdicts)
    used = count(0.0, others_s)
    made: list[str] = []

    def row(*_: object) -> list[str]:
        made.append(next(seen))
        return ["7", "rapid reset", "1.0 / 2.0", "1.0 / 9.0", made[-1]]

    monkeypatch.setattr(table, "_row", row)
    monkeypatch.setattr(table, "_others_s", lambda: next(used))
    assert table._undisturbed_row(ATTACKS[0], ours, 1.0, [])[-1] == last
    assert len(made) == runs
