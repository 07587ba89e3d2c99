"""The reference configuration of one node, made to run anywhere: loopback, free ports, fresh certificates."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.hbone.certificates import Authority
from tests.ports import free_port

SOURCE = Path(__file__).parents[4] / "data" / "reference"
IDENTITY = "spiffe://cluster.local/ns/default/sa/bookinfo-"
TUNNEL_LISTENER = f"outbound_tunnel_lis_{IDENTITY}productpage"
TUNNEL_CLUSTER = f"outbound_tunnel_clus_{IDENTITY}productpage"
SERVICE_CLUSTER = f"{IDENTITY}productpage_to_http_reviews.default.svc.cluster.local_outbound_internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The paths of the files, and the free ports that replace the fixed ones."""

    folder: Path
    bootstrap: Path
    admin: int
    readiness: int
    metrics: int
    ports: dict[int, int]


def write_reference(folder: Path, node: str = "w2") -> Reference:
    """Write the node's files into ``folder``; paths in them are absolute."""
    admin, readiness, metrics, *others = (free_port() for _ in range(6))
    ports = dict(zip((15001, 15006, 15008), others, strict=True))
    _write_secrets(folder / "certs")
    (folder / node).mkdir()
    for source in (SOURCE / node).iterdir():
        text = source.read_text().replace("./", f"{folder}/")
        text = text.replace("transparent: true", "transparent: false")
        # A mark needs a capability; SO_REUSEADDR needs none.
        text = text.replace("level: 1, name: 36, int_value: 1025", "level: 1, name: 2, int_value: 1")
        text = text.replace("level: 1, name: 36, int_value: 1026", "level: 1, name: 2, int_value: 1")
        text = text.replace("path: /dev/stdout", f"path: {folder}/access.log")
        for port, free in ports.items():
            text = text.replace(f"address: 0.0.0.0, port_value: {port}", f"address: 127.0.0.1, port_value: {free}")
        (folder / node / source.name).write_text(text.replace("port_value: 15000", f"port_value: {admin}"))
    return Reference(
        folder=folder,
        bootstrap=folder / node / "bootstrap.yaml",
        admin=admin,
        readiness=readiness,
        metrics=metrics,
        ports=ports,
    )


def rewrite(path: Path, *changes: tuple[str, str]) -> None:
    """Change a watched file in one step, as control planes do."""
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def _write_secrets(folder: Path) -> None:
    folder.mkdir()
    root = Authority()
    write_secret(folder / "sds-ROOTCA.json", "ROOTCA", {"validation_context": {"trusted_ca": inline(root.pem)}})
    for account in ("productpage", "reviews"):
        leaf = root.issue(IDENTITY + account, to_day=30.5)
        write_secret(
            folder / f"sds-bookinfo-{account}.json",
            IDENTITY + account,
            {
                "tls_certificate": {
                    "certificate_chain": inline(leaf.chain_pem + root.pem),
                    "private_key": inline(leaf.key_pem),
                }
            },
        )


def inline(pem: bytes) -> dict[str, str]:
    return {"inline_string": pem.decode()}


def write_secret(path: Path, name: str, content: dict[str, object]) -> None:
    secret = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
        "name": name,
        **content,
    }
    path.write_text(json.dumps({"version_info": "1", "resources": [secret]}))


def proxy_to(reference: Reference, port: int) -> None:
    """Make the plaintext listener carry what nobody intercepted to a local port."""
    rewrite(
        reference.folder / "w2" / "lds.yaml",
        ("- name: blackhole inbound plaintext\n", "- name: here\n"),
        (
            "stat_prefix: BlackHoleCluster, cluster: blackhole inbound plaintext",
            "stat_prefix: here, cluster: here",
        ),
    )
    address = f"{{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}"
    assignment = f"{{cluster_name: here, endpoints: [{{lb_endpoints: [{{endpoint: {address}}}]}}]}}"
    cds = reference.folder / "w2" / "cds.yaml"
    cds.write_text(
        cds.read_text() + f'- {{"@type": *C, name: here, type: STATIC, load_assignment: {assignment}}}\n'
    )
