"""Certificates of workloads and TLS sessions between them, in memory."""

from dataclasses import dataclass

from cryptography import x509

from hbone.errors import TlsError
from hbone.tls import TlsSession, sealed_bytes
from hbone.tls_context import TlsContext
from tests.hbone.certificates import Authority, Leaf
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.csr import IssuedCertificate

WEB = SpiffeId("cluster.local", "shop", "web")
CART = SpiffeId("cluster.local", "shop", "cart")


def issued(leaf: Leaf, roots: bytes, identity: SpiffeId = WEB) -> IssuedCertificate:
    return IssuedCertificate(
        identity=identity,
        chain=tuple(x509.load_pem_x509_certificates(leaf.chain_pem)),
        roots=tuple(x509.load_pem_x509_certificates(roots)),
        chain_pem=leaf.chain_pem,
        roots_pem=roots,
        key_pem=leaf.key_pem,
    )


def certificate(
    root: Authority, identity: SpiffeId = WEB, *, from_day: float = -1, to_day: float = 1
) -> IssuedCertificate:
    return issued(root.issue(str(identity), from_day=from_day, to_day=to_day), root.pem, identity)


@dataclass(slots=True)
class End:
    """One end of a handshake: what it failed with, and what application bytes reached it."""

    session: TlsSession
    error: TlsError | None = None
    received: bytes = b""
    spoken: bool = False


def handshake(client_context: TlsContext, server_context: TlsContext) -> tuple[End, End]:
    """Do a handshake. Each end sends ``hello`` as soon as TLS permits."""
    client, server = End(TlsSession(client_context)), End(TlsSession(server_context))
    room = memoryview(bytearray(sealed_bytes(1000)))
    to_server = to_client = b""
    for _ in range(8):
        to_server += _turn(client, to_client, room)
        to_client = _turn(server, to_server, room)
        to_server = b""
    return client, server


def _turn(end: End, arrived: bytes, room: memoryview) -> bytes:
    plain = memoryview(bytearray(1000))
    sent = b""
    if end.error is None:
        try:
            if arrived:
                end.session.receive(memoryview(arrived))
            if not end.session.established:
                end.session.handshake()
            if end.session.established:
                end.received += bytes(plain[: end.session.read_into(plain)])
                if not end.spoken:
                    end.spoken = True
                    sent += bytes(room[: end.session.seal(b"hello", room)])
        except TlsError as error:
            end.error = error
    return sent + bytes(room[: end.session.seal(b"", room)])
