"""Parses the application's probes, which the injector has rewritten so that a sidecar answers them for kubelet.
Pure.

Kubelet has no certificate of the mesh, so policies that require one would deny its probes. The injector rewrites
probes to paths of the proxy, which gets the original probes in ``ISTIO_KUBE_APP_PROBERS``, a JSON object::

    {"/app-health/web/readyz": {"httpGet": {"path": "/ready", "port": 8080, "scheme": "HTTP"}, "timeoutSeconds":
    1}}

Each entry has one of ``httpGet``, ``tcpSocket`` and ``grpc``, in Kubernetes' form, with ports as numbers.
"""

import json
import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote

VARIABLE: Final = "ISTIO_KUBE_APP_PROBERS"
#: The environment variable that makes the prober use the loopback address, as in Istio's sidecar.
LEGACY_LOCALHOST: Final = "REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION"
PREFIXES: Final = ("/app-health/", "/app-lifecycle/")
_PATH: Final = re.compile(r"/app-(health|lifecycle)/[^/]+/(livez|readyz|startupz|prestopz|poststartz)", re.ASCII)
_KINDS: Final = ("httpGet", "tcpSocket", "grpc")
#: Kubernetes' default for a probe's ``timeoutSeconds``.
_TIMEOUT_S: Final = 1.0
#: The punctuation that kubelet does not escape in a path. It escapes other characters, so any text is a valid
#: path.
_SENT_AS_WRITTEN: Final = string.punctuation
#: Characters that a header value must not contain (RFC 9110, 5.5). All other characters are sent in UTF-8, as
#: kubelet does.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
#: RFC 9110, 5.6.2.
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)


class BadProbers(ValueError):
    """The variable's value does not have the injector's format. The text names the faulty part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppProbe:
    """One probe.

    Attributes:
        kind: the kind of probe.
        port: the application's port.
        timeout_s: the time limit for the application's answer.
        host: the host to probe. ``None``: the pod's address.
        path: the path of an HTTP probe, with its query.
        headers: the headers of an HTTP probe, in order. A ``Host`` header replaces the default.
        service: the service for gRPC's health check. Empty means the whole server.
    """

    kind: Literal["http", "https", "tcp", "grpc"]
    port: int
    timeout_s: float = _TIMEOUT_S
    host: str | None = None
    path: str = "/"
    headers: tuple[tuple[str, str], ...] = ()
    service: str = ""


def parse_probers(text: str) -> Mapping[str, AppProbe]:
    """Read the variable. Empty means no probes.

    Raises:
        BadProbers: a probe is invalid. The text names its path and the fault.
    """
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which no probe can send
        raise BadProbers(f"not Unicode: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadProbers(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadProbers("must be an object of paths")
    return {path: _probe(path, value) for path, value in found.items()}


def _probe(path: str, value: object) -> AppProbe:
    if _PATH.fullmatch(path) is None:
        raise BadProbers(f"{path!r} is not /app-health/CONTAINER/readyz or the like")
    if not isinstance(value, dict):
        raise BadProbers(f"{path}: must be an object")
    kinds = [kind for kind in _KINDS if value.get(kind) is not None]
    if len(kinds) != 1:
        raise BadProbers(f"{path}: must have one of {', '.join(_KINDS)}, not {len(kinds)}")
    handler = value[kinds[0]]
    if not isinstance(handler, dict):
        raise BadProbers(f"{path}.{kinds[0]}: must be an object")
    port = handler.get("port")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise BadProbers(f"{path}.{kinds[0]}.port: {port!r} is no port from 1 to 65535")
    common: dict[str, Any] = {"port": port, "timeout_s": _timeout_s(path, value.get("timeoutSeconds"))}
    match kinds[0]:
        case "tcpSocket":
            return AppProbe(kind="tcp", **common)
        case "grpc":
            return AppProbe(kind="grpc", service=str(handler.get("service") or ""), **common)
        case _:
            return _http(path, handler, common)


def _timeout_s(path: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value) or _TIMEOUT_S
        except OverflowError:  # an int beyond the largest float
            seconds = math.inf
        if 0 < seconds < math.inf:
            return seconds
    elif value is None:
        return _TIMEOUT_S
    raise BadProbers(f"{path}.timeoutSeconds: {value!r} is no number of seconds")


def _http(path: str, handler: Mapping[str, Any], common: Mapping[str, Any]) -> AppProbe:
    scheme = str(handler.get("scheme") or "HTTP").upper()
    if scheme not in ("HTTP", "HTTPS"):
        raise BadProbers(f"{path}.httpGet.scheme: must be HTTP or HTTPS, not {scheme!r}")
    target = quote(str(handler.get("path") or "/"), safe=_SENT_AS_WRITTEN)
    headers = []
    listed = handler.get("httpHeaders") or []
    if not isinstance(listed, list):
        raise BadProbers(f"{path}.httpGet.httpHeaders: must be a list")
    for each in listed:
        name, value = (each.get("name"), each.get("value") or "") if isinstance(each, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(value, str) or not _is_header(name, value):
            raise BadProbers(f"{path}.httpGet.httpHeaders: {each!r} is no header")
        headers.append((name, value))
    return AppProbe(
        kind="https" if scheme == "HTTPS" else "http",
        host=str(handler["host"]) if handler.get("host") else None,
        path=target if target.startswith("/") else f"/{target}",
        headers=tuple(headers),
        **common,
    )


def _is_header(name: str, value: str) -> bool:
    return _TOKEN.fullmatch(name) is not None and _CONTROL.search(value) is None
