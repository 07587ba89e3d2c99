"""Compares the effect of each single field with Envoy."""

import pytest

from tests.interop import beside, scenarios, sources
from tests.interop.proxies import ENVOY

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("suite", [scenarios.SUITE, sources.SUITE], ids=["beside", "sources"])
def test_each_scenario_ends_like_envoys(suite: beside.Suite) -> None:
    if not ENVOY.exists():
        pytest.skip("NOT TESTED: no Envoy here")
    different = beside.compared(suite)
    assert not different, "\n".join(
        f"{name}\n   envoy {one}\n   ours  {other}" for name, (one, other) in different.items()
    )
