"""Explained results equal real ones: random chains, policies and hosts, over real sockets."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hbone.certificates import Authority
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    T,
    access_log,
    application,
    ask,
    chain,
    cluster,
    connect_route,
    endpoint,
    inbound,
    listener,
    outbound_cluster,
    page,
    run,
    tcp,
    tls,
)

RBAC = T + "envoy.extensions.filters.network.rbac.v3.RBAC"
TRANSPORTS = f"{T}envoy.extensions.transport_sockets"
HOSTS = 4
DIALS = 3


# Configurations


class Place(NamedTuple):
    """One host of a cluster."""

    health: str
    priority: int
    weight: int
    version: str
    locality_weight: int


_places = st.builds(
    Place,
    st.sampled_from(["HEALTHY", "HEALTHY", "UNHEALTHY", "DEGRADED", "DRAINING"]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([1, 3]),
    st.sampled_from(["1", "2"]),
    st.sampled_from([0, 1]),
)


class Backend(NamedTuple):
    """A cluster."""

    places: list[Place]
    policy: str
    panic: int
    subsets: str
    by_locality: bool


_backends = st.builds(
    Backend,
    st.lists(_places, max_size=HOSTS),
    st.sampled_from(["ROUND_ROBIN", "RANDOM", "LEAST_REQUEST", "RING_HASH", "MAGLEV"]),
    st.sampled_from([0, 50, 100]),
    st.sampled_from(["", "", "NO_FALLBACK", "ANY_ENDPOINT", "DEFAULT_SUBSET"]),
    st.booleans(),
)


def backend(made: Backend, ports: list[int], name: str) -> tuple[str, Json]:
    groups: list[Json] = []
    first = min((place.priority for place in made.places), default=0)
    for port, place in zip(ports, made.places, strict=False):
        host = endpoint(port, health_status=place.health, load_balancing_weight=place.weight)
        host["metadata"] = {"filter_metadata": {"envoy.lb": {"v": place.version}}}
        group: Json = {"priority": place.priority - first, "lb_endpoints": [host]}
        group |= {"locality": {"zone": str(port)}}
        if place.locality_weight:
            group["load_balancing_weight"] = place.locality_weight
        groups.append(group)
    common: Json = {"healthy_panic_threshold": {"value": made.panic}}
    if made.by_locality:
        common["locality_weighted_lb_config"] = {}
    document: Json = {
        "name": name,
        "type": "STATIC",
        "lb_policy": made.policy,
        "load_assignment": {"cluster_name": name, "endpoints": groups},
        "common_lb_config": common,
    }
    if made.subsets:
        document["lb_subset_config"] = {
            "fallback_policy": made.subsets,
            "default_subset": {"v": "1"},
            "subset_selectors": [{"keys": ["v"]}],
        }
    return "cluster", document


def inner(leads_to: str) -> tuple[str, Json]:
    """A cluster whose endpoint is an internal listener."""
    raw = {"name": "raw", "typed_config": {"@type": f"{TRANSPORTS}.raw_buffer.v3.RawBuffer"}}
    socket = {"@type": f"{TRANSPORTS}.internal_upstream.v3.InternalUpstreamTransport", "transport_socket": raw}
    there = {"endpoint": {"address": {"envoy_internal_address": {"server_listener_name": leads_to}}}}
    return "cluster", {
        "name": f"to {leads_to}",
        "type": "STATIC",
        "load_assignment": {"cluster_name": leads_to, "endpoints": [{"lb_endpoints": [there]}]},
        "transport_socket": {"name": "internal", "typed_config": socket},
    }


_principals = st.sampled_from(
    [
        {"any": True},
        {"direct_remote_ip": {"address_prefix": "127.0.0.0", "prefix_len": 8}},
        {"remote_ip": {"address_prefix": "10.0.0.0", "prefix_len": 8}},
        {"authenticated": {}},
        {"not_id": {"any": True}},
    ]
)
_rules = st.builds(
    lambda action, policies: {
        "action": action,
        "policies": {
            f"p{number}": {"permissions": [{"any": True}], "principals": [principal]}
            for number, principal in enumerate(policies)
        },
    },
    st.sampled_from(["ALLOW", "ALLOW", "DENY", "LOG"]),
    st.lists(_principals, min_size=1, max_size=2),
)
_filters = st.builds(
    lambda rules, shadow: {
        "name": "rbac",
        "typed_config": {"@type": RBAC, "stat_prefix": "tcp.", **rules, **shadow},
    },
    st.one_of(st.just({}), st.builds(lambda rules: {"rules": rules}, _rules)),
    st.one_of(st.just({}), st.builds(lambda rules: {"shadow_rules": rules}, _rules)),
)
_subset = st.sampled_from([{}, {}, {"v": "1"}, {"v": "2"}, {"v": "3"}])
_targets = st.sampled_from(["app", "app", "app", "other", "missing", "to inner", "to nowhere"])


@st.composite
def _proxies(draw: st.DrawFn, targets: st.SearchStrategy[str]) -> Json:
    more: Json = {}
    subset = draw(_subset)
    if subset:
        more["metadata_match"] = {"filter_metadata": {"envoy.lb": subset}}
    if draw(st.booleans()):
        return tcp(draw(targets), **more)
    weights = draw(st.lists(st.sampled_from([1, 2]), min_size=2, max_size=2))
    choices: list[Json] = [{"name": draw(targets), "weight": weight} for weight in weights]
    made = tcp("", weighted_clusters={"clusters": choices}, **more)
    del made["typed_config"]["cluster"]
    return made


class Case(NamedTuple):
    """A configuration: chains, of which the second is the default, and their targets."""

    chains: list[list[Json]]
    matches: bool
    app: Backend
    other: Backend
    inside: list[Json]
    inside_matches: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    policies = st.lists(_filters, max_size=2)
    chains = [[*draw(policies), draw(_proxies(_targets))] for _ in range(draw(st.sampled_from([1, 2])))]
    return Case(
        chains=chains,
        matches=draw(st.sampled_from([True, True, False])),
        app=draw(_backends),
        other=draw(_backends),
        inside=[*draw(policies), draw(_proxies(st.sampled_from(["app", "other", "missing"])))],
        inside_matches=draw(st.sampled_from([True, True, False])),
    )


def documents(case: Case, ports: list[int], folder: Path, number: int) -> list[tuple[str, Json]]:
    def match(matches: bool) -> Json:
        network = {"address_prefix": "127.0.0.0" if matches else "10.0.0.0", "prefix_len": 8}
        return {"filter_chain_match": {"source_prefix_ranges": [network]}}

    for filters in (*case.chains, case.inside):
        filters[-1]["typed_config"].pop("access_log", None)
    outer = [[*filters[:-1], logged(filters[-1], folder, "log")] for filters in case.chains]
    inside = [*case.inside[:-1], logged(case.inside[-1], folder, "inner")]
    more: Json = {}
    if len(outer) > 1:
        more["default_filter_chain"] = chain(*outer[1], name="default")
    front = listener(chain(*outer[0], name=f"case {number}", **match(case.matches)), **more)
    _, hidden = listener(
        chain(*inside, name="inside", **match(case.inside_matches)), name="inner", internal_listener={}
    )
    del hidden["address"]
    return [
        front,
        ("listener", hidden),
        backend(case.app, ports, "app"),
        backend(case.other, ports, "other"),
        inner("inner"),
        inner("nowhere"),
    ]


def logged(proxy: Json, folder: Path, name: str) -> Json:
    log = access_log(folder)
    log[0]["typed_config"]["path"] = str(folder / name)
    return {**proxy, "typed_config": {**proxy["typed_config"], "access_log": log}}


# Comparison


def lines(harness: Harness, name: str) -> list[Json]:
    path = harness.folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def closed(hop: Json) -> str:
    return str(hop.get("verdict") or "")


def compared(hop: Json, line: Json, inner_line: Json | None, *, worked: bool) -> None:
    """Compare one hop with its access line, and what is behind it."""
    shown = json.dumps([hop, line, inner_line], indent=1)
    if closed(hop):
        assert not worked, shown
        if "rbac_access_denied" in closed(hop):
            assert closed(hop) == f"closed: {line['details']}", shown
        return
    assert line["chain"] == hop["chain"], shown
    # Access lines do not name a cluster that does not exist.
    named = [
        each
        for each in hop["clusters"]
        if each["cluster"] == line["cluster"] or (line["flags"] == "NC" and closed(each).endswith("(NC)"))
    ]
    cluster = named[0] if named else None
    assert cluster is not None, shown
    if closed(cluster):
        assert not worked, shown
        flag = closed(cluster).rpartition("(")[2].rstrip(")")
        assert flag in line["flags"], shown
        return
    reached = [each for each in cluster["endpoints"] if each["address"] == line["upstream"]]
    assert reached, shown
    if "hop" not in reached[0]:
        assert worked is (not closed(reached[0])), shown
        return
    assert inner_line is not None or closed(reached[0]["hop"]), shown
    if inner_line is not None:
        compared(reached[0]["hop"], inner_line, None, worked=worked)
    else:
        assert not worked, shown


async def checked(harness: Harness) -> None:
    """Ask, connect, compare."""
    answer = json.loads(
        page(harness, "/explain", f"source=127.0.0.1&destination=127.0.0.1:{harness.port('l')}&listener=l")
    )
    before, before_inner = len(lines(harness, "log")), len(lines(harness, "inner"))
    worked = await ask(harness.port("l")) == b"ping"
    shown = json.dumps(answer, indent=1)
    verdict = answer["verdict"]
    assert verdict == "allowed" if verdict == "allowed" and worked else not worked or " but not by " in verdict, (
        shown
    )
    if answer["hop"]["chain"] is None:
        assert not worked, shown
        return
    await harness.until(lambda: len(lines(harness, "log")) > before)
    line = lines(harness, "log")[-1]
    inside = lines(harness, "inner")[before_inner:]
    compared(answer["hop"], line, inside[-1] if inside else None, worked=worked)


@settings(max_examples=12)
@given(st.lists(cases(), min_size=1, max_size=6))
def test_connection_behaves_as_explain_predicts(made: list[Case]) -> None:
    async def body(harness: Harness) -> None:
        async with contextlib.AsyncExitStack() as stack:
            ports = [await stack.enter_async_context(application()) for _ in range(HOSTS)]
            for number, case in enumerate(made):
                published = documents(case, ports, harness.folder, number)
                assert await harness.published(*published) is None
                await harness.until(lambda: harness.proxy.listeners.active and not harness.proxy.listeners.warming)
                for _ in range(DIALS):
                    await checked(harness)

    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), body)


def test_filter_state_that_is_shared_chooses_the_cluster_behind_an_internal_listener(tmp_path: Path) -> None:
    value = {
        "object_key": "envoy.tcp_proxy.cluster",
        "shared_with_upstream": "ONCE",
        "format_string": {"text_format": "other"},
    }
    config = T + "envoy.extensions.filters.network.set_filter_state.v3.Config"
    sets = {"name": "state", "typed_config": {"@type": config, "on_new_connection": [value]}}

    async def body(harness: Harness) -> None:
        # The override applies to the first hop, too, whose only way on is therefore a cluster of that name.
        _, hop = inner("inner")
        _, hidden = listener(chain(tcp("missing")), name="inner", internal_listener={})
        del hidden["address"]
        front = listener(chain(sets, tcp("missing")))
        assert await harness.published(front, ("listener", hidden), ("cluster", {**hop, "name": "other"})) is None
        await harness.until(lambda: harness.proxy.listeners.active)
        answer = json.loads(page(harness, "/explain", "source=127.0.0.1&destination=127.0.0.1:80&listener=l"))
        (way,) = answer["hop"]["clusters"][0]["endpoints"]
        assert way["hop"]["cluster_because"] == "filter state envoy.tcp_proxy.cluster names it"

    run(tmp_path, body)


def test_a_tunnel_to_a_cluster_without_http2_is_refused(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        proxy = logged(tcp(tunneling_config={"hostname": "app:80"}), harness.folder, "log")
        target = backend(Backend([Place("HEALTHY", 0, 1, "1", 0)], "RANDOM", 0, "", by_locality=False), [1], "app")
        assert await harness.published(listener(chain(proxy)), target) is None
        await harness.until(lambda: harness.proxy.listeners.active)
        await checked(harness)
        answer = json.loads(page(harness, "/explain", "source=127.0.0.1&destination=127.0.0.1:80&listener=l"))
        assert answer["verdict"] == "refused: closed: tunnels need HTTP/2, which the cluster does not speak"

    run(tmp_path, body)


def explanation(harness: Harness, question: str = "destination=127.0.0.1:80&listener=l") -> Json:
    answer: Json = json.loads(page(harness, "/explain", f"source=127.0.0.1&{question}"))
    return answer


async def published(harness: Harness, identities: Identities, authority: str, app: tuple[str, Json]) -> None:
    """Have both ends of a tunnel in one proxy, which leads to a cluster ``app``."""
    rest = [app, identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
    end = inbound({"route_config": connect_route("app")})
    await harness.published(end, *rest)
    await harness.until(lambda: harness.proxy.listeners.active)
    front = listener(chain(tcp("tunnel", tunneling_config={"hostname": authority})))
    await harness.published(end, front, outbound_cluster(harness.port("inbound")), *rest)
    await harness.until(lambda: len(harness.proxy.listeners.active) == 2)


LISTENER_FILTERS = T + "envoy.extensions.filters.listener."


@pytest.mark.parametrize("disabled", [True, False])
def test_a_listener_filter_that_is_disabled_for_the_port_is_passed_over(tmp_path: Path, disabled: bool) -> None:
    source = {
        "name": "src",
        "typed_config": {"@type": LISTENER_FILTERS + "original_src.v3.OriginalSrc", "mark": 7},
    }
    if disabled:
        source["filter_disabled"] = {"destination_port_range": {"start": 1, "end": 65536}}

    async def body(harness: Harness) -> None:
        async with application() as port:
            assert await harness.published(listener(listener_filters=[source]), cluster(port)) is None
            await harness.until(lambda: harness.proxy.listeners.active)
            hop = explanation(harness)["hop"]
            (way,) = hop["clusters"][0]["endpoints"]
            assert (hop["listener_filters"] == ["src: disabled for port 80"]) is disabled
            assert ("leaves_from" in way) is not disabled
            if disabled:
                assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_listener_filter_that_has_not_arrived_closes(tmp_path: Path) -> None:
    inspector = LISTENER_FILTERS + "tls_inspector.v3.TlsInspector"
    discovery = {"config_source": {"ads": {}, "initial_fetch_timeout": "0.1s"}, "type_urls": [inspector]}

    async def body(harness: Harness) -> None:
        async with application() as port:
            awaited = [{"name": "guard", "config_discovery": discovery}]
            harness.publish(listener(listener_filters=awaited), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            answer = explanation(harness)
            assert answer["verdict"] == "refused: closed: the configuration of filter guard has not arrived"
            assert answer["hop"]["chain"] is None
            assert await ask(harness.port("l")) == b""

    run(tmp_path, body)


INTERNAL_ONLY = "an internal listener passes no bytes to listener filters"


@pytest.mark.parametrize("kind", ["tls_inspector.v3.TlsInspector", "http_inspector.v3.HttpInspector"])
def test_listener_filters_that_read_bytes_are_refused_for_internal_listeners(tmp_path: Path, kind: str) -> None:
    async def body(harness: Harness) -> None:
        reads = {"name": "reads", "typed_config": {"@type": LISTENER_FILTERS + kind}}
        _, hidden = listener(name="inner", internal_listener={}, listener_filters=[reads])
        del hidden["address"]
        refused = await harness.published(("listener", hidden), cluster(1))
        assert refused is not None
        assert INTERNAL_ONLY in refused

    run(tmp_path, body)


@pytest.mark.parametrize("late", ["original_src.v3.OriginalSrc", "tls_inspector.v3.TlsInspector"])
def test_a_discovered_listener_filter_closes_an_internal_listener(tmp_path: Path, late: str) -> None:
    """The filter has not arrived, or can only be one that reads bytes."""
    discovery = {
        "config_source": {"ads": {}, "initial_fetch_timeout": "0.1s"},
        "type_urls": [LISTENER_FILTERS + late],
    }
    if "inspector" in late:
        discovery["default_config"] = {"@type": LISTENER_FILTERS + late}

    async def body(harness: Harness) -> None:
        async with application() as port:
            guard = [{"name": "guard", "config_discovery": discovery}]
            _, hidden = listener(name="inner", internal_listener={}, listener_filters=guard)
            del hidden["address"]
            harness.publish(listener(chain(tcp("to inner"))), ("listener", hidden), inner("inner"), cluster(port))
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            assert explanation(harness)["verdict"].startswith("refused: closed: ")
            assert await ask(harness.port("l")) == b""

    run(tmp_path, body)


def test_a_listener_filter_of_an_internal_listener_can_be_disabled(tmp_path: Path) -> None:
    source = {
        "name": "src",
        "typed_config": {"@type": LISTENER_FILTERS + "original_src.v3.OriginalSrc", "mark": 7},
        "filter_disabled": {"destination_port_range": {"start": 1, "end": 65536}},
    }

    async def body(harness: Harness) -> None:
        async with application() as port:
            _, hidden = listener(name="inner", internal_listener={}, listener_filters=[source])
            del hidden["address"]
            front = listener(chain(tcp("to inner")))
            assert await harness.published(front, ("listener", hidden), inner("inner"), cluster(port)) is None
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            (way,) = explanation(harness)["hop"]["clusters"][0]["endpoints"]
            assert way["hop"]["listener_filters"] == ["src: disabled for port 80"]
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


@pytest.mark.parametrize(("denied", "works"), [("application", False), ("listener", True)])
def test_explain_judges_port_policies_by_the_application_of_a_tunnel(
    tmp_path: Path, denied: str, works: bool
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            identities = Identities()
            rest = [cluster(port), identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
            policy = {"permissions": [{"destination_port": port}], "principals": [{"any": True}]}
            end = inbound({"route_config": connect_route("app")})
            await harness.published(end, *rest)
            await harness.until(lambda: harness.proxy.listeners.active)
            if denied == "listener":
                policy["permissions"] = [{"destination_port": harness.port("inbound")}]
            rules = {"action": "DENY", "policies": {"port": policy}}
            deny = {"name": "rbac", "typed_config": {"@type": RBAC, "stat_prefix": "tcp.", "rules": rules}}
            end = inbound({"route_config": connect_route("app")}, deny)
            front = listener(chain(tcp("tunnel", tunneling_config={"hostname": f"127.0.0.1:{port}"})))
            await harness.published(end, front, outbound_cluster(harness.port("inbound")), *rest)
            await harness.until(
                lambda: len(harness.proxy.listeners.active) == 2 and not harness.proxy.listeners.warming
            )
            assert explanation(harness)["verdict"].startswith("allowed") is works
            assert await ask(harness.port("l")) == (b"ping" if works else b"")

    run(tmp_path, body)


def test_a_chain_with_tls_of_an_internal_listener_closes(tmp_path: Path) -> None:
    identities = Identities()
    secrets = [identities.secret(SERVER), identities.root()]

    async def body(harness: Harness) -> None:
        async with application() as port:
            sealed = chain(tcp(), transport_socket=tls(SERVER, server=True))
            _, hidden = listener(sealed, name="inner", internal_listener={})
            del hidden["address"]
            front = listener(chain(tcp("to inner")))
            published = [front, ("listener", hidden), inner("inner"), cluster(port), *secrets]
            assert await harness.published(*published) is None
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            assert (
                explanation(harness)["verdict"]
                == "refused: closed: an internal listener needs a chain with a TCP proxy and without TLS"
            )
            assert await ask(harness.port("l")) == b""

    run(tmp_path, body)


def test_an_internal_connection_without_a_matching_chain_is_logged_with_no_route(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        elsewhere = chain(tcp(), filter_chain_match={"destination_port": 9})
        _, hidden = listener(elsewhere, name="inner", internal_listener={}, access_log=access_log(tmp_path))
        del hidden["address"]
        front = listener(chain(tcp("to inner")))
        assert await harness.published(front, ("listener", hidden), inner("inner"), cluster(1)) is None
        await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
        assert await ask(harness.port("l")) == b""
        (line,) = await harness.log()
        assert line["flags"] == "NR"

    run(tmp_path, body)


def test_a_tunnel_to_an_endpoint_without_an_ip_address_is_refused(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        piped = {"endpoint": {"address": {"pipe": {"path": str(tmp_path / "application")}}}}
        _, app = cluster(1)
        app["load_assignment"]["endpoints"] = [{"lb_endpoints": [piped]}]
        await published(harness, Identities(), "app:80", ("cluster", app))
        question = f"destination=127.0.0.1:80&identity={CLIENT}&listener=inbound"
        assert (
            explanation(harness, question)["verdict"] == "refused: closed: a tunnel can only lead to an IP address"
        )
        assert await ask(harness.port("l")) == b""

    run(tmp_path, body)


class Revoking(Identities):
    """Has a root with a revocation list that names a certificate, or certificates of other days."""

    def __init__(self, revoked: str = "", past: str = "", foreign: str = "") -> None:
        super().__init__()
        self._revoked, self._past, self._foreign = revoked, past, foreign
        self._list = b""

    def secret(self, identity: str) -> tuple[str, Json]:
        days = {"from_day": -2, "to_day": -1} if identity == self._past else {}
        authority = Authority() if identity == self._foreign else self.authority
        leaf = authority.issue(identity, **days)
        if identity == self._revoked:
            self._list = self.authority.revoke(x509.load_pem_x509_certificates(leaf.chain_pem)[0])
        return "secret", {
            "name": identity,
            "tls_certificate": {
                "certificate_chain": {"inline_string": leaf.chain_pem.decode()},
                "private_key": {"inline_string": leaf.key_pem.decode()},
            },
        }

    def root(self) -> tuple[str, Json]:
        kind, root = super().root()
        if self._list:
            root["validation_context"]["crl"] = {"inline_string": self._list.decode()}
        return kind, root


@pytest.mark.parametrize(
    ("identities", "why"),
    [
        (Revoking(), ""),
        (Revoking(revoked=CLIENT), "the client's certificate is revoked by the revocation lists"),
        (Revoking(revoked=SERVER), "the server's certificate is revoked by the revocation lists"),
        (Revoking(past=CLIENT), "the client's certificate has expired"),
        (Revoking(past=SERVER), "the server's certificate has expired"),
        (Revoking(foreign=CLIENT), "the client's certificate is not of a trusted root"),
        (Revoking(foreign=SERVER), "the server's certificate is not of a trusted root"),
    ],
)
def test_a_certificate_that_refuses_a_tunnel_is_in_its_verdict(
    tmp_path: Path, identities: Revoking, why: str
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            # The authority is an address, so that explain follows it to the end here.
            await published(harness, identities, f"127.0.0.1:{port}", cluster(port))
            assert explanation(harness)["verdict"] == (
                f"refused: closed: tls handshake error: {why}" if why else "allowed"
            )
            assert await ask(harness.port("l")) == (b"" if why else b"ping")

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("identity", "verdict"),
    [
        (CLIENT, "allowed"),
        (
            "spiffe://other/ns/a/sa/client",
            "refused: closed: tls handshake error: the configuration does not accept the names in the client's "
            "certificate",
        ),
        ("", "refused: closed: tls handshake error: the client has no certificate"),
    ],
    ids=["accepted", "other trust domain", "none"],
)
def test_a_clients_identity_is_compared_with_what_the_chains_tls_context_accepts(
    tmp_path: Path, identity: str, verdict: str
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await published(harness, Identities(), f"127.0.0.1:{port}", cluster(port))
            question = f"destination=127.0.0.1:{port}&identity={identity}&listener=inbound"
            assert explanation(harness, question)["verdict"] == verdict

    run(tmp_path, body)
