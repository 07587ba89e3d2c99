"""Priority load, in Envoy's arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model.address import SocketAddress
from xds.model.cluster import Endpoint, Health
from ztunnel.proxy.envoy.upstream.host import Host, HostGroup, PriorityLevel
from ztunnel.proxy.envoy.upstream.priorities import LevelLoad, spread


def level(healthy: int, unhealthy: int = 0, degraded: int = 0) -> PriorityLevel:
    states = [Health.HEALTHY] * healthy + [Health.UNHEALTHY] * unhealthy + [Health.DEGRADED] * degraded
    hosts = [Host(Endpoint(address=SocketAddress("10.0.0.1", n + 1), health=h)) for n, h in enumerate(states)]
    made = PriorityLevel([HostGroup(None, 0, hosts)])  # type: ignore[arg-type]  # locality is not looked at
    made.refresh()
    return made


@pytest.mark.parametrize(
    ("levels", "loads"),
    [
        ([level(2)], [LevelLoad(100, 0, False)]),
        ([level(2), level(2)], [LevelLoad(100, 0, False), LevelLoad(0, 0, False)]),
        # 75 % healthy times 1.4 is above 100 %: nothing spills.
        ([level(3, 1), level(2)], [LevelLoad(100, 0, False), LevelLoad(0, 0, False)]),
        # 50 % healthy times 1.4 is 70 %; the rest goes to the next level.
        ([level(1, 1), level(2)], [LevelLoad(70, 0, False), LevelLoad(30, 0, False)]),
        ([level(0, 2), level(2)], [LevelLoad(0, 0, False), LevelLoad(100, 0, False)]),
        # Degraded hosts take what healthy ones of every level leave.
        ([level(1, 0, 1), level(0, 1)], [LevelLoad(70, 30, False), LevelLoad(0, 0, False)]),
        # All unhealthy: every level panics, load by number of hosts.
        ([level(0, 1), level(0, 3)], [LevelLoad(25, 0, True), LevelLoad(75, 0, True)]),
        ([level(0, 2)], [LevelLoad(100, 0, True)]),
    ],
)
def test_load_spills_to_lower_priorities(levels: list[PriorityLevel], loads: list[LevelLoad]) -> None:
    assert spread(levels, 1.4, 50.0) == loads


def test_weighted_priority_health_counts_weights() -> None:
    """Envoy's weighted_priority_health: of weights 3 and 1 the first alone is 75 %, times 1.4 all of it."""
    heavy = Host(Endpoint(address=SocketAddress("10.0.0.1", 1), weight=3))
    light = Host(Endpoint(address=SocketAddress("10.0.0.1", 2), weight=1, health=Health.UNHEALTHY))
    first = PriorityLevel([HostGroup(None, 0, [heavy, light])])  # type: ignore[arg-type]  # see above
    first.refresh()
    second = level(2)
    assert spread([first, second], 1.4, 50.0) == [LevelLoad(70, 0, False), LevelLoad(30, 0, False)]
    weighted = spread([first, second], 1.4, 50.0, weighted=True)
    assert weighted == [LevelLoad(100, 0, False), LevelLoad(0, 0, False)]


def test_disabled_panic_uses_no_host_if_none_is_usable() -> None:
    assert spread([level(0, 2)], 1.4, 0.0) == [LevelLoad(0, 0, False)]


def test_levels_without_hosts_get_no_load() -> None:
    assert spread([], 1.4, 50.0) == []
    assert spread([level(0)], 1.4, 50.0) == [LevelLoad(0, 0, True)]


counts = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@given(st.lists(counts, min_size=1, max_size=4), st.sampled_from([0.0, 50.0, 100.0]))
def test_loads_sum_to_100_or_0(shape: list[tuple[int, int, int]], panic: float) -> None:
    loads = spread([level(*each) for each in shape], 1.4, panic)
    assert sum(load.healthy + load.degraded for load in loads) in (0, 100)
    usable = any(healthy or degraded for healthy, _, degraded in shape)
    if usable:
        assert sum(load.healthy + load.degraded for load in loads) == 100
    for load, (healthy, _, degraded) in zip(loads, shape, strict=True):
        if not load.panic:
            assert bool(load.healthy) <= bool(healthy)
            assert bool(load.degraded) <= bool(degraded)
