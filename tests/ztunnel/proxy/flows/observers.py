"""Hubble's service over the flight recorder of a proxy, in this process, and flows for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.hbone.certificates import Authority
from tests.ports import free_port
from tests.programs import needed
from tests.ztunnel.proxy.istio.accounting.test_flows import DENIED, record
from tests.ztunnel.proxy.istio.admin.test_server import Harness
from xds.model.address import SocketAddress
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.flows.observer import Observer, serve
from ztunnel.proxy.flows.page import More
from ztunnel.proxy.flows.settings import HubbleSettings, Peer
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.flows import shape
from ztunnel.proxy.istio.accounting.outcome import Failed

#: Flags of the relay for its own certificate, and the files of a Secret.
_FILES: Final = (("cert", "crt"), ("key", "key"))


def fill(harness: Harness) -> None:
    """End three connections: a tunnel that closed, one that a policy refused, a plain one that failed."""
    closed = record(harness, Direction.OUTBOUND)
    closed.trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    closed.opened()
    closed.complete()
    denied = record(harness, Direction.INBOUND)
    denied.opened()
    denied.complete(DENIED)
    ends = SocketAddress("10.0.0.7", 4001), SocketAddress("192.0.2.1", 443)
    failed = Record(harness.proxy.node, Direction.OUTBOUND, *ends)
    failed.opened()
    failed.complete(Failed("io error: Connection refused", Reason.REFUSED))


@asynccontextmanager
async def serving(
    harness: Harness,
    settings: HubbleSettings,
    node: str = "c1/n1",
    found: Callable[[], Iterable[Peer]] = tuple,
    more: More | None = None,
) -> AsyncIterator[Observer]:
    """Serve the recorder of a proxy; the address is that of the observer."""
    make = shape(harness.proxy.config)
    observer = Observer(harness.proxy.metrics.flows, make, more, node=node, settings=settings, found=found)
    before = observer.address = ""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve(observer, settings))
        while observer.address == before:
            await asyncio.sleep(0.01)
        try:
            yield observer
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def secret(folder: Path, root: Authority, *names: str) -> Path:
    """Write a folder like a mounted Secret."""
    folder.mkdir(exist_ok=True)
    leaf = root.issue(dns=names)
    for name, content in (("tls.crt", leaf.chain_pem), ("tls.key", leaf.key_pem), ("ca.crt", root.pem)):
        (folder / name).write_bytes(content)
    return folder


@contextmanager
def relaying(
    peer_service: str, cluster: str, client: Path | None, run: Callable[..., Any] = subprocess.Popen
) -> Iterator[str]:
    """Run Hubble's own relay; yield its address.

    Args:
        peer_service: the address of a proxy.
        cluster: the name of the cluster.
        client: a folder with the relay's certificate and the root of the proxies. None: plain text.
        run: starts the program, for example in another network namespace.
    """
    address = f"127.0.0.1:{free_port()}"
    options = ["--disable-client-tls"]
    if client is not None:
        options = [f"--tls-hubble-client-{kind}-file={client}/tls.{name}" for kind, name in _FILES]
        options += [f"--tls-hubble-server-ca-files={client}/ca.crt"]
    command = [
        *(needed("hubble-relay"), "serve", f"--peer-service={peer_service}", f"--cluster-name={cluster}"),
        *("--disable-server-tls", f"--listen-address={address}"),
        f"--health-listen-address=127.0.0.1:{free_port()}",
        *options,
    ]
    home = tempfile.TemporaryDirectory()  # it reads a configuration there, and writes its process id
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = run(command, **quiet, env={**os.environ, "HOME": home.name})
    try:
        yield address
    finally:
        process.kill()
        process.wait()
        home.cleanup()
