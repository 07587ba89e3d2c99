"""Finds the API server and a client's credentials like client-go: in the pod's service account or in kubeconfigs.

lightkube reads one file, and knows tokens and files with certificates. This module adds the parts of client-go
that kubeconfigs of providers use: a list of files in $KUBECONFIG, ``tls-server-name``, ``proxy-url``,
impersonation, and credential programs (``exec``) of version v1 or with client certificates. Files with
certificates are read again when they are replaced, because an agent runs longer than a certificate is valid.
"""

import asyncio
import base64
import json
import logging
import os
import ssl
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx2
import yaml
from lightkube import KubeConfig
from lightkube.config.client_adapter import user_auth
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from ztunnel.runtime.watched_file import file_state

log = logging.getLogger(__name__)

_DEFAULT: Final = Path("~/.kube/config")
_EXEC_VERSIONS: Final = frozenset(f"client.authentication.k8s.io/{each}" for each in ("v1", "v1beta1", "v1alpha1"))

#: The fields of a kubeconfig's cluster that a credential program gets.
_CLUSTER_INFO: Final = (
    "server",
    "tls-server-name",
    "insecure-skip-tls-verify",
    "certificate-authority-data",
    "proxy-url",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach one API server.

    Attributes:
        place: the files that describe it, for error messages.
        server: its URL.
        auth: adds the credentials to a request. None if the TLS connection has them, or if there are none.
        credentials: the source of the credentials, for error messages.
        headers: headers of every request.
        transport: opens the connections.
    """

    place: str
    server: str
    auth: httpx2.Auth | None
    credentials: str
    headers: Sequence[tuple[str, str]]
    transport: httpx2.AsyncBaseTransport


class Places:
    """The files that a configuration is read from, as far as they are known. Errors name them.

    Args:
        kubeconfig: the only file. None means the service account, $KUBECONFIG or ~/.kube/config.
    """

    def __init__(self, kubeconfig: Path | None) -> None:
        self.paths = [] if kubeconfig is None else [kubeconfig]

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths)) or "the kubeconfig"


def access_of(places: Places, context: str | None) -> Access:
    """Return how to reach the API server of a context; None is the current one.

    Raises:
        ConfigError: the configuration is incomplete.
        yaml.YAMLError, msgspec.MsgspecError, OSError, KeyError, TypeError, AttributeError, ValueError: it is
            malformed, or a file that it names cannot be read.
    """
    described = _service_account() if not places.paths else None
    if described is None:
        described = _merged(places)
    found = KubeConfig.from_dict(described).get(context)
    if found is None:
        raise ConfigError("it has no current context")
    cluster: Mapping[str, Any] = _named(described["clusters"], found.context.cluster)["cluster"]
    user: Mapping[str, Any] = {}
    if found.context.user:
        user = _named(described["users"], found.context.user)["user"]
    program = user.get("exec")
    credentials = ExecAuth(program, cluster) if program and not ({"token", "tokenFile"} & user.keys()) else None
    files = [Path(each[key]) for each, key in _certificate_files(cluster, user)]

    def tls() -> ssl.SSLContext:
        made = _tls_context(cluster, user)
        if credentials is not None and credentials.certificate:
            with _file_of(credentials.certificate) as pair:
                made.load_cert_chain(pair)
        return made

    def state() -> object:
        return [*map(file_state, files), credentials.certificate if credentials is not None else ""]

    return Access(
        place=str(places),
        server=str(found.cluster.server),
        auth=credentials or user_auth(found.user or User()),
        credentials=str(user.get("tokenFile") or (program["command"] if program else "the kubeconfig")),
        headers=tuple(_impersonation(user)),
        transport=RenewedTransport(
            tls, state, proxy=cluster.get("proxy-url"), server_name=cluster.get("tls-server-name")
        ),
    )


def _service_account() -> dict[str, Any] | None:
    """Return the description of the pod's own API server. None outside a pod."""
    try:
        found = KubeConfig.from_service_account().get()
    except ConfigError:
        return None
    assert found is not None
    assert found.user is not None
    cluster = {"server": found.cluster.server, "certificate-authority": found.cluster.certificate_auth}
    return {
        "current-context": "pod",
        "contexts": [{"name": "pod", "context": {"cluster": "pod", "user": "pod"}}],
        "clusters": [{"name": "pod", "cluster": cluster}],
        "users": [{"name": "pod", "user": {"tokenFile": found.user.token_file}}],
    }


def _merged(places: Places) -> dict[str, Any]:
    """Return the description in one or several files. The first file that has a name or the current context
    counts, and missing files of a list are skipped, like in client-go (ClientConfigLoadingRules.Load).
    """
    listed = not places.paths and os.environ.get("KUBECONFIG")
    if listed:
        places.paths = [Path(each) for each in dict.fromkeys(listed.split(os.pathsep)) if each]
    try:
        places.paths = [each.expanduser() for each in places.paths or [_DEFAULT]]
    except RuntimeError:  # a user without an entry in passwd, as in containers
        raise ConfigError("there is no $KUBECONFIG, and the user has no home directory") from None
    present = [path for path in places.paths if path.is_file()]
    if not present or (not listed and len(present) < len(places.paths)):
        raise ConfigError(f"Configuration file {places} not found")
    merged: dict[str, Any] = {}
    for path in present:
        described = yaml.safe_load(path.read_text(encoding="utf-8"))
        if described is None and len(present) > 1:
            continue
        if described.get("current-context"):
            merged.setdefault("current-context", described["current-context"])
        for section, kind in (("clusters", "cluster"), ("contexts", "context"), ("users", "user")):
            entries = merged.setdefault(section, [])
            known = {each["name"] for each in entries}
            for entry in described.get(section) or ():
                if entry["name"] not in known:
                    # Tools write empty values for the fields that they do not set.
                    fields = {key: value for key, value in (entry[kind] or {}).items() if value not in ("", None)}
                    entries.append({"name": entry["name"], kind: fields})
                    for holder, key in _files_of(fields):
                        holder[key] = str(path.parent / holder[key])
    return merged


def _files_of(fields: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the places of all paths in a cluster or user: a dictionary and its key."""
    yield from _certificate_files(fields, fields)
    if "tokenFile" in fields:
        yield fields, "tokenFile"
    program = fields.get("exec")
    if program and os.sep in program["command"]:
        yield program, "command"


def _certificate_files(cluster: Any, user: Any) -> Iterator[tuple[Any, str]]:
    """Yield the places of the paths of certificates and keys that are used: data has precedence over a file."""
    for holder, key in (
        (cluster, "certificate-authority"),
        (user, "client-certificate"),
        (user, "client-key"),
    ):
        if key in holder and f"{key}-data" not in holder:
            yield holder, key


def _named(entries: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    return next(each for each in entries if each["name"] == name)


def _impersonation(user: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the headers about the user that requests act as ("User impersonation" in Kubernetes' docs)."""
    if "as" in user:
        yield "Impersonate-User", str(user["as"])
    if "as-uid" in user:
        yield "Impersonate-Uid", str(user["as-uid"])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for name, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            yield f"Impersonate-Extra-{quote(str(name), safe='')}", str(value)


def _tls_context(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    """Return a context that verifies the server, with the user's certificate if there is one.

    Raises:
        OSError: a file cannot be read (ssl.SSLError: it has no certificate or key, or they do not match).
    """
    authority = "certificate-authority"
    if f"{authority}-data" in cluster:
        # Text around the certificates can have any characters.
        text = base64.b64decode(cluster[f"{authority}-data"]).decode("ascii", "ignore")
        made = ssl.create_default_context(cadata=text)
    elif authority in cluster:
        made = ssl.create_default_context(cafile=cluster[authority])
    else:
        made = httpx2.create_ssl_context(verify=not cluster.get("insecure-skip-tls-verify"), trust_env=False)
    if "client-certificate" in user or "client-certificate-data" in user:
        with _part(user, "client-certificate") as certificate, _part(user, "client-key") as key:
            made.load_cert_chain(certificate, key)
    return made


@contextmanager
def _part(user: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the path of a user's certificate or key."""
    if f"{name}-data" in user:
        with _file_of(base64.b64decode(user[f"{name}-data"])) as path:
            yield path
    else:
        yield user[name]


@contextmanager
def _file_of(content: bytes | str) -> Iterator[str]:
    """Yield the path of a private temporary file, because Python's ``ssl`` reads certificates and keys from files
    only.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        yield file.name


class RenewedTransport(httpx2.AsyncBaseTransport):
    """Opens connections with the current certificates. Connections opened before a change stay in use for the
    requests that they carry.

    Args:
        tls: returns a new context. Raises OSError if a file cannot be read, or does not match another.
        state: returns a value that changes with the files.
        proxy: the URL of an HTTP proxy.
        server_name: the name that the server's certificate must have. None means the host of the URL.
    """

    def __init__(
        self,
        tls: Callable[[], ssl.SSLContext],
        state: Callable[[], object],
        *,
        proxy: str | None = None,
        server_name: str | None = None,
    ) -> None:
        self._tls = tls
        self._look = state
        self._proxy = proxy
        self._server_name = server_name
        self._state = state()
        self._current = self._made()
        self._earlier: httpx2.AsyncBaseTransport | None = None
        self._fault = ""

    def _made(self) -> httpx2.AsyncBaseTransport:
        return httpx2.AsyncHTTPTransport(verify=self._tls(), trust_env=False, proxy=self._proxy)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._server_name is not None:
            request.extensions = {**request.extensions, "sni_hostname": self._server_name}
        state = self._look()
        if state != self._state and (made := self._renewed()) is not None:
            superseded, self._earlier, self._current = self._earlier, self._current, made
            self._state = state
            if superseded is not None:
                await superseded.aclose()
        return await self._current.handle_async_request(request)

    def _renewed(self) -> httpx2.AsyncBaseTransport | None:
        """Return a transport with the new certificates. None if they cannot be used (yet): certificate and key are
        two files, which are not replaced at the same time.
        """
        try:
            made = self._made()
        except OSError as error:
            fault = error.strerror or str(error)
            if fault != self._fault:
                log.warning("kube: changed certificates are not used: %s", fault)
            self._fault = fault
            return None
        self._fault = ""
        return made

    async def aclose(self) -> None:
        await self._current.aclose()
        if self._earlier is not None:
            await self._earlier.aclose()


class ExecAuth(httpx2.Auth):
    """Credentials from a program ("client-go credential plugins" in Kubernetes' docs): a token, a client
    certificate, or both. The program runs for the first request, when the credentials have expired, and after
    status 401.

    Args:
        program: the kubeconfig's ``exec``.
        cluster: the kubeconfig's cluster.

    Raises:
        ConfigError: the program's API version is not known.
    """

    def __init__(self, program: Mapping[str, Any], cluster: Mapping[str, Any]) -> None:
        self._command = [str(program["command"]), *map(str, program.get("args") or ())]
        self._variables = {str(each["name"]): str(each["value"]) for each in program.get("env") or ()}
        self._version = program["apiVersion"]
        if self._version not in _EXEC_VERSIONS:
            raise ConfigError(f"auth exec api version {self._version} not implemented")
        self._mode = program.get("interactiveMode") or "IfAvailable"
        self._cluster = cluster if program.get("provideClusterInfo") else None
        self._running = asyncio.Lock()
        self._runs = 0
        self._token: str | None = None
        self._expires: datetime | None = None
        #: The certificate and its key in PEM; empty without one.
        self.certificate = ""

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        for last in (False, True):
            runs = self._runs
            if last or not runs or (self._expires is not None and self._expires <= datetime.now(UTC)):
                async with self._running:
                    if self._runs == runs:  # otherwise another request has just run it
                        await self._run()
            if self._token is not None:
                request.headers["Authorization"] = f"Bearer {self._token}"
            response = yield request
            if response.status_code != 401:
                return

    async def _run(self) -> None:
        """Run the program, and keep its credentials.

        Raises:
            ConfigError: it fails, or would need a terminal.
            OSError: it cannot be started.
            ValueError, LookupError, TypeError: its output is not an ExecCredential with credentials.
        """
        interactive = self._mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if self._mode == "Always" and not interactive:
            raise ConfigError(f"{self._command[0]} needs a terminal as standard input")
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, **self._variables, "KUBERNETES_EXEC_INFO": json.dumps(self._info(interactive))},
            stdin=None if interactive else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode:
            said = errors.decode(errors="replace")
            raise ConfigError(f"Exec {self._command[0]} returned {process.returncode}: {said}")
        status = json.loads(output)["status"]
        token, expires = status.get("token") or None, status.get("expirationTimestamp")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        if token is None and not (certificate and key):
            raise LookupError("no credentials")
        self._expires = datetime.fromisoformat(expires) if expires else None
        self._token, self.certificate = token, f"{certificate}\n{key}\n" if certificate and key else ""
        self._runs += 1

    def _info(self, interactive: bool) -> dict[str, Any]:
        spec: dict[str, Any] = {"interactive": interactive}
        if self._cluster is not None:
            spec["cluster"] = {key: self._cluster[key] for key in _CLUSTER_INFO if key in self._cluster}
            if "certificate-authority" in self._cluster:
                content = Path(self._cluster["certificate-authority"]).read_bytes()
                spec["cluster"].setdefault("certificate-authority-data", base64.b64encode(content).decode())
            for extension in self._cluster.get("extensions") or ():
                if extension["name"] == "client.authentication.k8s.io/exec":
                    spec["cluster"]["config"] = extension["extension"]
        return {"apiVersion": self._version, "kind": "ExecCredential", "spec": spec}
