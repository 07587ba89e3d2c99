"""Each step of a hand-over in Envoy's dialect, times a change of either side's configuration at that step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.handover.generations import Generations, play
from tests.ztunnel.proxy.envoy.rig import Open, Rig, rbac
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
    rig = made.old if "predecessor" in what else made.new
    resources = list(rig.resources)
    if "denies" in what:
        ends = next(document for _, document in resources if document.get("name") == "inbound")
        ends["filter_chains"][0]["filters"][0] = rbac(OTHER)
        await rig.published(*resources)
    elif "listener" in what:
        await rig.published(*(each for each in resources if each[1].get("name") != "inbound"))
        await rig.until(lambda: all(each.name != "inbound" for each in rig.proxy.listeners.active))
    else:
        rig.publish(*(each for each in resources if each[1].get("name") != "tunnel" or each[0] != "cluster"))
        await rig.until(lambda: rig.proxy.clusters.get("tunnel") is None)


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
        elif not result.left:
            # It was taken first, so that the listener's end or the cluster's replacement met a live connection.
            assert step in ("taken", "gone")
        else:
            assert set(result.stays) == {f"declined: {CHANGES[what]}"}
            assert await client.say(b"again") == b"again"
        await client.close()
        for rig in (made.old, made.new):
            await rig.until(lambda rig=rig: not len(rig.proxy.connections.hops))
        for rig in (made.old, made.new):
            for pool in list(rig.proxy.connector.pools.values()):
                await pool.close()
        for rig in (made.old, made.new):
            await rig.until(lambda rig=rig: not len(rig.proxy.connections))
        lines = [line for rig in (made.old, made.new) for line in await _log(rig)]
        # Of the client's connection, and of the request at the tunnel's other end.
        assert len(lines) == 2, lines
        if denied:
            assert POLICY_CHANGE in {line["details"] for line in lines}

    play(tmp_path, body, monkeypatch)


async def _log(rig: Rig) -> list[dict[str, object]]:
    rig.proxy.logs.writer.flush()
    await asyncio.sleep(0.1)
    return list(await rig.log(0)) if (rig.folder / "log").exists() else []
