"""``python -m tests.hostile``: every attack with a bystander beside it, against ours and against Envoy.

Figures depend on the machine and its load, so compare only columns of one run. Run by root, the target, the
bystander and its application are scheduled before other work of the machine. Such work slows them down even so, by
caches and by the other thread of a core. Therefore a row with a slow bystander is measured again, three times in
all, if other processes used more than a twentieth of the machine.

A row passes if the bystander's p99 is below three times its p99 without the attack (in this row, or the median of
the rows until then, at least a millisecond), none of its requests failed, memory grew by less than the row
permits, and a flooding client got ENHANCE_YOUR_CALM or was held to the share of a core that one connection can
cost (``Limits.work_rate``). A slow core holds a flood to that share for longer than a row lasts, before enough
pauses have passed for closing it. CPU is the share of a core that the target uses: for the bystander alone, and
together with the attack. The status is 1 if a row of ours does not pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from tests.hostile.attacks import ATTACKS, FAILED_PROBE, Attack, reset_handshakes, run
from tests.hostile.bystander import Bystander, Latencies
from tests.hostile.target import Target, envoy, ours, take_precedence

_TARGETS: dict[str, Callable[..., AbstractContextManager[Target]]] = {"ours": ours, "envoy": envoy}
_LEAST_S = 0.001
#: A quarter of a core, and what the records of TLS and system calls add.
_HELD = 0.3
_SLOW = "slow"
_TRIES = 3
_DISTURBED = 0.05


def _alone(target: Target, seconds: float) -> Latencies:
    with Bystander(target, precedence=True) as bystander:
        time.sleep(seconds)  # the length of the measurement
    return bystander.seen


class _Used:
    """The processor time that a target uses from now on."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._begun_s, self._cpu_s = time.monotonic(), target.cpu_s()

    def so_far(self) -> tuple[float, float]:
        """Return seconds of processor time, and of time: the end of an attack takes some on a busy machine."""
        return self._target.cpu_s() - self._cpu_s, time.monotonic() - self._begun_s


def _others_s() -> float:
    """Return the processor time in seconds that processes outside of this process's group have used until now.

    The group has the target, the applications and the attackers. A process that has ended counts for its parent.
    """
    busy, group = Path("/proc/stat").read_text().split()[1:9], os.getpgrp()
    ticks = sum(map(int, busy)) - int(busy[3]) - int(busy[4])  # without idle and iowait
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (process / "stat").read_text().rsplit(") ", 1)[1].split()
            if int(fields[2]) == group:
                ticks -= sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _undisturbed_row(
    attack: Attack,
    open_target: Callable[..., AbstractContextManager[Target]],
    seconds: float,
    alone_p99: list[float],
) -> list[str]:
    """Run one attack, again if its only defect can be the fault of other processes; see the module."""
    for number in range(1, _TRIES + 1):
        begun_s, others_s = time.monotonic(), _others_s()
        row = _row(attack, open_target, seconds, alone_p99)
        share = (_others_s() - others_s) / (time.monotonic() - begun_s) / (os.cpu_count() or 1)
        if row[-1] != _SLOW or share <= _DISTURBED or number == _TRIES:
            break
        print(f"{attack.name}: {row[3]} ms, others used {share:.0%} of the machine: again", file=sys.stderr)
    return row


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _row(
    attack: Attack,
    open_target: Callable[..., AbstractContextManager[Target]],
    seconds: float,
    alone_p99: list[float],
) -> list[str]:
    """Run one attack. ``alone_p99`` has the values of earlier rows, and gets that of this row."""
    with open_target(files=attack.files) as target:
        take_precedence(target.pid)
        take_precedence(target.echo_pid, over_target=True)
        used = _Used(target)
        alone = _alone(target, seconds)
        alone_s, elapsed_s = used.so_far()
        alone_share = alone_s / elapsed_s
        alone_p99.append(alone.p(0.99))
        before, growth = target.rss_bytes(), 0
        used = _Used(target)
        with Bystander(target, precedence=True) as bystander:
            queue = run(attack, target, seconds)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                time.sleep(0.1)  # between two samples of memory
                growth = max(growth, target.rss_bytes() - before)
            seen = queue.get(timeout=60)
        during, (during_s, elapsed_s) = bystander.seen, used.so_far()
    wrong = []
    # With 800 requests the p99 depends on eight of them. The median of all rows is more precise.
    if during.p(0.99) > 3 * max(alone.p(0.99), statistics.median(alone_p99), _LEAST_S):
        wrong.append(_SLOW)
    if during.failures:
        wrong.append(f"{len(during.failures)} failed, first {during.failures[0]}")
    if growth > attack.most_growth:
        wrong.append("grows")
    if seen.answers[FAILED_PROBE]:
        wrong.append(f"{seen.answers[FAILED_PROBE]} probes failed")
    attacker_share = (during_s - alone_share * elapsed_s) / seconds
    if attack.calm and not seen.ends["ENHANCE_YOUR_CALM"] and attacker_share > _HELD:
        wrong.append("not told")
    return [
        attack.row,
        attack.name,
        f"{_ms(alone.p(0.5))} / {_ms(alone.p(0.99))}",
        f"{_ms(during.p(0.5))} / {_ms(during.p(0.99))}",
        f"{_ms(alone.new_p(0.99))} / {_ms(during.new_p(0.99))}",
        f"{alone_share:.0%} / {during_s / elapsed_s:.0%}",
        f"{seen.sent / 1e6:.1f}",
        f"{growth / 2**20:.0f}",
        seen.told(),
        ", ".join(wrong) or "ok",
    ]


def _handshakes(open_target: Callable[..., AbstractContextManager[Target]]) -> str:
    with open_target() as target:
        reset_handshakes(target, 500)
        seen = _alone(target, 1.0)
        tracebacks = target.log.read_text().count("Traceback")
    failures = len(seen.failures)
    return f"500 handshakes cut off by RST: {tracebacks} tracebacks, {failures} failures of the bystander"


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--target", choices=[*_TARGETS, "both"], default="both")
    args = parser.parse_args()
    bad = 0
    columns = (
        "row", "attack", "p50 / p99 alone, ms", "p50 / p99 during, ms", "new p99 alone / during, ms",
        "CPU alone / during", "MB sent", "RSS, MiB", "told", "verdict",
    )  # fmt: skip
    for name in _TARGETS if args.target == "both" else (args.target,):
        print(f"\n{name}\n\n| {' | '.join(columns)} |")
        print("|---" * len(columns) + "|")
        alone_p99: list[float] = []
        for attack in ATTACKS:
            if args.only in attack.name and not (attack.ours_only and name != "ours"):
                row = _undisturbed_row(attack, _TARGETS[name], args.seconds, alone_p99)
                bad += name == "ours" and row[-1] != "ok"
                print(f"| {' | '.join(row)} |", flush=True)
        print(f"\n{_handshakes(_TARGETS[name])}", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
