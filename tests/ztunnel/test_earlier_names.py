"""Scripts that import modules by their earlier names get the present modules."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("earlier", "present"),
    [
        ("ztunnel.agent.cni.installer", "ztunnel.node.agent.cni.installer"),
        ("ztunnel.istio.admin.prober", "ztunnel.proxy.istio.admin.prober"),
        ("ztunnel.istio.app_probes", "ztunnel.proxy.istio.settings.app_probes"),
        ("ztunnel.envoy.outcome", "ztunnel.proxy.envoy.stream.outcome"),
        ("ztunnel.runtime.go_yaml", "ztunnel.runtime.formats.go_yaml"),
        ("ztunnel.runtime.half_open", "ztunnel.proxy.dataplane.handshake_limiter"),
        ("ztunnel.istio.metrics_page", "ztunnel.proxy.istio.accounting.families"),
        ("ztunnel.calico", "ztunnel.policy.calico"),
    ],
)
def test_an_earlier_name_is_the_same_module(earlier: str, present: str) -> None:
    module = importlib.import_module(earlier)
    assert module is importlib.import_module(present)
    assert module.__spec__ is not None
    assert module.__spec__.name == present


@pytest.mark.parametrize("name", ["ztunnel.agent.nothing", "ztunnel.nothing", "ztunnel.runtime.nothing"])
def test_other_names_are_not_found(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)
