"""Measures one pair of tunnel ends: bulk MB/s, requests/s and new connections/s.

Four processes on loopback: a load client, end A (plain socket into tunnel), end B (tunnel into plain
socket), a load server. mTLS 1.3 and HTTP/2 between A and B, one connection. No routing, policy or logs: the
figure is an upper bound for the product, and the same path. Run: ``python -m bench.tunnel_micro``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import multiprocessing
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hbone.aio.connection import connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.spin import SpinSettings
from hbone.settings import Role
from hbone.tls_context import TlsContext, TlsSettings

PIECE = bytes(262_144)


def identity() -> TlsSettings:
    now = datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(1))
    builder = builder.not_valid_after(now + datetime.timedelta(1))
    san = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://cluster.local/ns/a/sa/b")])
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.add_extension(san, critical=True).sign(key, hashes.SHA256())
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return TlsSettings(certificate_chain_pem=pem, private_key_pem=private, trusted_ca_pem=pem)


def listen() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sock.setblocking(False)
    return sock


async def accept_each(listener: socket.socket, handle: Callable[[socket.socket], Any]) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        while True:
            sock, _ = await loop.sock_accept(listener)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tasks.create_task(handle(sock))


async def dial(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


def run_a(listener: socket.socket, tls: TlsSettings | None, port_b: int, spin_s: float) -> None:
    async def main() -> None:
        poller = Poller(SpinSettings(limit_s=spin_s))
        context = TlsContext(Role.CLIENT, tls) if tls is not None else None
        connections = [await connect(await dial(port_b), context, default_client(), poller) for _ in range(2)]
        request = ((b":method", b"CONNECT"), (b":authority", b"127.0.0.1:80"))

        async def handle(sock: socket.socket) -> None:
            best = min(connections, key=lambda connection: connection.open_streams)
            with PlainSocket(sock, poller) as client, await best.open(request) as tunnel:
                await relay(client, tunnel, ByteCounts())

        await accept_each(listener, handle)

    uvloop.run(main())


def run_b(listener: socket.socket, tls: TlsSettings | None, port: int, spin_s: float) -> None:
    async def main() -> None:
        poller = Poller(SpinSettings(limit_s=spin_s))
        context = TlsContext(Role.SERVER, tls) if tls is not None else None

        async def on_request(request: Request) -> None:
            sock = await dial(port)
            with PlainSocket(sock, poller) as app, request.accept() as tunnel:
                await relay(tunnel, app, ByteCounts())

        async def handle(sock: socket.socket) -> None:
            # The second connection sends its first request only after all bulk cases.
            settings = ConnectionSettings(first_request_timeout_s=None)
            await serve_connection(sock, context, settings, poller, on_request)

        await accept_each(listener, handle)

    uvloop.run(main())


def run_server(listener: socket.socket) -> None:
    """Serve connections; the first byte selects the mode: s discards, g sends, e answers with 1 KiB."""
    listener.setblocking(True)

    def serve(sock: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        with contextlib.suppress(OSError), sock:
            kind = sock.recv(1)
            if kind == b"s":
                while sock.recv_into(buffer):
                    pass
                sock.sendall(b"k")
            elif kind == b"g":
                sock.recv(1)
                left = int.from_bytes(sock.recv(8), "big")
                while left > 0:
                    left -= sock.send(PIECE[:left])
            else:
                while sock.recv(4096):
                    sock.sendall(PIECE[:1024])

    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


def upload(port: int, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"s")
        for _ in range(size // len(PIECE)):
            sock.sendall(PIECE)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"k"


def download(port: int, size: int) -> None:
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"g")
        sock.sendall(b" ")
        time.sleep(0.01)
        sock.sendall(size.to_bytes(8, "big"))
        got = 0
        while count := sock.recv_into(buffer):
            got += count
        assert got == size, (got, size)


def request_loop(port: int, until: float, latencies: list[float]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"e")
        while time.perf_counter() < until:
            start = time.perf_counter()
            sock.sendall(PIECE[:1024])
            left = 1024
            while left:
                left -= len(sock.recv(left))
            latencies.append(time.perf_counter() - start)


def connect_loop(port: int, until: float, latencies: list[float]) -> None:
    while time.perf_counter() < until:
        start = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"e" + PIECE[:1])
            left = 1024
            while left:
                left -= len(sock.recv(left))
        latencies.append(time.perf_counter() - start)


def many(count: int, seconds: float, loop: Callable[[int, float, list[float]], None], port: int) -> str:
    latencies: list[float] = []
    until = time.perf_counter() + seconds
    threads = [threading.Thread(target=loop, args=(port, until, latencies)) for _ in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    latencies.sort()
    p50, p99 = latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
    return f"{len(latencies) / elapsed:9,.0f} /s   p50 {p50 * 1e6:6.0f} us   p99 {p99 * 1e6:6.0f} us"


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def chain(tls: bool, spin_s: float) -> Iterator[tuple[int, int, int]]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = identity() if tls else None
    server, b, a = listen(), listen(), listen()
    processes = [
        multiprocessing.Process(target=run_server, args=(server,), daemon=True),
        multiprocessing.Process(target=run_b, args=(b, settings, server.getsockname()[1], spin_s), daemon=True),
        multiprocessing.Process(target=run_a, args=(a, settings, b.getsockname()[1], spin_s), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        time.sleep(0.5)
        yield a.getsockname()[1], processes[2].pid or 0, processes[1].pid or 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-tls", action="store_true")
    parser.add_argument("--spin-us", type=float, default=0)
    parser.add_argument("--only", choices=["bulk", "requests", "connections"])
    args = parser.parse_args()
    size = args.mib << 20
    with chain(not args.no_tls, args.spin_us / 1e6) as (port, pid_a, pid_b):
        upload(port, 16 << 20)
        if args.only in (None, "bulk"):
            for name, run in (("upload", upload), ("download", download)):
                rates = []
                before = cpu_s(pid_a), cpu_s(pid_b)
                for _ in range(args.rounds):
                    start = time.perf_counter()
                    run(port, size)
                    rates.append(size / (time.perf_counter() - start) / 1e6)
                gib = args.rounds * size / 2**30
                used = (cpu_s(pid_a) - before[0]) / gib, (cpu_s(pid_b) - before[1]) / gib
                print(
                    f"bulk {name:9s} {statistics.median(rates):7.0f} MB/s (best {max(rates):.0f})"
                    f"   cpu s/GiB A {used[0]:.2f} B {used[1]:.2f}"
                )
        cases = (("requests", request_loop, (1, 64)), ("connections", connect_loop, (1, 32)))
        for name, loop, counts in cases:
            if args.only in (None, name):
                for count in counts:
                    print(f"{name:11s} x{count:<3d} {many(count, args.seconds, loop, port)}")


if __name__ == "__main__":
    main()
