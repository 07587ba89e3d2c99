"""Every attack for a moment: verdicts by counts and states; ``python -m tests.hostile`` has the figures."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.hostile.attacks import ATTACKS, FAILED_PROBE, Attack, reset_handshakes, run
from tests.hostile.bystander import Bystander
from tests.hostile.target import Target, ours

pytestmark = pytest.mark.hostile

#: A tenth of the defaults, and fewer pauses, so that a slow core with a high price ends attacks in time, too.
_LIMITS = {"work_burst": 20_000, "work_rate": 25_000.0, "stall_burst_s": 0.1}
_TRIES = 4
_SECONDS = 2.0


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with ours(_LIMITS, fair=True) as found:
        # The first requests come before the measurement, which must not show a starting process's memory.
        with Bystander(found) as bystander:
            _wait_for(bystander, connections=5, requests=50)
        yield found


def _wait_for(bystander: Bystander, *, connections: int, requests: int) -> None:
    """Wait until it has measured so many."""
    seen = bystander.seen
    until_s = time.monotonic() + 30.0
    while len(seen.connections) < connections or len(seen.requests) < requests:
        assert seen.failures == []
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_bystander_is_served_beside(attack: Attack, target: Target) -> None:
    if attack.files is None:
        _attacked(attack, target)
    else:
        with ours(_LIMITS, files=attack.files, fair=True) as few:
            _attacked(attack, few)


def _attacked(attack: Attack, target: Target) -> None:
    before = target.rss_bytes()
    with Bystander(target) as bystander:
        for attempt in range(_TRIES):
            seen = run(attack, target, _SECONDS * (1 + 2 * attempt)).get(timeout=90)  # longer on a busy machine
            if seen.connections >= attack.connections and (not attack.calm or seen.ends["ENHANCE_YOUR_CALM"]):
                break  # otherwise the machine was too busy for the attacker to exceed the limit
        growth = target.rss_bytes() - before
        # After the attack, too, and not only beside it.
        done = bystander.seen
        _wait_for(bystander, connections=len(done.connections) + 1, requests=len(done.requests) + 1)
    assert bystander.seen.failures == []
    assert seen.connections >= attack.connections
    assert growth < attack.most_growth
    assert not seen.answers[FAILED_PROBE]
    if attack.calm:
        assert seen.ends["ENHANCE_YOUR_CALM"] >= 1, seen


def test_handshakes_cut_off_leave_no_traceback(target: Target) -> None:
    reset_handshakes(target, 100)
    with Bystander(target) as bystander:
        _wait_for(bystander, connections=3, requests=0)
    assert bystander.seen.failures == []
    assert "Traceback" not in target.log.read_text()
