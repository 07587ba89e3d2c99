"""Answers from dumps: the same as the proxy's own, and what a dump does not have."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.proxy.istio.path.test_explain import _balancing, _endpoints, _regions, around
from tests.ztunnel.proxy.istio.path.test_route import BACK, BY_NAME, CLIENT, VIP, WAYPOINT, cart, pod, wp
from xds.dialects.istio.local_file import read_policy
from xds.errors import ConfigError
from xds.model.authorization import AuthorizationPolicy
from xds.model.mesh import Mesh
from xds.model.refused import RefusedResource
from xds.model.service import LoadBalancing
from xds.model.workload import Locality, NetworkAddress, Workload
from ztunnel.ask.inspect.saved import SavedMesh
from ztunnel.proxy.istio.path.explain import BadQuestion, explain, question
from ztunnel.proxy.istio.xds import mesh_dump

NOW_S = 1_700_000_000.0


def dumped(mesh: Mesh, **more: Any) -> dict[str, Any]:
    """What ``/config_dump`` shows of a mesh."""
    dump = {
        "workloads": list(mesh_dump.workloads(mesh)),
        "services": list(mesh_dump.services(mesh)),
        "policies": list(mesh_dump.policies(mesh, {})),
        "refusedResources": mesh_dump.refused_resources(mesh),
        "config": {"network": "", "illegalPorts": [15001]},
        "version": {"rustVersion": "Python 3.11"},
    }
    return json.loads(json.dumps(dump | more))


def saved(*values: Any, **more: Any) -> SavedMesh:
    mesh = Mesh()
    mesh.apply([CLIENT, *values])
    return SavedMesh(dumped(mesh, **more), NOW_S)


_policies = st.builds(
    lambda name, action, account, port: read_policy(
        {
            "name": name,
            "namespace": "shop",
            "scope": "Namespace",
            "action": action,
            "dryRun": False,
            "rules": [
                [
                    [{"serviceAccounts": [{"namespace": "shop", "serviceAccount": account}]}],
                    [{"notDestinationPorts": [port]}],
                ]
            ],
        }
    ),
    st.sampled_from("abc"),
    st.sampled_from(["Allow", "Deny"]),
    st.sampled_from(["client", "other"]),
    st.sampled_from([8080, 9]),
)


def in_any_order(value: Any) -> Any:
    """A value with its lists sorted: a dump sorts workloads, where a mesh has them as they came."""
    if isinstance(value, dict):
        return {key: in_any_order(inner) for key, inner in value.items()}
    return sorted(map(in_any_order, value), key=json.dumps) if isinstance(value, list) else value


@given(
    st.lists(_endpoints, max_size=6, unique_by=lambda each: each.uid),
    st.lists(_policies, max_size=3, unique_by=lambda each: each.name),
    _balancing,
    _regions,
    st.booleans(),
)
def test_a_dump_gives_the_proxys_answer(
    endpoints: list[Workload],
    policies: list[AuthorizationPolicy],
    balancing: LoadBalancing,
    region: str,
    waypoint: bool,
) -> None:
    client = pod("client", "10.0.0.1", locality=Locality(region))
    service = cart(load_balancing=balancing, waypoint=BY_NAME if waypoint else None)
    # Among equal endpoints, and among matching policies, the first in order of arrival is used. A dump has them in
    # order of name.
    endpoints.sort(key=lambda each: each.uid)
    policies.sort(key=lambda each: each.key)
    there = around(client, service, wp(), WAYPOINT, *endpoints, *policies)
    asked = {"source": "shop/client", "destination": VIP}
    told = SavedMesh(dumped(there.mesh), NOW_S).ask(asked)
    assert told.pop("not_in_the_dump") == [
        "endpoints that failed a moment ago, which come last",
        "Calico's policies",
    ]
    assert told.pop("certificate") == {"state": "none here: no pod of this node has the identity"}
    assert in_any_order(told) == in_any_order(explain(question("shop/client", VIP, "", there), there))


def test_addresses_of_refused_configuration_are_refused() -> None:
    new = RefusedResource("new", "unknown mode", (NetworkAddress("", "10.0.0.7"),))
    told = saved(new).ask({"source": "shop/client", "destination": "10.0.0.7:80"})
    assert told["verdict"] == "refused: configuration of new was refused: unknown mode"


def test_inbound_questions_and_endpoints() -> None:
    mesh = saved(BACK, cart())
    told = mesh.ask({"source": "10.0.0.1", "destination": "10.0.0.2:8080", "direction": "inbound"})
    assert (told["verdict"], told["source"]["identity"]) == ("allowed", None)
    assert "certificate" not in told
    told = mesh.ask({"source": "10.0.0.1", "destination": "cart.example", "endpoint": "10.0.0.2:8080"})
    assert told["destination"] == VIP


CERTIFICATE = {"identity": str(CLIENT.identity), "state": "Available", "certChain": [], "rootCerts": []}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"certChain": [{"expirationTime": "2023-11-15T10:13:20Z"}]},
            {"state": "available", "valid_until": "2023-11-15T10:13:20Z", "days_left": 0.5},
        ),
        (
            {"certChain": [{"expirationTime": "2023-11-14T10:13:20Z"}]},
            {"state": "expired", "valid_until": "2023-11-14T10:13:20Z", "days_left": -0.5},
        ),
        ({"certChain": [{"expirationTime": "soon"}]}, {"state": "Available; its time cannot be read: soon"}),
        ({"state": "Unavailable: no way"}, {"state": "Unavailable: no way"}),
        ({"identity": "spiffe://x"}, {"state": "none here: no pod of this node has the identity"}),
    ],
)
def test_the_sources_certificate(change: dict[str, Any], said: dict[str, Any]) -> None:
    mesh = saved(BACK, certificates=[CERTIFICATE | change])
    assert mesh.ask({"source": "shop/client", "destination": "10.0.0.2:8080"})["certificate"] == said


def test_the_answer_lists_what_the_dump_lacks() -> None:
    rust = saved(BACK, version={"rustVersion": "1.90"}, config=None, policies=[{"name": "p", "namespace": "shop"}])
    told = rust.ask({"source": "10.0.0.9", "destination": "10.0.0.2:8080"})
    assert told["not_in_the_dump"] == [
        "what an inbound client has proven: it is taken for the workload at its address",
        "policy shop/p: scope: is required; action: is required; dryRun: is required; rules: is required; "
        "taken at its strictest",
        "config, with the network and the proxy's own ports",
    ]
    assert (rust.identity_at["10.0.0.1"], rust.identity_at["10.0.0.2"]) == (
        str(CLIENT.identity),
        str(BACK.identity),
    )


def test_of_many_unreadable_entries_the_first_are_named() -> None:
    mesh = saved(services=[{"name": f"s{number}"} for number in range(12)])
    lacks = mesh.ask({"source": "10.0.0.1", "destination": "10.0.0.2:1"})["not_in_the_dump"]
    assert lacks[-1] == "and 4 entries more that cannot be read"


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"source": "shop/none", "destination": VIP}, "source 'shop/none': no workload"),
        ({"source": "shop/client", "destination": VIP, "identity": "bob"}, "not a workload identity"),
        ({"source": "shop/client", "destination": VIP, "listener": "l"}, "only in Envoy's dialect"),
    ],
)
def test_malformed_questions_are_refused(asked: dict[str, str], error: str) -> None:
    with pytest.raises(BadQuestion, match=error):
        saved().ask(asked)


@pytest.mark.parametrize("more", [{"config": [7]}, {"certificates": 7}])
def test_what_is_no_dump_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a"):
        saved(**more)
