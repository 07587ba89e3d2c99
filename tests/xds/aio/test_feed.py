"""Handing one response out to many subscriptions."""

import asyncio
from collections.abc import Callable, Coroutine

from xds.aio.feed import Feed, GrpcSubscription
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.client_state import ClientOptions, Received
from xds.protocol.delta import DeltaClient
from xds.protocol.resource import Receive, Resource, Update
from xds.protocol.types import EDS

MANY = 100


def response(version: str = "1") -> Received:
    resources = tuple(
        Resource(name=f"n{number}", version=version, body=AnyMessage(type_url=EDS)) for number in range(MANY)
    )
    update = Update(type_url=EDS, version=version, resources=resources)
    return Received(update=update, nonces=("1",), stream=1, arrived_s=0.0)


def run(body: Callable[[Feed, list[GrpcSubscription], list[str]], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        state = DeltaClient(ClientOptions(node=Node()))
        feed = Feed(EDS, state, lambda: None)
        called: list[str] = []

        def receiver(name: str) -> Receive:
            async def receive(update: Update) -> None:
                called.append(name)

            return receive

        subscriptions = []
        for number in range(MANY):
            subscription = GrpcSubscription(feed, receiver(f"n{number}"), 0, None)
            feed.set(subscription, [f"n{number}"])
            subscriptions.append(subscription)
        feed.tell()
        async with asyncio.TaskGroup() as tasks:
            delivering = tasks.create_task(feed.deliver_forever())
            await body(feed, subscriptions, called)
            delivering.cancel()

    asyncio.run(main())


def test_other_callbacks_run_between_receivers() -> None:
    async def body(feed: Feed, subscriptions: list[GrpcSubscription], called: list[str]) -> None:
        feed.arrived(response())
        seen = set()
        while len(called) < MANY:
            await asyncio.sleep(0)
            seen.add(len(called))
        assert len(seen) > 3
        assert called == [f"n{number}" for number in range(MANY)]
        assert all(subscription.stats.update_success == 1 for subscription in subscriptions)

    run(body)


def test_a_receiver_closed_meanwhile_is_not_called() -> None:
    async def body(feed: Feed, subscriptions: list[GrpcSubscription], called: list[str]) -> None:
        feed.arrived(response())
        while not called:
            await asyncio.sleep(0)
        assert len(called) < MANY
        subscriptions[-1].close()
        while len(called) < MANY - 1:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert f"n{MANY - 1}" not in called

    run(body)
