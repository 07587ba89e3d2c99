"""The connection to a Kubernetes API server: lists in pages, watches, writes. Objects are dictionaries.

:mod:`ztunnel.kube.kubeconfig` finds the server and the credentials. The transport is lightkube's, httpx2.
lightkube's typed models are not used: readers here look at a few fields, which can be wrong in any way, and 20,000
pods take more time and memory as model objects than as dictionaries.

Commands that read a cluster import this module when they run. A proxy never does (tests/test_architecture.py).
"""

import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import msgspec
import yaml
from lightkube.core.exceptions import ConfigError

from ztunnel.kube.errors import ApiRefused, ApiUnreachable, BadAnswer, BadKubeconfig, WatchFailed
from ztunnel.kube.kinds import Kind, Selection
from ztunnel.kube.kubeconfig import Places, access_of
from ztunnel.kube.objects import Object

#: The number of objects in a page, half of client-go's, because decoding a page is the longest stall of the loop
#: (python -m bench.kube).
PAGE: Final = 250
_REQUEST_TIMEOUT_S: Final = 30.0
#: The time limit for a silent watch: API servers send a bookmark about once a minute, so a longer silence probably
#: means a connection lost without a FIN. Watching again from the last version costs one request.
_SILENT_S: Final = 150.0
#: The longest line of a watch: etcd accepts objects of 1.5 MiB, and their JSON is at most a few times longer.
_MAX_LINE: Final = 16 * 1024 * 1024


class _ListMetadata(msgspec.Struct):
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    continued: str | None = msgspec.field(name="continue", default=None)


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[dict[str, Any]] | None = None


class _Event(msgspec.Struct):
    type: str
    object: dict[str, Any]


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0


_list_decoder: Final = msgspec.json.Decoder(_List)
_event_decoder: Final = msgspec.json.Decoder(_Event)
_status_decoder: Final = msgspec.json.Decoder(_Status)


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page of a list.

    Attributes:
        items: as the API server writes them: without ``apiVersion`` and ``kind``.
        resource_version: the version of the whole list. A watch starts from this version.
        continued: the token for the next page. Empty on the last page.
    """

    items: Sequence[Object]
    resource_version: str
    continued: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A line of a watch: ADDED, MODIFIED, DELETED or BOOKMARK, and the object."""

    type: str
    object: Object


@contextlib.asynccontextmanager
async def connect(
    kubeconfig: Path | None = None, *, context: str | None = None, as_user: str = "", limit_s: float | None = None
) -> AsyncIterator["Client"]:
    """Yield a client of the API server. The first request opens the connection.

    Args:
        kubeconfig: the kubeconfig file. None means the pod's service account if there is one, else the files of
            $KUBECONFIG, else ~/.kube/config.
        context: a context of the file. None means the file's current one.
        as_user: the user to impersonate. Empty for the kubeconfig's own user.
        limit_s: the time limit of a request; the default is 30 s.

    Raises:
        BadKubeconfig: raised before any request. Its one line names the file.
    """
    # httpx2 logs every request at level INFO. Our own log lines have the same information.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    places = Places(kubeconfig)
    try:
        access = access_of(places, context)
        http = httpx2.AsyncClient(
            base_url=access.server,
            auth=access.auth,
            headers=[*access.headers],
            timeout=limit_s or _REQUEST_TIMEOUT_S,
            transport=access.transport,
            # The proxies that environment variables name are not used: an agent inside the cluster is close to its
            # API server.
            trust_env=False,
        )
        if as_user:
            http.headers["Impersonate-User"] = as_user
    except (ConfigError, yaml.YAMLError, msgspec.MsgspecError, httpx2.InvalidURL) as error:
        raise BadKubeconfig(str(places), " ".join(str(error).split())) from error
    except ssl.SSLError as error:
        raise BadKubeconfig(str(places), f"its CA or client certificate cannot be read: {error}") from error
    except OSError as error:
        raise BadKubeconfig(
            str(places), f"{error.filename or 'a file it names'}: {error.strerror or error}"
        ) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        # A kubeconfig is not validated: a missing entry becomes a KeyError with the entry's name.
        named = f" ({error})" if isinstance(error, KeyError) else ""
        raise BadKubeconfig(str(places), f"a cluster, user or context is missing or misshapen{named}") from error
    async with http:
        yield Client(http, access.server, access.credentials)


class Client:
    """Requests to one API server; see :func:`connect`.

    Every method raises ApiUnreachable, BadAnswer or ApiRefused.
    """

    def __init__(self, http: httpx2.AsyncClient, server: str, credentials: str) -> None:
        self._http = http
        self.server = server
        self._credentials = credentials

    async def list_page(self, selection: Selection, continued: str = "", limit: int = PAGE) -> ListPage:
        """Return the page of a list with the token ``continued``, or the first page if that is empty. Status 410
        means that the token is too old, and the list must start over.
        """
        params = {**selection.params(), "limit": str(limit)}
        if continued:
            params["continue"] = continued
        path = selection.kind.path(selection.namespace)
        body = await self._request("GET", path, params=params)
        try:
            page = _list_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise BadAnswer(self.server, f"GET {path} is no list ({error})") from error
        return ListPage(page.items or (), page.metadata.resource_version, page.metadata.continued or "")

    async def watch(self, selection: Selection, version: str, timeout_s: int) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events after ``version`` until the API server ends the stream, which it can do at any time.

        Args:
            selection: the objects.
            version: the version of the list or of the last event.
            timeout_s: the duration after which the API server ends the stream.

        Raises:
            ApiRefused: in particular WatchFailed for an ERROR event. Status 410 means that the version is too old,
                and a new list is needed.
        """
        path = selection.kind.path(selection.namespace)
        params = {
            **selection.params(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        request = self._http.build_request(
            "GET", path, params=params, timeout=httpx2.Timeout(_REQUEST_TIMEOUT_S, read=_SILENT_S)
        )
        with self._translated(f"GET {path}"):
            response = await self._send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise _refused(f"GET {path}", response.status_code, await response.aread())
                async for line in _lines(response.aiter_bytes(), self.server, path):
                    try:
                        event = _event_decoder.decode(line)
                    except msgspec.MsgspecError as error:
                        raise BadAnswer(
                            self.server, f"the watch of {path} has a line that is none ({error})"
                        ) from error
                    if event.type == "ERROR":
                        status = msgspec.convert(event.object, _Status, strict=False)
                        raise WatchFailed(f"watch {path}", status.code, status.reason, status.message)
                    yield WatchEvent(event.type, event.object)
            except msgspec.MsgspecError as error:
                raise BadAnswer(self.server, f"the watch of {path} has an error that is none ({error})") from error
            finally:
                await response.aclose()

    async def version(self) -> tuple[Object, str]:
        """Return the API server's ``/version``, and the ``Date`` of its answer. Empty if the answer has none."""
        request = self._http.build_request("GET", "/version")
        with self._translated("GET /version"):
            response = await self._send(request)
        if response.status_code != 200:
            raise _refused("GET /version", response.status_code, response.content)
        try:
            found: Object = msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise BadAnswer(self.server, f"/version is no object ({error})") from error
        return found, response.headers.get("date", "")

    async def list_all(self, selection: Selection) -> list[Object]:
        """Return all objects of a selection, page by page. If the list expires meanwhile, start over once."""
        for attempt in (1, 2):
            found: list[Object] = []
            continued = ""
            try:
                while True:
                    page = await self.list_page(selection, continued)
                    found += page.items
                    continued = page.continued
                    if not continued:
                        return found
            except ApiRefused as error:
                if error.status != 410 or attempt == 2:
                    raise
        raise AssertionError("unreachable")

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return self._object(await self._request("GET", kind.path(namespace, name)), kind)

    async def create(self, kind: Kind, namespace: str, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object, and return the object from the API server's answer."""
        params = {"dryRun": "All"} if dry_run else {}
        return self._object(await self._request("POST", kind.path(namespace), params=params, body=body), kind)

    async def replace(self, kind: Kind, namespace: str, name: str, body: Object) -> Object:
        """Replace an object. If it has a ``resourceVersion`` that is not the current one, the API server answers
        409.
        """
        return self._object(await self._request("PUT", kind.path(namespace, name), body=body), kind)

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        """Change fields of an object by a merge patch (RFC 7386); null removes a field. ``subresource``: such as
        ``status``.
        """
        path = kind.path(namespace, name) + (f"/{subresource}" if subresource else "")
        return self._object(
            await self._request("PATCH", path, body=patch, content_type="application/merge-patch+json"), kind
        )

    async def json_patch(
        self, kind: Kind, namespace: str, name: str, patch: Sequence[Mapping[str, Any]]
    ) -> Object:
        """Apply the operations of a JSON patch (RFC 6902), all or none. The status is 422 if a ``test`` among them
        fails.
        """
        return self._object(
            await self._request(
                "PATCH", kind.path(namespace, name), body=patch, content_type="application/json-patch+json"
            ),
            kind,
        )

    async def delete(self, kind: Kind, namespace: str, name: str, *, grace_s: int | None = None) -> None:
        params = {} if grace_s is None else {"gracePeriodSeconds": str(grace_s)}
        await self._request("DELETE", kind.path(namespace, name), params=params)

    def _object(self, body: bytes, kind: Kind) -> Object:
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise BadAnswer(self.server, f"the answer is no {kind.name} ({error})") from error

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> bytes:
        request = self._http.build_request(
            method,
            path,
            params=params,
            content=None if body is None else msgspec.json.encode(body),
            headers={} if body is None else {"content-type": content_type},
        )
        with self._translated(f"{method} {path}"):
            response = await self._send(request)
        if not 200 <= response.status_code < 300:
            raise _refused(f"{method} {path}", response.status_code, response.content)
        return response.content

    async def _send(self, request: httpx2.Request, *, stream: bool = False) -> httpx2.Response:
        """Send a request with its credentials, which can come from a file or from a program (``exec``)."""
        try:
            return await self._http.send(request, stream=stream)
        except OSError as error:
            raise ConfigError(f"no credentials from {self._credentials}: {error.strerror or error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"no credentials from {self._credentials}: it gives no token") from error

    @contextlib.contextmanager
    def _translated(self, request: str) -> Iterator[None]:
        try:
            yield
        except httpx2.TimeoutException as error:
            raise ApiUnreachable(self.server, f"{request}: no answer in time") from error
        except httpx2.ConnectError as error:
            reason = str(error)
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                what = reason.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
                reason = f"its certificate is not trusted by the CA of the kubeconfig ({what or reason})"
            raise ApiUnreachable(self.server, reason) from error
        except httpx2.HTTPError as error:
            raise ApiUnreachable(self.server, f"{request}: {error or type(error).__name__}") from error
        except ConfigError as error:
            # The token's file is read again if the API server refuses the token, and can be missing by then. With
            # ``exec``, the credentials program runs at the first request.
            raise ApiUnreachable(self.server, f"{request}: {' '.join(str(error).split())}") from error


async def _lines(pieces: AsyncIterator[bytes], server: str, path: str) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. An incomplete last line is not an event, and is dropped."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        *complete, rest = piece.split(b"\n")
        for end in complete:
            held.append(end)
            line = b"".join(held)
            held.clear()
            size = 0
            if line.strip():
                yield line
        held.append(rest)
        size += len(rest)
        if size > _MAX_LINE:
            raise BadAnswer(server, f"the watch of {path} has a line of more than {_MAX_LINE >> 20} MiB")


def _refused(request: str, status: int, body: bytes) -> ApiRefused:
    try:
        said = _status_decoder.decode(body)
    except msgspec.MsgspecError:
        # The body can be a load balancer's page, or plain text from an API server that is starting.
        said = _Status(message=body[:200].decode("ascii", "replace"))
    return ApiRefused(request, status, said.reason, said.message)
