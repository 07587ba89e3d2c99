"""The bench of single changes runs against both proxies."""

import pytest

from bench.changes import cost
from tests.interop.proxies import ENVOY

pytestmark = pytest.mark.interop


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
@pytest.mark.parametrize("kind", ["envoy", "ours"])
def test_every_configuration_change_is_applied_like_in_envoy(kind: str) -> None:
    """It returns once every change was counted as an update."""
    assert cost(kind, changes=150, rate=1000.0) >= 0.0
