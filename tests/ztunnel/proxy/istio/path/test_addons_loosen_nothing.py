"""For random addons, meshes and policies: a connection that opens is allowed by policy."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hbone.errors import HboneError
from tests.generated import examples
from tests.ztunnel.proxy.istio.inbound_case import fields, policy
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    OTHER,
    SERVER,
    VIP,
    Cluster,
    certificate,
    endpoint,
    identity,
    play,
    shop,
    workload,
)
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.facts import PeerCertificate
from xds.model.policy import Always, Never
from xds.model.workload import PolicyKey
from ztunnel.addons import Addon, Cut, Delay, Deny, Facts, Prefer, Verdict
from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.addons.settings import Given
from ztunnel.proxy.istio.path.addons import PodAddons
from ztunnel.proxy.istio.path.inbound_target import inbound_facts
from ztunnel.proxy.istio.path.judgement import judgement

#: What a hook does: answers, an exception, nonsense.
ANSWERS = st.one_of(
    st.none(),
    st.builds(Deny, st.just("no")),
    st.builds(Delay, st.floats(0.01, 2)),
    st.builds(Prefer, st.sampled_from([{"version": "v1"}, {"version": "v2"}, {"version": "none"}])),
    st.builds(Cut, st.just("cut"), st.floats(1, 5)),
    st.sampled_from([True, "allow", ValueError("bad"), SystemExit(0)]),
)
NAMES = ("default/a", "default/b")


@dataclass(frozen=True)
class Behaviour:
    """One addon.

    Attributes:
        connecting, accepting: what its hooks do.
        on_error: its setting.
        waits: its hooks are ``async def``.
    """

    connecting: Any
    accepting: Any
    on_error: str
    waits: bool


BEHAVIOURS = st.builds(Behaviour, ANSWERS, ANSWERS, st.sampled_from(["deny", "ignore"]), st.booleans())


def addon(number: int, behaviour: Behaviour) -> type:
    def said(answer: Any) -> Verdict | None:
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    class Random(Addon):
        name = f"random{number}"

        def connecting(self, facts: Facts) -> Verdict | None:
            return said(behaviour.connecting)

        def accepting(self, facts: Facts) -> Any:
            return said(behaviour.accepting)

    class Waiting(Addon):
        name = f"random{number}"

        async def connecting(self, facts: Facts) -> Verdict | None:
            return said(behaviour.connecting)

        async def accepting(self, facts: Facts) -> Any:
            return said(behaviour.accepting)

    return Waiting if behaviour.waits else Random


@st.composite
def policies(draw: st.DrawFn) -> list[AuthorizationPolicy]:
    """Policies for the whole mesh and for the workloads that name them, some of which never arrive."""
    conditions = st.sampled_from([Always(), Never()])
    found = [
        replace(policy(f"mesh{number}", draw(st.sampled_from(Action)), draw(conditions)), scope=PolicyScope.GLOBAL)
        for number in range(draw(st.integers(0, 2)))
    ]
    for name in draw(st.sets(st.sampled_from(NAMES))):
        made = policy(name.partition("/")[2], draw(st.sampled_from(Action)), draw(conditions))
        found.append(replace(made, scope=PolicyScope.WORKLOAD_SELECTOR))
    return found


@settings(max_examples=examples(40), deadline=None)
@given(
    behaviours=st.lists(BEHAVIOURS, max_size=3),
    policies=policies(),
    named=st.lists(st.sets(st.sampled_from(NAMES)), min_size=2, max_size=2),
    way=st.sampled_from(["service", "pod", "wire"]),
)
def test_connection_open_with_any_addon_verdict_is_allowed_by_policy(
    behaviours: list[Behaviour], policies: list[AuthorizationPolicy], named: list[set[str]], way: str
) -> None:
    opened: list[str] = []

    async def body(cluster: Cluster) -> None:
        servers = [
            endpoint(
                name, host, canonical_revision=version, authorization_policies=tuple(map(PolicyKey, sorted(keys)))
            )
            for name, host, version, keys in zip(
                ("server", "other"), (SERVER, OTHER), ("v1", "v2"), named, strict=True
            )
        ]
        await cluster.start(workload("client", CLIENT), *servers)
        cluster.mesh.apply([shop(), *policies])
        for host in (SERVER, OTHER):
            cluster.application(host)
        loaded = [
            load_class(addon(number, each), {f"random{number}": {"on_error": Given(each.on_error, "here")}})
            for number, each in enumerate(behaviours)
        ]
        cluster.node.addons = PodAddons(AddonHost(loaded))
        if way == "wire":
            opened.extend(["server"] * await over_the_wire(cluster))
        else:
            answered = await cluster.dial(f"{VIP}:80" if way == "service" else f"{SERVER}:{APP_PORT}").ask()
            await cluster.until(lambda: cluster.lines())
            arrived = (line for line in cluster.lines() if line["direction"] == "inbound")
            opened.extend(line["dst.workload"] for line in arrived if int(line["bytes_recv"]))
            assert bool(answered) <= bool(opened)
        for name in opened:
            server = next(each for each in servers if each.name == name)
            facts = inbound_facts(
                SocketAddress(CLIENT, 1),
                SocketAddress(server.addresses[0], APP_PORT),
                PeerCertificate(uri_sans=("spiffe://cluster.local/ns/default/sa/client",)),
            )
            assert not judgement(cluster.mesh.policies_for(server), facts).refusal

    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder), body)


async def over_the_wire(cluster: Cluster) -> int:
    """Request the server twice over one tunnel connection, the second time with a plan; return how many opened."""
    connection = await cluster.tunnels_to("server", shown=certificate(identity("client")))
    opened = 0
    for number in (1, 2):
        try:
            (await connection.open(fields())).close()
            opened += 1
        except HboneError:
            pass
        await cluster.until(lambda number=number: len(cluster.lines()) == number)
    connection.close()
    return opened
