"""A running node proxy beside its data path: its own tunnel, its end, pods that start and stop, strangers."""

import asyncio
import contextlib
import os
import re
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import hpack
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from deploy.lab import Lab, Place
from hbone.frames import SETTINGS, WINDOW_UPDATE
from tests.netns.istio import HELLO, ROOT, NodeProxy, ask, eventually, mesh_of
from tests.netns.toys import app
from tests.ztunnel.proxy.istio.zds.agents import Agent
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect, listen
from xds.model.identity import SpiffeId
from xds.model.secret import Certificate
from ztunnel.proxy.identity import authority as ca
from ztunnel.proxy.istio.zds.messages import DeletePod, SnapshotSent
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]

GET_METRICS = b"GET /metrics HTTP/1.1\r\nHost: ztunnel\r\nConnection: close\r\n\r\n"


# Its own tunnel


def test_metrics_through_a_tunnel_to_the_proxy_itself(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["near"], "w2": ["far"]}
        async with mesh_of(nodes, tmp_path) as mesh:
            proxy = mesh.proxies["w1"]
            for name in ("near", "far"):
                page = await ask(mesh.lab.pod(name), proxy.place.ipv4, 15020, GET_METRICS)
                assert page.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"istio_build{" in page
                line = await mesh.node_of(name).ended("outbound", "ztunnel-w1")
                assert line["dst.identity"] == "spiffe://cluster.local/ns/istio-system/sa/ztunnel"
                assert line["dst.hbone_addr"] == f"{proxy.place.ipv4}:15020"

            def served() -> set[str]:
                lines = proxy.access("inbound")
                return {line["src.identity"] for line in lines if line.get("dst.workload") == "ztunnel-w1"}

            both = {f"spiffe://cluster.local/ns/default/sa/{name}" for name in ("near", "far")}
            await eventually(lambda: served() == both, "both are known to the proxy")

    asyncio.run(main())


# What is counted


def labels_of(proxy: NodeProxy, name: str, **wanted: str) -> dict[str, str]:
    """Labels of the one sample of a metric that has these."""
    found = []
    for line in proxy.get(15020, "/metrics")[1].splitlines():
        if line.startswith(name + "{"):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line))
            if wanted.items() <= labels.items():
                found.append(labels)
    assert len(found) == 1, found
    return found[0]


def test_both_ends_count_a_connection_alike(tmp_path: Path) -> None:
    async def main() -> None:
        web = {"addresses": ["10.96.1.1"], "ports": {"http": {"port": 80, "target": 8080}}, "pods": ["server"]}
        nodes = {"w1": ["client"], "w2": ["server", "outside"]}
        options: dict[str, Any] = {"mesh": {"services": {"web": web}}, "captured": ["client", "server"]}
        async with (
            mesh_of(nodes, tmp_path, **options) as mesh,
            app(mesh.lab.pod("server")),
            app(mesh.lab.pod("outside")),
        ):
            client = mesh.lab.pod("client")
            answer = await ask(client, "10.96.1.1", 80)
            ours, theirs = mesh.proxies["w1"], mesh.proxies["w2"]
            await ours.ended("outbound", "server")
            await theirs.ended("inbound", "server")
            opened = "istio_tcp_connections_opened_total"
            source = labels_of(ours, opened, reporter="source")
            destination = labels_of(theirs, opened, reporter="destination")
            del source["reporter"], destination["reporter"]
            assert source == destination
            side = {
                "workload": "client",
                "canonical_service": "client",
                "workload_namespace": "default",
                "principal": "spiffe://cluster.local/ns/default/sa/client",
                "app": "client",
                "cluster": "Kubernetes",
            }
            for name, value in side.items():
                assert source[f"source_{name}"] == value
                assert source[f"destination_{name}"] == value.replace("client", "server")
            assert source["destination_service"] == "web.default.svc.cluster.local"
            assert source["destination_service_name"] == "web"
            assert (source["connection_security_policy"], source["response_flags"]) == ("mutual_tls", "-")
            for proxy, reporter in ((ours, "source"), (theirs, "destination")):
                for name, value in (
                    ("istio_tcp_connections_opened_total", 1),
                    ("istio_tcp_connections_closed_total", 1),
                    ("istio_tcp_connections_failed_total", 0),
                    ("istio_tcp_received_bytes_total", len(HELLO)),
                    ("istio_tcp_sent_bytes_total", len(answer)),
                    ("istio_tcp_sockets_open", 0 if reporter == "source" else 1),
                ):
                    assert proxy.metric(name, reporter=reporter) == value, (name, reporter)

            # To somebody outside it is plain, and to somebody unknown nothing is known.
            await ask(client, mesh.lab.pod("outside").ipv4, 8080)
            await ours.ended("outbound", "outside")
            plain = labels_of(ours, opened, destination_workload="outside")
            assert plain["connection_security_policy"] == plain["source_principal"] == "unknown"
            async with app(mesh.lab.worker("w2").place, 9090):
                await ask(client, mesh.lab.worker("w2").gateway(4), 9090)
            await eventually(lambda: ours.metric("istio_tcp_connections_closed_total") == 3, "the third is over")
            unknown = labels_of(ours, opened, destination_workload="unknown")
            assert {value for name, value in unknown.items() if name.startswith("destination_")} == {"unknown"}
            assert unknown["source_workload"] == "client"

    asyncio.run(main())


# The end


async def drains(mesh: Any, proxy: NodeProxy) -> None:
    await eventually(
        lambda: any(line["message"].startswith("draining") for line in proxy.log()), "draining begins"
    )


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    async def main() -> None:
        async with mesh_of({"w1": ["client", "server"]}, tmp_path) as mesh, app(mesh.lab.pod("server")):
            client, proxy = mesh.lab.pod("client"), mesh.proxies["w1"]
            with await connect((str(mesh.lab.pod("server").ipv4), 8080), netns=client.netns) as sock:
                loop = asyncio.get_running_loop()
                assert await loop.sock_recv(sock, 100)
                proxy.process.send_signal(signal.SIGINT)
                await drains(mesh, proxy)
                await loop.sock_sendall(sock, HELLO)  # open connections continue
                assert await loop.sock_recv(sock, 100) == HELLO
                began = time.monotonic()
                proxy.process.send_signal(signal.SIGINT)
                assert await asyncio.to_thread(proxy.process.wait, 10) == 0
                assert time.monotonic() - began < 5  # of 25 that it would have waited
            assert "interrupted again, exiting without waiting for connections" in {
                line["message"] for line in proxy.log()
            }

    asyncio.run(main())


def test_the_start_is_logged_without_secrets(tmp_path: Path) -> None:
    async def main() -> None:
        env = {"XDS_HEADER_x-secret": "hush", "CA_HEADER_x-secret": "hush", "ZTUNNEL_SPIN": "1"}
        async with mesh_of({"w1": ["a"]}, tmp_path, env=env) as mesh:
            proxy = mesh.proxies["w1"]
            # The log's writer may be a moment behind.
            await eventually(
                lambda: any("ZTUNNEL_SPIN " in line["message"] for line in proxy.log()), "the start is logged"
            )
            messages = [line["message"] for line in proxy.log()]
            assert messages[0].startswith("version: version.BuildInfo{")
            (configuration,) = [text for text in messages if text.startswith("running with config: ")]
            assert '"xdsHeaders": ["x-secret"]' in configuration
            assert '"localNode": "w1"' in configuration
            assert "environment variable ZTUNNEL_SPIN is not known; did you mean ZTUNNEL_SPIN_US?" in messages
            assert "hush" not in proxy.log_path.read_text()

    asyncio.run(main())


# Pods that come and go

LOCAL_MESH = "workloads: []\npolicies: []\nservices: []\n"


class LoneProxy(NodeProxy):
    """A proxy process whose agent is the test."""

    def start(self, folder: Path, agent: Agent) -> None:
        self.log_path = folder / "lone.log"
        env = {
            **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
            "PYTHONPATH": str(ROOT),
            "XDS_ADDRESS": "",
            "LOCAL_XDS": LOCAL_MESH,
            "FAKE_CA": "true",
            "INPOD_UDS": str(agent.path),
            "NODE_NAME": "w1",
            "RUST_LOG": "warn",
            "LOG_FORMAT": "json",
        }
        with self.log_path.open("ab") as output:
            self.process = self.place.popen(
                [sys.executable, "-m", "ztunnel", "proxy", "ztunnel"], env=env, stdout=output, stderr=output
            )

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.asynccontextmanager
async def lone_proxy(folder: Path) -> AsyncIterator[tuple[LoneProxy, Agent]]:
    with Lab({"w1": []}) as lab:
        async with Agent() as agent:
            place = lab.worker("w1").place
            proxy = LoneProxy(place, folder, None, None, [])  # type: ignore[arg-type]
            proxy.start(folder, agent)
            await agent.accept()
            assert await agent.ask(SnapshotSent()) == ""
            await eventually(proxy.ready, "ready")
            yield proxy, agent


def info(number: int) -> PodInfo:
    return PodInfo(name=f"pod-{number}", namespace="default", service_account="default")


def test_five_hundred_pods_come_and_go_and_leave_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as stack:
            spaces = [stack.enter_context(Netns.create()) for _ in range(4)]
            async with lone_proxy(tmp_path) as (proxy, agent):

                async def come_and_go(first: int, last: int) -> None:
                    for number in range(first, last):
                        uid = f"uid-{number}"
                        assert await agent.add(uid, spaces[number % len(spaces)], info(number)) == ""
                        assert await agent.ask(DeletePod(PodUid(uid))) == ""
                    await eventually(
                        lambda: proxy.metric("workload_manager_proxies_stopped_total") == last, "all have ended"
                    )

                await come_and_go(0, 200)  # caches and the allocator reach their steady size
                descriptors, threads = proxy.descriptors(), proxy.threads()
                memory = proxy.resident_bytes()
                await come_and_go(200, 700)
                # The last request's connection can exist a little longer.
                await eventually(lambda: proxy.descriptors() <= descriptors, "no descriptor is left over")
                assert proxy.threads() == threads
                assert proxy.resident_bytes() - memory < 4 << 20
                assert proxy.metric("workload_manager_proxies_started_total") == 700
                assert proxy.metric("workload_manager_active_proxy_count") == 0
                assert proxy.metric("workload_manager_pending_proxy_count") == 0
                assert proxy.dump()["workloadState"] == {}
                assert proxy.log() == []  # not a warning

    asyncio.run(main())


def test_a_hundred_pods_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as stack:
            spaces = [stack.enter_context(Netns.create()) for _ in range(100)]
            async with lone_proxy(tmp_path) as (proxy, agent):
                for number, space in enumerate(spaces):
                    assert await agent.add(f"uid-{number}", space, info(number)) == ""
                states = proxy.dump()["workloadState"]
                assert len(states) == 100
                assert {state["state"] for state in states.values()} == {"Up"}
                assert states["uid-7"] == {
                    "connections": {"inbound": [], "outbound": []},
                    "info": {"name": "pod-7", "namespace": "default", "serviceAccount": "default"},
                    "state": "Up",
                }
                proxy.process.terminate()
                assert await asyncio.to_thread(proxy.process.wait, 20) == 0

    asyncio.run(main())


def test_a_pod_that_cannot_start_is_pending_alone(tmp_path: Path) -> None:
    async def main() -> None:
        with Netns.create() as good, Netns.create() as taken:
            async with lone_proxy(tmp_path) as (proxy, agent):
                assert await agent.add("uid-good", good, info(1)) == ""
                with listen("::", 15006, netns=taken):
                    assert "[::]:15006" in await agent.add("uid-taken", taken, info(2))
                    states = proxy.dump()["workloadState"]
                    assert states["uid-good"]["state"] == "Up"
                    assert states["uid-taken"] == {
                        "info": {"name": "pod-2", "namespace": "default", "serviceAccount": "default"},
                        "state": "Pending",
                    }
                    assert proxy.metric("workload_manager_active_proxy_count") == 1
                    assert proxy.metric("workload_manager_pending_proxy_count") == 1
                    assert proxy.ready()  # one pod's trouble is not the node's
                await eventually(
                    lambda: proxy.dump()["workloadState"]["uid-taken"]["state"] == "Up", "it is tried again"
                )
                assert proxy.metric("workload_manager_pending_proxy_count") == 0
                agent.hang_up()
                await eventually(lambda: not proxy.ready(), "an absent agent shows")
                assert proxy.get(15021, "/healthz/ready")[1] == "not ready, pending: workload proxy manager\n"
                assert set(proxy.dump()["workloadState"]) == {"uid-good", "uid-taken"}  # and they go on

    asyncio.run(main())


# Strangers at the tunnel's port


def opening(authority: str) -> bytes:
    """Return the first bytes of an HTTP/2 client that requests a tunnel and sends data through it."""
    head = hpack.Encoder().encode([(":method", "CONNECT"), (":authority", authority)])

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, b"")
        + frame(1, 4, 1, head)
        + frame(0, 1, 1, b"let me in\n")
    )


def heard(place: Place, host: str, folder: Path, shown: Certificate | None, authority: str) -> bytes:
    """What a client with this certificate gets out of a pod's port 15008, as bytes of HTTP/2."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    if shown is not None:
        file = folder / "stranger.pem"
        file.write_bytes(shown.chain_pem + shown.key_pem)
        context.load_cert_chain(file)
    received = b""
    sock = place.socket()
    sock.settimeout(10)
    sock.connect((host, 15008))
    with sock, contextlib.suppress(ssl.SSLError, ConnectionError), context.wrap_socket(sock) as tls:
        tls.sendall(opening(authority))
        while data := tls.recv(65536):
            received += data
            if b"let me in" in received:
                break
    return received


def frame_types(said: bytes) -> Iterator[int]:
    """Return the types of complete frames."""
    while said:
        yield said[3]
        said = said[9 + int.from_bytes(said[:3], "big") :]


class Forger:
    """Certificates of every kind.

    Args:
        folder: of the mesh, with its authority.
    """

    def __init__(self, folder: Path) -> None:
        self._authority = ca.CertificateAuthority.open(folder / "ca", "cluster.local", ca.now())
        self._folder = folder

    def good(self) -> Certificate:
        return self._issue(SpiffeId("cluster.local", "default", "client"))

    def _issue(self, identity: SpiffeId) -> Certificate:
        return self._authority.issue(identity, ca.now(), timedelta(hours=1))

    def foreign(self) -> Certificate:
        other = ca.CertificateAuthority.in_memory("cluster.local", ca.now())
        return other.issue(SpiffeId("cluster.local", "default", "client"), ca.now(), timedelta(hours=1))

    def expired(self) -> Certificate:
        then = ca.now() - timedelta(hours=2)
        return self._authority.issue(SpiffeId("cluster.local", "default", "client"), then, timedelta(hours=1))

    def of_tomorrow(self) -> Certificate:
        then = ca.now() + timedelta(days=1)
        return self._authority.issue(SpiffeId("cluster.local", "default", "client"), then, timedelta(hours=1))

    def nobody(self) -> Certificate:
        """Names a host instead of an identity."""
        return self._authority.issue_for_hosts(["client.default.svc"], ca.now(), timedelta(hours=1))

    def elsewhere(self) -> Certificate:
        return self._issue(SpiffeId("other.domain", "default", "client"))

    def revoked(self) -> Certificate:
        certificate = self.good()
        serial = x509.load_pem_x509_certificates(certificate.chain_pem)[0].serial_number
        self.publish(serial)
        return certificate

    def publish(self, *serials: int) -> None:
        """Write the revocation list."""
        root = x509.load_pem_x509_certificate((self._folder / "ca" / "root-cert.pem").read_bytes())
        key: Any = load_pem_private_key((self._folder / "ca" / "root-key.pem").read_bytes(), None)
        now = ca.now()
        builder = x509.CertificateRevocationListBuilder().issuer_name(root.subject)
        builder = builder.last_update(now).next_update(now + timedelta(days=1))
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        new = self._folder / "crl.new"
        new.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
        new.rename(self._folder / "crl.pem")


@pytest.mark.parametrize("early_data", [True, False], ids=["early-data", "no-early-data"])
def test_strangers_get_no_answer_and_each_is_told_of(tmp_path: Path, *, early_data: bool) -> None:
    """If early data is announced, unauthenticated clients get the SETTINGS with the server's first flight;
    otherwise nothing.
    """
    greeting = [SETTINGS, WINDOW_UPDATE] if early_data else []

    async def main() -> None:
        forger = Forger(tmp_path)
        forger.publish()
        env = {"CRL_PATH": str(tmp_path / "crl.pem"), "ZTUNNEL_EARLY_DATA": str(early_data).lower()}
        nodes = {"w1": ["server"], "w2": ["stranger"]}
        async with mesh_of(nodes, tmp_path, captured=["server"], env=env) as mesh:
            server, stranger, proxy = mesh.lab.pod("server"), mesh.lab.pod("stranger"), mesh.proxies["w1"]
            authority = f"{server.ipv4}:8080"

            async def told(shown: Certificate | None) -> bytes:
                return await asyncio.to_thread(heard, stranger, str(server.ipv4), tmp_path, shown, authority)

            async with app(server):
                assert b"let me in" in await told(forger.good())  # else the others prove nothing
                inbound = proxy.metric("istio_tcp_connections_opened_total", reporter="destination")
                assert inbound == 1
                cases: Mapping[str, tuple[Certificate | None, str]] = {
                    "missing": (None, "no_cert"),
                    "foreign": (forger.foreign(), "chain"),
                    "expired": (forger.expired(), "expired"),
                    "of tomorrow": (forger.of_tomorrow(), "expired"),
                    "nobody": (forger.nobody(), "san"),
                    "elsewhere": (forger.elsewhere(), "san"),
                }
                for number, (name, (shown, reason)) in enumerate(cases.items(), start=1):
                    assert list(frame_types(await told(shown))) == greeting, name
                    await eventually(lambda number=number: len(errors(proxy)) == number, f"the line about {name}")
                    assert f"({reason})" in errors(proxy)[-1], name
                assert proxy.metric("istio_tcp_connections_opened_total", reporter="destination") == 1
                revoked = forger.revoked()
                async with asyncio.timeout(20):
                    while list(frame_types(await told(revoked))) != greeting:  # until the proxy has seen the list
                        pass
                await eventually(lambda: len(errors(proxy)) > len(cases), "the line about the revoked one")
                if (
                    "revoked by CRL" in errors(proxy)[-1]
                ):  # its handshake was over before, and its request not yet here
                    assert list(frame_types(await told(revoked))) == greeting
                    await eventually(lambda: len(errors(proxy)) > len(cases) + 1, "the line about the handshake")
                assert "(revoked)" in errors(proxy)[-1]
                assert proxy.metric("istio_crl_policy_rejections_total", reporter="destination") >= 1
                assert b"let me in" in await told(forger.good())

    asyncio.run(main())


def errors(proxy: NodeProxy) -> list[str]:
    """Return the logged errors of refused tunnels."""
    lines = [line for line in proxy.access("inbound") if line["message"] == "connection failed"]
    return [line["error"] for line in lines]
