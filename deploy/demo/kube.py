"""The demo of a cluster: a real API server, agents that enrol pods by label, network policy, and admission review.

Nodes and pods are network namespaces. The demo does the work of the scheduler and the kubelet (it creates pods and
reports their addresses), and a part of istiod's work (it writes the annotated pods into the mesh file of the
embedded control plane).
"""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from deploy.apiserver import ADMIN, PROGRAMS, ApiServer, found
from deploy.demo.inpod import InPodDemo
from deploy.demo.stage import OUTSIDE, PORT, SETTLE_S, ZTUNNEL_COMMAND, Call, Unexpected, connect, enter
from deploy.lab import Place
from deploy.processes import Proc
from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_ROUTE, NetlinkSocket
from tproxy.inpod import PROBE_SOURCES

_REDIRECTION = "ambient.istio.io/redirection"
_MODE = "istio.io/dataplane-mode"
_SPACE = "default"
#: Pods that exist before the mesh; ``ratings`` comes later, through the injector.
_FIRST = {"reviews-v1": "worker", "productpage": "worker2", OUTSIDE: "worker2"}
_LATE = "ratings"
#: The address where `ztunnel audit` finds an agent by default.
_AGENT_PAGES = "127.0.0.1:15014"
_POLICY = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"


class MissingPrograms(Exception):
    """The API server's programs are not installed. The text explains how to get them."""


def programs() -> dict[str, str]:
    """Return the paths of etcd and kube-apiserver.

    Raises:
        MissingPrograms: a program is not installed.
    """
    paths = {name: found(name) for name in PROGRAMS}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        raise MissingPrograms(
            f"this demo needs {' and '.join(missing)}: run `make kube` once (Go, some minutes), or name them in "
            "ETCD and KUBE_APISERVER"
        )
    return {name: path for name, path in paths.items() if path is not None}


@dataclass
class KubeDemo(InPodDemo):
    """The demo with an API server, where labels select the pods of the mesh."""

    setting = "an API server, a control plane, and per node an agent, a proxy and network policy"
    places: ClassVar[Mapping[str, list[str]]] = {
        "worker": ["reviews-v1", _LATE],
        "worker2": ["productpage", OUTSIDE],
    }
    api: "ApiServer" = field(init=False)
    agents: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    procs: dict[str, Proc] = field(default_factory=dict)
    in_mesh: set[str] = field(default_factory=set)

    def start(self) -> None:
        _loopback_up()
        folder = self.folder / "api"
        folder.mkdir()
        self.api = ApiServer(folder, programs(), _free_ports(3), self.lab.own)
        try:
            self.api.start()
        except AssertionError as error:
            raise Unexpected(str(error)) from error
        print(f"  an API server at {self.api.url}")
        self.replace("mesh.yaml", self._mesh_now())
        serve = [*ZTUNNEL_COMMAND, "control-plane", "mesh.yaml", "--listen", f"unix:{self.socket}"]
        self.run(self.lab.worker("worker").place, "control-plane", serve)
        for pod, node in _FIRST.items():
            self._create(self._pod(pod, node))
            self._report(pod, node)
        for node, worker in self.lab.workers.items():
            self._relay(worker.place)
            self._proc(node)
            self._start_agent(node)
            netpol = [*ZTUNNEL_COMMAND, "netpol", "run", f"--kubeconfig={self.api.kubeconfig()}", f"--node={node}"]
            self.run(worker.place, "netpol", netpol)
            self.proxies[node] = self._start_proxy(node, worker.ztunnel)
        self._start_application("reviews-v1")
        for node, worker in self.lab.workers.items():
            self.wait(f"the proxy of {node}", partial(self._is_ready, worker.ztunnel))
        self.wait("the application", lambda: self.listens(self.lab.pod("reviews-v1")))
        threading.Thread(target=self._be_istiod, name="istiod", daemon=True).start()

    # The parts of the demo

    def _start_agent(self, node: str) -> None:
        options = [f"--kubeconfig={self.api.kubeconfig()}", f"--node={node}", f"--proc={self._proc(node).folder}"]
        command = [*ZTUNNEL_COMMAND, "agent", "--kube", "--socket", f"{node}.zds", f"--probe-user={os.getuid()}"]
        command.append(f"--metrics={_AGENT_PAGES}")
        self.agents[node] = self.run(self.lab.worker(node).place, "agent", [*command, *options])

    def _start_application(self, name: str) -> None:
        self.run(self.lab.pod(name), "app", [sys.executable, "-m", "deploy.demo.app", name, str(PORT)])

    def _proc(self, node: str) -> Proc:
        if node not in self.procs:
            proc = self.procs[node] = Proc(self.folder / f"proc-{node}")
            proc.add(1, self.lab.worker(node).place.netns)
        return self.procs[node]

    def _relay(self, place: Place) -> None:
        """Forward the API server's port into a node, which has its own loopback device."""
        port = int(self.api.url.rpartition(":")[2])
        with place.netns.entered():
            listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=_relay, args=(listener, port), name="relay", daemon=True).start()

    def _be_istiod(self) -> None:
        """Write the mesh file with the pods that are in the mesh according to their annotations. In a cluster,
        istiod does this.
        """
        while True:
            try:
                pods = self.request("GET", f"/api/v1/namespaces/{_SPACE}/pods")["items"]
            except (OSError, ValueError):
                time.sleep(0.1)
                continue
            annotated = {
                pod["metadata"]["name"]
                for pod in pods
                if pod["metadata"].get("annotations", {}).get(_REDIRECTION) == "enabled"
            }
            if annotated != self.in_mesh:
                self.in_mesh = annotated
                try:
                    self.replace("mesh.yaml", self._mesh_now())
                except OSError:
                    return  # the demo has ended
            time.sleep(0.1)

    def _mesh_now(self) -> str:
        pods = {
            pod: {
                "node": node,
                "addresses": [str(address) for address in self.lab.pod(pod).addresses],
                "service_account": pod,
                "mesh": pod in self.in_mesh,
            }
            for pod, node in {**_FIRST, _LATE: "worker"}.items()
        }
        return json.dumps({"nodes": {node: {} for node in self.lab.workers}, "pods": pods}, indent=1)

    # The API

    def request(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        """Send one request to the API server, and return the object in its answer.

        Raises:
            OSError: no answer, or an error status.
        """
        headers = {"authorization": f"Bearer {ADMIN}", "content-type": kind}
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.api.url}{path}", data, headers, method=method)
        trust = ssl.create_default_context(cafile=self.api.ca)
        with urllib.request.urlopen(asked, timeout=10, context=trust) as answer:
            return json.loads(answer.read())

    def _patch(self, path: str, body: object) -> Any:
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def _label(self, mode: str | None) -> None:
        self._patch(f"/api/v1/namespaces/{_SPACE}", {"metadata": {"labels": {_MODE: mode}}})

    def _pod(self, name: str, node: str) -> dict[str, Any]:
        spec = {"nodeName": node, "serviceAccountName": name, "containers": [{"name": "app", "image": "app"}]}
        labels = {"app": name} | ({_MODE: "none"} if name == OUTSIDE else {})
        metadata = {"name": name, "namespace": _SPACE, "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def _create(self, pod: Mapping[str, Any]) -> None:
        self.request("POST", f"/api/v1/namespaces/{_SPACE}/pods", pod)

    def _report(self, name: str, node: str) -> None:
        """Run a pod's sandbox and report its addresses, as a kubelet does."""
        place = self.lab.pod(name)
        uid = self.request("GET", f"/api/v1/namespaces/{_SPACE}/pods/{name}")["metadata"]["uid"]
        self._proc(node).add(1000 + len(list(self._proc(node).folder.iterdir())), place.netns, uid)
        ips = [{"ip": str(address)} for address in place.addresses]
        status = {"status": {"phase": "Running", "podIP": ips[0]["ip"], "podIPs": ips}}
        self._patch(f"/api/v1/namespaces/{_SPACE}/pods/{name}/status", status)

    def _annotations(self) -> dict[str, str | None]:
        pods = self.request("GET", f"/api/v1/namespaces/{_SPACE}/pods")["items"]
        return {pod["metadata"]["name"]: pod["metadata"].get("annotations", {}).get(_REDIRECTION) for pod in pods}

    # The play

    def play(self) -> None:
        """Run the acts of the demo. They include plain-text traffic, so the packets between the nodes are not
        checked here.
        """
        self.acts()

    def acts(self) -> None:
        reviews = str(self.lab.pod("reviews-v1").ipv4)
        print("\nproductpage calls reviews-v1; nothing is in the mesh")
        kept = connect(self.lab.pod("productpage"), reviews, PORT)
        call = self.call_on(kept, "productpage", reviews)
        self._show("plain", call, call.answered_by == "reviews-v1", self._records())
        self._act_label(reviews)
        self._lives(kept, "the connection from before goes on, outside the mesh until it ends")
        through = connect(self.lab.pod("productpage"), reviews, PORT)
        self.call_on(through, "productpage", reviews)
        self._act_probe(reviews)
        self._act_policy_in_kernel(reviews)
        self._act_agent(reviews)
        self._act_gate(reviews)
        self._act_audit()
        self._act_unlabel(reviews)
        for connection, what in ((kept, "from before the mesh"), (through, "through the mesh")):
            self._lives(connection, f"the connection {what} is still open")
            connection.close()

    def _lives(self, connection: Any, what: str) -> None:
        call = self.call_on(connection, "productpage", "reviews-v1")
        self.check(call.answered_by == "reviews-v1", f"{what}{f': {call.error}' if call.error else ''}")

    def _tunnelled(self, pod: str, address: str) -> tuple[Call, list[dict[str, object]], bool]:
        self.new_lines()
        call = self.call(pod, address)
        records = self._records(2)
        return call, records, len(records) == 2 and all("dst.identity" in line for line in records)

    def _act_label(self, reviews: str) -> None:
        print(f"\nkubectl label namespace {_SPACE} {_MODE}=ambient")
        self._label("ambient")
        names = set(_FIRST) - {OUTSIDE}
        self._wait_or_fail(
            "its pods say ambient.istio.io/redirection=enabled",
            lambda: all(self._annotations()[name] == "enabled" for name in names),
        )
        self._wait_or_fail(
            "the control plane has told the proxies", lambda: self._tunnelled("productpage", reviews)[2]
        )
        self.check(self._annotations()[OUTSIDE] is None, f"but {OUTSIDE}, whose own label is {_MODE}=none")
        call, records, tunnelled = self._tunnelled("productpage", reviews)
        self._show("HBONE", call, call.answered_by == "reviews-v1" and tunnelled, records)

    def _act_probe(self, reviews: str) -> None:
        print("\nthe kubelet of worker probes reviews-v1, from the node")
        self.new_lines()
        node = self.lab.worker("worker").place
        connection = connect(node, reviews, PORT)
        try:
            call = self.call_on(connection, "kubelet", reviews)
        finally:
            connection.close()
        self._show("probe", call, call.peer == str(PROBE_SOURCES[0]), self._records())

    def _act_policy_in_kernel(self, reviews: str) -> None:
        print("\na NetworkPolicy lets only productpage reach reviews-v1, then visitor as well")
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "reviews"},
            "spec": {
                "podSelector": {"matchLabels": {"app": "reviews-v1"}},
                "policyTypes": ["Ingress"],
                "ingress": [_from("productpage")],
            },
        }
        self.request("POST", _POLICY, policy)
        self._wait_or_fail(f"{OUTSIDE} is denied", lambda: not self._reaches(OUTSIDE, reviews))
        call, _, tunnelled = self._tunnelled("productpage", reviews)
        self._show("productpage is not", call, call.answered_by == "reviews-v1" and tunnelled, [])
        self._patch(f"{_POLICY}/reviews", {"spec": {"ingress": [_from("productpage"), _from(OUTSIDE)]}})
        self._wait_or_fail(f"{OUTSIDE} is allowed", lambda: self._reaches(OUTSIDE, reviews))

    def _reaches(self, pod: str, address: str) -> bool:
        """Return whether a connection succeeds. If a policy denies it, the kernel drops its packets without an
        answer.
        """
        with self.lab.pod(pod).socket() as sock:
            sock.settimeout(1.0)
            try:
                sock.connect((address, PORT))
            except OSError:
                return False
        return True

    def _call_or_fail(self, pod: str, address: str) -> Call:
        """Call a pod. If the connect fails, report this as a failed call instead of raising."""
        try:
            return self.call(pod, address)
        except OSError as error:
            return Call(pod, address, "", type(error).__name__, 0.0)

    def _act_agent(self, reviews: str) -> None:
        print("\nkill -9 of the agent of worker2; its successor finds everything as it was")
        agent = self.agents["worker2"]
        agent.kill()
        agent.wait(SETTLE_S)
        call, _, tunnelled = self._tunnelled("productpage", reviews)
        self._show("without an agent", call, call.answered_by == "reviews-v1" and tunnelled, [])
        self._start_agent("worker2")
        log = self.folder / f"agent-{self.lab.worker('worker2').place.name}.log"
        self._wait_or_fail("the successor has enrolled its pods anew", lambda: "pod enabled" in log.read_text())
        call, _, tunnelled = self._tunnelled("productpage", reviews)
        self._show("with its successor", call, call.answered_by == "reviews-v1" and tunnelled, [])

    def _act_gate(self, reviews: str) -> None:
        print(f"\na new pod, {_LATE}, through `ztunnel inject -f`: it starts once its gate finds the mesh in it")
        file = self.folder / f"{_LATE}.json"
        file.write_text(json.dumps(self._pod(_LATE, "worker")))
        inject = subprocess.run(
            [*ZTUNNEL_COMMAND, "inject", "-f", str(file)],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(_root())},
        )  # fmt: skip
        if inject.returncode:
            self.check(False, f"ztunnel inject: {inject.stderr.strip()}")
            return
        pod = _yaml(inject.stdout)
        gates = [container["name"] for container in pod["spec"].get("initContainers", ())]
        self.check(gates == ["mesh-gate"], f"its init containers: {', '.join(gates)}")
        self._create(pod)
        gate = self.run(self.lab.pod(_LATE), "gate", [*ZTUNNEL_COMMAND, "gate"])
        self._report(_LATE, "worker")
        try:
            status = gate.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            status = -1
        self.check(status == 0, f"the gate is open, status {status}")
        self._wait_or_fail(
            "its first calls are in the mesh",
            lambda: self._is_tunnelled(_LATE, str(self.lab.pod("productpage").ipv4)),
        )

    def _act_audit(self) -> None:
        print("\nztunnel audit, on worker: is each pod in the mesh that says so, in every respect?")
        place = self.lab.worker("worker").place
        audit = self.run(place, "audit", [*ZTUNNEL_COMMAND, "audit"])
        status = audit.wait(SETTLE_S)
        for line in (self.folder / f"audit-{place.name}.log").read_text().splitlines():
            print(f"       {line}")
        self.check(status == 0, f"no finding, status {status}")

    def _is_tunnelled(self, pod: str, address: str) -> bool:
        """Make a call from a pod, and return whether it carried the pod's identity. The call itself can fail."""
        self.new_lines()
        self._call_or_fail(pod, address)
        return any("src.identity" in line for line in self._records(1))

    def _act_unlabel(self, reviews: str) -> None:
        print(f"\nkubectl label namespace {_SPACE} {_MODE}-")
        self._label(None)
        self._patch(f"/api/v1/namespaces/{_SPACE}/pods/{_LATE}", {"metadata": {"labels": {_MODE: None}}})
        self._wait_or_fail("no pod is annotated", lambda: not any(self._annotations().values()))

        def plain() -> bool:
            self.new_lines()
            return not self._call_or_fail("productpage", reviews).error and not self._records()

        self._wait_or_fail("new connections are plain", plain)

    def traffic(self) -> "contextlib.AbstractContextManager[object]":
        """No-op: the pods of this demo are created through the API server."""
        return contextlib.nullcontext()

    def explain(self) -> None:
        kubectl = f"kubectl --kubeconfig={self.api.kubeconfig()}"
        print(f"\n{kubectl} label namespace {_SPACE} {_MODE}=ambient")
        self._label("ambient")
        self._wait_or_fail("the pods are in the mesh again", lambda: any(self._annotations().values()))
        worker = self.lab.worker("worker")
        inside, node, pod = enter(worker.ztunnel), enter(worker.place), enter(self.lab.pod("productpage"))
        ztunnel = " ".join(ZTUNNEL_COMMAND)
        reviews = self.lab.pod("reviews-v1").ipv4
        self.print_hints(
            {
                "kubectl": f"{kubectl} get pods -o yaml",
                "a pod calls": f"{pod} curl -s http://{reviews}:{PORT}/",
                "why, why not": f"{inside} {ztunnel} explain {_SPACE}/productpage {_SPACE}/reviews-v1:{PORT}",
                "its state": f"{inside} {ztunnel} status   (workloads, connections, ...)",
                "every pod": f"{node} {ztunnel} audit",
                "in the kernel": f"{node} {ztunnel} netpol status",
                **self.live_page(worker.ztunnel),
                "logs": f"{self.folder}/*.log",
            }
        )


def _from(pod: str) -> dict[str, Any]:
    return {"from": [{"podSelector": {"matchLabels": {"app": pod}}}]}


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _loopback_up() -> None:
    """Bring up the loopback device, which is down in a new namespace."""
    with NetlinkSocket(NETLINK_ROUTE) as link:
        bodies = link.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))
        for found_link in map(rtnetlink.read_link, bodies):
            if found_link.name == "lo" and not found_link.up:
                link.request(rtnetlink.set_up(found_link.index))


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _relay(listener: socket.socket, port: int) -> None:
    """Forward connections to the same port in this process's own namespace, until the process ends."""
    while True:
        client, _ = listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", port))
        except OSError:
            client.close()
            continue
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=(source, sink), name="relay", daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        # Shut down both sockets, so that the thread for the other direction ends, too.
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
