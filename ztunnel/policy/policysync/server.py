"""The PolicySync server: one socket for each pod, which identifies the pod, and one for a node's proxy.

A stream's next message is computed at the moment when it can be written, from the state that the client has and
the current state. So a slow client needs no queue, and gets the newest state when it reads again. A new stream on
a pod's socket ends the previous one without an error, like in Felix. A node's socket serves all processes of a
proxy, and other clients.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from xds.aio.grpc_server import Context, GrpcServer, read
from xds.dialects.calico.policysync import PolicyForm, decode_report, encode
from xds.errors import ConfigError
from xds.grpc.serve_error import ServeError
from xds.model import calico as c
from xds.proto.felix.policysync_pb2 import ReportResult
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.policysync.flows import Flows
from ztunnel.policy.policysync.view import View, by_names, changes, view_of
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.watched_file import FileState, file_state

log = logging.getLogger(__name__)

SYNC: Final = "/felix.PolicySync/Sync"
REPORT: Final = "/felix.PolicySync/Report"
#: Any user may connect: policy servers run as other users, and only a socket's pod can reach its folder.
SOCKET_MODE: Final = 0o777

#: The most streams of a node's socket. A further stream replaces the oldest.
NODE_STREAMS: Final = 64

#: Returns the endpoints whose policies a socket serves.
Endpoints = Callable[[Compiled], Iterable[c.EndpointId]]


@dataclass(eq=False, slots=True)
class _Stream:
    """One Sync call. ``replaced``: it has ended because a newer call took its place."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: bool = False


class PolicySyncServer:
    """Serves compiled policies; ``async with`` closes every socket at the end.

    Args:
        form: the form of policy lists. Clients before Calico 3.32 need another form.

    Attributes:
        flows: the clients' reports.
    """

    def __init__(self, form: PolicyForm = PolicyForm.MESSAGES) -> None:
        self.flows = Flows()
        self._form = form
        self._compiled: Compiled | None = None
        #: The streams of each socket, by the socket's path, oldest first.
        self._streams: dict[str, dict[_Stream, None]] = {}
        self._sockets: dict[str, AsyncExitStack] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for path in list(self._sockets):
            await self.close(path)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._sockets)

    def publish(self, compiled: Compiled) -> None:
        """Serve another state from now on. Clients receive the differences."""
        self._compiled = compiled
        for streams in self._streams.values():
            for stream in streams:
                stream.changed.set()

    async def open(self, path: str, endpoints: Endpoints, *, streams: int = 1, mode: int = SOCKET_MODE) -> None:
        """Serve a socket. A stale socket at its path is replaced.

        Args:
            streams: the largest number of streams at once, see :data:`NODE_STREAMS`.
            mode: the socket's mode. A pod's socket is open to all, since only the pod has its folder. Only the
                mode of a node's socket decides who can read the policies of every pod.

        Raises:
            ServeError: the path cannot be served.
        """
        async with AsyncExitStack() as stack:
            server = GrpcServer(
                [f"unix:{path}"],
                route=lambda method: (
                    (lambda context: self._serve(context, path, endpoints, streams)) if method == SYNC else None
                ),
                unary={REPORT: self._report},
                socket_mode=mode,
            )
            await stack.enter_async_context(server)
            self._sockets[path] = stack.pop_all()

    async def close(self, path: str) -> None:
        """Close a socket and end its streams; idempotent."""
        sockets = self._sockets.pop(path, None)
        if sockets is not None:
            await sockets.aclose()

    def _report(self, message: bytes) -> bytes:
        try:
            self.flows.add(decode_report(message))
        except ConfigError:
            self.flows.faults += 1
            return ReportResult(successful=False).SerializeToString()
        return ReportResult(successful=True).SerializeToString()

    async def _serve(self, context: Context, path: str, endpoints: Endpoints, most: int) -> None:
        await read(context)
        stream = _Stream()
        streams = self._streams.setdefault(path, {})
        while len(streams) >= most:
            oldest = next(iter(streams))
            del streams[oldest]
            oldest.replaced = True
            oldest.changed.set()
        streams[stream] = None
        try:
            await self._send(context, stream, endpoints)
        finally:
            streams.pop(stream, None)
            if not streams and self._streams.get(path) is streams:
                del self._streams[path]

    async def _send(self, context: Context, stream: _Stream, endpoints: Endpoints) -> None:
        sent, in_sync, known = View(), False, False
        while not stream.replaced:
            stream.changed.clear()
            if self._compiled is not None:
                view = view_of(self._compiled, endpoints(self._compiled))
                if self._form is PolicyForm.NAMES:
                    view = by_names(view)
                for update in changes(sent, view):
                    await context.write(encode(update, self._form))
                sent = view
                if not in_sync:
                    await context.write(encode(c.InSync(), self._form))
                    in_sync = True
                if known and not view.endpoints:
                    return  # the pod and its client have ended
                known = bool(view.endpoints)
            await stream.changed.wait()


def pod_socket(prefix: Path, uid: str) -> str:
    """Return the path of a pod's socket, in the folder that is mounted into the pod."""
    return str(prefix / "mount" / uid / "socket")


def endpoint_of_credentials(text: bytes) -> c.EndpointId:
    """Return the endpoint of the pod in a driver's credentials. Keys are case-insensitive, like in Felix.

    Raises:
        ValueError: they are not a JSON object, or do not name a pod.
    """
    loaded = json.loads(text)
    if not isinstance(loaded, dict):
        raise ValueError("must be a JSON object")
    fields = {key.lower(): value for key, value in loaded.items()}
    found = [fields.get(name) for name in ("namespace", "workload")]
    for name, value in zip(("Namespace", "Workload"), found, strict=True):
        if not isinstance(value, str) or not value or "/" in value:
            raise ValueError(f"{name}: must be a name, not {value!r}")
    return c.EndpointId("k8s", "/".join(map(str, found)), "eth0")


class Binder:
    """Keeps a socket for each pod of a node below ``<prefix>/mount``.

    The socket of a pod that the policy server knows is ``<prefix>/mount/UID/socket``. In addition, a volume driver
    (Calico's FlexVolume or CSI driver) can write credentials ``<prefix>/creds/ID.json``, which name a pod. The pod
    gets the socket ``<prefix>/mount/ID/socket``, even if the policy server does not know it yet. A CSI driver uses
    the volume's ID.

    Args:
        server: the server that owns the sockets.
        prefix: such as ``/var/run/nodeagent``.
        node: the node whose pods are served. None serves the pods of every node. Credentials always name pods of
            this machine.
    """

    def __init__(self, server: PolicySyncServer, prefix: Path, node: str | None = None) -> None:
        self._server = server
        self._prefix = prefix
        self._node = node
        self._failed: set[str] = set()
        self._credentials: dict[Path, tuple[FileState, c.EndpointId | None]] = {}

    async def bind(self, compiled: Compiled) -> None:
        """Open sockets for new pods, and close the sockets of removed pods. Failures are retried at the next
        call.
        """
        wanted = {
            pod_socket(self._prefix, uid): endpoint
            for uid, endpoint in compiled.uids.items()
            if self._node in (None, compiled.nodes.get(endpoint))
        }
        wanted |= self._with_credentials()
        ours = f"{self._prefix}/mount/"
        for path in self._server.paths:
            if path.startswith(ours) and path not in wanted:
                await self._server.close(path)
        for path, endpoint in wanted.items():
            if path not in self._server.paths:
                await self._open(path, endpoint)

    def _with_credentials(self) -> dict[str, c.EndpointId]:
        """Return the sockets of pods with credentials. A credentials file is read again when it changes."""
        read: dict[Path, tuple[FileState, c.EndpointId | None]] = {}
        for file in sorted((self._prefix / "creds").glob("*.json")):
            state = file_state(file)
            known = self._credentials.get(file)
            if known is not None and known[0] == state:
                read[file] = known
                continue
            try:
                read[file] = state, endpoint_of_credentials(file.read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                log.error("credentials of pod not usable file=%s error=%s", file, plain_reason(error))
                read[file] = state, None
        self._credentials = read
        return {
            pod_socket(self._prefix, file.stem): endpoint
            for file, (_, endpoint) in read.items()
            if endpoint is not None
        }

    async def _open(self, path: str, endpoint: c.EndpointId) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            await self._server.open(path, lambda compiled: (endpoint,))
        except (ServeError, OSError) as error:
            if path not in self._failed:
                log.error("socket of pod not served pod=%s error=%s", endpoint.workload, plain_reason(error))
            self._failed.add(path)
        else:
            self._failed.discard(path)
