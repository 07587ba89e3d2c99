"""Two nodes, seven pods, one control plane, one proxy per node; every promise of the README shown once.

Everything lives in network namespaces of this machine and is gone afterwards. Exit status 0 means that each
line came out as expected.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.demo.wire import WireReport, WireTap
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.lab import Lab, Place, become_root_of_own_namespaces
from tproxy.errors import TproxyError
from tproxy.node import HOST, OWNERSHIP, ZTUNNEL, node

VIP = "10.96.183.192"
PORT = 9080
NODES = {
    "worker": ["reviews-v1", "ratings", "visitor"],
    "worker2": ["productpage", "reviews-v2", "reviews-v3", "intruder"],
}
ACCOUNTS = {"productpage": "bookinfo-productpage", "ratings": "bookinfo-ratings", "intruder": "intruder"}
OUTSIDE = "visitor"
SERVERS = ("reviews-v1", "reviews-v2", "reviews-v3", "ratings")
SECRET = b"the secret of this page is plain to see"


class Unexpected(Exception):
    """Something did not come out as promised."""


@dataclass
class Demo:
    """The running demo: where things are, and how many expectations failed."""

    lab: Lab
    folder: Path
    colour: bool
    failures: int = 0
    read_until: dict[str, int] = field(default_factory=dict)

    # The stage

    def mesh(self, reviews: tuple[str, ...] = ("reviews-v1", "reviews-v2", "reviews-v3")) -> str:
        """The mesh file."""
        pods = {}
        for worker, names in NODES.items():
            for name in names:
                account = ACCOUNTS.get(name, "bookinfo-reviews" if name.startswith("reviews") else "default")
                pods[name] = {
                    "node": worker,
                    "addresses": [str(address) for address in self.lab.pod(name).addresses],
                    "service_account": account,
                    "mesh": name != OUTSIDE,
                }
        document = {
            "nodes": {worker: {} for worker in NODES},
            "pods": pods,
            "services": {"reviews": {"addresses": [VIP], "ports": {"http": PORT}, "pods": list(reviews)}},
            "policies": {
                "reviews-viewer": {
                    "action": "ALLOW",
                    "service_account": "bookinfo-reviews",
                    "rules": [{"from": {"principals": ["cluster.local/ns/default/sa/bookinfo-productpage"]}}],
                }
            },
        }
        return json.dumps(document, indent=1)

    def start(self) -> None:
        """Interception, applications, control plane, proxies; returns when all are ready."""
        for worker in self.lab.workers.values():
            members = [name for name in worker.pods if name != OUTSIDE]
            netns = {ZTUNNEL: worker.ztunnel.netns, HOST: worker.place.netns}
            with contextlib.closing(BlockingKernel(netns, OWNERSHIP)) as kernel:
                changes = kernel.apply(node(worker.wanted(members)))
            print(f"  {worker.place.name}: interception of {len(members)} pods in place, {len(changes)} changes")
        for name in SERVERS:
            self.run(self.lab.pod(name), "app", [sys.executable, "-m", "deploy.demo.app", name, str(PORT)])
        (self.folder / "mesh.yaml").write_text(self.mesh())
        control = [*_ZTUNNEL, "control-plane", "mesh.yaml", "--listen", f"unix:{self.socket}", "--json-log"]
        self.run(next(iter(self.lab.workers.values())).place, "control-plane", control)
        for name, worker in self.lab.workers.items():
            proxy = [*_ZTUNNEL, "proxy", "--control-plane", f"unix:{self.socket}", "--node", name]
            self.run(worker.ztunnel, f"proxy-{name}", [*proxy, "--log-flush", "100ms"])
        for name, worker in self.lab.workers.items():
            self.wait(f"the proxy of {name}", partial(self.is_live, worker.ztunnel))
        for name in SERVERS:
            self.wait(f"the application of {name}", partial(self.listens, self.lab.pod(name)))

    @property
    def socket(self) -> Path:
        """Where control plane and proxies meet; a file, so namespaces do not matter."""
        return self.folder / "xds.sock"

    def run(self, place: Place, name: str, command: list[str]) -> None:
        """Start a program in a namespace; its output goes to a file."""
        log = (self.folder / f"{name}-{place.name}.log").open("wb")
        here = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        place.popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, env=environment)
        log.close()

    @staticmethod
    def wait(what: str, ready: Callable[[], bool], limit_s: float = 20.0) -> None:
        """Ask again until it is so."""
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ready():
                    return
            if time.monotonic() > deadline:
                raise Unexpected(f"{what} was not ready within {limit_s:g} s")
            time.sleep(0.05)

    def is_live(self, ztunnel: Place) -> bool:
        """Whether a proxy has listeners and everything they need."""
        return self.admin(ztunnel, "/ready").startswith("LIVE")

    def listens(self, pod: Place) -> bool:
        """Whether a pod's application answers, asked from inside the pod: no proxy is involved."""
        with pod.socket() as sock:
            sock.settimeout(1.0)
            sock.connect(("127.0.0.1", PORT))
        return True

    def admin(self, place: Place, path: str) -> str:
        """GET from a proxy's admin server, inside its namespace."""
        connection = _connect(place, "127.0.0.1", 15000)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    # The play

    def call(self, pod: str, host: str) -> "Call":
        """One HTTP request from a pod."""
        connection = _connect(self.lab.pod(pod), host, PORT)
        try:
            return self.call_on(connection, pod, host)
        finally:
            connection.close()

    def call_on(self, connection: http.client.HTTPConnection, pod: str, host: str) -> "Call":
        """One request on an open connection."""
        began = time.perf_counter()
        try:
            connection.request("GET", "/reviews/0")
            text = connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            return Call(pod, host, "", type(error).__name__, time.perf_counter() - began)
        return Call(pod, host, text, "", time.perf_counter() - began)

    def hops(self, quiet_s: float = 0.35) -> list[dict[str, object]]:
        """New access log lines of both proxies, in the order of the path, once no more come."""
        lines: list[dict[str, object]] = []
        last = time.monotonic()
        while time.monotonic() - last < quiet_s:
            time.sleep(0.05)
            for worker in self.lab.workers:
                data = (self.folder / f"proxy-{worker}-{worker}-ztunnel.log").read_bytes()
                start = self.read_until.get(worker, 0)
                end = self.read_until[worker] = data.rfind(b"\n") + 1
                found = [json.loads(line) for line in data[start:end].splitlines() if line.startswith(b"{")]
                if found:
                    last = time.monotonic()
                    lines += [{"node": worker, **line} for line in found]
        return sorted(lines, key=lambda line: _place_on_path(str(line["hop"])))

    def show(self, title: str, call: "Call", expected: bool, hops: list[dict[str, object]]) -> None:
        """A call and what the proxies say about it."""
        self.judge(expected, f"{title}: {call}")
        seen = set()
        for hop in hops:
            key = (hop["node"], hop["hop"], hop["chain"], hop["upstream"])
            if (
                str(hop["hop"]).endswith(("capture listener", "inbound listener", "listener plaintext"))
                or key in seen
            ):
                continue  # a listener's own line repeats the filter's
            seen.add(key)
            print(f"      {_row(hop)}")

    def judge(self, expected: bool, text: str) -> None:
        """One expectation."""
        self.failures += not expected
        mark = "ok  " if expected else "FAIL"
        if self.colour:
            mark = f"\033[{32 if expected else 31}m{mark}\033[0m"
        print(f"  {mark} {text}")

    def act_rotation(self) -> None:
        """The service's address, six times: every version in turn, on both nodes."""
        print(f"\nproductpage calls the service reviews at {VIP}:{PORT}")
        answers = []
        for _ in range(6):
            call = self.call("productpage", VIP)
            hops = self.hops()
            answers.append(call.answered_by)
            self.show("service", call, call.answered_by.startswith("reviews-v"), hops)
        even = sorted(answers) == sorted([*("reviews-v1", "reviews-v2", "reviews-v3")] * 2)
        self.judge(even, f"each version answered twice: {', '.join(answers)}")

    def act_pod_address(self) -> None:
        """A pod's own address, on the other node: one hop less, the client's address kept."""
        print("\nproductpage calls a pod of the other node by its address")
        call = self.call("productpage", str(self.lab.pod("reviews-v1").ipv4))
        kept = call.peer == str(self.lab.pod("productpage").ipv4)
        self.show("pod, IPv4", call, call.answered_by == "reviews-v1" and kept, self.hops())
        call = self.call("productpage", str(self.lab.pod("reviews-v1").ipv6))
        kept = call.peer == str(self.lab.pod("productpage").ipv6)
        self.show("pod, IPv6", call, call.answered_by == "reviews-v1" and kept, self.hops())

    def act_outside(self) -> None:
        """From outside the mesh, in plain text: let in where no policy forbids it."""
        print("\na pod outside the mesh calls one inside")
        call = self.call(OUTSIDE, str(self.lab.pod("ratings").ipv4))
        self.show("outside", call, call.answered_by == "ratings", self.hops())
        call = self.call(OUTSIDE, str(self.lab.pod("reviews-v1").ipv4))
        self.show("outside, to a protected pod", call, bool(call.error), self.hops())

    def act_refused(self) -> None:
        """An identity that the policy does not name."""
        print("\na pod with another identity calls reviews; its policy names productpage only")
        call = self.call("intruder", VIP)
        hops = self.hops()
        denied = any("rbac_access_denied" in str(hop["termination"]) for hop in hops)
        self.show("refused", call, bool(call.error) and denied, hops)

    def act_move(self) -> None:
        """The control plane moves traffic while a connection stays open."""
        print("\nthe mesh file changes: reviews is only reviews-v2 now; one connection stays open meanwhile")
        connection = _connect(self.lab.pod("productpage"), VIP, PORT)
        before = self.call_on(connection, "productpage", VIP)
        (self.folder / "mesh.new").write_text(self.mesh(("reviews-v2",)))
        (self.folder / "mesh.new").replace(self.folder / "mesh.yaml")
        moved = [""]

        def all_moved() -> bool:
            moved[:] = [self.call("productpage", VIP).answered_by for _ in range(3)]
            return set(moved) == {"reviews-v2"}

        began = time.monotonic()
        try:
            self.wait("the change", all_moved, 10.0)
        except Unexpected:
            self.judge(False, f"new connections still go to {', '.join(moved)}")
        else:
            self.judge(
                True, f"new connections go to reviews-v2 only, {time.monotonic() - began:.1f} s after the edit"
            )
        after = self.call_on(connection, "productpage", VIP)
        same = before.answered_by == after.answered_by != ""
        self.judge(same, f"the open connection goes on with {after.answered_by or after.error}")
        connection.close()
        self.hops()

    def act_dump(self) -> None:
        """What the proxy says it is configured with."""
        print("\ncurl -s 127.0.0.1:15000/config_dump?include_eds, on worker2")
        dump = json.loads(self.admin(self.lab.worker("worker2").ztunnel, "/config_dump?include_eds"))
        kinds = [config["@type"].rpartition(".")[2] for config in dump["configs"]]
        for index, kind in enumerate(kinds):
            print(f"      configs[{index}]  {kind}")
        wanted = ["BootstrapConfigDump", "ClustersConfigDump", "EndpointsConfigDump"]
        self.judge(kinds[:1] + [k for k in kinds if k in wanted[1:]] == wanted, "the dump has its order")
        endpoints = next(c for c in dump["configs"] if c["@type"].endswith("EndpointsConfigDump"))
        mine = "bookinfo-productpage_to_http_reviews"
        for entry in endpoints.get("dynamic_endpoint_configs", []):
            config = entry["endpoint_config"]
            if mine in config.get("cluster_name", ""):
                text = json.dumps(config["endpoints"][0]["lb_endpoints"][0], indent=1)
                print("\n".join("      " + line for line in text.splitlines()))
                self.judge("reviews" in config["cluster_name"], "the endpoint of the moved service is there")
                return
        self.judge(False, "no endpoints of the service in the dump")

    def act_wire(self, report: WireReport) -> None:
        """Nothing but TLS between the nodes."""
        print("\nthe wire between the nodes, during all of the above")
        text = f"{report.packets} packets with payload, {report.records} TLS records, {report.tls_bytes} bytes"
        self.judge(
            report.records > 0 and not report.plain, f"{text}; {len(report.plain)} payloads that are not TLS"
        )
        for plain in report.plain[:5]:
            print(f"      {plain}")
        self.judge(report.secrets_seen == 0, f"the pages' text was seen {report.secrets_seen} times")

    def play(self) -> None:
        """Everything, in order."""
        place = self.lab.worker("worker2").place
        with place.netns.entered():
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        tap = WireTap(raw, "eth0", SECRET)
        try:
            self.act_rotation()
            self.act_pod_address()
            self.act_outside()
            self.act_refused()
            self.act_move()
            self.act_dump()
        finally:
            report = tap.stop()
        self.act_wire(report)

    def explain(self) -> None:
        """How to look around."""
        inside = self.lab.worker("worker2").ztunnel.netns
        pod = self.lab.pod("productpage").netns
        print("\nStill running; ctrl-C ends it. From another terminal:")
        print(f"  mesh file      {self.folder / 'mesh.yaml'}   (edit it: the proxies follow)")
        print(f"  logs           {self.folder}/*.log")
        print(f"  a pod calls    nsenter --net={_path(pod)} curl -s http://{VIP}:{PORT}/")
        print(f"  admin          nsenter --net={_path(inside)} curl -s 127.0.0.1:15000/help")
        print(f"  connections    nsenter --net={_path(inside)} curl -s 127.0.0.1:15000/connections")


@dataclass(frozen=True)
class Call:
    """One request: who, where to, what came back and how long it took."""

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


def _row(hop: dict[str, object]) -> str:
    """One hop as one line of the table."""
    upstream = str(hop["upstream"] or "-").replace(
        "outbound_tunnel_lis_spiffe://cluster.local/ns/default/sa/", "…/"
    )
    who = " -> ".join(_short(hop[key]) for key in ("client_identity", "server_identity") if hop[key])
    said = next((str(hop[key]) for key in ("termination", "failure") if hop[key]), "")
    parts = (
        f"{hop['node']:8}",
        f"{str(hop['hop'])[:38]:38}",
        f"to {upstream[:46]:46}",
        f"{hop['bytes_received']} B in {hop['bytes_sent']} B out",
        f"{hop['duration_ms']} ms",
        who and f"as {who}",
        said,
    )
    return "  ".join(part for part in parts if part)


def _place_on_path(hop: str) -> int:
    """Where a hop comes on the way from client to application; the clock's milliseconds do not tell."""
    words = ("capture", "outbound tunnel", "passthrough", "inbound")
    return next((place for place, word in enumerate(words) if hop.startswith(word)), len(words))


def _short(identity: object) -> str:
    return str(identity).rpartition("/")[2]


def _path(netns: object) -> str:
    name = getattr(netns, "name", "")
    return f"/run/netns/{name}"


_ZTUNNEL = [sys.executable, "-m", "ztunnel"]


def _connect(place: Place, host: str, port: int) -> http.client.HTTPConnection:
    """An HTTP connection whose socket lives in a namespace."""
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


@contextlib.contextmanager
def stage(colour: bool) -> Iterator[Demo]:
    """The lab and a folder for its files; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ztunnel-demo-") as folder, Lab(NODES) as lab:
        yield Demo(lab, Path(folder), colour)


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="stay up afterwards (make demo KEEP=1)")
    args = parser.parse_args()
    try:
        become_root_of_own_namespaces()
        began = time.monotonic()
        with stage(sys.stdout.isatty()) as demo:
            print("Setting the stage: two nodes, their pods, a control plane, a proxy per node")
            try:
                demo.start()
            except Unexpected as error:
                print(f"demo: {error}; logs follow", file=sys.stderr)
                for log in sorted(demo.folder.glob("*.log")):
                    print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
                return 1
            print(f"  ready after {time.monotonic() - began:.1f} s")
            demo.play()
            failures = demo.failures
            print(
                f"\n{'Everything came out as expected.' if not failures else f'{failures} expectations failed.'}"
            )
            if args.keep:
                demo.explain()
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()
        return 1 if failures else 0
    except TproxyError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything is taken down", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
