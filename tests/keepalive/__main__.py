"""Quiet connections to a server of grpc-go with its default enforcement: ``python -m tests.keepalive --minutes
10``.

The streams to a control plane and to a PolicySync server stay open and quiet, the channel to a certificate
authority stays open without a call. Each must keep its one connection for the whole time; one PING too many ends
it after three.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tests.ports import free_port
from xds.aio.channel import Channel
from xds.aio.client import AdsClient
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.protocol.resource import Update

SERVER = Path(".tools/keepalive-server")
CDS = "type.googleapis.com/envoy.config.cluster.v3.Cluster"


def build() -> None:
    """Build the server; needs Go, a minute once."""
    SERVER.parent.mkdir(exist_ok=True)
    source = Path(__file__).with_name("server")
    subprocess.run(["go", "build", "-o", SERVER.absolute(), "."], cwd=source, check=True)


class Served:
    """A running server, and how often connections to it began."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    async def follow(self, output: asyncio.StreamReader) -> None:
        """Count what the server prints until it ends."""
        while line := await output.readline():
            self.begun += line == b"begins\n"
            self.ended += line == b"ends\n"


@contextlib.asynccontextmanager
async def serving(address: str) -> AsyncIterator[Served]:
    """Run a server at an address or a socket's path."""
    process = await asyncio.create_subprocess_exec(SERVER, address, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"serves\n"
    served = Served()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.follow(process.stdout), name="server's output")
            yield served
            process.kill()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def ads(address: str, seconds: float) -> None:
    """The stream to a control plane."""

    async def receive(_: Update) -> None:
        return

    async with AdsClient(address, Node(id="n")) as client:
        client.subscribe(CDS, None, receive)
        await asyncio.sleep(seconds)


async def policy_sync(address: str, seconds: float) -> None:
    """A server stream that sends nothing."""
    async with Channel(address) as channel:
        call = await channel.call("/felix.PolicySync/Sync")
        await call.write(b"", ended=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call.read(), seconds)


async def authority(address: str, seconds: float) -> None:
    """A channel without a call, after one that was given up."""
    async with Channel(address) as channel:
        call = await channel.call("/istio.v1.auth.IstioCertificateService/CreateCertificate")
        call.cancel()
        await asyncio.sleep(seconds)


CLIENTS = {"control plane": ads, "PolicySync": policy_sync, "certificate authority": authority}


async def measure(seconds: float) -> dict[str, tuple[int, int]]:
    """Return how many connections each client began, and how many ended before it did."""

    async def one(name: str, socket: str) -> tuple[int, int]:
        address = socket or f"127.0.0.1:{free_port()}"
        async with serving(address) as served:
            await CLIENTS[name](f"unix:{socket}" if socket else address, seconds)
            return served.begun, max(0, served.ended - 1)

    with tempfile.TemporaryDirectory() as folder:
        sockets = {name: os.path.join(folder, "sync") if name == "PolicySync" else "" for name in CLIENTS}
        results = await asyncio.gather(*(one(name, socket) for name, socket in sockets.items()))
    return dict(zip(sockets, results, strict=True))


def main() -> int:
    """Print a line per client. Return 1 if one lost its connection."""
    parser = argparse.ArgumentParser(prog="python -m tests.keepalive")
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    build()
    results = asyncio.run(measure(minutes * 60))
    for name, (begun, _) in results.items():
        print(f"{name}: {begun} connection{'s' * (begun != 1)} in {minutes:g} minutes")
    return int(any(begun != 1 or ended for begun, ended in results.values()))


if __name__ == "__main__":
    sys.exit(main())
