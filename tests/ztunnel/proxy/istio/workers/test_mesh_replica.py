"""A mesh and its replica answer alike after every batch."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.generated import examples
from tests.ztunnel.proxy.istio.workers.test_messages import SERVICE, WORKLOAD, decoded, policy
from xds.model.authorization import AuthorizationPolicy
from xds.model.mesh import Changes, Mesh
from xds.model.refused import RefusedResource
from xds.model.service import Service
from xds.model.workload import NetworkAddress, PolicyKey, ServiceKey, Workload, WorkloadUid
from ztunnel.proxy.istio.workers.mesh_replica import BATCH, MeshReplica, delta, snapshot
from ztunnel.proxy.istio.workers.messages import MeshChange, encode

POLICY = policy()


def workload(number: int, **more: object) -> Workload:
    found = replace(
        WORKLOAD,
        uid=WorkloadUid(f"w{number}"),
        addresses=(f"10.0.{number // 250}.{number % 250}",),
        name=f"w{number}",
        node="here",
        services={ServiceKey(f"default/s{number % 3}.local"): {80: 8080}},
    )
    return replace(found, **more)  # type: ignore[arg-type]


def service(number: int) -> Service:
    return replace(SERVICE, name=f"s{number}", hostname=f"s{number}.local", vips=(), cidr_vips=())


def refused(number: int) -> RefusedResource:
    found = workload(number)
    return RefusedResource(found.uid, "unknown protocol", (NetworkAddress("", found.addresses[0]),))


def authorization(number: int) -> AuthorizationPolicy:
    return replace(POLICY, name=f"p{number}")


def sent(message: MeshChange) -> MeshChange:
    ((found, _),) = decoded(encode(message), from_main=True)
    assert isinstance(found, MeshChange)
    return found


class Both(RuleBasedStateMachine):
    """A mesh and its replica, which may begin in the middle."""

    @initialize(before=st.lists(st.integers(0, 5)))
    def begin(self, before: list[int]) -> None:
        self.mesh = Mesh(node="here")
        self.mesh.apply([workload(number) if number % 2 else refused(number) for number in before])
        self.copy = Mesh(node="here")
        self.replica = MeshReplica(self.copy)
        for message in snapshot(self.mesh):
            self.replica.receive(sent(message))
        self.mesh.watch(self.changed)

    def changed(self, changes: Changes) -> None:
        for message in delta(changes, self.mesh):
            self.replica.receive(sent(message))

    @rule(
        put=st.lists(st.integers(0, 5), max_size=3),
        services=st.lists(st.integers(0, 2), max_size=2),
        removed=st.lists(st.integers(0, 5), max_size=3),
        gone=st.lists(st.integers(0, 2), max_size=2),
        policies=st.sets(st.integers(0, 2)),
    )
    def apply(
        self, put: list[int], services: list[int], removed: list[int], gone: list[int], policies: set[int]
    ) -> None:
        names = tuple(PolicyKey(f"default/p{number}") for number in sorted(policies))
        self.mesh.apply(
            [
                *(service(number) for number in services),
                *(workload(number, authorization_policies=names) for number in put),
            ],
            [*(f"w{number}" for number in removed), *(f"default/s{number}.local" for number in gone)],
        )

    @rule(
        numbers=st.lists(st.integers(0, 5), max_size=3),
        put=st.lists(st.integers(0, 5), max_size=2),
        removed=st.lists(st.integers(0, 5), max_size=2),
    )
    def refuse(self, numbers: list[int], put: list[int], removed: list[int]) -> None:
        self.mesh.apply(
            [*map(refused, numbers), *(workload(number, name="refused before") for number in put)],
            [f"w{number}" for number in removed],
        )

    @rule(put=st.lists(st.integers(0, 2), max_size=2))
    def put_policies(self, put: list[int]) -> None:
        self.mesh.apply([authorization(number) for number in put])

    @rule(removed=st.lists(st.integers(0, 2), max_size=2))
    def remove_policies(self, removed: list[int]) -> None:
        self.mesh.apply(removed_policies=[f"default/p{number}" for number in removed])

    @invariant()
    def they_answer_alike(self) -> None:
        if not hasattr(self, "copy"):
            return
        mesh, copy = self.mesh, self.copy
        assert {each.uid: each for each in mesh.workloads()} == {each.uid: each for each in copy.workloads()}
        assert {each.key: each for each in mesh.services()} == {each.key: each for each in copy.services()}
        assert {each.key: each for each in mesh.policies()} == {each.key: each for each in copy.policies()}
        assert {each.name: each for each in mesh.refused_resources()} == {
            each.name: each for each in copy.refused_resources()
        }
        assert mesh.staged() == copy.staged()
        assert set(mesh.local_identities) == set(copy.local_identities)
        for number in range(3):
            key = f"default/s{number}.local"
            assert mesh.endpoints(key) == copy.endpoints(key)
        for each in mesh.workloads():
            there = copy.workload(each.uid)
            assert there is not None
            assert mesh.policies_for(each).missing == copy.policies_for(there).missing
            assert mesh.policies_for(each).enforced == copy.policies_for(there).enforced


TestBoth = Both.TestCase
TestBoth.settings = settings(max_examples=examples(60), stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("count", [1, BATCH, BATCH + 1, 3 * BATCH])
def test_a_batch_is_sent_in_parts_and_applied_as_one(count: int) -> None:
    mesh, copy, batches = Mesh(), Mesh(), []
    copy.watch(batches.append)
    replica = MeshReplica(copy)
    messages: list[MeshChange] = []
    mesh.watch(lambda changes: messages.extend(delta(changes, mesh)))
    mesh.apply([authorization(number) for number in range(count)])
    assert [message.more for message in messages] == [True] * (-(-count // BATCH) - 1) + [False]
    assert all(len(message.put) <= BATCH for message in messages)
    for message in messages[:-1]:
        replica.receive(message)
    assert batches == []
    replica.receive(messages[-1])
    assert [len(batch.policies) for batch in batches] == [count]


def test_a_snapshot_begins_with_the_policies() -> None:
    mesh = Mesh()
    mesh.apply([*(workload(number) for number in range(BATCH + 1)), service(0), authorization(0)])
    kinds = [(type(message.put[0]).__name__, len(message.put), message.more) for message in snapshot(mesh)]
    assert kinds == [
        ("AuthorizationPolicy", 1, False),
        ("Service", 1, False),
        ("Workload", BATCH, False),
        ("Workload", 1, False),
    ]
