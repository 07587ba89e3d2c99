"""What is attacked: a tunnel server of ours or a real Envoy, with the same applications behind it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.hbone.certificates import Authority
from tests.hostile.apps import GROUPS

SERVER, ATTACKER, BYSTANDER = "server", "attacker", "bystander"
ENVOY = Path(sys.executable).parent / "envoy"
_WAIT_S = 20.0

_MANAGER = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_BOOTSTRAP = """
static_resources:
  listeners:
{listeners}
  clusters:
{clusters}
"""
_LISTENER = """
  - name: tunnels-{port}
    address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          common_tls_context:
            alpn_protocols: [h2]
            tls_certificates:
            - certificate_chain: {{filename: {folder}/server.pem}}
              private_key: {{filename: {folder}/server.key}}
            validation_context: {{trusted_ca: {{filename: {folder}/root.pem}}}}
      filters:
      - name: hcm
        typed_config:
          "@type": {manager}
          stat_prefix: tunnels
          codec_type: HTTP2
          http2_protocol_options: {{allow_connect: true, max_concurrent_streams: 200}}
          upgrade_configs: [{{upgrade_type: CONNECT}}]
          http_filters:
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
          route_config:
            virtual_hosts:
{hosts}
"""
_HOST = """
            - name: {name}
              domains: ["{name}:1"]
              routes:
              - match: {{connect_matcher: {{}}}}
                route:
                  cluster: {name}
                  timeout: 0s
                  upgrade_configs: [{{upgrade_type: CONNECT, connect_config: {{}}}}]
"""
_CLUSTER = """
  - name: {name}
    circuit_breakers:
      thresholds: [{{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000}}]
    load_assignment:
      cluster_name: {name}
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server, with the values that its clients need.

    Attributes:
        port: the port for tunnels of the attacked pod.
        bystander_port: the port for tunnels of another pod of the same proxy.
        echo_pid: the process of the bystander's application.
        dns_port, pages_port: the ports for names and pages. 0: it has none.
        fair: attackers and their applications have the priority of other processes. For figures they have the
            lowest, with which they get no time on a machine where other processes are busy.
    """

    port: int
    pid: int
    folder: Path
    log: Path
    bystander_port: int
    echo_pid: int
    dns_port: int = 0
    pages_port: int = 0
    fair: bool = False

    def rss_bytes(self) -> int:
        """Memory that the process has resident."""
        status = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(status[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def take_precedence(pid: int = 0, *, over_target: bool = False) -> None:
    """Schedule the threads of a process before other work of this machine, if the user has the right to do so.

    The table compares the bystander's latency with and without an attack, eight seconds each. Other work on the
    machine changes in between, and the measured processes must not wait for it.

    Args:
        pid: the process. 0: the calling thread only.
        over_target: for the bystander and its application. They do not wait for a target that uses their core.
    """
    policy = os.SCHED_RR, os.sched_param(2 if over_target else 1)
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task") if pid else ("0",):
            os.sched_setscheduler(int(thread), *policy)


@contextlib.contextmanager
def ours(
    limits: Mapping[str, float] | None = None, *, files: int | None = None, fair: bool = False
) -> Iterator[Target]:
    """Run a server of ours.

    Args:
        limits: those that differ from the default.
        files: the most descriptors that it may have.
        fair: see :class:`Target`.
    """
    with _apps(fair=fair) as (folder, ports, echo_pid), open(folder / "log", "w+b") as log:
        given = json.dumps({"folder": str(folder), "ports": ports, "limits": dict(limits or {})})
        command = [sys.executable, "-m", "tests.hostile.ours", given]
        with _process(command, log.fileno(), files) as process:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            yield Target(pid=process.pid, folder=folder, log=folder / "log", echo_pid=echo_pid, fair=fair, **found)


@contextlib.contextmanager
def envoy(*, files: int | None = None) -> Iterator[Target]:
    """Run a real Envoy; ``files`` is the most descriptors that it may have."""
    with _apps() as (folder, ports, echo_pid), open(folder / "log", "w+b") as log:
        with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as second:
            port, other = free.getsockname()[1], second.getsockname()[1]
        hosts = "".join(_HOST.format(name=name) for name in ports)
        bootstrap = folder / "envoy.yaml"
        bootstrap.write_text(
            _BOOTSTRAP.format(
                listeners="".join(
                    _LISTENER.format(port=each, manager=_MANAGER, folder=folder, hosts=hosts)
                    for each in (port, other)
                ),
                clusters="".join(_CLUSTER.format(name=name, port=each) for name, each in ports.items()),
            )
        )
        command = [str(ENVOY), "-c", str(bootstrap), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn"]
        with _process(command, log.fileno(), files) as process:
            until = time.monotonic() + _WAIT_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert time.monotonic() < until, (folder / "log").read_text()
                    time.sleep(0.05)  # until Envoy listens, see the limit above
            yield Target(port, process.pid, folder, folder / "log", other, echo_pid)


@contextlib.contextmanager
def _apps(*, fair: bool = False) -> Iterator[tuple[Path, dict[str, int], int]]:
    with tempfile.TemporaryDirectory(prefix="hostile") as name:
        folder = Path(name)
        authority = Authority()
        (folder / "root.pem").write_bytes(authority.pem)
        for who in (SERVER, ATTACKER, BYSTANDER):
            leaf = authority.issue(f"spiffe://cluster.local/ns/hostile/sa/{who}")
            (folder / f"{who}.pem").write_bytes(leaf.chain_pem)
            (folder / f"{who}.key").write_bytes(leaf.key_pem)
        ports: dict[str, int] = {}
        pids: list[int] = []
        with contextlib.ExitStack() as processes:
            for group in GROUPS:
                command = [sys.executable, "-m", "tests.hostile.apps", *(["--fair"] if fair else []), *group]
                process = processes.enter_context(_process(command, None))
                assert process.stdout is not None
                ports |= json.loads(process.stdout.readline())
                pids.append(process.pid)
            yield folder, ports, pids[0]


@contextlib.contextmanager
def _process(command: list[str], log: int | None, files: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    if files is not None:
        command = ["prlimit", f"--nofile={files}:{files}", *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()
