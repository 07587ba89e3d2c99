"""What the commands read in these tests: a dump of the Rust ztunnel, and a server of given pages."""

import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

#: Shape, keys and values as in a dump of the Rust ztunnel 1.30.
RUST = {
    "certificates": [
        {
            "certChain": [
                {
                    "expirationTime": "2026-11-22T11:25:15Z",
                    "pem": "LS0t",
                    "serialNumber": "7127",
                    "validFrom": "2026-11-21T11:23:15Z",
                }
            ],
            "identity": "spiffe://cluster.local/ns/default/sa/a",
            "rootCerts": [
                {
                    "expirationTime": "2036-11-19T11:25:15Z",
                    "pem": "LS0t",
                    "serialNumber": "1",
                    "validFrom": "2026-11-21T11:23:15Z",
                }
            ],
            "state": "Available",
        },
        {
            "certChain": [],
            "identity": "spiffe://cluster.local/ns/other/sa/b",
            "rootCerts": [],
            "state": "Unavailable: no way",
        },
    ],
    "config": {"illegalPorts": [15001, 15006, 15008], "network": "", "proxyMode": "Shared"},
    "policies": [
        {
            "action": "Allow",
            "name": "few",
            "namespace": "default",
            "rules": [[[{"serviceAccounts": [{"namespace": "other", "serviceAccount": "b"}]}]]],
            "scope": "WorkloadSelector",
            "dryRun": False,
        },
        {
            "action": "Deny",
            "name": "no",
            "namespace": "default",
            "rules": [],
            "scope": "Namespace",
            "dryRun": True,
        },
    ],
    "services": [
        {
            "endpoints": {
                "c//Pod/default/a": {"port": {"80": 8080}, "status": "Healthy", "workloadUid": "c//Pod/default/a"},
                "c//Pod/default/b": {
                    "port": {"80": 8080},
                    "status": "Unhealthy",
                    "workloadUid": "c//Pod/default/b",
                },
            },
            "hostname": "web.default.svc.cluster.local",
            "name": "web",
            "namespace": "default",
            "ports": {"80": 8080},
            "vips": ["/10.96.0.7"],
            "waypoint": {"destination": "default/wp.default.svc.cluster.local", "hboneMtlsPort": 15008},
        }
    ],
    "stagedServices": {},
    "version": {"rustVersion": "1.90.0", "version": "1.30.0"},
    "workloadState": {
        "uid-a": {
            "connections": {
                "inbound": [
                    {"actualDst": "10.0.0.2:80", "originalDst": None, "protocol": "HBONE", "src": "10.0.0.3:4000"}
                ],
                "outbound": [
                    {
                        "actualDst": "10.0.0.3:15008",
                        "originalDst": "10.0.0.3:8080",
                        "protocol": "HBONE",
                        "src": "10.0.0.2:49386",
                    }
                ],
            },
            "info": {"name": "a", "namespace": "default", "serviceAccount": "a"},
            "state": "Up",
        },
        "uid-b": {"info": {"name": "b", "namespace": "other", "serviceAccount": "b"}, "state": "Pending"},
    },
    "workloads": [
        {
            "capacity": 1,
            "clusterId": "c",
            "name": "a",
            "namespace": "default",
            "networkMode": "Standard",
            "node": "n1",
            "protocol": "HBONE",
            "serviceAccount": "a",
            "services": ["default/web.default.svc.cluster.local"],
            "status": "Healthy",
            "trustDomain": "cluster.local",
            "uid": "c//Pod/default/a",
            "workloadIps": ["10.0.0.2"],
        },
        {
            "authorizationPolicies": ["default/few"],
            "capacity": 1,
            "clusterId": "c",
            "name": "c",
            "namespace": "default",
            "networkMode": "Standard",
            "node": "n2",
            "protocol": "HBONE",
            "serviceAccount": "c",
            "status": "Healthy",
            "uid": "c//Pod/default/c",
            "workloadIps": ["10.0.0.3"],
        },
    ],
}
Output = pytest.CaptureFixture[str]


# No answer
@contextmanager
def pages(
    bodies: Mapping[str, bytes],
    *,
    other: bytes | None = None,
    missing: bytes = b"not found\n",
    asked: list[str] | None = None,
) -> Iterator[str]:
    """Serve pages by path, and ``other`` or 404 elsewhere. Yield the address.

    The target of each request is appended to ``asked``.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.append(self.path)
            body = bodies.get(self.path.partition("?")[0], other)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(missing if body is None else body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def page(body: bytes) -> AbstractContextManager[str]:
    """Serve one page at every path. Yield the address."""
    return pages({}, other=body)
