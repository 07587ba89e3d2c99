"""Measures sealing and opening of TLS records with each way of calling OpenSSL, and handshakes with each group.

Compares :class:`hbone.tls.TlsSession` (cffi pointers) with pyOpenSSL's public calls and with the standard
library's ``ssl.MemoryBIO``, in one process and without sockets. Run: ``python -m bench.tls_micro``.
"""

from __future__ import annotations

import os
import ssl
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import replace

from OpenSSL import SSL

from bench.tunnel_micro import identity
from hbone.settings import Role
from hbone.tls import TlsSession, sealed_bytes
from hbone.tls_context import TlsContext, TlsSettings

MOST = 262_135
PLAIN = memoryview(os.urandom(MOST))
OUT = memoryview(bytearray(sealed_bytes(MOST)))
BACK = memoryview(bytearray(MOST + 65_536))
PIECE = 16_384

Times = tuple[float, float]


def shaken_hands(contexts: tuple[TlsContext, TlsContext]) -> tuple[TlsSession, TlsSession]:
    """Return a client and a server session after their handshake with mutual authentication."""
    client, server = map(TlsSession, contexts)
    while not (client.established and server.established):
        for one, other in ((client, server), (server, client)):
            if not one.established:
                one.handshake()
            other.receive(memoryview(bytes(OUT[: one.seal(b"", OUT)])))
    client.read_into(BACK)
    return client, server


def ours(settings: TlsSettings) -> Callable[[int], Times]:
    client, server = shaken_hands((TlsContext(Role.CLIENT, settings), TlsContext(Role.SERVER, settings)))

    def run(size: int) -> Times:
        start = time.perf_counter()
        sealed = client.seal(PLAIN[:size], OUT)
        middle = time.perf_counter()
        server.receive(OUT[:sealed])
        assert server.read_into(BACK) == size
        return middle - start, time.perf_counter() - middle

    return run


def public(settings: TlsSettings) -> Callable[[int], Times]:
    client = SSL.Connection(TlsContext(Role.CLIENT, replace(settings, trusted_ca_pem=None)).raw)
    server = SSL.Connection(TlsContext(Role.SERVER, replace(settings, trusted_ca_pem=None)).raw)
    client.set_connect_state()
    server.set_accept_state()

    def attempt(call: Callable[[], object]) -> object:
        try:
            return call()
        except SSL.WantReadError:
            return b""

    for _ in range(4):
        for one, other in ((client, server), (server, client)):
            attempt(one.do_handshake)
            data = attempt(lambda one=one: one.bio_read(65_536))  # type: ignore[misc]
            if data:
                other.bio_write(data)  # type: ignore[arg-type]
    attempt(lambda: client.recv(10))

    def run(size: int) -> Times:
        start = time.perf_counter()
        client.sendall(PLAIN[:size])
        data = client.bio_read(size + 65_536)
        middle = time.perf_counter()
        server.bio_write(data)
        got = 0
        while got < size:
            got += server.recv_into(BACK[got:], PIECE)
        return middle - start, time.perf_counter() - middle

    return run


def standard(settings: TlsSettings) -> Callable[[int], Times]:
    assert settings.certificate_chain_pem is not None
    assert settings.private_key_pem is not None
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(settings.certificate_chain_pem + settings.private_key_pem)
        file.flush()
        server_context.load_cert_chain(file.name)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    to_client, from_client, to_server, from_server = (ssl.MemoryBIO() for _ in range(4))
    client = client_context.wrap_bio(to_client, from_client)
    server = server_context.wrap_bio(to_server, from_server, server_side=True)
    for _ in range(4):
        for one, out, into in ((client, from_client, to_server), (server, from_server, to_client)):
            try:
                one.do_handshake()
            except ssl.SSLWantReadError:
                pass
            into.write(out.read())
    try:
        client.read(1)
    except ssl.SSLWantReadError:
        pass

    def run(size: int) -> Times:
        start = time.perf_counter()
        for position in range(0, size, PIECE):
            client.write(PLAIN[position : min(size, position + PIECE)])
        data = from_client.read()
        middle = time.perf_counter()
        to_server.write(data)
        got = 0
        while got < size:
            got += server.read(PIECE, BACK[got:])  # type: ignore[operator]  # typeshed knows bytearrays only
        return middle - start, time.perf_counter() - middle

    return run


def main() -> None:
    settings = identity()
    print(f"{'':22s} {'bytes':>8s} {'seal us':>9s} {'open us':>9s}   (best of 5 rounds)")
    for name, make in (("cffi (ours)", ours), ("pyOpenSSL, public", public), ("ssl.MemoryBIO", standard)):
        run = make(settings)
        for size, count in ((1024, 2000), (PIECE, 500), (MOST, 80)):
            rounds = []
            for _ in range(5):
                times = [run(size) for _ in range(count)]
                rounds.append([sum(column) / count * 1e6 for column in zip(*times, strict=True)])
            seal, unseal = min(rounds, key=sum)
            print(f"{name:22s} {size:8d} {seal:9.1f} {unseal:9.1f}")
    print(f"\n{'handshake':22s} {'both us':>9s}")
    for groups in (None, ("X25519",)):
        offered = replace(settings, groups=groups)
        contexts = TlsContext(Role.CLIENT, offered), TlsContext(Role.SERVER, offered)
        best = min(timeit.repeat(lambda: shaken_hands(contexts), number=100, repeat=5))  # noqa: B023
        print(f"{shaken_hands(contexts)[0].facts().group or '':22s} {best / 100 * 1e6:9.1f}")


if __name__ == "__main__":
    main()
