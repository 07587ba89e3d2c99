"""Hubble's own relay and command, unmodified, over the proxies of two nodes: ``make hubble`` builds them."""

import asyncio
import contextlib
import os
import subprocess
from pathlib import Path

import grpc.aio
import pytest

from tests.hbone.certificates import Authority
from tests.netns.istio import ask, mesh_of
from tests.netns.test_istio_ops import bridge
from tests.netns.toys import app
from tests.ports import free_port
from tests.programs import needed
from tests.ztunnel.proxy.flows import hubble_ui
from tests.ztunnel.proxy.flows.observers import relaying, secret
from xds.proto.hubble.observer.observer_pb2 import GetFlowsResponse
from ztunnel.proxy.flows.settings import Peer

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
NODES = {"w1": ["client", "near"], "w2": ["far", "outside"]}
CAPTURED = ["client", "near", "far"]
CLUSTER = "Kubernetes"
DENY_NEAR = {"action": "DENY", "rules": [{"from": {"principals": ["cluster.local/ns/default/sa/near"]}}]}


async def flows_of_the_page(relay: str, number: int) -> list[GetFlowsResponse]:
    """Return the first flows that Hubble UI gets when it opens a page."""
    found: list[GetFlowsResponse] = []
    async with grpc.aio.insecure_channel(relay) as channel, asyncio.timeout(20):
        call = channel.unary_stream("/observer.Observer/GetFlows")
        async for each in call(hubble_ui.request("default").SerializeToString()):
            response = GetFlowsResponse.FromString(each)
            if response.HasField("flow"):
                found.append(response)
                if len(found) == number:
                    break
    return found


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mTLS"])
def test_relay_command_and_page_show_the_flows_of_two_nodes(secured: bool, tmp_path: Path) -> None:
    command, port, far_port = needed("hubble"), free_port(), free_port()
    needed("hubble-relay")  # before the proxies start
    root, client = Authority(), None
    if secured:
        names = [Peer(name=f"{CLUSTER}/{node}", address="x").server_name for node in NODES]
        folder = secret(tmp_path / "server", root, *names, f"hubble-peer.{CLUSTER}.hubble-grpc.cilium.io")
        # The relay is on a node, and finds the other proxies by the workloads of the mesh.
        env = {
            "ZTUNNEL_HUBBLE": f"0.0.0.0:{port}",
            "ZTUNNEL_HUBBLE_TLS": str(folder),
            "ZTUNNEL_WORKER_THREADS": "2",
        }
        client = secret(tmp_path / "client", root, "relay")
    else:
        # Without TLS proxies serve on loopback. The relay is elsewhere, with a port-forward to each.
        peers = f"{CLUSTER}/w2=127.0.0.1:{far_port}"
        env = {"ZTUNNEL_HUBBLE": f"127.0.0.1:{port}", "ZTUNNEL_HUBBLE_PEERS": peers}

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            options = {"captured": CAPTURED, "env": env, "mesh": {"policies": {"no-near": DENY_NEAR}}}
            mesh = await stack.enter_async_context(mesh_of(NODES, tmp_path, **options))
            far = mesh.lab.pod("far")
            await stack.enter_async_context(app(far))
            assert await ask(mesh.lab.pod("client"), far.ipv4, 8080) != b""
            assert await ask(mesh.lab.pod("outside"), far.ipv4, 8080) != b""
            with contextlib.suppress(OSError):
                assert await ask(mesh.lab.pod("near"), far.ipv4, 8080) == b""
            place = mesh.proxies["w1"].place
            if secured:
                there = stack.enter_context(relaying(f"127.0.0.1:{port}", CLUSTER, client, place.popen))
                here = stack.enter_context(bridge(mesh, "w1", int(there.rpartition(":")[2])))
                relay = f"127.0.0.1:{here}"
            else:
                stack.enter_context(bridge(mesh, "w1", port, port))
                stack.enter_context(bridge(mesh, "w2", port, far_port))
                relay = stack.enter_context(relaying(f"127.0.0.1:{port}", CLUSTER, client))

            async def hubble(*words: str) -> list[str]:
                done = await asyncio.to_thread(
                    subprocess.run,
                    [command, *words, "--server", relay],
                    capture_output=True,
                    text=True,
                    timeout=30,
                    check=False,
                    env={**os.environ, "HOME": str(tmp_path)},
                )
                return done.stdout.splitlines()

            async with asyncio.timeout(40):
                while not any("Connected Nodes: 2/2" in line for line in await hubble("status")):
                    await asyncio.sleep(0.1)
            nodes = await hubble("list", "nodes")
            assert [line.split()[:2] for line in nodes[1:]] == [[f"{CLUSTER}/{n}", "Connected"] for n in NODES]

            shown = [hubble_ui.flow_of(each) for each in await flows_of_the_page(relay, 5)]
            assert hubble_ui.check(shown) == {
                ("client", "far", 8080),
                ("near", "far", 8080),
                ("outside", "far", 8080),
            }
            outbound, inbound = (
                next(
                    each
                    for each in shown
                    if each["traffic_direction"] == way and each["source"].get("pod_name") == "client"
                )
                for way in ("EGRESS", "INGRESS")
            )
            assert {outbound["node_name"], inbound["node_name"]} == {f"{CLUSTER}/{node}" for node in NODES}
            trace = outbound["trace_context"]["parent"]["trace_id"]
            both = await hubble("observe", "--last", "10", "--trace-id", trace)
            assert len(both) == 2
            assert all("default/client" in line and "default/far:8080" in line for line in both)
            (denied,) = await hubble("observe", "--verdict", "DROPPED", "--print-policy-names")
            assert "INGRESS DENIED BY no-near (AuthorizationPolicy)" in denied
            (plain,) = await hubble("observe", "--not", "--encrypted", "--verdict", "FORWARDED")
            assert "to-endpoint FORWARDED" in plain

    asyncio.run(run())
