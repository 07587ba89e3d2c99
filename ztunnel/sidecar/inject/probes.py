"""Redirects kubelet's probes to the sidecar, and restores them. Pure.

Kubelet connects without a client certificate, so a mesh that requires one would refuse its probes. So ``httpGet``,
``tcpSocket`` and ``grpc`` of probes and lifecycle hooks become ``httpGet`` of the proxy's status port. The proxy
gets the originals as a list in its environment (:mod:`ztunnel.proxy.istio.settings.app_probes` reads it). Paths
and format are the same as in Istio's injector. ``exec`` and ``sleep`` stay.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from xds.digits import whole_number
from ztunnel.sidecar.inject.decision import mapping

VARIABLE: Final = "ISTIO_KUBE_APP_PROBERS"
_PROBES: Final = {"readinessProbe": "readyz", "livenessProbe": "livez", "startupProbe": "startupz"}
_HOOKS: Final = {"preStop": "prestopz", "postStart": "poststartz"}
_HANDLERS: Final = ("httpGet", "tcpSocket", "grpc")


def rewrite(containers: Sequence[Any], status_port: int, warnings: list[str]) -> dict[str, Any]:
    """Rewrite the probes of containers in place, and return the originals by path.

    Args:
        containers: a pod's containers, without the proxy.
        status_port: the proxy's port. A probe that already uses it is left unchanged.
        warnings: receives a line for each probe that cannot be rewritten because its port's name does not exist.
    """
    originals: dict[str, Any] = {}
    for container, holder, key, path in _handled(containers):
        probe = holder[key]
        name = next(name for name in _HANDLERS if isinstance(probe.get(name), dict))
        port = _port_number(probe[name].get("port"), container)
        if port is None:
            said = f"container {container.get('name')}: {key}: no port is named {probe[name].get('port')!r}"
            warnings.append(f"{said}; the probe is left as it is")
            continue
        if port == status_port:
            continue
        original: dict[str, Any] = {name: {**copy.deepcopy(probe[name]), "port": port}}
        if probe.get("timeoutSeconds") is not None:
            original["timeoutSeconds"] = probe["timeoutSeconds"]
        originals[path] = original
        kept = {field: value for field, value in probe.items() if field not in _HANDLERS}
        holder[key] = {**kept, "httpGet": {"path": path, "port": status_port, "scheme": "HTTP"}}
    return originals


def restore(containers: Sequence[Any], originals: Mapping[str, Any]) -> None:
    """Restore the original probes in place. Ports that had names become numbers."""
    for _, holder, key, path in _handled(containers):
        original = originals.get(path)
        if isinstance(original, dict) and mapping(holder[key], "httpGet").get("path") == path:
            kept = {field: value for field, value in holder[key].items() if field not in _HANDLERS}
            handler = {name: original[name] for name in _HANDLERS if name in original}
            holder[key] = {**kept, **handler}


def _handled(containers: Sequence[Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], str, str]]:
    """Yield every probe with a rewritable handler, as four values: its container, the object that contains the
    probe, the probe's key in this object, and its path.
    """
    for container in containers:
        if not isinstance(container, dict):
            continue
        name = container.get("name")
        for key, word in _PROBES.items():
            if _has_handler(container.get(key)):
                yield container, container, key, f"/app-health/{name}/{word}"
        lifecycle = container.get("lifecycle")
        for key, word in _HOOKS.items():
            if isinstance(lifecycle, dict) and _has_handler(lifecycle.get(key)):
                yield container, lifecycle, key, f"/app-lifecycle/{name}/{word}"


def _has_handler(probe: object) -> bool:
    return isinstance(probe, dict) and any(isinstance(probe.get(name), dict) for name in _HANDLERS)


def _port_number(port: object, container: Mapping[str, Any]) -> int | None:
    if isinstance(port, int) and not isinstance(port, bool):
        return port
    if isinstance(port, str) and (number := whole_number(port, 65535)) is not None:
        return number
    listed = container.get("ports")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("name") == port and isinstance(each.get("containerPort"), int):
            return int(each["containerPort"])
    return None
