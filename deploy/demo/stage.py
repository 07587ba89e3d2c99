"""The base of every demo: a lab with the pods of bookinfo, the programs in it, and one output line per
expectation.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

from deploy.demo.folder import marked
from deploy.demo.window import Window
from deploy.demo.wire import WireReport, WireTap
from deploy.lab import Lab, Place

VIP = "10.96.183.192"
PORT = 9080
NODES = {
    "worker": ["reviews-v1", "ratings", "visitor"],
    "worker2": ["productpage", "reviews-v2", "reviews-v3", "intruder"],
}
VERSIONS = ("reviews-v1", "reviews-v2", "reviews-v3")
OUTSIDE = "visitor"
SERVERS = (*VERSIONS, "ratings")
SECRET = b"the secret of this page is plain to see"
ZTUNNEL_COMMAND = (sys.executable, "-m", "ztunnel")
#: Log lines arrive in bursts. A burst has ended when no new line has arrived for this time.
_QUIET_S = 0.35
#: The longest wait for log lines that are known to be missing.
_SLOW_S = 5.0
#: The time limit for an expectation to be met.
SETTLE_S = 10.0
#: The widest line of a table.
COLUMNS = 120
_INDENT = " " * 6
#: Seconds between two rounds of calls in a demo that stays up.
_TRAFFIC_S = 0.5
#: The number of calls before a proxy ends, and of calls afterwards.
_CALLS = 40
_ACCOUNTS = {"productpage": "bookinfo-productpage", "ratings": "bookinfo-ratings", "intruder": "intruder"}


class Unexpected(Exception):
    """A part of the demo did not become ready."""


def print_logs(folder: Path) -> None:
    """Print the end of every log file of a demo to standard error."""
    for log in sorted(folder.glob("*.log")):
        print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)


def account(pod: str) -> str:
    """Return the service account of a pod."""
    return _ACCOUNTS.get(pod, "bookinfo-reviews" if pod.startswith("reviews") else "default")


@dataclass
class Demo(ABC):
    """The running demo: its lab and files, and the number of failed expectations."""

    setting: ClassVar[str]
    places: ClassVar[Mapping[str, list[str]]] = NODES
    lab: Lab
    folder: Path
    colour: bool
    window: Window | None = None
    failures: int = 0
    wire: WireTap = field(init=False)
    proxies: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    _logs: dict[Path, str] = field(default_factory=dict)
    _read_until: dict[Path, int] = field(default_factory=dict)

    @abstractmethod
    def start(self) -> None:
        """Start all processes of the demo, and return when they are ready.

        Raises:
            Unexpected: a part did not become ready in time.
        """

    @abstractmethod
    def succeed(self, node: str) -> "subprocess.Popen[bytes]":
        """Start a node's next proxy beside the running one, and return when it is ready."""

    @property
    def hands_over(self) -> bool:
        """Whether open connections move to a node's next proxy."""
        return False

    @abstractmethod
    def acts(self) -> None:
        """Run all acts, in order."""

    @abstractmethod
    def explain(self) -> None:
        """Print commands to inspect the running demo."""

    def traffic(self) -> "contextlib.AbstractContextManager[object]":
        """Return a context manager that makes calls while entered, for a long-running demo."""
        return Traffic(self)

    def print_hints(self, hints: Mapping[str, str]) -> None:
        """Print commands for another terminal, each with what it shows."""
        print("\nStill running; ctrl-C ends it. From another terminal:")
        for name, command in hints.items():
            print(f"  {name:14} {command}")

    def print_traffic(self) -> None:
        """Print what :meth:`traffic` does while the demo stays up."""
        print(
            "Meanwhile productpage goes on calling the service, on a connection that stays open and on new ones,"
        )
        print("and intruder is refused.")

    def live_page(self, proxy: Place) -> dict[str, str]:
        """Return the hint that shows where a proxy's live page is, if a browser can reach it."""
        return {"live page": f"http://{self.window.towards(proxy, 15000)}/ui"} if self.window is not None else {}

    def tap(self, node: str, pod: str) -> str:
        """Return the command that captures a pod's streams, and shows them where tshark is installed.

        The command need not enter a namespace, because the socket is a file.
        """
        command = f"{' '.join(ZTUNNEL_COMMAND)} tap {pod} --for 10s --socket {self.tap_socket(node)}"
        if shutil.which("tshark") is None:
            return f"{command} -w {pod.rpartition('/')[2]}.pcapng   (for Wireshark)"
        return f"{command} -w - | tshark -l -r - -Y http"

    def tap_socket(self, node: str) -> Path:
        """Return the path of the socket on which a node's proxy accepts taps."""
        return self.folder / f"{node}.tap"

    # The stage

    @property
    def socket(self) -> Path:
        """The path of the control plane's socket; as a file it is reachable from all network namespaces."""
        return self.folder / "xds.sock"

    def replace(self, name: str, text: str) -> None:
        """Replace one of the demo's files atomically."""
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.replace(self.folder / name)

    def mesh(
        self,
        *,
        reviews: tuple[str, ...] = VERSIONS,
        viewer: str = "bookinfo-productpage",
        outside: tuple[str, ...] = (OUTSIDE,),
    ) -> str:
        """Return the mesh file.

        Args:
            reviews: the pods of the service.
            viewer: the account that the service's policy allows.
            outside: pods that are not in the mesh.
        """
        pods = {}
        for worker, names in NODES.items():
            for name in names:
                pods[name] = {
                    "node": worker,
                    "addresses": [str(address) for address in self.lab.pod(name).addresses],
                    "service_account": account(name),
                    "mesh": name not in outside,
                }
        document = {
            "nodes": {worker: {} for worker in NODES},
            "pods": pods,
            "services": {"reviews": {"addresses": [VIP], "ports": {"http": PORT}, "pods": list(reviews)}},
            "policies": {
                "reviews-viewer": {
                    "action": "ALLOW",
                    "service_account": "bookinfo-reviews",
                    "rules": [{"from": {"principals": [f"cluster.local/ns/default/sa/{viewer}"]}}],
                }
            },
        }
        return json.dumps(document, indent=1)

    def start_control_plane(self, *arguments: str) -> None:
        """Start serving the mesh file."""
        self.replace("mesh.yaml", self.mesh())
        serve = [*ZTUNNEL_COMMAND, "control-plane", "mesh.yaml", "--listen", f"unix:{self.socket}", *arguments]
        self.control_plane = self.run(next(iter(self.lab.workers.values())).place, "control-plane", serve)

    def start_applications(self) -> None:
        """Start the pods' applications."""
        for name in SERVERS:
            self.run(self.lab.pod(name), "app", [sys.executable, "-m", "deploy.demo.app", name, str(PORT)])

    def wait_for_applications(self) -> None:
        """Wait until all applications answer."""
        for name in SERVERS:
            self.wait(f"the application of {name}", partial(self.listens, self.lab.pod(name)))

    def run_proxy(
        self,
        node: str,
        place: Place,
        command: list[str],
        environment: Mapping[str, str] = os.environ,
        *,
        generation: int = 0,
    ) -> "subprocess.Popen[bytes]":
        """Start a proxy of a node, whose log :meth:`new_lines` reads."""
        name = f"proxy{generation or ''}"
        self._logs[self.folder / f"{name}-{place.name}.log"] = node
        return self.run(place, name, command, environment)

    def run(
        self, place: Place, name: str, command: list[str], environment: Mapping[str, str] = os.environ
    ) -> "subprocess.Popen[bytes]":
        """Start a program in a namespace; its output goes to a file."""
        log = (self.folder / f"{name}-{place.name}.log").open("wb")
        here = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
        with log:
            return place.popen(
                command,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**marked(environment), "PYTHONPATH": path},
            )

    @staticmethod
    def wait(what: str, ready: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Poll until a condition is true."""
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ready():
                    return
            if time.monotonic() > deadline:
                raise Unexpected(f"{what} was not ready within {limit_s:g} s")
            time.sleep(0.05)

    def listens(self, pod: Place) -> bool:
        """Return whether a pod's application accepts a connection from inside the pod, without a proxy."""
        with pod.socket() as sock:
            sock.settimeout(1.0)
            sock.connect(("127.0.0.1", PORT))
        return True

    def page(self, place: Place, port: int, path: str) -> tuple[int, str]:
        """Return a page of a proxy's HTTP server, requested inside its namespace."""
        connection = connect(place, "127.0.0.1", port)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    # The play

    def act_successor(self) -> None:
        """Start a second proxy beside the first, and end the first."""
        print("\nthe proxy of worker2 is replaced while pods go on calling")
        connection = connect(self.lab.pod("productpage"), VIP, PORT)
        before = self.call_on(connection, "productpage", VIP)
        old = self.proxies["worker2"]
        with _Caller(self) as caller:
            self.proxies["worker2"] = self.succeed("worker2")
            so_far = caller.count
            old.send_signal(signal.SIGTERM)
            self.wait("more calls", lambda: caller.count >= so_far + _CALLS)
            during = self.call_on(connection, "productpage", VIP)
            if not self.hands_over:
                connection.close()
            try:
                status = old.wait(SETTLE_S)
            except subprocess.TimeoutExpired:
                status = -1
            at_end = caller.count
            self.wait("calls without the first generation", lambda: caller.count >= at_end + _CALLS)
        failures = [call for call in caller.calls if call.error]
        self.check(not failures, f"{len(caller.calls)} new connections meanwhile, {len(failures)} failed")
        for call in failures[:3]:
            print(f"      {call}")
        same = before.answered_by == during.answered_by != ""
        self.check(same, f"the open connection went on with {during.answered_by or during.error}")
        self.check(status == 0, f"the first generation ended by itself, status {status}")
        if self.hands_over:
            after = self.call_on(connection, "productpage", VIP)
            connection.close()
            same = before.answered_by == after.answered_by != ""
            self.check(
                same, f"without it, the connection opened before went on with {after.answered_by or after.error}"
            )
        self.new_lines()

    def call(self, pod: str, host: str) -> "Call":
        """Make one HTTP request from a pod."""
        connection = connect(self.lab.pod(pod), host, PORT)
        try:
            return self.call_on(connection, pod, host)
        finally:
            connection.close()

    def call_on(self, connection: http.client.HTTPConnection, pod: str, host: str) -> "Call":
        """Make one request on an open connection."""
        began = time.perf_counter()
        try:
            connection.request("GET", "/reviews/0")
            text = connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            return Call(pod, host, "", type(error).__name__, time.perf_counter() - began)
        return Call(pod, host, text, "", time.perf_counter() - began)

    def new_lines(
        self, at_least: int = 0, wanted: Callable[[dict[str, object]], bool] = lambda line: True
    ) -> list[dict[str, object]]:
        """Wait until no more log lines arrive, and return the new JSON lines of all proxies, each with its node.

        Args:
            at_least: the number of lines to wait for, within a time limit.
            wanted: selects the lines that count and are returned.
        """
        lines: list[dict[str, object]] = []
        last = time.monotonic()
        while time.monotonic() - last < (_QUIET_S if len(lines) >= at_least else _SLOW_S):
            time.sleep(0.05)
            for path, node in self._logs.items():
                data = path.read_bytes()
                start = self._read_until.get(path, 0)
                end = self._read_until[path] = data.rfind(b"\n") + 1
                found = [json.loads(line) for line in data[start:end].splitlines() if line.startswith(b"{")]
                if found:
                    last = time.monotonic()
                    lines += [{"node": node, **line} for line in found if wanted(line)]
        return lines

    def check(self, expected: bool, text: str) -> None:
        """Show one expectation and whether it was met."""
        self.failures += not expected
        mark = "ok  " if expected else "FAIL"
        if self.colour:
            mark = f"\033[{32 if expected else 31}m{mark}\033[0m"
        print(f"  {mark} {text}")

    def _act_wire(self, report: WireReport) -> None:
        """Check that the nodes have sent each other only TLS."""
        print("\nthe wire between the nodes, during all of the above")
        text = f"{report.packets} packets with payload, {report.records} TLS records, {report.tls_bytes} bytes"
        self.check(
            report.records > 0 and not report.plain, f"{text}; {len(report.plain)} payloads that are not TLS"
        )
        for plain in report.plain[:5]:
            print(f"      {plain}")
        self.check(report.secrets_seen == 0, f"the pages' text was seen {report.secrets_seen} times")

    def play(self) -> None:
        """Run the demo while capturing the wire between the nodes."""
        place = self.lab.worker("worker2").place
        with place.netns.entered():
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.wire = WireTap(raw, "eth0", SECRET)
        try:
            self.acts()
        finally:
            report = self.wire.stop()
        self._act_wire(report)


class _Caller:
    """Calls the service from productpage repeatedly while entered. Each call has a new connection."""

    def __init__(self, demo: Demo) -> None:
        self.calls: list[Call] = []
        self._demo = demo
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caller", daemon=True)

    @property
    def count(self) -> int:
        """Return the number of calls so far."""
        return len(self.calls)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                call = self._demo.call("productpage", VIP)
            except OSError as error:
                call = Call("productpage", VIP, "", type(error).__name__, 0.0)
            self.calls.append(call)


class Traffic:
    """Makes calls while entered, so that the commands for a running demo have something to show.

    productpage calls the service on a connection that stays open and on new ones, intruder is refused.
    """

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        demo, connection = self._demo, None
        while not self._stopped.wait(_TRAFFIC_S):
            # A user who experiments with the demo can stop programs that these calls need.
            with contextlib.suppress(OSError):
                if connection is None:
                    connection = connect(demo.lab.pod("productpage"), VIP, PORT)
                if demo.call_on(connection, "productpage", VIP).error:
                    connection.close()
                    connection = None
                for pod in ("productpage", "intruder"):
                    demo.call(pod, VIP)
        if connection is not None:
            connection.close()


@dataclass(frozen=True)
class Call:
    """The outcome of one request: client, destination, answer and duration."""

    pod: str
    host: str
    text: str
    error: str
    seconds: float

    @property
    def answered_by(self) -> str:
        """The application that answered."""
        return self.text.partition(" ")[0]

    @property
    def peer(self) -> str:
        """The client as the application saw it."""
        found = re.search(r"called by (\S+):", self.text)
        return found[1].removeprefix("::ffff:") if found else ""

    def __str__(self) -> str:
        what = f"{self.answered_by}, which saw {self.peer}" if self.text else f"closed ({self.error})"
        return f"{self.pod} -> {self.host}: {what}, {self.seconds * 1000:.1f} ms"


def short(identity: object) -> str:
    """Return the last path segment of a SPIFFE identity."""
    return str(identity).rpartition("/")[2]


def row(parts: Iterable[str]) -> str:
    """Return a table row with the given parts, without empty ones, in lines of at most :data:`COLUMNS`."""
    lines = [""]
    for part in filter(None, parts):
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(_INDENT) + len(longer.rstrip()) <= COLUMNS or not lines[-1].strip():
            lines[-1] = longer
        else:
            lines.append(" " * 8 + part)
    return "\n".join(_INDENT + line.rstrip() for line in lines)


def enter(place: Place) -> str:
    """Return the command that enters a namespace from another terminal. A program's command can follow it.

    The namespaces of a demo without root belong to its user namespace, and have names in its mounts only.
    """
    inside = f"nsenter --net=/run/netns/{place.netns.name}"
    mine, first = (Path(f"/proc/{pid}/uid_map").read_text().split() for pid in ("self", 1))
    if mine == first:
        return inside
    return f"nsenter -t {os.getpid()} -U -m --preserve-credentials {inside}"


def connect(place: Place, host: str, port: int) -> http.client.HTTPConnection:
    """Return an HTTP connection whose socket is in a namespace."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    sock = place.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.settimeout(5)
    try:
        sock.connect((host, port))
    except OSError:
        sock.close()
        raise
    connection.sock = sock
    return connection
