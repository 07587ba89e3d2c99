"""An API server for tests: lists in pages, watches, compaction and faults, over real sockets."""

import asyncio
import contextlib
import json
import re
import ssl as ssl_module
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonpatch

_PATH = re.compile(
    r"^/apis?/(?:[^/]+/)?(?P<version>v1|v1alpha[12]|v3)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?$"
)


class FakeApi:
    """Objects of any kind, with one sequence of versions for all.

    Attributes:
        requests: method and target of every request.
        refuse: status, reason and message for every further request.
        garbage: lines that the next watch sends first.
        keeps: created objects are stored; 409 for a second one of the same name.
        compacted: watches from earlier versions get an error event, with the status ``compacted_status``.
        versions: the versions of installed API groups.
        silent: watches send nothing more, as if their connections had been lost without a FIN.
        lists: the number of lists begun.
        watches: open streams.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[Any] = []
        self.refuse: tuple[int, str, str] | None = None
        self.accept_token: str | None = None
        self.garbage: list[bytes] = []
        self.keeps = False
        self.versions = {"v1"}
        self.silent = False
        self.lists = 0
        self.watches: list[asyncio.StreamWriter] = []
        self.version = 100
        self.compacted = 0
        self.compacted_status = (410, "Expired", "too old resource version")
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self.expire_continue = False
        self.drop_after_list = False
        self.port = 0
        self._serving = False
        self._clients: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def put(
        self,
        plural: str,
        namespace: str,
        name: str,
        *,
        tell: bool = True,
        labels: dict[str, str] | None = None,
        **fields: Any,
    ) -> None:
        self.version += 1
        key = (plural, namespace, name)
        before = self.objects.get(key)
        metadata: dict[str, Any] = {"name": name, "resourceVersion": str(self.version), "uid": f"uid-{name}"}
        if labels is not None:
            metadata["labels"] = labels
        if namespace:
            metadata["namespace"] = namespace
        self.objects[key] = {"metadata": metadata, **fields}
        if tell:
            await self._note("MODIFIED" if before else "ADDED", plural, self.objects[key])

    async def remove(self, plural: str, namespace: str, name: str, *, tell: bool = True) -> None:
        self.version += 1
        gone = self.objects.pop((plural, namespace, name))
        gone["metadata"]["resourceVersion"] = str(self.version)
        if tell:
            await self._note("DELETED", plural, gone)

    async def _note(self, kind: str, plural: str, item: dict[str, Any]) -> None:
        self.history.append((self.version, kind, plural, json.loads(json.dumps(item))))
        self._wake_watches()

    def _wake_watches(self) -> None:
        """Let every watch look at the history again; each that waits has the event that was current before."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def bookmark(self, plural: str) -> None:
        self.version += 1
        await self._note("BOOKMARK", plural, {"metadata": {"resourceVersion": str(self.version)}})

    def break_watches(self) -> None:
        for writer in self.watches:
            writer.transport.abort()
        self.watches.clear()
        self._wake_watches()

    async def wait_watches(self, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while len(self.watches) < count:
                await asyncio.sleep(0.005)

    @contextlib.asynccontextmanager
    async def serve(self, ssl: Any = None) -> AsyncIterator["FakeApi"]:
        server = await asyncio.start_server(self._client, "127.0.0.1", self.port, ssl=ssl)
        self.port = server.sockets[0].getsockname()[1]
        self._serving = True
        try:
            yield self
        finally:
            self._serving = False
            server.close()
            self.watches.clear()
            for serving, writer in list(self._clients.items()):
                writer.transport.abort()
                serving.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)
            await asyncio.sleep(0)  # transports close one iteration after abort()

    def kubeconfig(self, folder: Path, *, scheme: str = "http", **cluster: str) -> Path:
        path = folder / "kubeconfig"
        described = {
            "current-context": "it",
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
            "clusters": [{"name": "it", "cluster": {"server": f"{scheme}://127.0.0.1:{self.port}", **cluster}}],
            "users": [{"name": "me", "user": {"token": "secret"}}],
        }
        path.write_text(json.dumps(described))
        return path

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._clients[serving] = writer
        try:
            # otherwise it was accepted in the last iteration of serve(), which did not record it
            if self._serving:
                await self._requests(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:  # by the end of serve(); asyncio's streams would print it
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl_module.SSLError):
                await writer.wait_closed()
            del self._clients[serving]

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.split("\r\n")
            headers = {n.lower(): v.strip() for n, _, v in (each.partition(":") for each in rest if each)}
            method, target, _ = line.split(" ")
            self.requests.append(f"{method} {target}")
            self.headers.append(headers)
            length = int(headers.get("content-length", 0))
            body = json.loads(await reader.readexactly(length)) if length else None
            if not await self._answer(method, target, headers, body, writer):
                break

    async def _answer(
        self, method: str, target: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter
    ) -> bool:
        if self.accept_token is not None and headers.get("authorization") != f"Bearer {self.accept_token}":
            return await self._status(writer, 401, "Unauthorized", "Unauthorized")
        if self.refuse is not None:
            return await self._status(writer, *self.refuse)
        split = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        if split.path == "/version":
            return await self._send(writer, 200, json.dumps({"major": "1", "minor": "32"}).encode())
        found = _PATH.match(split.path)
        if found is None or found["version"] not in self.versions:
            return await self._status(writer, 404, "NotFound", "the server could not find the requested resource")
        # Two groups have network policies; Calico's have the name "networkpolicies.v3" here.
        plural = found["plural"] + (".v3" if found["version"] == "v3" else "")
        if method in ("POST", "PATCH"):
            self.bodies.append(body)
        key = (plural, found["namespace"] or "", found["name"] or "")
        if method == "POST" and self.keeps:
            return await self._create((*key[:2], body["metadata"]["name"]), body, writer)
        if method == "PATCH" and isinstance(body, list):
            made = jsonpatch.apply_patch(self.objects[key], body)
            fields = {name: value for name, value in made.items() if name != "metadata"}
            await self.put(*key, **fields)
            return await self._send(writer, 200, json.dumps(self.objects[key]).encode())
        if method in ("POST", "PATCH"):
            return await self._send(writer, 201, json.dumps(body).encode())
        if found["name"]:
            if key not in self.objects:
                return await self._status(writer, 404, "NotFound", f"{found['name']} not found")
            return await self._send(writer, 200, json.dumps(self.objects[key]).encode())
        if query.get("watch"):
            await self._watch(plural, int(query["resourceVersion"]), writer)
            return False
        return await self._list(plural, query, writer)

    async def _create(self, key: tuple[str, str, str], body: Any, writer: asyncio.StreamWriter) -> bool:
        if key in self.objects:
            return await self._status(writer, 409, "AlreadyExists", f"{key[2]} already exists")
        await self.put(*key, **{name: value for name, value in body.items() if name != "metadata"})
        return await self._send(writer, 201, json.dumps(self.objects[key]).encode())

    async def _list(self, plural: str, query: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        items = [value for key, value in sorted(self.objects.items()) if key[0] == plural]
        begin = int(query.get("continue", 0))
        if begin == 0:
            self.lists += 1
        elif self.expire_continue:
            self.expire_continue = False
            return await self._status(writer, 410, "Expired", "The provided continue parameter is too old")
        end = begin + int(query["limit"])
        metadata = {"resourceVersion": str(self.version)}
        if end < len(items):
            metadata["continue"] = str(end)
        return await self._send(
            writer, 200, json.dumps({"metadata": metadata, "items": items[begin:end]}).encode()
        )

    async def _watch(self, plural: str, version: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        garbage, self.garbage = self.garbage, []
        for line in garbage:
            _chunk(writer, line)
        if version < self.compacted:
            code, reason, message = self.compacted_status
            status = {"kind": "Status", "code": code, "reason": reason, "message": message}
            _chunk(writer, json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            writer.write(b"0\r\n\r\n")
            return
        self.watches.append(writer)
        while writer in self.watches:
            for at, kind, of, item in self.history:
                if at > version and of == plural and not self.silent:
                    version = at
                    _chunk(writer, json.dumps({"type": kind, "object": item}).encode() + b"\n")
            # Not a Condition with a time limit: a watch that is cancelled while it takes the condition's lock
            # again would leave it locked, and every later change would wait for it.
            changed = self._changed
            await writer.drain()
            await changed.wait()

    async def end_watches(self) -> None:
        """End every stream as an API server does after its timeout."""
        for writer in self.watches:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            writer.close()
        self.watches.clear()
        self._wake_watches()

    async def _status(self, writer: asyncio.StreamWriter, code: int, reason: str, message: str) -> bool:
        status = {"kind": "Status", "code": code, "reason": reason, "message": message}
        return await self._send(writer, code, json.dumps(status).encode())

    async def _send(self, writer: asyncio.StreamWriter, code: int, body: bytes) -> bool:
        head = (
            f"HTTP/1.1 {code} X\r\ndate: {formatdate(usegmt=True)}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return True


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
