"""How long one change of policies keeps the loop from other connections: ``python -m bench.review``.

The reviewed lives have the data path's facts, but no sockets. Each is judged by a DENY policy that does not match.
For each number of lives it prints the duration of the whole review, and the longest time without other work in the
loop.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence

import uvloop

from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.policy import PeerPrincipal, Policy, PolicyList, Tier, Verdict
from xds.model.string_match import StringMatch
from ztunnel.policy.engine import judge
from ztunnel.proxy.dataplane.life_table import ALLOWED, Event
from ztunnel.proxy.dataplane.life_table import Verdict as LifeVerdict
from ztunnel.proxy.dataplane.live_table import Life, Lives, LiveTable

HERE = SocketAddress("10.0.0.1", 8080)
DENY = Policy("ns/deny", Verdict.DENY, PeerPrincipal(StringMatch("exact", "td/ns/n/sa/nobody")))
POLICIES = PolicyList((Tier((DENY,)),), Verdict.ALLOW)


class _Connection(Life):
    """A registered connection with the facts of an inbound one."""

    def __init__(self, group: Lives["_Connection"], number: int) -> None:
        super().__init__(group)
        source = SocketAddress(f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", 40_000)
        peer = PeerCertificate(uri_sans=(f"spiffe://td/ns/n/sa/client{number % 500}",))
        self.facts = ConnectionFacts(source=source, direct_source=source, destination=HERE, peer=peer)
        self.opened(lambda _: None)

    def judge(self) -> LifeVerdict:
        """Evaluate one policy."""
        return ALLOWED if judge(POLICIES, self.facts).allowed else LifeVerdict("denied")


async def measured(count: int) -> tuple[float, float]:
    """Return the seconds of a review of ``count`` lives, and its longest pause."""
    table = LiveTable()
    group: Lives[_Connection] = Lives(table)
    for number in range(count):
        _Connection(group, number)
    longest, last, done = 0.0, 0.0, False

    async def other() -> None:
        nonlocal longest, last
        while not done:
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now
            await asyncio.sleep(0)

    last = began = time.perf_counter()
    running = asyncio.ensure_future(other())  # noqa: TID251  awaited below
    group.review(Event.POLICIES)
    await table.reviewed()
    took = time.perf_counter() - began
    done = True
    await running
    return took, longest


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per number of lives."""
    parser = argparse.ArgumentParser(prog="python -m bench.review", description=__doc__)
    parser.add_argument("--lives", type=int, nargs="*", default=[100, 1_000, 10_000, 50_000])
    for count in parser.parse_args(arguments).lives:
        took, longest = min(uvloop.run(measured(count)) for _ in range(3))
        print(f"{count:6} lives: review {took * 1000:7.1f} ms, longest pause {longest * 1000:5.2f} ms")


if __name__ == "__main__":
    main()
