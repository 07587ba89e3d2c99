"""Each step of a hand-over in Envoy's dialect, times a change of either side's configuration at that step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.handover.generations import Generations, play
from tests.ztunnel.proxy.envoy.harness import Harness, Open, rbac
from tests.ztunnel.proxy.envoy.test_lives import OTHER, POLICY_CHANGE
from ztunnel.proxy.dataplane.handover import giver, taker
from ztunnel.proxy.dataplane.handover.messages import Offer
from ztunnel.proxy.dataplane.rendezvous import Parcel

#: When the change comes: before the offer, while the unit is made, before the giver's word, after it.
STEPS = ("before", "offered", "taken", "gone")
#: What has become of a tunnel's client, and why.
CHANGES = {
    "the successor denies": POLICY_CHANGE,
    "the predecessor denies": POLICY_CHANGE,
    "the successor has no listener for tunnels": "its listener is not known",
    "the successor has no cluster": "its cluster is not known",
}


async def change(made: Generations, what: str) -> None:
    """Make a change, and wait until its proxy has it."""
    harness = made.old if "predecessor" in what else made.new
    resources = list(harness.resources)
    if "denies" in what:
        ends = next(document for _, document in resources if document.get("name") == "inbound")
        ends["filter_chains"][0]["filters"][0] = rbac(OTHER)
        await harness.published(*resources)
    elif "listener" in what:
        await harness.published(*(each for each in resources if each[1].get("name") != "inbound"))
        await harness.until(lambda: all(each.name != "inbound" for each in harness.proxy.listeners.active))
    else:
        harness.publish(*(each for each in resources if each[1].get("name") != "tunnel" or each[0] != "cluster"))
        await harness.until(lambda: harness.proxy.clusters.get("tunnel") is None)


def interrupted(monkeypatch: pytest.MonkeyPatch, step: str, event: Callable[[], Awaitable[None]]) -> None:
    """Have an event happen once, at a step of the first unit."""
    pending = [event]

    async def happen(at: str) -> None:
        if step == at and pending:
            await pending.pop()()

    consider, send = taker.Taker.consider, giver.Giver._send

    async def considered(self: taker.Taker, offer: Offer, parcel: Parcel) -> str:
        await happen("offered")
        found = await consider(self, offer, parcel)
        await happen("taken")
        return found

    async def sent(self: giver.Giver, message: object, descriptors: object = ()) -> None:
        await send(self, message, descriptors)  # type: ignore[arg-type]
        if type(message).__name__ in ("Go", "Keep"):
            await happen("gone")

    monkeypatch.setattr(taker.Taker, "consider", considered)
    monkeypatch.setattr(giver.Giver, "_send", sent)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", CHANGES)
def test_change_during_any_handover_step_applies_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, what: str
) -> None:
    async def body(made: Generations) -> None:
        client = await Open.to(made.old.port("tunnel"))
        assert await client.say(b"hello") == b"hello"
        await made.meet()
        if step == "before":
            await change(made, what)
        else:
            interrupted(monkeypatch, step, lambda: change(made, what))
        result = await made.give(0.0)
        denied = "denies" in what and (step, what) != ("gone", "the predecessor denies")  # it has nothing to deny
        if denied:
            assert await client.ended()
        elif not result.left or set(result.stays) == {"ended"}:
            # It was taken first, so that the listener's end or the cluster's replacement met a live connection.
            # The successor then ends the tunnel, perhaps before its other end is offered.
            assert step in ("taken", "gone")
        else:
            assert set(result.stays) == {f"declined: {CHANGES[what]}"}
            assert await client.say(b"again") == b"again"
        await client.close()
        for harness in (made.old, made.new):
            await harness.until(lambda harness=harness: not len(harness.proxy.connections.hops))
        for harness in (made.old, made.new):
            for pool in list(harness.proxy.connector.tunnels.pools.values()):
                await pool.close()
        for harness in (made.old, made.new):
            await harness.until(lambda harness=harness: not len(harness.proxy.connections))
        lines = [line for harness in (made.old, made.new) for line in await _log(harness)]
        # One line for the client's connection, and one for the request at the tunnel's other end.
        assert len(lines) == 2, lines
        if denied:
            assert POLICY_CHANGE in {line["details"] for line in lines}

    play(tmp_path, body, monkeypatch)


async def _log(harness: Harness) -> list[dict[str, object]]:
    harness.proxy.logs.writer.flush()
    await asyncio.sleep(0.1)
    return list(await harness.log(0)) if (harness.folder / "log").exists() else []
