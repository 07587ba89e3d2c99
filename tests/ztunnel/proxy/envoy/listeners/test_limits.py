"""Places and tokens of a chain's limits."""

from unittest import mock

import pytest

from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.listener import ConnectionLimit, LocalRateLimit
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveHop, PodQuota
from ztunnel.proxy.envoy.listeners.limits import LiveConnectionLimit, LiveRateLimit
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.stream.outcome import TooMany
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.descriptors import Descriptors

HERE = SocketAddress("127.0.0.1", 1)


def info() -> StreamInfo:
    facts = ConnectionFacts(source=HERE, direct_source=HERE, destination=HERE)
    return StreamInfo(connection_id=0, facts=facts, started=0.0, started_at=0.0)


def test_connection_limit_place_is_released_once() -> None:
    limit = LiveConnectionLimit(ConnectionLimit(stat_prefix="p", most=1, delay_s=3), Stats())
    connections = Connections(PodQuota(Descriptors(100)))
    first = LiveHop(connections.hops, info(), mock.Mock(), SystemClock())
    limit.check(first.info)
    with pytest.raises(TooMany) as full:
        limit.check(info())
    assert full.value.delay_s == 3
    first.close()
    first.close()
    limit.check(info())
    with pytest.raises(TooMany):
        limit.check(info())


def test_rate_limit_tokens_refill_up_to_the_maximum() -> None:
    now_s = 0.0
    model = LocalRateLimit(stat_prefix="p", most_tokens=3, tokens_per_fill=2, fill_interval_s=10)
    limit = LiveRateLimit(model, Stats(), lambda: now_s)

    def admitted() -> int:
        for count in range(10):
            try:
                limit.check(info())
            except TooMany:
                return count
        return 10

    assert admitted() == 3
    now_s = 4
    assert admitted() == 0
    now_s = 10
    assert admitted() == 2
    now_s = 1000
    assert admitted() == 3


def test_only_the_rate_limit_sets_a_response_flag() -> None:
    rate = LiveRateLimit(
        LocalRateLimit(stat_prefix="p", most_tokens=1, tokens_per_fill=1, fill_interval_s=60), Stats(), lambda: 0.0
    )
    connections = LiveConnectionLimit(ConnectionLimit(stat_prefix="p", most=1), Stats())
    for limit, flags in ((rate, {Flag.UPSTREAM_RETRY_EXHAUSTED}), (connections, set())):
        admitted, closed = info(), info()
        limit.check(admitted)
        with pytest.raises(TooMany):
            limit.check(closed)
        assert (set(admitted.flags), set(closed.flags)) == (set(), flags)


def test_a_limit_that_is_off_admits_everything() -> None:
    limit = LiveConnectionLimit(ConnectionLimit(stat_prefix="p", most=1, enabled=False), Stats())
    for _ in range(3):
        limit.check(info())
