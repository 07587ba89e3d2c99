"""Workloads that have a name instead of addresses: looked up when they are dialled."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from tests.netns.istio import HELLO, AmbientMesh, ask, mesh_of, refused
from tests.netns.test_istio_dns import NameServer, names_of
from tests.netns.toys import app

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
DOMAIN = "default.svc.cluster.local"
#: Services by the name of their only endpoint, and how that one is reached.
SERVICES = {"outside": ("10.96.3.1", "TCP"), "server": ("10.96.3.2", "HBONE"), "nobody": ("10.96.3.3", "TCP")}


def _named(mesh: AmbientMesh) -> Mapping[str, Any]:
    endpoints = [
        {
            "uid": f"Kubernetes/ServiceEntry/default/{name}",
            "name": f"named-{name}",
            "namespace": "default",
            "serviceAccount": name,
            "hostname": f"{name}.example.net",
            "workloadIps": [],
            "protocol": protocol,
            "services": {f"default/{name}.{DOMAIN}": {80: 8080}},
        }
        for name, (_, protocol) in SERVICES.items()
    ]
    common = {"namespace": "default", "ports": {80: 8080}}
    services = [
        {"name": name, "hostname": f"{name}.{DOMAIN}", "vips": [f"/{vip}"], **common}
        for name, (vip, _) in SERVICES.items()
    ]
    return {"workloads": [*mesh.workloads(), *endpoints], "services": services}


def test_on_demand_dns_request(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["client"], "w2": ["server", "outside", "names"]}
        options: dict[str, Any] = {"captured": ["client", "server"], "local": _named, "resolv_conf": names_of}
        asked = []
        async with mesh_of(nodes, tmp_path, **options) as mesh:

            def behave(query: dns.message.Message, protocol: str) -> list[bytes]:
                (question,) = query.question
                name, response = str(question.name), dns.message.make_response(query)
                asked.append((name, dns.rdatatype.to_text(question.rdtype)))
                pod = name.split(".")[0]
                if pod not in ("server", "outside"):
                    response.set_rcode(dns.rcode.NXDOMAIN)
                elif question.rdtype == dns.rdatatype.A:
                    address = str(mesh.lab.pod(pod).ipv4)
                    response.answer.append(dns.rrset.from_text(name, 60, "IN", "A", address))
                return [response.to_wire()]

            client, proxy = mesh.lab.pod("client"), mesh.node_of("client")
            async with (
                NameServer(mesh.lab.pod("names"), behave),
                app(mesh.lab.pod("server")),
                app(mesh.lab.pod("outside")),
            ):
                for name in ("outside", "server"):
                    vip, protocol = SERVICES[name]
                    for _ in range(2):
                        answer = await ask(client, vip, 80)
                        assert answer == f"app {name} peer {client.ipv4}\n".encode() + HELLO
                    lines = await proxy.lines("outbound", 2, dst_workload=f"named-{name}")
                    port = 8080 if protocol == "TCP" else 15008
                    assert {line["dst.addr"] for line in lines} == {f"{mesh.lab.pod(name).ipv4}:{port}"}
                    # Counted each time, asked once while the answer holds.
                    assert proxy.metric("istio_on_demand_dns_total", hostname=f"{name}.example.net") == 2
                    assert len([kind for asked_for, kind in asked if asked_for == f"{name}.example.net."]) <= 2
                    assert asked.count((f"{name}.example.net.", "A")) == 1
                assert await refused(client, SERVICES["nobody"][0], 80)
                line = await proxy.failed("dns lookup: ", "outbound")
                assert line["message"] == "connection failed"

    asyncio.run(main())
