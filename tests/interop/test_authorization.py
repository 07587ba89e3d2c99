"""Compares with Envoy which clients a policy of principals and permissions lets in."""

import json

import pytest

from tests.generated import at_night
from tests.interop.authorization import policies, verdicts
from tests.interop.proxies import ENVOY

pytestmark = pytest.mark.interop


def test_rbac_policies_allow_the_same_connections_as_envoy() -> None:
    if not ENVOY.exists():
        pytest.skip("NOT TESTED: no Envoy here")
    rules = policies(at_night(120, 20))
    with verdicts("envoy", rules) as envoy, verdicts("ours", rules) as ours:
        different = {
            json.dumps(rule): {name: (theirs[name], mine[name]) for name in mine if theirs[name] != mine[name]}
            for rule, theirs, mine in zip(rules, envoy, ours, strict=True)
            if theirs != mine
        }
    assert not different, "\n".join(f"{rule}\n    (envoy, ours): {who}" for rule, who in different.items())
    decided = {verdict for each in envoy for verdict in each.values()}
    assert decided == {True, False}
