"""What happens with one field set, beside Envoy."""

import pytest

from tests.interop import beside
from tests.interop.proxies import ENVOY

pytestmark = pytest.mark.interop


def test_each_scenario_ends_like_envoys() -> None:
    if not ENVOY.exists():
        pytest.skip("NOT TESTED: no Envoy here")
    with beside.observed("envoy") as envoy, beside.observed("ours") as ours:
        different = beside.differences(envoy, ours)
    assert not different, "\n".join(
        f"{name}\n   envoy {one}\n   ours  {other}" for name, (one, other) in different.items()
    )
