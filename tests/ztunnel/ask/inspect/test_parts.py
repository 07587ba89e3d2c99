"""Parts of dumps by name, in both dialects."""

from typing import Any

import pytest

from ztunnel.ask.inspect.parts import NoSuchPart, part

_DUMP = "type.googleapis.com/envoy.admin.v3."
SERVICE = {"name": "cart", "namespace": "shop", "hostname": "cart.example"}
MESH = {
    "config": {"network": "net", "illegalPorts": [1]},
    "services": [SERVICE, {"name": "other", "namespace": "shop", "hostname": "other.example"}],
    "certificates": [{"identity": "spiffe://a"}],
}
LISTENER = {"name": "l", "active_state": {"listener": {"name": "l"}}}
STATIC = {"listener": {"name": "s"}}
ENVOY = {
    "configs": [
        {"@type": f"{_DUMP}BootstrapConfigDump", "bootstrap": {"node": {"id": "n"}}},
        {"@type": f"{_DUMP}ListenersConfigDump", "static_listeners": [STATIC], "dynamic_listeners": [LISTENER]},
    ]
}


@pytest.mark.parametrize(
    ("dump", "words", "found"),
    [
        (MESH, ["config"], MESH["config"]),
        (MESH, ["config", "network"], "net"),
        (MESH, ["services", "cart"], [SERVICE]),
        (MESH, ["services", "cart.example"], [SERVICE]),
        (MESH, ["services", "shop/cart"], [SERVICE]),
        (MESH, ["services", "shop/cart.example"], [SERVICE]),
        (MESH, ["certificates", "spiffe://a"], MESH["certificates"]),
        (ENVOY, ["bootstrap", "bootstrap"], {"node": {"id": "n"}}),
        (ENVOY, ["listeners", "l"], [LISTENER]),
        (ENVOY, ["listeners", "s"], [STATIC]),
    ],
)
def test_a_part_is_found(dump: Any, words: list[str], found: Any) -> None:
    assert part(dump, *words) == found


@pytest.mark.parametrize(
    ("dump", "words", "error"),
    [
        (MESH, ["x"], "no part 'x'; there are config, services, certificates"),
        (MESH, ["services", "x"], "services has no 'x'; there are cart, other"),
        (MESH, ["config", "x"], "config has no 'x'; there are illegalPorts, network"),
        (ENVOY, ["clusters"], "no part 'clusters'; there are bootstrap, listeners"),
        (ENVOY, ["listeners", "x"], "listeners has no 'x'; there are s, l"),
        ({"services": [{} for _ in range(20)]}, ["services", "x"], "one without a name, ..."),
        ([], ["services"], "not a config_dump"),
        ({}, ["services"], "there are none"),
        ({"configs": [1, None, ENVOY["configs"][0]]}, ["x"], "no part 'x'; there are bootstrap"),
    ],
)
def test_an_unknown_part_is_answered_with_the_existing_parts(dump: Any, words: list[str], error: str) -> None:
    with pytest.raises(NoSuchPart) as raised:
        part(dump, *words)
    assert error in str(raised.value)
