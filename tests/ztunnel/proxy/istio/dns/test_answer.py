"""The names that belong to the mesh, and their answers."""

from dataclasses import replace
from typing import Any

import pytest

from tests.ztunnel.proxy.istio.dns.meshes import CLIENT, mesh, service, workload
from xds.model.mesh import Mesh
from xds.model.service import IpFamilies, Visibility
from ztunnel.proxy.istio.dns.answer import DnsSettings, Local, aliases, answer, expansions, wildcards

SETTINGS = DnsSettings()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", ["a.shop.svc.cluster.local"]),
        ("a.b", ["a.b.svc.cluster.local", "a.b.shop.svc.cluster.local"]),
        ("a.b.svc", ["a.b.svc.cluster.local", "a.b.svc.svc.cluster.local"]),
        ("a.b.c", ["a.b.c.svc.cluster.local"]),
        ("a.b.c.svc", ["a.b.c.svc.cluster.local"]),
        ("a.b.c.d", []),
        ("a.b.svc.cluster.local", []),
        ("svc", ["svc.shop.svc.cluster.local"]),
    ],
)
def test_names_expand_by_the_search_list(name: str, expected: list[str]) -> None:
    assert list(expansions(name, "shop", "cluster.local")) == expected


def test_wildcards_of_a_name() -> None:
    assert list(wildcards("a.b.c")) == ["*.b.c", "*.c"]
    assert list(wildcards("a")) == []


def test_aliases_are_ordered_without_duplicates() -> None:
    found = [(alias.name, alias.stripped) for alias in aliases("a.b.svc.cluster.local", "b", SETTINGS)]
    assert found == [
        ("a.b.svc.cluster.local", None),
        ("a", "a"),
        ("a.b", "a.b"),
        ("a.b.b.svc.cluster.local", "a.b"),
        ("a.b.svc", "a.b.svc"),
        ("a.b.svc.svc.cluster.local", "a.b.svc"),
    ]
    assert [alias.name for alias in aliases("x.example.com", "b", replace(SETTINGS, search=("example.com",)))] == [
        "x.example.com",
        "x.example.com.svc.cluster.local",
        "x",
        "x.b.svc.cluster.local",
    ]


@pytest.mark.parametrize("hostname", ["API.Example.com", "*.Example.com"])
def test_host_names_match_in_any_case(hostname: str) -> None:
    """ServiceEntries can have capital letters, and istiod sends their host names as written."""
    made = mesh(service(hostname, "240.240.0.1"))
    for name in ("api.example.com", "API.Example.com", "Api.EXAMPLE.com"):
        assert ask(made, name) == ["240.240.0.1"]
    made.apply([service(hostname, "240.240.0.2")])
    assert ask(made, "api.example.com") == ["240.240.0.2"]
    made.apply(removed=[f"shop/{hostname}"])
    assert ask(made, "api.example.com") is None


def ask(made: Mesh, name: str, *, ipv6: bool = False, **options: Any) -> list[str] | None:
    found = whole(made, name, ipv6=ipv6, **options)
    return None if found is None else [str(address) for address in found.addresses]


def whole(made: Mesh, name: str, *, ipv6: bool = False, **options: Any) -> Local | None:
    client = options.pop("client", CLIENT)
    return answer(name, ipv6=ipv6, client=client, mesh=made, settings=DnsSettings(**options))


CART = service("cart.shop.svc.cluster.local", "10.9.0.1", "fd00::1")


@pytest.mark.parametrize(
    "name",
    [
        "cart",
        "cart.shop",
        "cart.shop.svc",
        "cart.shop.svc.cluster.local",
        "CART.Shop.svc.cluster.LOCAL",
    ],
)
def test_kubernetes_service_resolves_by_each_of_its_names(name: str) -> None:
    found = whole(mesh(CART), name)
    assert found is not None
    assert (found.service, found.canonical) == (CART, None)
    assert ask(mesh(CART), name) == ["10.9.0.1"]
    assert ask(mesh(CART), name, ipv6=True) == ["fd00::1"]


@pytest.mark.parametrize("name", ["", "cart.other", "cart2", "cluster.local", "x.cart.shop.svc.cluster.local"])
def test_names_outside_the_mesh_are_not_answered(name: str) -> None:
    assert ask(mesh(CART), name) is None


def test_external_name_with_a_search_domain_is_answered_with_a_cname() -> None:
    made = mesh(service("api.example.com", "240.240.0.1"))
    for name in ("api.example.com.shop.svc.cluster.local", "api.example.com.svc.cluster.local"):
        found = whole(made, name)
        assert found is not None
        assert found.canonical == "api.example.com"
    direct = whole(made, "api.example.com")
    assert direct is not None
    assert direct.canonical is None


def test_exact_name_wins_over_wildcards() -> None:
    made = mesh(
        service("*.example.com", "240.240.0.1"),
        service("api.example.com", "240.240.0.2"),
        service("*.com", "240.240.0.3"),
    )
    assert ask(made, "api.example.com") == ["240.240.0.2"]
    assert ask(made, "x.example.com") == ["240.240.0.1"]
    assert ask(made, "a.b.example.com") == ["240.240.0.1"]
    assert ask(made, "example.com") == ["240.240.0.3"]
    assert ask(made, "com") is None
    stripped = whole(made, "x.example.com.shop.svc.cluster.local")
    assert stripped is not None
    assert stripped.canonical is None, "a wildcard's records are under the name that was asked for"


def test_services_without_addresses() -> None:
    headless = service("db.shop.svc.cluster.local")
    made = mesh(
        headless,
        service("external.example.com"),
        workload("db-0", "10.0.0.5", "fd00::5", "10.0.0.6", of=headless),
        workload("db-1", "fd00::6", of=headless),
        workload("db-2", of=headless),
    )
    assert ask(made, "db") == ["10.0.0.5"]
    assert sorted(ask(made, "db", ipv6=True) or []) == ["fd00::5", "fd00::6"]
    assert ask(made, "external.example.com") is None
    assert ask(mesh(headless), "db") == []


def test_addresses_of_other_networks_are_not_answered() -> None:
    far = service("far.shop.svc.cluster.local", "10.9.0.2", network="other")
    assert ask(mesh(far), "far") == []
    assert ask(mesh(far), "far", client=replace(CLIENT, network="other")) == ["10.9.0.2"]


@pytest.mark.parametrize(
    ("families", "v4", "v6"),
    [
        (None, ["10.9.0.1"], ["fd00::1"]),
        (IpFamilies.DUAL, ["10.9.0.1"], ["fd00::1"]),
        (IpFamilies.IPV4, ["10.9.0.1"], []),
        (IpFamilies.IPV6, [], ["fd00::1"]),
    ],
)
def test_address_families_of_a_service(families: IpFamilies | None, v4: list[str], v6: list[str]) -> None:
    made = mesh(replace(CART, ip_families=families))
    assert ask(made, "cart") == v4
    assert ask(made, "cart", ipv6=True) == v6
    found = answer("cart", ipv6=True, client=CLIENT, mesh=made, settings=DnsSettings(ipv6=False))
    assert found is not None
    assert found.addresses == ()


def test_preference_among_services_of_one_name() -> None:
    here = service("api.example.com", "240.0.0.1", namespace="shop")
    canonical = service("api.example.com", "240.0.0.2", namespace="b", canonical=True)
    preferred = service("api.example.com", "240.0.0.3", namespace="c")
    first = service("api.example.com", "240.0.0.4", namespace="d")
    private = service("api.example.com", "240.0.0.5", namespace="e", visibility=Visibility.NAMESPACE)
    everybody = [private, first, preferred, canonical, here]
    for expected in ("240.0.0.1", "240.0.0.2", "240.0.0.3", "240.0.0.4"):
        assert ask(mesh(*everybody), "api.example.com", preferred_namespace="c") == [expected]
        everybody.pop()
    assert ask(mesh(*everybody), "api.example.com") is None
    assert ask(mesh(*everybody), "api.example.com", client=replace(CLIENT, namespace="e")) == ["240.0.0.5"]


def test_service_without_addresses_does_not_hide_one_of_another_namespace() -> None:
    here = service("api.example.com", namespace="shop")
    other = service("api.example.com", "240.0.0.2", namespace="b")
    assert ask(mesh(here, other), "api.example.com") == ["240.0.0.2"]
    assert ask(mesh(other, here), "api.example.com") == ["240.0.0.2"]
    assert ask(mesh(here), "api.example.com") is None
    everything = service("*.example.com", "240.0.0.3", namespace="b")
    assert ask(mesh(here, everything), "api.example.com") == ["240.0.0.3"]


def test_configured_cluster_domain_is_used() -> None:
    made = mesh(service("cart.shop.svc.mesh.example"))
    assert ask(made, "cart", cluster_domain="mesh.example") == []
    assert ask(made, "cart") is None
