"""Events: merged, counted, rate-limited, and never in the way."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.kube.fake_api import FakeApi
from ztunnel.kube.client import connect
from ztunnel.kube.events import EventWriter
from ztunnel.kube.informer import Known
from ztunnel.kube.objects import ObjectKey

WEB = ObjectKey("Pod", "shop", "web")
KNOWN = {WEB: Known("uid-1", "77", "v1")}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def with_writer(tmp_path: Path, check: Any, **options: Any) -> None:
    async def run() -> None:
        async with (
            FakeApi().serve() as api,
            connect(api.kubeconfig(tmp_path)) as client,
            EventWriter(client, "ztunnel-netpol", "n1", KNOWN.get, interval_s=0, **options) as sink,
        ):
            await check(api, sink)

    asyncio.run(run())


def test_an_event_names_its_object_so_that_describe_finds_it(tmp_path: Path) -> None:
    async def check(api: FakeApi, sink: EventWriter) -> None:
        sink.event(WEB, "PolicyNotApplied", "a selector cannot be read")
        await until(lambda: len(api.bodies) == 1)
        (event,) = api.bodies
        assert api.requests == ["POST /api/v1/namespaces/shop/events"]
        assert event["involvedObject"] == {
            "kind": "Pod",
            "namespace": "shop",
            "name": "web",
            "uid": "uid-1",
            "apiVersion": "v1",
            "resourceVersion": "77",
        }
        assert event["metadata"]["name"].startswith("web.")
        assert (event["type"], event["reason"], event["count"]) == ("Warning", "PolicyNotApplied", 1)
        assert event["source"] == {"component": "ztunnel-netpol", "host": "n1"}

    with_writer(tmp_path, check)


@pytest.mark.parametrize("name", ["a" * 199 + "-" + "b" * 50, "a" * 198 + "-." + "b" * 50, "b" * 253, "web"])
def test_name_of_an_event_is_valid_for_objects_with_long_names(tmp_path: Path, name: str) -> None:
    async def check(api: FakeApi, sink: EventWriter) -> None:
        sink.event(ObjectKey("NetworkPolicy", "shop", name), "PolicyNotApplied", "a selector cannot be read")
        await until(lambda: len(api.bodies) == 1)
        label = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
        assert re.fullmatch(rf"{label}(\.{label})*", api.bodies[0]["metadata"]["name"])
        assert len(api.bodies[0]["metadata"]["name"]) <= 253

    with_writer(tmp_path, check)


def test_repeats_before_the_write_are_one_event(tmp_path: Path) -> None:
    async def check(api: FakeApi, sink: EventWriter) -> None:
        for _ in range(500):
            sink.event(WEB, "PolicyNotApplied", "same")
        sink.event(WEB, "PolicyNotApplied", "other")
        await until(lambda: len(api.bodies) == 2)
        assert {event["message"]: event["count"] for event in api.bodies} == {"same": 500, "other": 1}

    with_writer(tmp_path, check)


def test_repeats_after_the_write_raise_the_count(tmp_path: Path) -> None:
    async def check(api: FakeApi, sink: EventWriter) -> None:
        sink.event(WEB, "PolicyNotApplied", "same")
        await until(lambda: len(api.bodies) == 1)
        sink.event(WEB, "PolicyNotApplied", "same")
        await until(lambda: len(api.bodies) == 2)
        assert api.requests[1] == f"PATCH /api/v1/namespaces/shop/events/{api.bodies[0]['metadata']['name']}"
        assert api.bodies[1]["count"] == 2

    with_writer(tmp_path, check, repeat_s=0)


def test_a_repeat_waits_for_its_minute_and_others_do_not(tmp_path: Path) -> None:
    async def check(api: FakeApi, sink: EventWriter) -> None:
        sink.event(WEB, "PolicyNotApplied", "same")
        await until(lambda: len(api.bodies) == 1)
        sink.event(WEB, "PolicyNotApplied", "same")
        sink.event(WEB, "PolicyNotApplied", "other")
        await until(lambda: len(api.bodies) == 2)
        assert api.bodies[1]["message"] == "other"

    with_writer(tmp_path, check, repeat_s=3600)


def test_the_writer_ends_while_an_event_ends_its_wait_for_a_repeat(tmp_path: Path) -> None:
    """The event and the cancellation arrive in the same loop iteration."""

    async def check(api: FakeApi, sink: EventWriter) -> None:
        sink.event(WEB, "PolicyNotApplied", "same")
        await until(lambda: len(api.bodies) == 1)
        sink.event(WEB, "PolicyNotApplied", "same")
        for _ in range(5):
            await asyncio.sleep(0.01)  # until the writer waits for the repeat's time
        sink.event(WEB, "PolicyNotApplied", "other")
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await sink.__aexit__()

    with_writer(tmp_path, check, repeat_s=3600)


def test_an_object_outside_namespaces_has_its_events_in_default(tmp_path: Path) -> None:
    async def check(api: FakeApi, sink: EventWriter) -> None:
        sink.event(ObjectKey("ClusterNetworkPolicy", "", "deny"), "PolicyNotApplied", "x" * 5000)
        await until(lambda: len(api.bodies) == 1)
        assert api.requests == ["POST /api/v1/namespaces/default/events"]
        assert len(api.bodies[0]["message"]) == 1024

    with_writer(tmp_path, check)


def test_a_flood_is_bounded_and_a_refusal_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(api: FakeApi, sink: EventWriter) -> None:
        api.refuse = (403, "Forbidden", "events is forbidden")
        for number in range(1500):
            sink.event(WEB, "PolicyNotApplied", f"number {number}")
        await until(lambda: len(api.requests) >= 20)
        assert len(sink._waiting) <= 1000
        api.refuse = None
        await until(lambda: bool(api.bodies))

    with_writer(tmp_path, check)
    said = [record.getMessage() for record in caplog.records]
    assert sum("events is forbidden" in line for line in said) == 1
    assert any("more than 1000 events wait" in line for line in said)
