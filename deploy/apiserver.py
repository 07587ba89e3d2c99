"""A real API server: etcd and kube-apiserver as processes on loopback, without kubelet, scheduler or controllers.

Tests and the demo do the work of these components: they create namespaces and accounts, and update the status of
pods like a kubelet. ``make kube`` builds the two programs.
"""

import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

_START_S = 90.0

#: Two bearer tokens that this API server accepts: one with all rights, one without any.
ADMIN, NOBODY = "admin-token", "nobody-token"


PROGRAMS = ("etcd", "kube-apiserver")


def cache() -> Path:
    """Return the folder that ``make kube`` fills: below $XDG_CACHE_HOME, outside the repository."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ztunnel-py" / "kube"


def found(name: str) -> str | None:
    """Return the path of a program, or None if it is found nowhere: in ETCD or KUBE_APISERVER, in the cache, or in
    PATH.
    """
    named = os.environ.get(name.upper().replace("-", "_"))
    if named:
        return named
    return shutil.which(name, path=str(cache())) or shutil.which(name)


class ApiServer:
    """One API server with its etcd.

    Args:
        folder: the folder for its files.
        programs: the paths of ``PROGRAMS``.
        ports: three free ports: etcd's for clients, etcd's for peers, and the API's.
        own: called with each started process, so that the caller can end it later.

    Attributes:
        url: the API's URL.
        ca: the file with the certificate of the API server, which is its own CA.
    """

    def __init__(
        self,
        folder: Path,
        programs: Mapping[str, str],
        ports: Sequence[int],
        own: "Callable[[subprocess.Popen[bytes]], object]" = lambda process: None,
    ) -> None:
        self.folder = folder
        self._programs = programs
        self._ports = ports
        self._own = own
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"https://127.0.0.1:{self._ports[2]}"
        self.ca = folder / "certificates" / "apiserver.crt"

    def start(self) -> None:
        """Start etcd and kube-apiserver, and return when the API is ready."""
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
            # No controller runs here to create the default accounts that this admission plugin requires.
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
        """Kill kube-apiserver; etcd keeps its objects. A graceful stop would take a minute, because it waits for
        open watches.
        """
        self._running["kube-apiserver"].kill()
        self._end("kube-apiserver")

    def stop(self) -> None:
        """Stop etcd and kube-apiserver; idempotent."""
        if "kube-apiserver" in self._running:
            self.stop_api()
        self._end("etcd")

    def compact(self, version: str) -> None:
        """Compact etcd: it drops all object versions before ``version``, so watches from earlier versions are
        refused.
        """
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
        """Return the log of the program ``name``."""
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
        self._own(self._running[name])

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
