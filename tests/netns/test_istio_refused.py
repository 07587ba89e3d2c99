"""Refused connections: by policy, by the peer's identity, by the tunnel's target, and malicious calls."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import Place
from hbone.errors import ConnectionBroken, ConnectRefused, HboneError, TlsError
from tests.netns.hbone_ends import HboneEnds
from tests.netns.istio import HELLO, AmbientMesh, ask, mesh_of, refused
from tests.netns.toys import app
from tproxy.aio.sockets import connect
from tproxy.errors import TproxyError

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
IDENTITY = "spiffe://cluster.local/ns/default/sa/{}"
ALLOW_ANOTHER = {"rules": [{"from": {"principals": ["cluster.local/ns/default/sa/another"]}}]}
DENY_CLIENT = {"action": "DENY", "rules": [{"from": {"principals": ["cluster.local/ns/default/sa/client"]}}]}


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (ALLOW_ANOTHER, "allow policies exist, but none allowed"),
        (DENY_CLIENT, "explicitly denied by: default/only"),
    ],
    ids=["allow", "deny"],
)
def test_policy(tmp_path: Path, policy: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far"]}
        async with mesh_of(nodes, tmp_path, mesh={"policies": {"only": policy}}) as mesh:
            for name in ("near", "far"):
                server = mesh.lab.pod(name)
                async with app(server):
                    assert await refused(mesh.lab.pod("client"), server.ipv4, 8080)
                outbound = await mesh.node_of("client").ended("outbound", name)
                inbound = await mesh.node_of(name).ended("inbound", name)
                assert outbound["error"] == "http status: 401 Unauthorized"
                assert inbound["error"] == f"connection closed due to policy rejection: {reason}"
                assert (inbound["src.identity"], inbound["level"]) == (IDENTITY.format("client"), "error")
                labels = {"destination_workload": name}
                for proxy, reporter, flags in (
                    (mesh.node_of("client"), "source", "CONNECT"),
                    (mesh.node_of(name), "destination", "DENY"),
                ):
                    labels |= {"reporter": reporter, "response_flags": flags}
                    assert proxy.metric("istio_tcp_connections_failed_total", **labels) == 1

    asyncio.run(main())


def test_plain_connections_are_judged_without_identity(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["server"], "w2": ["outside"]}
        policies = {"policies": {"mesh-only": {"action": "DENY", "rules": [{"from": {"not_principals": ["*"]}}]}}}
        async with mesh_of(nodes, tmp_path, captured=["server"], mesh=policies) as mesh:
            server = mesh.lab.pod("server")
            async with app(server):
                assert await refused(mesh.lab.pod("outside"), server.ipv4, 8080)
            line = await mesh.node_of("server").ended("inbound", "server")
            assert line["error"].endswith("explicitly denied by: default/mesh-only")

    asyncio.run(main())


# What a tunnel names


def _services(mesh: AmbientMesh) -> Mapping[str, Any]:
    ports = {"default/numeric.example.com": {80: 8080}, "default/named.example.com": {80: 8080}}
    services = [
        {
            "name": name,
            "namespace": "default",
            "hostname": f"{name}.example.com",
            "vips": [],
            "ports": {80: target, 81: 0},
        }
        for name, target in (("numeric", 8080), ("named", 0))
    ]
    return {"workloads": mesh.workloads(server={"services": ports}), "services": services}


def test_what_tunnels_may_name(tmp_path: Path) -> None:
    # hbone_ip_mismatch, test_svc_hostname_port, test_svc_hostname_named_port, and the rest of the table of answers
    async def main() -> None:
        nodes = {"w1": ["server", "other"], "w2": ["stranger"]}
        async with (
            mesh_of(nodes, tmp_path, captured=["server", "other"], local=_services) as mesh,
            HboneEnds(tmp_path) as ends,
        ):
            server, other, stranger = (mesh.lab.pod(name) for name in ("server", "other", "stranger"))
            own, proxy = server.ipv4, mesh.node_of("server")
            mismatch = "ip mismatch: {} != {}"
            recursive = "attempted recursive call to ourselves"
            cases = [
                (f"{own}:8080", 200, ""),
                ("numeric.example.com:80", 200, ""),
                ("named.example.com:80", 200, ""),
                (f"{other.ipv4}:8080", 400, mismatch.format(own, other.ipv4)),
                ("127.0.0.1:8080", 400, mismatch.format(own, "127.0.0.1")),
                (f"{mesh.node_of('server').place.ipv4}:15000", 400, mismatch.format(own, proxy.place.ipv4)),
                ("nobody.example.com:80", 503, "no service or workload for hostname: nobody.example.com"),
                ("named.example.com:81", 503, "service named.example.com:81 found, but cannot resolve port"),
                ("no authority", 400, "no valid authority pseudo header"),
                (f"{own}:0", 400, "no valid authority pseudo header"),
                (f"{own}:15001", 503, recursive),
                (f"{own}:15006", 503, recursive),
                (f"{own}:15008", 503, recursive),
                (f"{own}:9", 503, "connection failed: Connection refused (os error 111)"),
            ]
            async with app(server), ends.connection(stranger, own, "stranger", expect="server") as connection:
                for authority, status, error in cases:
                    assert await ends.status(connection, authority) == status, authority
                    if error:
                        line = await proxy.failed(error, "inbound")
                        # Only connections that were opened count.
                        refused_late = line["message"] == "connection complete"
                        assert refused_late == error.startswith("connection failed"), authority
                get = ((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/"), (b":authority", b"x"))
                with pytest.raises(ConnectRefused) as answer:
                    await connection.open(get)
                assert answer.value.status == 400
                await proxy.failed("expected method CONNECT, got GET", "inbound")
                assert await ends.status(connection, f"{own}:8080") == 200  # and the connection stays open

    asyncio.run(main())


def test_trust_domain_mismatch_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["server"], "w2": ["stranger"]}
        async with mesh_of(nodes, tmp_path, captured=["server"]) as mesh, HboneEnds(tmp_path) as ends:
            server, stranger = mesh.lab.pod("server"), mesh.lab.pod("stranger")
            async with app(server):
                # TLS 1.3: a client learns only after its own handshake that it is not wanted.
                with pytest.raises((TlsError, ConnectionBroken, HboneError)):
                    async with ends.connection(
                        stranger, server.ipv4, "client", expect="server", trust_domain="other.domain"
                    ) as connection:
                        await ends.tunnel(connection, f"{server.ipv4}:8080")
            line = await mesh.node_of("server").failed("expected trustdomain (cluster.local)", "inbound")
            assert line["error"].startswith("tls handshake error: ")
            assert "got spiffe://other.domain/ns/default/sa/client" in line["error"]
            assert mesh.node_of("server").metric("istio_tcp_connections_opened_total") == 0

    asyncio.run(main())


# Malicious calls

NOTHING, PAGE, SOCKS_ERROR = "nothing", "page", "SOCKS error"


async def call(place: Place, host: object, port: int) -> str:
    """Return the result of an HTTP request."""
    loop, answer = asyncio.get_running_loop(), b""
    try:
        sock = await connect((str(host), port), netns=place.netns, timeout_s=3)
    except (TproxyError, OSError):
        return NOTHING
    with sock:
        try:
            async with asyncio.timeout(20):
                await loop.sock_sendall(sock, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                while data := await loop.sock_recv(sock, 65536):
                    answer += data
        except ConnectionError:
            pass
    if answer.startswith(b"HTTP/1.1 "):
        return PAGE
    if answer.startswith(b"\x05"):
        return SOCKS_ERROR
    assert not answer or answer.startswith(b"\x15"), answer  # a TLS alert may arrive before the reset
    return NOTHING


def test_malicious_calls(tmp_path: Path) -> None:
    # malicious_calls_inpod: nothing of the proxy can be had through its own captures, nothing goes in circles
    ports = (15001, 15006, 15008, 15080, 15000, 15020, 15021)
    nothing = dict.fromkeys(ports, NOTHING)
    node = {**nothing, 15020: PAGE, 15021: PAGE}
    expected = {
        ("client", "its proxy's node"): node,
        ("client", "another node"): node,
        ("client", "its own address"): nothing,
        ("client", "localhost"): {**nothing, 15080: SOCKS_ERROR},
        ("client", "a captured pod"): nothing,
        ("client", "an uncaptured pod"): nothing,
        ("outside", "its proxy's node"): node,
        ("outside", "its own address"): nothing,
        ("outside", "localhost"): nothing,
        ("outside", "a captured pod"): nothing,
    }

    async def main() -> None:
        nodes = {"w1": ["client", "server"], "w2": ["far"], "w3": ["outside"]}
        env = {"UNSTABLE_ENABLE_SOCKS5": "true"}
        async with mesh_of(nodes, tmp_path, captured=["client", "server", "far"], env=env) as mesh:
            found = {}
            for caller, target in expected:
                place = mesh.lab.pod(caller)
                host = {
                    "its proxy's node": mesh.node_of(caller).place.ipv4,
                    "another node": mesh.lab.worker("w2").place.ipv4,
                    "its own address": place.ipv4,
                    "localhost": "127.0.0.1",
                    "a captured pod": mesh.lab.pod("server").ipv4,
                    "an uncaptured pod": mesh.lab.pod("outside").ipv4,
                }[target]
                answers = await asyncio.gather(*(call(place, host, port) for port in ports))
                found[caller, target] = dict(zip(ports, answers, strict=True))
            assert found == expected
            # A circle would have left many more connections than were made.
            proxy = mesh.node_of("client")
            assert len(proxy.access()) < 3 * sum(map(len, expected.values()))
            assert not proxy.connections()
            server = mesh.lab.pod("server")
            async with app(server):
                assert (await ask(mesh.lab.pod("client"), server.ipv4, 8080)).endswith(HELLO)

    asyncio.run(main())
