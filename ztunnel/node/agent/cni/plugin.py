"""The CNI plugin that is copied to the host: announces each sandbox to the agent before a process starts in it.

It is chained after the network's own plugin (CNI specification 1.0). It makes no changes itself: the agent enters
the sandbox's namespace. If the agent does not answer 200, the sandbox fails, and the kubelet creates a new one, so
a pod of the mesh never starts outside the mesh. Pods of the excluded namespaces are not announced, so that the
agent and its dependencies can start without it.

It uses only the standard library of Python 3.7 and later, because it runs on hosts by itself, without this
package.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from typing import Any, Mapping  # noqa: UP035 - collections.abc's cannot be subscripted in Python 3.7

TIMEOUT_S = 10.0
VERSIONS = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
#: Error codes of the CNI specification: for the environment, for the configuration, and for "try again later".
BAD_ENVIRONMENT, BAD_CONFIG, TRY_AGAIN = 4, 7, 11


class Refused(Exception):
    """The plugin refuses a sandbox, so that creating it fails."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def add(config: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Announce a sandbox, and return the result of the plugins before this one.

    Raises:
        Refused: the sandbox must fail.
    """
    previous: Any = config.get("prevResult")
    if not isinstance(previous, dict):
        raise Refused(BAD_CONFIG, "no prevResult: the plugin must come after the network's own")
    pairs = dict(part.partition("=")[::2] for part in environment.get("CNI_ARGS", "").split(";"))
    name, namespace = pairs.get("K8S_POD_NAME", ""), pairs.get("K8S_POD_NAMESPACE", "")
    netns = environment.get("CNI_NETNS", "")
    if not name or not namespace:
        return previous  # the sandbox does not belong to a Kubernetes pod
    if not netns:
        raise Refused(BAD_ENVIRONMENT, "CNI_NETNS is empty")
    own = namespace == config.get("agent_namespace") and name.startswith(config.get("agent_prefix") or "ztunnel-")
    if own or namespace in (config.get("exclude_namespaces") or ()):
        return previous
    event = {
        "Netns": netns,
        "PodName": name,
        "PodNamespace": namespace,
        "PodUID": pairs.get("K8S_POD_UID", ""),
        "IPs": [_address(each) for each in previous.get("ips") or () if each],
    }
    path = config.get("socket") or "/var/run/istio-cni/pluginevent.sock"
    connection = _Connection(path)
    try:
        connection.request("POST", "/cmdadd", json.dumps(event), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise Refused(
            TRY_AGAIN, f"the node agent does not answer at {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    finally:
        connection.close()
    if answer.status != 200:
        raise Refused(TRY_AGAIN, text or f"the node agent answered {answer.status}")
    return previous


def _address(entry: dict[str, Any]) -> dict[str, Any]:
    address, _, length = (entry.get("address") or "").partition("/")
    return {"Interface": entry.get("interface"), "Address": {"IP": address, "Prefix": length}}


def main() -> int:
    """Run one command of the CNI specification, and return the exit status."""
    command = os.environ.get("CNI_COMMAND", "")
    version = "1.0.0"
    try:
        if command == "VERSION":
            print(json.dumps({"cniVersion": version, "supportedVersions": VERSIONS}))
            return 0
        if command != "ADD":
            # Nothing to do for DEL, CHECK, STATUS and GC: the rules disappear with the namespace, and the API
            # server reports deleted pods.
            return 0
        try:
            config = json.load(sys.stdin)
        except ValueError as error:
            raise Refused(BAD_CONFIG, f"the configuration is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise Refused(BAD_CONFIG, "the configuration is not an object")
        version = config.get("cniVersion") or version
        print(json.dumps(add(config, os.environ)))
    except Refused as error:
        print(json.dumps({"cniVersion": version, "code": error.code, "msg": f"ztunnel-cni: {error}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
