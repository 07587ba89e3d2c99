"""A real API server: etcd and kube-apiserver as processes on loopback, without kubelet, scheduler or controllers.

A test plays those: it creates namespaces and service accounts, and patches a pod's status as a kubelet would.
"""

import contextlib
import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.apiserver.programs import needed
from tests.ports import free_port

_START_S = 90.0

#: Tokens of this cluster: everything is allowed to one, nothing to the other.
ADMIN, NOBODY = "admin-token", "nobody-token"


class ApiServer:
    """One API server with its etcd, in a folder; see :func:`api_server`.

    Attributes:
        url: of the API.
        ca: the file with the certificate of the API server, which is its own CA.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs = {name: needed(name) for name in ("etcd", "kube-apiserver")}
        self._ports = [free_port() for _ in range(3)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"https://127.0.0.1:{self._ports[2]}"
        self.ca = folder / "certificates" / "apiserver.crt"

    def start(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (self.folder / "accounts.key").write_bytes(private)
        (self.folder / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n{NOBODY},nobody,2\n')
        client, peer, _ = self._ports
        urls = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={urls[0]}",
            f"--advertise-client-urls={urls[0]}",
            f"--listen-peer-urls={urls[1]}",
            f"--initial-advertise-peer-urls={urls[1]}",
            f"--initial-cluster=default={urls[1]}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )
        self.start_api()

    def start_api(self) -> None:
        """Start kube-apiserver, and return when it is ready."""
        keys = self.folder / "accounts.key"
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._ports[0]}",
            f"--cert-dir={self.ca.parent}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._ports[2]}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={keys}",
            f"--service-account-signing-key-file={keys}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/24",
            # No controller makes the default accounts that this one wants.
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged",
            "--v=0",
        )
        deadline_s = time.monotonic() + _START_S
        while not self._ready():
            stopped = [name for name, process in self._running.items() if process.poll() is not None]
            if stopped or time.monotonic() > deadline_s:
                name = stopped[0] if stopped else "kube-apiserver"
                raise AssertionError(f"{name} does not start: {self.log(name)[-2000:]}")
            time.sleep(0.1)

    def stop_api(self) -> None:
        """Kill kube-apiserver; etcd keeps its objects. Its orderly end waits for watches, for a minute."""
        self._running["kube-apiserver"].kill()
        self._end("kube-apiserver")

    def stop(self) -> None:
        if "kube-apiserver" in self._running:
            self.stop_api()
        self._end("etcd")

    def compact(self, version: str) -> None:
        """Have etcd forget all versions before this one; watches from them are refused."""
        body = json.dumps({"revision": version, "physical": True}).encode()
        address = f"http://127.0.0.1:{self._ports[0]}/v3/kv/compaction"
        with urllib.request.urlopen(urllib.request.Request(address, body), timeout=30) as answer:
            answer.read()

    def kubeconfig(self, token: str = ADMIN, ca: Path | None = None) -> Path:
        """Write a kubeconfig for a token, and return its path."""
        path = self.folder / f"kubeconfig-{token[-40:]}-{(ca or self.ca).stem}"
        described = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [
                {"name": "test", "cluster": {"server": self.url, "certificate-authority": str(ca or self.ca)}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(json.dumps(described))
        return path

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def _ready(self) -> bool:
        try:
            trust = ssl.create_default_context(cafile=self.ca)
            request = urllib.request.Request(f"{self.url}/readyz", headers={"authorization": f"Bearer {ADMIN}"})
            with urllib.request.urlopen(request, timeout=5, context=trust) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [self._programs[name], *arguments], stdout=log, stderr=log, cwd=self.folder
            )

    def _end(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(15)


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Run an API server; without its programs the test is skipped, loudly."""
    server = ApiServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
