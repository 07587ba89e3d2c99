"""Certificates over gRPC: what the authority sees, how it is known, and each failure in words."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.limits import WAIT_S
from tests.ztunnel.proxy.identity.material import CART, WEB
from xds.aio.grpc_server import new_server
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from ztunnel.proxy.identity.authority import CertificateAuthority
from ztunnel.proxy.identity.csr import AuthorityUnreachable, IdentityError
from ztunnel.proxy.istio.certificates.ca_client import METHOD, IstioCertificateAuthority
from ztunnel.proxy.istio.certificates.credentials import Credentials, Endpoint, Roots, Token
from ztunnel.proxy.istio.certificates.fake_ca import FakeCertificateAuthority

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


class FakeCa:
    """An authority behind gRPC."""

    def __init__(self) -> None:
        self.authority = CertificateAuthority.in_memory("cluster.local", NOW)
        self.requests: list[IstioCertificateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.identity = WEB

    async def create(self, request: IstioCertificateRequest, context: Any) -> IstioCertificateResponse:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refusal is not None:
            await context.abort(*self.refusal)
        key = x509.load_pem_x509_csr(request.csr.encode()).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        leaf = self.authority.certify(key, self.identity, NOW, DAY)
        root = self.authority.root_pem.decode()
        return IstioCertificateResponse(cert_chain=[leaf.public_bytes(Encoding.PEM).decode(), root])

    async def serve(self, address: str, hosts: list[str] | None = None) -> tuple[Any, int]:
        server = new_server()
        handler = grpc.unary_unary_rpc_method_handler(
            self.create,
            request_deserializer=IstioCertificateRequest.FromString,
            response_serializer=IstioCertificateResponse.SerializeToString,
        )
        service, _, method = METHOD.lstrip("/").partition("/")
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
        if hosts is None:
            port = server.add_insecure_port(address)
        else:
            own = self.authority.issue_for_hosts(hosts, NOW, DAY)
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(own.key_pem, own.chain_pem)]))
        await server.start()
        return server, port


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            await body()

    asyncio.run(main())


def client(target: str, *, roots: Roots | None = None, **options: Any) -> IstioCertificateAuthority:
    credentials = options.pop("credentials", Credentials(token=Token("secret-token")))
    options.setdefault("impersonate", True)
    return IstioCertificateAuthority(Endpoint.parse(target), credentials, roots, **options)


def test_signing_request_has_istiods_fields_and_metadata(tmp_path: Path) -> None:
    async def body() -> None:
        ca = FakeCa()
        server, _ = await ca.serve(f"unix:{tmp_path}/ca")
        ours = client(
            f"unix:{tmp_path}/ca",
            credentials=Credentials(token=Token("secret-token"), cluster_id="c1", headers=(("x-extra", "1"),)),
            lifetime_s=3600.0,
        )
        issued = await ours.issue(WEB)
        assert issued.identity == WEB
        assert issued.roots_pem == ca.authority.root_pem
        request, metadata = ca.requests[0], ca.metadata[0]
        assert dict(request.metadata) == {"ImpersonatedIdentity": "spiffe://cluster.local/ns/shop/sa/web"}
        assert request.validity_duration == 3600
        assert (metadata["authorization"], metadata["clusterid"], metadata["x-extra"]) == (
            "Bearer secret-token",
            "c1",
            "1",
        )
        ca.identity = CART
        with pytest.raises(IdentityError, match=f"did not find expected SAN: {WEB}"):
            await ours.issue(WEB)
        alone = client(f"unix:{tmp_path}/ca", impersonate=False)
        assert (await alone.issue(WEB)).identity == CART
        assert not ca.requests[-1].HasField("metadata")
        for each in (ours, alone):
            await each.close()
        await server.stop(0)

    run(body)


def test_ca_failures_have_texts(tmp_path: Path) -> None:
    async def body() -> None:
        ca = FakeCa()
        server, _ = await ca.serve(f"unix:{tmp_path}/ca")
        ca.refusal = (grpc.StatusCode.UNAUTHENTICATED, "request authenticate failure")
        ours = client(f"unix:{tmp_path}/ca")
        with pytest.raises(IdentityError) as caught:
            await ours.issue(WEB)
        assert str(caught.value) == "signing gRPC error (UNAUTHENTICATED): request authenticate failure"
        await ours.close()
        await server.stop(0)
        gone = client(f"unix:{tmp_path}/nobody")
        with pytest.raises(AuthorityUnreachable, match=r"signing gRPC error \(UNAVAILABLE\)"):
            await gone.issue(WEB)
        await gone.close()
        missing = client(f"unix:{tmp_path}/ca", credentials=Credentials(token=Token(f"{tmp_path}/token")))
        with pytest.raises(AuthorityUnreachable, match="cannot read token file"):
            await missing.issue(WEB)
        await missing.close()

    run(body)


def test_unresponsive_authority_times_out(tmp_path: Path) -> None:
    async def body() -> None:
        ca = FakeCa()

        async def never(request: IstioCertificateRequest, context: Any) -> IstioCertificateResponse:
            await asyncio.Event().wait()
            raise AssertionError

        ca.create = never  # type: ignore[method-assign]
        server, _ = await ca.serve(f"unix:{tmp_path}/ca")
        ours = client(f"unix:{tmp_path}/ca", timeout_s=0.2)
        with pytest.raises(AuthorityUnreachable, match=r"signing gRPC error \(DEADLINE_EXCEEDED\)"):
            await ours.issue(WEB)
        await ours.close()
        await server.stop(0)

    run(body)


def test_ca_roots_are_reloaded_for_each_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        path = tmp_path / "root.pem"
        ca, stranger = FakeCa(), FakeCa()
        server, port = await ca.serve("127.0.0.1:0", ["127.0.0.1"])
        ours = client(f"https://127.0.0.1:{port}", roots=Roots(str(path)))
        with pytest.raises(AuthorityUnreachable, match="cannot read root certificate file"):
            await ours.issue(WEB)
        path.write_bytes(stranger.authority.root_pem)
        with pytest.raises(AuthorityUnreachable, match=r"\(UNAVAILABLE\).*TLS failed \(chain\)"):
            await ours.issue(WEB)
        assert ca.requests == []
        path.write_bytes(ca.authority.root_pem)
        await ours.issue(WEB)
        path.unlink()
        await ours.issue(WEB)
        assert "the old ones stay in use" in caplog.text
        path.write_bytes(stranger.authority.root_pem)
        with pytest.raises(IdentityError):
            await ours.issue(WEB)
        await ours.close()
        await server.stop(0)

    run(body)


def test_alternative_ca_hostname_is_accepted(tmp_path: Path) -> None:
    async def body() -> None:
        for hosts in (["istiod.example"], ["127.0.0.1"]):
            ca = FakeCa()
            server, port = await ca.serve("127.0.0.1:0", hosts)
            roots = Roots(ca.authority.root_pem.decode())
            ours = client(f"https://127.0.0.1:{port}", roots=roots, alternative_name="istiod.example")
            await ours.issue(WEB)
            await ours.issue(WEB)
            wrong = client(f"https://127.0.0.1:{port}", roots=roots, alternative_name="other.example")
            if hosts == ["istiod.example"]:
                with pytest.raises(AuthorityUnreachable, match=r"\(UNAVAILABLE\)"):
                    await wrong.issue(WEB)
            for each in (ours, wrong):
                await each.close()
            await server.stop(0)

    run(body)


def test_the_fake_authority_warns_and_certifies(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCertificateAuthority(now=lambda: datetime.now(UTC), lifetime_s=60)
    assert "WORTHLESS" in caplog.text
    issued = asyncio.run(fake.issue(WEB))
    assert issued.identity == WEB
    issued.chain[0].verify_directly_issued_by(issued.roots[0])
    assert issued.not_after - datetime.now(UTC) < timedelta(seconds=61)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_authority_that_closes_connections_has_a_failure_text(
    tmp_path: Path, runner: Callable[[Any], None]
) -> None:
    """GOAWAY, or a limit of no streams, in the bytes that open the connection: an attempt that failed, no more."""
    settings = b"\0\0\6\4\0\0\0\0\0\0\3\0\0\0\0"
    goaway = b"\0\0\x0c\7\0\0\0\0\0" + bytes(8) + b"stop"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(settings + goaway)
        while await reader.read(65536):
            pass
        writer.close()

    async def body() -> None:
        server = await asyncio.start_unix_server(serve, tmp_path / "ca")
        async with server:
            ours = client(f"unix:{tmp_path}/ca")
            for _ in range(10):
                with pytest.raises(
                    AuthorityUnreachable, match=r"signing gRPC error \(UNAVAILABLE\): .* GOAWAY NO_ERROR stop"
                ):
                    await ours.issue(WEB)
            await ours.close()

    runner(asyncio.wait_for(body(), WAIT_S))
