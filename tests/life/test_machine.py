"""Random connections and random changes over real proxies: every open connection is allowed now, and closed ones
leave nothing.

Whether a connection is allowed is computed here independently, from the mesh and the revocation lists, without the
product's tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import default_client
from hbone.errors import HboneError
from tests.generated import examples
from tests.ztunnel.proxy.istio.inbound_case import APP, GATED, NEAR, POD, TunnelClient, fields, policy
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    OTHER,
    ROOT,
    SERVER,
    Cluster,
    End,
    WorkloadCertificate,
    certificate,
    identity,
    play,
    workload,
)
from xds.model.authorization import Action, AuthorizationPolicy
from xds.model.policy import Always, Never, PeerPrincipal
from xds.model.string_match import StringMatch
from ztunnel.policy.engine import holds
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.path.authorizer import POLICY_GRACE_S
from ztunnel.proxy.istio.path.pod_connection import Carrier, PodConnection

FAR = workload("far", OTHER, node=ELSEWHERE)
ONE, TWO = certificate(identity("one")), certificate(identity("two"))
BY_ONE = PeerPrincipal(StringMatch("exact", identity("one").removeprefix("spiffe://")))
POLICIES = {
    "deny all": policy("d", Action.DENY),
    "deny one": policy("d", Action.DENY, BY_ONE),
    "deny none": policy("d", Action.DENY, Never()),
    "allow all": policy("a", Action.ALLOW),
    "allow one": policy("a", Action.ALLOW, BY_ONE),
    "gate denies": policy(action=Action.DENY, condition=Always()),
    "gate allows": policy(action=Action.ALLOW, condition=Always()),
}
STEPS = [
    "tunnel of one",
    "tunnel of two",
    "plain",
    "joined",
    "outbound",
    *POLICIES,
    "without d",
    "without a",
    "without gate",
    "pod names gate",
    "pod names none",
    "pod goes",
    "revoke one",
    "revoke two",
    "revoke none",
    "renew",
    "hold dials",
    "let dials go",
    "a client closes",
    "a client resets",
    "seconds",
    "many seconds",
]


class World:
    """A node, its peers, and what has been opened."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.clients: list[End] = []
        self.carriers: list[Connection] = []
        self.missing_since_s: float | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._dialling: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        cluster = self.cluster
        await cluster.start(POD, NEAR)
        cluster.mesh.apply([FAR])
        cluster.application(SERVER)
        cluster.peer("far", OTHER)
        cluster.wire.gates[APP] = self._gate
        cluster.revoke(RevocationLists())

    async def step(self, name: str) -> None:
        cluster = self.cluster
        match name.split():
            case ["tunnel", "of", who]:
                self._dialling.append(cluster.tasks.create_task(self._tunnel(ONE if who == "one" else TWO)))
            case ["plain"]:
                self.clients.append(cluster.plain(f"{SERVER}:{APP_PORT}"))
            case ["joined"] if cluster.pods["client"]:
                self.clients.append(cluster.dial(f"{SERVER}:{APP_PORT}"))
            case ["outbound"]:
                self.clients.append(cluster.dial(f"{OTHER}:{APP_PORT}"))
            case ["without", gone]:
                cluster.mesh.apply(removed_policies=[f"default/{gone}"])
            case ["pod", "names", what]:
                cluster.mesh.apply([GATED if what == "gate" else POD])
            case ["pod", "goes"]:
                cluster.mesh.apply((), [POD.uid])
            case ["revoke", who]:
                leaves = {"one": [ONE], "two": [TWO], "none": []}[who]
                chain = [each.issued.chain[0] for each in leaves]
                cluster.revoke(RevocationLists.parse(ROOT.revoke(*chain)) if chain else RevocationLists())
            case ["renew"]:
                cluster.certificates.put(identity("server"))
            case ["hold", "dials"]:
                self._gate.clear()
            case ["let", "dials", "go"]:
                self._gate.set()
            case ["a", "client", how]:
                if self.clients:
                    end = self.clients.pop(0)
                    end.close() if how == "closes" else end.reset()
            case ["seconds"]:
                await asyncio.sleep(2)
            case ["many", "seconds"]:
                await asyncio.sleep(POLICY_GRACE_S + 1)
            case _:
                cluster.mesh.apply([POLICIES[name]])
        await asyncio.sleep(0.05)

    async def _tunnel(self, shown: WorkloadCertificate) -> None:
        near = self.cluster.sockets["server"].arrives(15008, None, CLIENT).sock
        with contextlib.suppress(HboneError, OSError):
            context = shown.client_context((identity("server"),))
            connection = await connect(near, context, default_client(), self.cluster.node.poller)
            self.carriers.append(connection)
            self.clients.append(TunnelClient(self.cluster, await connection.open(fields())).end)

    # What must hold

    def check(self) -> None:
        """Compare everything that is open with what is allowed."""
        now_s = self.cluster.node.clock.monotonic()
        missing = self._named - self.cluster_policies.keys()
        self.missing_since_s = (self.missing_since_s or now_s) if missing else None
        for life in self.cluster.node.live:
            if life.state not in (State.OPEN, State.JOINED, State.DRAINING) or life.reason:
                continue
            if isinstance(life, Carrier):
                assert life.connection is not None
                facts = life.connection.facts
                assert facts is not None
                assert not self._lists.is_revoked(facts.chain), "a revoked peer has a tunnel connection"
            elif isinstance(life, PodConnection) and life.facts is not None:
                assert self._allows(life, now_s), f"open and not allowed: {life.record.source} {life.facts}"

    @property
    def cluster_policies(self) -> dict[str, AuthorizationPolicy]:
        return {str(each.key): each for each in self.cluster.mesh.policies()}

    @property
    def _named(self) -> set[str]:
        described = self.cluster.pods["server"]._local.last
        return set(map(str, described.authorization_policies)) if described is not None else set()

    @property
    def _lists(self) -> RevocationLists:
        lists = self.cluster.node.revocation_lists()
        assert lists is not None
        return lists

    def _allows(self, life: PodConnection, now_s: float) -> bool:
        """Return Istio's decision, computed independently: no DENY matches, and an ALLOW matches if there is
        any.
        """
        assert life.facts is not None
        applying = [
            each
            for key, each in self.cluster_policies.items()
            if key in self._named or each.scope is not type(each.scope).WORKLOAD_SELECTOR
        ]
        denies = [each for each in applying if each.action is Action.DENY]
        allows = [each for each in applying if each.action is Action.ALLOW]
        if any(holds(each.condition, life.facts) for each in denies):
            return False
        if self.missing_since_s is not None:
            # A missing policy denies after its grace period. Steps are 50 ms apart.
            return now_s - self.missing_since_s <= POLICY_GRACE_S + 0.2
        return not allows or any(holds(each.condition, life.facts) for each in allows)

    async def end(self) -> None:
        """Close the test's sockets. The proxies must have no connection left then."""
        self._gate.set()
        for end in self.clients:
            end.close()
        for carrier in self.carriers:
            carrier.close()
        for task in self._dialling:
            with contextlib.suppress(HboneError, OSError):
                await task
        for end in self.clients:
            end.close()
        for carrier in self.carriers:
            carrier.close()
        for pod in self.cluster.pods.values():
            await pod.stop()
        assert not list(self.cluster.node.live)
        assert all(pod._tunnels.pool.statistics.streams == 0 for pod in self.cluster.pods.values())


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=14))
def test_open_implies_allowed_and_closed_leaves_nothing(steps: list[str]) -> None:
    async def body(cluster: Cluster) -> None:
        world = World(cluster)
        await world.begin()
        for step in steps:
            await world.step(step)
            world.check()
        await world.end()

    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder), body)
