"""A PolicySync server that means harm, over the real wire: memory stays bounded, the last good store answers."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.generated import at_night
from tests.ztunnel.policy.calico.felix import Felix
from tests.ztunnel.policy.calico.test_follower import (
    ALLOW,
    DENY,
    ENDPOINT,
    FLOW,
    LOOPS,
    ONE,
    POD,
    SNAPSHOT,
    code,
    following,
    run,
    until,
)
from xds.model import calico as c
from ztunnel.policy.calico import follower as module
from ztunnel.policy.calico.verdict import Code


def test_rubbish_of_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes are not a message, or one without effect on good state. A hundred invalid messages end the
    stream.
    """
    noise = random.Random(7)
    rubbish = [b"\xff" + noise.randbytes(size) for size in (*range(60), 1_000, 100_000)]

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(*SNAPSHOT)
            await until(lambda: follower.in_sync)
            for piece in (*rubbish, *rubbish):
                stream.put_nowait(piece)
            await until(lambda: not follower.in_sync)
            assert "100 messages cannot be read" in follower.error
            assert code(follower) is Code.OK
            await felix.stream(DENY, ENDPOINT, c.InSync())
            await until(lambda: follower.in_sync)
            assert code(follower) is Code.PERMISSION_DENIED

    run(main)


def test_ids_that_are_missing_twice_there_or_reserved(tmp_path: Path) -> None:
    def with_id(text: str) -> bytes:
        return bytes([0x12, len(text) + 2, 0x0A, len(text)]) + text.encode()  # an IPSetUpdate of no members

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(
                with_id(""), with_id("\0s:a"), with_id("s:a"), with_id("s:a"), ALLOW, ALLOW, *SNAPSHOT
            )
            await until(lambda: follower.in_sync)
            assert follower.counts.faults == 2
            assert len(follower.evaluator.store.ip_sets) == 1
            assert code(follower) is Code.OK
            stream.put_nowait(c.IpSetDelta("s:none", ("10.0.0.1",), ()))
            stream.put_nowait(c.IpSetRemove("s:none"))
            stream.put_nowait(c.PolicyUpdate(c.PolicyId("GlobalNetworkPolicy", "", "none"), None))
            stream.put_nowait(c.EndpointUpdate(c.EndpointId("k8s", "no/ne", "eth0"), None))
            stream.put_nowait(c.InSync())
            await until(lambda: follower.evaluator.store.ignored == 1)
            await until(lambda: follower.counts.updates == 12)
            assert (code(follower), follower.in_sync) == (Code.OK, True)

    run(main)


@LOOPS
def test_a_set_of_a_million_members_leaves_other_tasks_their_turn_and_counts_when_it_is_whole(
    loop: str, tmp_path: Path
) -> None:
    """By night, and an eighth of a million in other runs."""
    members = tuple(f"10.{a}.{b}.{d}" for a in range(at_night(16, 2)) for b in range(256) for d in range(244))
    not_in = c.Rule(c.Action.ALLOW, source=c.PeerMatch(not_ip_sets=("s:a",)))
    seen: set[int] = set()
    allowed: set[bool] = set()

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(
                c.IpSetUpdate("s:a", c.IpSetType.NET, ("10.0.0.1",)),
                c.PolicyUpdate(ONE, c.Policy("", (not_in,))),
                ENDPOINT,
                c.InSync(),
            )
            await until(lambda: follower.in_sync)
            sets = follower.evaluator.store.ip_sets
            assert code(follower) is Code.PERMISSION_DENIED
            stream.put_nowait(c.IpSetUpdate("s:a", c.IpSetType.NET, members[: len(members) // 2]))
            stream.put_nowait(c.IpSetDelta("s:a", members[len(members) // 2 :], ()))
            while sets.members < len(members):
                seen.add(sets.members)
                allowed.add(follower.evaluator.check(POD, FLOW).allowed)
                await asyncio.sleep(0)
            assert len(seen) > len(members) / 10_000, "other tasks had their turn within each of the two messages"
            assert allowed == {False}, "half a set is not taken for the whole, or for none"
            assert len(sets) == 1

    run(main, loop)


@pytest.mark.parametrize("kind", ["members", "unreadable members", "policies", "labels"])
def test_what_has_no_end_ends_the_stream(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless data ends the stream, even after InSync, and even if it consists of few large objects."""
    monkeypatch.setattr(module, "OBJECTS", 20_000)
    many = tuple(f"10.0.{index >> 8}.{index & 255}" for index in range(21_000))
    rule = c.Rule(c.Action.ALLOW, source=c.PeerMatch(account_names=("x" * 100,)))
    endless: dict[str, list[c.Update]] = {
        "members": [c.IpSetUpdate("s:a", c.IpSetType.NET, many)],
        "unreadable members": [
            c.IpSetUpdate("s:a", c.IpSetType.NET, ()),
            *[c.IpSetDelta("s:a", tuple(f"no {i} {number}" for i in range(2_000)), ()) for number in range(11)],
        ],
        "policies": [
            c.PolicyUpdate(c.PolicyId("GlobalNetworkPolicy", "", f"p{number}"), c.Policy("", (rule,) * 150))
            for number in range(20)
        ],
        "labels": [c.NamespaceUpdate(f"n{number}", {"a": "x" * 20_000}) for number in range(20)],
    }

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(*SNAPSHOT)
            await until(lambda: follower.in_sync)
            for update in endless[kind]:
                stream.put_nowait(update)
            await until(lambda: not follower.in_sync)
            assert "the server has sent more than 20,000 objects" in follower.error
            assert code(follower) is Code.OK

    run(main)


def test_objects_that_are_replaced_again_and_again_are_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OBJECTS", 20_000)
    members = tuple(f"10.0.{index >> 8}.{index & 255}" for index in range(6_000))
    big = c.PolicyUpdate(ONE, c.Policy("", (c.Rule(c.Action.ALLOW),) * 500))

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(*SNAPSHOT)
            for _ in range(30):
                stream.put_nowait(c.IpSetUpdate("s:a", c.IpSetType.NET, members))
                stream.put_nowait(big)
                stream.put_nowait(c.IpSetUpdate("s:b", c.IpSetType.NET, ("nonsense" * 1_000,)))
            await until(lambda: follower.counts.updates == 93)
            assert follower.in_sync
            assert follower.evaluator.store.ip_sets.weight == 6_000 + 126

    run(main)


def test_a_stream_that_never_says_insync_is_named_and_the_last_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SLOW_S", 0.02)

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(*SNAPSHOT)
            await until(lambda: follower.in_sync)
            stream.put_nowait(None)
            stream = await felix.stream(DENY, ENDPOINT)
            await until(lambda: "has not sent InSync yet" in follower.error)
            assert (code(follower), follower.in_sync) == (Code.OK, False)
            assert follower.age_s > 0
            stream.put_nowait(c.InSync())
            await until(lambda: follower.in_sync)
            assert (code(follower), follower.error) == (Code.PERMISSION_DENIED, "")

    run(main)
    assert any("PolicySync not complete" in line for line in caplog.messages)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_flood_of_updates_takes_no_memory_and_leaves_checks_their_turn(tmp_path: Path) -> None:
    """Updates arrive as fast as possible, 20,000 in nightly runs. The only queue is the network's."""
    checks, updates = 0, at_night(20_000, 4_000)

    async def main() -> None:
        nonlocal checks
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(*SNAPSHOT)
            await until(lambda: follower.in_sync)
            for number in range(updates):
                stream.put_nowait(DENY if number % 2 else ALLOW)
            before = resident_bytes()
            while follower.counts.updates < updates + 3:
                assert code(follower) in (Code.OK, Code.PERMISSION_DENIED)
                checks += 1
                await asyncio.sleep(0)
            assert checks > 100
            assert resident_bytes() - before < 64 * 1024 * 1024
            assert code(follower) is Code.PERMISSION_DENIED

    run(main)
