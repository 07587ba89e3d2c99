"""Connects to a proxy or node agent of a cluster through ``kubectl``, because its pages are served on its pod's
loopback only.

``kubectl port-forward`` opens a port of this machine that leads to the pod while the command runs. It needs
neither a shell nor curl in the pod's image. kubectl's own configuration determines the cluster and the
credentials.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Final, NamedTuple


class Daemon(NamedTuple):
    """A DaemonSet that runs one pod per node.

    Attributes:
        name: the DaemonSet's name in errors.
        label: the label ``app`` of the DaemonSet's pods.
        port: the port of the pods' admin pages.
    """

    name: str
    label: str
    port: int

    @property
    def selector(self) -> str:
        """The label selector of the DaemonSet's pods."""
        return f"app={self.label}"


#: The node proxies. Istio's own DaemonSet and ours have this label.
PROXY: Final = Daemon("ztunnel", "ztunnel", 15000)
AGENT: Final = Daemon("node agent", "ztunnel-agent", 15014)
#: The container name of a sidecar proxy, used by Istio's injector and ours.
_SIDECAR: Final = "istio-proxy"
#: Time limits for a request to the API server, and until the port is open. They are a guess that allows for
#: distant clusters.
_ANSWER_S: Final = 20.0
#: How much of a pod's log is read to return its end. 20,000 lines of an access log are at most 20 MiB.
_LOG_FACTOR: Final = 20
_FORWARDING: Final = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) ->")
_KLOG: Final = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d")


class Unreachable(Exception):
    """The pod or node does not exist, or kubectl cannot reach the cluster; the text says which, and what to do."""


class Kubectl:
    """Runs kubectl.

    Args:
        context: the context of its configuration. Empty means the current one.
        kubeconfig: the file of its configuration. Empty means its own choice.
        as_user: the user to impersonate. Empty for the kubeconfig's own user.
        limit_s: the time limit for one request.
    """

    def __init__(
        self, context: str = "", kubeconfig: str = "", as_user: str = "", limit_s: float = _ANSWER_S
    ) -> None:
        flags = (("--context", context), ("--kubeconfig", kubeconfig), ("--as", as_user))
        self._words = ["kubectl", *(word for flag, value in flags if value for word in (flag, value))]
        self._limit_s = limit_s

    def get(self, *words: str, limit_s: float | None = None) -> Any:
        """Return the JSON of ``kubectl get``.

        Raises:
            Unreachable: there is no answer in time, or kubectl refuses.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        command = [*self._words, "get", *words, "-o", "json"]
        try:
            # kubectl writes UTF-8 in any locale.
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=limit_s
            )
        except OSError as error:
            raise _no_kubectl(error) from None
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{' '.join(command)}: no answer in {limit_s:g} s") from None
        if done.returncode:
            raise Unreachable(_complaint(done.stderr) or f"{' '.join(command)}: exit status {done.returncode}")
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise Unreachable(f"{' '.join(command)}: answered no JSON") from None

    def names(self, kind: str, limit_s: float) -> Iterator[str]:
        """Yield the names of all nodes, or of all pods as ``NAMESPACE/NAME``.

        Raises:
            Unreachable: there is no answer in time.
        """
        for item in _items(self.get(kind, "--all-namespaces", limit_s=limit_s)):
            about = item.get("metadata") or {}
            yield f"{about['namespace']}/{about['name']}" if about.get("namespace") else str(about.get("name"))

    def of_pod(self, pod: str, daemon: Daemon) -> tuple[str, str]:
        """Return namespace and name of the daemon on a pod's node. For a pod with its own proxy, return that pod.

        Args:
            pod: ``NAME.NAMESPACE`` like in istioctl, ``NAMESPACE/NAME``, or a name in namespace default.
            daemon: the daemon whose pod on that node is returned.

        Raises:
            Unreachable: there is none.
        """
        namespace, name = pod_name(pod)
        found = self.get("pod", name, "--namespace", namespace)
        spec = found.get("spec") or {}
        containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
        is_one = _label(found) == daemon.label
        if is_one or (daemon is PROXY and any(each.get("name") == _SIDECAR for each in containers)):
            return namespace, name
        node = spec.get("nodeName")
        if not node:
            raise Unreachable(f"pod {namespace}/{name} is on no node yet")
        return self.of_node(node, daemon)

    def of_node(self, node: str, daemon: Daemon) -> tuple[str, str]:
        """Return namespace and name of the daemon's pod on a node, the newer one if two are running.

        Raises:
            Unreachable: there is none.
        """
        words = ("--all-namespaces", "--selector", daemon.selector, "--field-selector", f"spec.nodeName={node}")
        running = [item for item in _items(self.get("pods", *words)) if _phase(item) == "Running"]
        if not running:
            raise Unreachable(
                f"no {daemon.name} runs on node {node!r}: no pod there has the label {daemon.selector}"
            )
        newest = max(running, key=_use)
        return newest["metadata"]["namespace"], newest["metadata"]["name"]

    def of_all_nodes(self, daemon: Daemon) -> dict[str, tuple[str, str]]:
        """Return namespace and name of the daemon's pod on every node, the newer one if two are running.

        If none is running on a node, return a pod that is not: forwarding to it fails, and the error reports the
        node.

        Raises:
            Unreachable: there is no answer, or no node has the daemon.
        """
        found = {
            str(item["spec"]["nodeName"]): (str(item["metadata"]["namespace"]), str(item["metadata"]["name"]))
            for item in sorted(
                _items(self.get("pods", "--all-namespaces", "--selector", daemon.selector)), key=_use
            )
            if (item.get("spec") or {}).get("nodeName") and _phase(item) != "Succeeded"
        }
        if not found:
            raise Unreachable(f"no {daemon.name} runs: no pod has the label {daemon.selector}")
        return dict(sorted(found.items()))

    def pods(self, selector: str, namespace: str = "") -> dict[tuple[str, str], str]:
        """Return the node of every pod with these labels, by namespace and name.

        Raises:
            Unreachable: there is no answer.
        """
        where = ("--namespace", namespace) if namespace else ("--all-namespaces",)
        found = _items(self.get("pods", *where, "--selector", selector))
        return {
            (str(item["metadata"]["namespace"]), str(item["metadata"]["name"])): str(
                (item.get("spec") or {}).get("nodeName") or ""
            )
            for item in found
        }

    def logs(self, namespace: str, name: str, *, previous: bool = False, limit_bytes: int, since: str = "") -> str:
        """Return the newest lines of a pod's log, or of the log from before its containers restarted.

        Args:
            limit_bytes: the most bytes to return.

        Raises:
            Unreachable: there is no answer in time, or kubectl refuses.
        """
        # kubectl's limit ends the output, which would leave the newest lines out. So it only limits the memory.
        read_bytes = limit_bytes * _LOG_FACTOR
        words = ["logs", "--namespace", namespace, name, "--all-containers", f"--limit-bytes={read_bytes}"]
        words += ["--tail=20000", *(["--previous"] if previous else []), *([f"--since={since}"] if since else [])]
        command = [*self._words, *words]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=self._limit_s)
        except OSError as error:
            raise _no_kubectl(error) from None
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{' '.join(command)}: no answer in {self._limit_s:g} s") from None
        if done.returncode:
            raise Unreachable(_complaint(done.stderr.decode(errors="replace")) or "kubectl logs failed")
        newest = done.stdout[-limit_bytes:]
        if len(newest) < len(done.stdout):
            newest = newest.partition(b"\n")[2]  # the first line is cut
        return newest.decode(errors="replace")

    @contextmanager
    def forwarded(self, namespace: str, name: str, port: int) -> Iterator[str]:
        """Forward a local port to a port on a pod's loopback; yields the local ``HOST:PORT``.

        Raises:
            Unreachable: the port was not opened.
        """
        target = ["--namespace", namespace, f"pod/{name}", f":{port}", "--address", "127.0.0.1"]
        with tempfile.TemporaryFile() as errors:
            try:
                running = subprocess.Popen(
                    [*self._words, "port-forward", *target],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            except OSError as error:
                raise _no_kubectl(error) from None
            ports: queue.SimpleQueue[int | None] = queue.SimpleQueue()
            reader = threading.Thread(target=_read_ports, args=(running.stdout, ports), daemon=True)
            with running:
                reader.start()
                try:
                    yield f"127.0.0.1:{_opened(ports, errors, f'{namespace}/{name}')}"
                finally:
                    running.kill()  # no data is lost: all requests have been answered
                    reader.join()


def kubectl_of(args: argparse.Namespace) -> Kubectl:
    """Return a runner of kubectl that is configured by the flags of a command line."""
    return Kubectl(args.context, args.kubeconfig, args.as_user, args.request_timeout or _ANSWER_S)


def pod_name(text: str) -> tuple[str, str]:
    """Return namespace and name of ``NAME.NAMESPACE``, ``NAMESPACE/NAME``, or a name in namespace default."""
    namespace, slash, name = text.partition("/")
    if slash:
        return namespace, name
    name, dot, namespace = text.rpartition(".")  # a pod's name may have dots, a namespace's has none
    return (namespace, name) if dot else ("default", namespace)


def _read_ports(said: IO[bytes], ports: queue.SimpleQueue[int | None]) -> None:
    """Read kubectl's output to its end. kubectl writes a line for each connection, and would block on a full
    pipe."""
    for line in said:
        found = _FORWARDING.match(line)
        if found is not None:
            ports.put(int(found.group(1)))
    ports.put(None)


def _opened(ports: queue.SimpleQueue[int | None], errors: IO[bytes], pod: str) -> int:
    """Wait until kubectl has opened the port."""
    reason = f"no port was opened in {_ANSWER_S:g} s"
    try:
        port = ports.get(timeout=_ANSWER_S)
    except queue.Empty:
        port = None
    else:
        if port is not None:
            return port
        errors.seek(0)
        reason = _complaint(errors.read().decode(errors="replace")) or "it ended"
    raise Unreachable(f"kubectl port-forward to {pod}: {reason}")


def _no_kubectl(error: OSError) -> Unreachable:
    if not isinstance(error, FileNotFoundError):
        return Unreachable(f"kubectl cannot be run: {error.strerror}")
    return Unreachable("kubectl is not on the PATH; it is needed to query the proxies of nodes and pods")


def _items(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(found.get("items") or [])


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase"))


def _use(pod: Mapping[str, Any]) -> tuple[bool, str]:
    """Return a sort key for a node's proxy pods: running pods sort after others, newer ones after older ones. The
    last pod is queried.
    """
    return _phase(pod) == "Running", str(pod["metadata"].get("creationTimestamp"))


def _label(pod: Mapping[str, Any]) -> str:
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return str(labels.get("app", ""))


def _complaint(text: str) -> str:
    """Return the readable part of kubectl's error output, without the klog lines about earlier attempts."""
    lines = [line for line in text.strip().splitlines() if line]
    return next((line for line in lines if not _KLOG.match(line)), lines[0] if lines else "")
