"""The control plane as Istio's node proxies use it: over TLS with tokens, over a socket without."""

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from tests.hbone.certificates import of_unknown_version
from tests.limits import WAIT_S
from tests.ztunnel.control_plane.meshes import document, mesh
from xds.aio.server import Caller, NotAdmitted
from xds.errors import ConfigError
from xds.model.identity import SpiffeId
from xds.proto import registry
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DeltaDiscoveryResponse
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from xds.proto.istio.security.authorization_pb2 import Authorization
from xds.proto.istio.workload.workload_pb2 import Address
from xds.protocol.types import CDS, method_path
from ztunnel.cli import main as ztunnel
from ztunnel.control_plane.istio import Registrar, is_node_proxy
from ztunnel.control_plane.server import ControlPlane
from ztunnel.control_plane.tokens import node_token
from ztunnel.proxy.identity.authority import CertificateAuthority
from ztunnel.proxy.identity.csr import IdentityError, signing_request
from ztunnel.proxy.istio.certificates.ca_client import IstioCertificateAuthority
from ztunnel.proxy.istio.certificates.credentials import Credentials, Endpoint, Roots, Token

ADDRESS, AUTHORIZATION = registry.type_url(Address), registry.type_url(Authorization)
SECRET = b"s" * 32
NOW = datetime.now(UTC)
KEY = ec.generate_private_key(ec.SECP256R1())
REVIEWS = SpiffeId("cluster.local", "default", "bookinfo-reviews")
PRODUCTPAGE = SpiffeId("cluster.local", "default", "bookinfo-productpage")  # on worker2 only
LEGACY = SpiffeId("cluster.local", "default", "default")  # in no mesh


def node(
    name: str, node_id: str = "ztunnel~10.0.0.1~ztunnel-x.istio-system~istio-system.svc.cluster.local"
) -> Node:
    message = Node(id=node_id)
    message.metadata.update({"NODE_NAME": name})
    return message


# ---------------------------------------------------------------------- who may have what, by values


def registrar(lifetime: timedelta = timedelta(hours=24)) -> Registrar:
    served = mesh()
    authority = CertificateAuthority.in_memory("cluster.local", NOW)
    return Registrar(lambda: served, authority, SECRET, lifetime, lambda: NOW)


def caller(token: str | None = None, *, local: bool = True) -> Caller:
    metadata = {} if token is None else {"authorization": f"Bearer {token}"}
    return Caller(metadata=metadata, local=local)


def token_for(name: str, expires: timedelta = timedelta(hours=1)) -> str:
    return node_token(SECRET, name, (NOW + expires).timestamp())


def request(
    identity: SpiffeId, *, impersonate: bool = True, validity_s: int = 0, csr: bytes | None = None
) -> bytes:
    message = IstioCertificateRequest(
        csr=(csr or signing_request(identity, KEY)).decode(), validity_duration=validity_s
    )
    if impersonate:
        message.metadata.update({"ImpersonatedIdentity": str(identity)})
    return message.SerializeToString()


def leaf(answer: bytes) -> x509.Certificate:
    chain = IstioCertificateResponse.FromString(answer).cert_chain
    found, root = (x509.load_pem_x509_certificate(pem.encode()) for pem in chain)
    found.verify_directly_issued_by(root)
    return found


@pytest.mark.parametrize("impersonate", [True, False])
def test_a_trusted_socket_gets_certificates_of_the_mesh_and_of_nobody_else(impersonate: bool) -> None:
    found = leaf(registrar().create_certificate(request(PRODUCTPAGE, impersonate=impersonate), caller()))
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [str(PRODUCTPAGE)]
    assert found.public_key() == KEY.public_key()
    for stranger in (LEGACY, SpiffeId("other.example", "default", "bookinfo-productpage")):
        with pytest.raises(NotAdmitted, match=f"no pod in the mesh is {stranger}"):
            registrar().create_certificate(request(stranger, impersonate=impersonate), caller())


@pytest.mark.parametrize("local", [True, False])
def test_a_token_gets_what_lives_on_its_node(local: bool) -> None:
    who = caller(token_for("worker"), local=local)
    registrar().create_certificate(request(REVIEWS), who)
    with pytest.raises(NotAdmitted, match=f"no pod on node worker is {PRODUCTPAGE}"):
        registrar().create_certificate(request(PRODUCTPAGE), who)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "a bearer token is needed"),
        ({"authorization": "Basic abc"}, "a bearer token is needed"),
        ({"authorization": "Bearer"}, "not one of this control plane"),
        ({"authorization": "Bearer abc.def.ghi"}, "not one of this control plane"),
        ({"authorization": f"Bearer {node_token(b'x' * 32, 'worker', 9e9)}"}, "not one of this control plane"),
        ({"authorization": f"Bearer {token_for('worker', timedelta(seconds=-1))}"}, "has expired"),
        ({"authorization": f"Bearer {token_for('mars')}"}, "which the mesh does not have"),
    ],
)
def test_unknown_callers_are_refused(metadata: dict[str, str], words: str) -> None:
    stranger = Caller(metadata=metadata, local=False)
    with pytest.raises(NotAdmitted, match=words):
        registrar().create_certificate(request(REVIEWS), stranger)
    with pytest.raises(NotAdmitted, match=words):
        registrar().admit(node("worker"), stranger)


def test_a_token_is_for_one_node() -> None:
    ours = registrar()
    ours.admit(node("worker"), caller(token_for("worker"), local=False))
    ours.admit(node("anything"), caller())
    with pytest.raises(NotAdmitted, match="the token is for node worker, the caller says it is worker2"):
        ours.admit(node("worker2"), caller(token_for("worker")))
    with pytest.raises(NotAdmitted, match="the caller says it is none"):
        ours.admit(Node(id="x"), caller(token_for("worker"), local=False))


def test_no_certificate_lives_longer_than_all_others() -> None:
    ours = registrar(timedelta(hours=1))
    for validity_s, expected in ((0, 3600), (60, 60), (10**12, 3600)):
        found = leaf(ours.create_certificate(request(REVIEWS, validity_s=validity_s), caller()))
        assert abs((found.not_valid_after_utc - NOW).total_seconds() - expected) <= 1
    with pytest.raises(ConfigError, match="-1 seconds"):
        ours.create_certificate(request(REVIEWS, validity_s=-1), caller())


def csr(*uris: str, key: Any = KEY) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    signed_with = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, signed_with).public_bytes(Encoding.PEM)


_P256 = bytes.fromhex("2a8648ce3d030107")  # the curve of a key


def tampered(old: bytes = b"bookinfo", new: bytes = b"bookinfa") -> bytes:
    der = bytearray(x509.load_pem_x509_csr(signing_request(REVIEWS, KEY)).public_bytes(Encoding.DER))
    position = der.index(old)
    der[position : position + len(old)] = new
    return x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff", "malformed request"),
        (request(REVIEWS, csr=b"nonsense"), "not a certificate signing request"),
        (request(REVIEWS, csr=of_unknown_version(csr(str(REVIEWS)))), "not a certificate signing request"),
        (request(REVIEWS, csr=tampered(_P256, _P256[:-1] + b"\x63")), "not a certificate signing request"),
        (request(REVIEWS, csr=tampered()), "not signed by its own key"),
        (request(REVIEWS, impersonate=False, csr=csr()), "exactly one identity"),
        (request(REVIEWS, impersonate=False, csr=csr(str(REVIEWS), str(PRODUCTPAGE))), "exactly one identity"),
        (request(REVIEWS, impersonate=False, csr=csr("spiffe://x/y")), "not a workload identity"),
        (request(REVIEWS, csr=csr(str(REVIEWS), key=rsa.generate_private_key(65537, 1024))), "2048 bits at least"),
        (request(REVIEWS, csr=csr(str(REVIEWS), key=ed25519.Ed25519PrivateKey.generate())), "keys must be"),
    ],
)
def test_requests_that_make_no_sense(data: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        registrar().create_certificate(data, caller())


@given(data=st.binary(max_size=200), text=st.text(max_size=50))
def test_any_request_is_answered_or_refused(data: bytes, text: str) -> None:
    ours = registrar()
    impersonated = IstioCertificateRequest(csr=signing_request(REVIEWS, KEY).decode())
    impersonated.metadata.update({"ImpersonatedIdentity": text})
    for sent in (data, IstioCertificateRequest(csr=text).SerializeToString(), impersonated.SerializeToString()):
        with pytest.raises((ConfigError, NotAdmitted)):
            ours.create_certificate(sent, caller())


@pytest.mark.parametrize(
    ("node_id", "expected"),
    [("ztunnel~10.0.0.1~z.ns~ns.svc.cluster.local", True), ("sidecar~0.0.0.0~a.b~c", False), ("node-1", False)],
)
def test_istios_node_proxies_are_known_by_their_id(node_id: str, expected: bool) -> None:
    assert is_node_proxy(Node(id=node_id)) is expected


@pytest.mark.parametrize("node_id", ["ztunnel", "ztunnel~a~b", "ztunnel~a~b~c~d", "ztunnel~~b~c"])
def test_ids_that_istiod_refuses_are_refused(node_id: str) -> None:
    with pytest.raises(ConfigError, match="is not ztunnel~"):
        is_node_proxy(Node(id=node_id))


# ---------------------------------------------------------------------- over real sockets


class Stream:
    """A delta stream as Rust ztunnel opens it."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.call = channel.stream_stream(
            method_path(None, delta=True),
            request_serializer=DeltaDiscoveryRequest.SerializeToString,
            response_deserializer=DeltaDiscoveryResponse.FromString,
        )(metadata=metadata)

    async def send(self, type_url: str, **fields: Any) -> None:
        await self.call.write(DeltaDiscoveryRequest(type_url=type_url, **fields))

    async def next(self) -> DeltaDiscoveryResponse:
        """The next response, which is acknowledged."""
        response = await self.call.read()
        assert isinstance(response, DeltaDiscoveryResponse)
        await self.send(response.type_url, response_nonce=response.nonce)
        return response


def serve(tmp_path: Path, body: Callable[[ControlPlane], Awaitable[None]], *, tls: bool) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump(document()))

    async def main() -> None:
        addresses = ["127.0.0.1:0"] if tls else []
        plane = ControlPlane(
            path,
            [*addresses, f"unix:{tmp_path}/xds"],
            tmp_path / "ca",
            tls_hosts=["127.0.0.1", "istiod.example"] if tls else (),
        )
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(plane.run())
            await plane.ready.wait()
            await body(plane)
            serving.cancel()

    asyncio.run(main())


def command_token(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump(document()))
    status = ztunnel(["control-plane", str(path), "--ca-dir", str(tmp_path / "ca"), "--token", name])
    return status, capsys.readouterr().out.strip()


def test_a_proxy_elsewhere_with_tls_and_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_token(tmp_path, "mars", capsys)[0] == 1
    status, token = command_token(tmp_path, "worker", capsys)
    assert status == 0
    (tmp_path / "token").write_text(f"{token}\n")

    async def body(plane: ControlPlane) -> None:
        roots = Roots(str(tmp_path / "ca/root-cert.pem"))
        secret = Credentials(token=Token(str(tmp_path / "token")))
        target = plane.addresses[0]
        authority = IstioCertificateAuthority(Endpoint.parse(f"https://{target}"), secret, roots, impersonate=True)
        issued = await authority.issue(REVIEWS)
        assert issued.roots_pem == roots.read()
        with pytest.raises(IdentityError, match=r"UNAUTHENTICATED\): no pod on node worker is"):
            await authority.issue(PRODUCTPAGE)
        await authority.close()
        bare = IstioCertificateAuthority(
            Endpoint.parse(f"https://{target}"),
            Credentials(token=Token(None, tmp_path / "none")),
            roots,
            impersonate=True,
        )
        with pytest.raises(IdentityError, match=r"UNAUTHENTICATED\): a bearer token is needed"):
            await bare.issue(REVIEWS)
        await bare.close()
        credentials = grpc.ssl_channel_credentials(roots.read())
        async with grpc.aio.secure_channel(target, credentials) as channel:
            stream = Stream(channel, secret.metadata())
            await stream.send(ADDRESS, node=node("worker"))
            assert len((await stream.next()).resources) == 6
            for metadata, who, code in (
                ((), "worker", grpc.StatusCode.UNAUTHENTICATED),
                (secret.metadata(), "worker2", grpc.StatusCode.UNAUTHENTICATED),
            ):
                refused = Stream(channel, metadata)
                await refused.send(ADDRESS, node=node(who))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await refused.call.read()
                assert caught.value.code() is code

    serve(tmp_path, body, tls=True)


def test_the_socket_needs_no_token_even_beside_tls(tmp_path: Path) -> None:
    async def body(plane: ControlPlane) -> None:
        none = Credentials(token=Token(None, tmp_path / "none"))
        local = IstioCertificateAuthority(Endpoint.parse(plane.addresses[-1]), none, None, impersonate=True)
        await local.issue(PRODUCTPAGE)
        await local.close()

    serve(tmp_path, body, tls=True)


def test_an_edit_sends_the_difference_and_addresses_come_before_policies(tmp_path: Path) -> None:
    async def body(plane: ControlPlane) -> None:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/xds") as channel:
            stream = Stream(channel)
            await stream.send(ADDRESS, node=node("worker"))
            await stream.send(AUTHORIZATION, node=node("worker"))
            first, second = await stream.next(), await stream.next()
            assert [first.type_url, second.type_url] == [ADDRESS, AUTHORIZATION]
            assert all(resource.version for resource in (*first.resources, *second.resources))
            assert [resource.name for resource in second.resources] == ["default/reviews-viewer"]
            changed = document(policies={})
            changed["pods"]["legacy"]["mesh"] = True
            del changed["pods"]["productpage"]
            (tmp_path / "mesh.yaml").write_text(yaml.safe_dump(changed))
            updates = {response.type_url: response for response in (await stream.next(), await stream.next())}
            # Those the policy was for do not name it any more.
            assert [resource.name for resource in updates[ADDRESS].resources] == [
                f"Kubernetes//Pod/default/{name}" for name in ("legacy", "reviews-v1", "reviews-v2", "reviews-v3")
            ]
            assert list(updates[ADDRESS].removed_resources) == ["Kubernetes//Pod/default/productpage"]
            assert list(updates[AUTHORIZATION].removed_resources) == ["default/reviews-viewer"]

    serve(tmp_path, body, tls=False)


def test_on_demand_and_coming_back(tmp_path: Path) -> None:
    everything = ["*"]

    async def body(plane: ControlPlane) -> None:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/xds") as channel:
            stream = Stream(channel)
            nothing = {"resource_names_subscribe": everything, "resource_names_unsubscribe": everything}
            await stream.send(ADDRESS, node=node("worker"), **nothing)
            own = await stream.next()
            known = {resource.name: resource.version for resource in own.resources}
            assert set(known) == {f"Kubernetes//Pod/default/{name}" for name in ("reviews-v1", "legacy")}
            await stream.send(ADDRESS, resource_names_subscribe=["/10.96.183.192"])
            answer = await stream.next()
            known |= {resource.name: resource.version for resource in answer.resources}
            (service,) = [resource for resource in answer.resources if resource.aliases[0] == "/10.96.183.192"]
            assert service.name == "default/reviews.default.svc.cluster.local"
            assert len(known) == 5, "the service and all of its pods"
            address = Address.FromString(service.resource.value).service.addresses[0].address
            assert ipaddress.ip_address(address) == ipaddress.ip_address("10.96.183.192")
            again = Stream(channel)
            await again.send(ADDRESS, node=node("worker"), initial_resource_versions=known, **nothing)
            assert list((await again.next()).resources) == []
            changed = document()
            changed["pods"]["reviews-v3"]["version"] = "v3"
            (tmp_path / "mesh.yaml").write_text(yaml.safe_dump(changed))
            update = await again.next()
            assert [resource.name for resource in update.resources] == ["Kubernetes//Pod/default/reviews-v3"]

    serve(tmp_path, body, tls=False)


def test_registry_only_cannot_be_served_in_istios_dialect_and_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(plane: ControlPlane) -> None:
        (tmp_path / "mesh.yaml").write_text(yaml.safe_dump(document(outbound="REGISTRY_ONLY")))
        while not plane.mesh.registry_only:
            await asyncio.sleep(0.02)
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/xds") as channel:
            stream = Stream(channel)
            await stream.send(ADDRESS, node=node("worker"))
            await stream.next()
        assert "node worker will pass through traffic to unknown destinations" in caplog.text

    serve(tmp_path, body, tls=False)


def test_a_malformed_id_is_told_so_and_envoys_dialect_is_as_it_was(tmp_path: Path) -> None:
    async def body(plane: ControlPlane) -> None:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/xds") as channel:
            stream = Stream(channel)
            await stream.send(ADDRESS, node=node("worker", "ztunnel~nonsense"))
            with pytest.raises(grpc.aio.AioRpcError, match="is not ztunnel~"):
                await stream.call.read()
            assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
            envoy = Stream(channel)
            await envoy.send(CDS, node=node("worker", "sidecar~0.0.0.0~z.ns~ns"))
            assert (await envoy.next()).resources

    serve(tmp_path, body, tls=False)
