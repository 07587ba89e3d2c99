"""The control plane over a real socket: live edits, faults that change nothing, renewed certificates."""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from tests.limits import WAIT_S
from tests.ztunnel.control_plane.meshes import document
from tests.ztunnel.policy.calico.test_follower import following, until
from xds.aio.client import AdsClient
from xds.model.calico import EndpointId, Flow
from xds.model.identity import SpiffeId
from xds.proto import registry
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.protocol.resource import Update
from xds.protocol.types import CDS, SDS
from ztunnel.control_plane.mesh import MeshFaults
from ztunnel.control_plane.server import ControlPlane
from ztunnel.policy.calico.follower import Follower
from ztunnel.proxy.envoy.config.bootstrap import bootstrap_for

PRODUCTPAGE = SpiffeId("cluster.local", "default", "bookinfo-productpage")
REVIEWS = "spiffe://cluster.local/ns/default/sa/bookinfo-reviews"


class Inbox:
    """Collects what one subscription received."""

    def __init__(self) -> None:
        self.updates: asyncio.Queue[Update] = asyncio.Queue()

    async def receive(self, update: Update) -> None:
        self.updates.put_nowait(update)

    async def next(self) -> Update:
        return await asyncio.wait_for(self.updates.get(), WAIT_S)


def serve(
    tmp_path: Path,
    body: Callable[[AdsClient, Path, ControlPlane], Awaitable[None]],
    *,
    delta: bool = False,
    **options: object,
) -> None:
    """Run ``body`` against a control plane and a client of node worker2."""
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump(document()))

    async def main() -> None:
        plane = ControlPlane(path, [f"unix:{tmp_path}/xds"], tmp_path / "ca", **options)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(plane.run())
            await asyncio.wait_for(plane.ready.wait(), WAIT_S)
            node = bootstrap_for(f"unix:{tmp_path}/xds", "worker2", delta=delta, admin=None).node
            async with AdsClient(f"unix:{tmp_path}/xds", node, delta=delta) as client:
                await body(client, path, plane)
            serving.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("delta", [False, True])
def test_an_edit_reaches_the_node(tmp_path: Path, delta: bool) -> None:
    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        inbox = Inbox()
        client.subscribe(CDS, None, inbox.receive)
        before = await inbox.next()
        assert any("_to_http_reviews" in resource.name for resource in before.resources)
        path.write_text(
            yaml.safe_dump(document(services={"shop": {"addresses": ["10.96.0.9"], "ports": {"tcp": 1}}}))
        )
        after = await inbox.next()
        assert any("_to_tcp_shop" in resource.name for resource in after.resources)

    serve(tmp_path, body, delta=delta)


def test_a_faulty_edit_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        inbox = Inbox()
        client.subscribe(CDS, None, inbox.receive)
        await inbox.next()
        good = plane.mesh
        path.write_text(yaml.safe_dump(document(pods={"p": {"node": "mars", "addresses": ["10.0.0.1"]}})))
        async with asyncio.timeout(WAIT_S):
            while "the last good mesh stays active" not in caplog.text:
                await asyncio.sleep(0.02)
        assert plane.mesh is good
        assert "pods.p.node: no such node: 'mars'" in caplog.text
        assert inbox.updates.empty()
        path.write_bytes(b"\xff\xfe")
        async with asyncio.timeout(WAIT_S):
            while "not UTF-8 text at byte 0; the last good mesh stays active" not in caplog.text:
                await asyncio.sleep(0.02)
        path.unlink()
        await asyncio.sleep(0.5)
        assert plane.mesh is good

    serve(tmp_path, body)


def test_a_mesh_that_is_written_in_place_is_read_when_it_is_complete(tmp_path: Path) -> None:
    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        good = plane.mesh
        mesh = document()
        rest = yaml.safe_dump({"policies": mesh.pop("policies")})
        first = yaml.safe_dump({**mesh, "services": {}})
        with path.open("w") as file:
            for part in (first, "# a long pause\n", rest):
                file.write(part)
                file.flush()
                assert not plane._reload()  # no poll runs meanwhile, because this does not await
        assert plane.mesh is good
        async with asyncio.timeout(WAIT_S):
            while plane.mesh is good:
                await asyncio.sleep(0.02)
        assert plane.mesh.services == ()
        assert plane.mesh.policies == good.policies

    serve(tmp_path, body)


def test_file_that_is_emptied_before_it_is_written_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        inbox = Inbox()
        client.subscribe(CDS, None, inbox.receive)
        await inbox.next()
        good, text = plane.mesh, path.read_text()
        path.write_text("")
        async with asyncio.timeout(WAIT_S):
            while (
                "is empty, as while it is written; the last good mesh stays active" not in caplog.text
                and plane.mesh is good
            ):
                await asyncio.sleep(0.02)
        assert plane.mesh is good
        path.write_text(text)
        async with asyncio.timeout(WAIT_S):
            while plane.mesh is good:
                await asyncio.sleep(0.02)
        assert plane.mesh == good
        assert inbox.updates.empty()

    serve(tmp_path, body)


def test_certificates_are_renewed_at_half_life_and_only_local_ones_are_given(tmp_path: Path) -> None:
    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        inbox, foreign = Inbox(), Inbox()
        client.subscribe(SDS, [REVIEWS], inbox.receive)
        chains = set()
        for _ in range(3):
            update = await inbox.next()
            secret = registry.unpack(update.resources[0].body)
            assert isinstance(secret, Secret)
            chains.add(secret.tls_certificate.certificate_chain.inline_string)
        assert len(chains) == 3
        name = "spiffe://cluster.local/ns/default/sa/somebody-else"
        client.subscribe(SDS, [name], foreign.receive, initial_fetch_timeout_s=1.0)
        await asyncio.sleep(1.2)
        assert foreign.updates.empty() or not (await foreign.next()).resources

    serve(tmp_path, body, lifetime=timedelta(seconds=1))


@pytest.mark.parametrize("delta", [False, True])
def test_node_that_is_removed_from_the_mesh_loses_its_pods_and_certificates(tmp_path: Path, delta: bool) -> None:
    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        clusters, secrets = Inbox(), Inbox()
        client.subscribe(CDS, None, clusters.receive)
        client.subscribe(SDS, [REVIEWS], secrets.receive)
        assert any(f"_tunnel_clus_{REVIEWS}" in each.name for each in (await clusters.next()).resources)
        assert (await secrets.next()).resources
        assert PRODUCTPAGE in plane._leaves
        mesh = document(services={})
        kept = {name: pod for name, pod in mesh["pods"].items() if pod["node"] != "worker2"}
        path.write_text(yaml.safe_dump({**mesh, "pods": kept, "nodes": {"worker": {}}}))
        after = await clusters.next()
        assert not any("_tunnel_clus_" in each.name for each in after.resources)
        if delta:
            assert any(f"_tunnel_clus_{REVIEWS}" in name for name in after.removed)
        async with asyncio.timeout(WAIT_S):
            while PRODUCTPAGE in plane._leaves:  # otherwise it would be renewed for ever
                await asyncio.sleep(0.02)

    serve(tmp_path, body, delta=delta)


def test_a_faulty_file_at_the_start_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("pods: 1")
    with pytest.raises(MeshFaults, match="pods: must be a mapping"):
        ControlPlane(path, [], tmp_path / "ca")


def policies(action: str) -> list[dict[str, object]]:
    rule = {
        "action": action,
        "source": {"selector": "app == 'page'", "serviceAccounts": {"selector": "role == 'web'"}},
    }
    account = {"name": "bookinfo-productpage", "namespace": "default", "labels": {"role": "web"}}
    spec = {"selector": "app == 'reviews'", "ingress": [rule]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
        {
            "apiVersion": "projectcalico.org/v3",
            "kind": "GlobalNetworkPolicy",
            "metadata": {"name": "one"},
            "spec": spec,
        },
    ]


def test_its_policies_are_served_to_each_nodes_proxy(tmp_path: Path) -> None:
    pods = document()["pods"]
    pods["productpage"]["labels"] = {"app": "page"}
    for name in ("reviews-v1", "reviews-v2"):
        pods[name]["labels"] = {"app": "reviews"}
    reviews = EndpointId("k8s", "default/reviews-v2", "eth0")

    def mesh(action: str, **more: object) -> str:
        return yaml.safe_dump(document(pods=pods, calico=policies(action), **more))

    def allowed(follower: Follower, principal: str) -> bool:
        flow = Flow(source_ip="10.244.2.3", destination_ip="10.244.2.23", source_principal=principal)
        return follower.evaluator.check(reviews, flow).allowed

    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        page = "spiffe://cluster.local/ns/default/sa/bookinfo-productpage"
        async with following(f"unix:{tmp_path}/policies/worker2.sock") as follower, asyncio.timeout(WAIT_S):
            await until(lambda: follower.in_sync)
            assert stat.S_IMODE(os.stat(tmp_path / "policies" / "worker2.sock").st_mode) == 0o600
            names = {key.workload for key in follower.evaluator.store.endpoints}
            assert names == {"default/productpage", "default/reviews-v2", "default/reviews-v3"}
            assert allowed(follower, REVIEWS)  # no policy yet
            path.write_text(mesh("Allow"))
            # The account's labels arrive after the policy that selects it.
            await until(lambda: not allowed(follower, REVIEWS) and allowed(follower, page))
            path.write_text(mesh("Permit"))
            path.write_text(mesh("Deny", nodes={"worker": {}, "worker2": {}, "worker3": {}}))
            await until(lambda: not allowed(follower, page))
            await until((tmp_path / "policies" / "worker3.sock").is_socket)

    serve(tmp_path, body, policy_folder=tmp_path / "policies")


def test_a_socket_that_cannot_be_served_holds_up_no_other_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = tmp_path / "policies"

    async def body(client: AdsClient, path: Path, plane: ControlPlane) -> None:
        (sockets / "worker3.sock").write_text("in the way")
        nodes: dict[str, object] = {name: {} for name in ("worker", "worker2", "worker3", "worker4")}
        path.write_text(yaml.safe_dump(document(nodes=nodes)))
        async with asyncio.timeout(WAIT_S):
            await until((sockets / "worker4.sock").is_socket)
            assert not (sockets / "worker3.sock").is_socket()
            (sockets / "worker3.sock").unlink()
            await until((sockets / "worker3.sock").is_socket)

    serve(tmp_path, body, policy_folder=sockets)
    failures = [each.getMessage() for each in caplog.records if "policies of a new node" in each.getMessage()]
    assert len(failures) == 1
    assert "worker3.sock" in failures[0]
