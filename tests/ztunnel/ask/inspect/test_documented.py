"""The keys of explain's JSON are a promise: each one that an answer has is in the documentation."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ztunnel.ask.inspect.test_envoy_listeners import QUESTIONS
from tests.ztunnel.ask.inspect.test_saved import CERTIFICATE, saved
from tests.ztunnel.ask.inspect.test_seen import INBOUND, PODS
from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import write_reference
from tests.ztunnel.proxy.istio.path.test_explain import ONLY_CLIENT, policy
from tests.ztunnel.proxy.istio.path.test_route import BACK, BY_NAME, VIP, WAYPOINT, behind, cart, pod, wp
from xds.model.authorization import Action
from xds.model.workload import Health, Protocol
from ztunnel.ask.inspect.seen import live, told_of

DOCUMENTED = set(re.findall(r"`(\w+)`", (Path(__file__).parents[4] / "docs/asking.md").read_text()))


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_keys_in_an_istio_mesh() -> None:
    sick = behind("sick", "10.0.1.2", status=Health.UNHEALTHY)
    outside = pod("outside", "10.0.0.8", protocol=Protocol.TCP)
    dry = policy("dry", Action.DENY, ONLY_CLIENT, dry_run=True)
    meshes = [
        (cart(), BACK, sick, outside, dry, policy("allow", Action.ALLOW, ONLY_CLIENT)),
        (cart(waypoint=BY_NAME), BACK, wp(), WAYPOINT),
        (cart(), sick),
    ]
    found: set[str] = set()
    for values in meshes:
        mesh = saved(*values, certificates=[CERTIFICATE | {"state": "Unavailable: x"}])
        for source in ("shop/client", "192.0.2.1", *(["shop/outside"] if outside in values else [])):
            found |= set(keys(mesh.ask({"source": source, "destination": VIP})))
        found |= set(keys(mesh.ask(INBOUND)))
        for seen in live(PODS, "10.0.0.1:4000"):
            found |= set(keys(told_of(seen, mesh.ask(seen.asked))))
    assert found > {"seen", "ways", "inbound", "left_out", "dry_run", "certificate", "policies_because", "verdict"}
    assert found - DOCUMENTED == set()


def test_keys_in_envoys_dialect(tmp_path: Path) -> None:
    def check(running: Running) -> None:
        found = {key for given in QUESTIONS for key in keys(running.admin.get("/explain", **given).json)}
        assert found > {"hop", "clusters", "endpoints", "tls", "policies"}
        assert found - DOCUMENTED == set()

    serve(write_reference(tmp_path), check)
