"""The command ``ztunnel control-plane``."""

import argparse
import asyncio
import ipaddress
import logging
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from ztunnel.runtime.console.arguments import add_flags, some_seconds
from ztunnel.runtime.console.serving import failed, log_lines, until_signal
from ztunnel.runtime.text_file import read_text

_WARNING = "for laptops, tests and virtual machines; a cluster uses istiod"


def add_arguments(subparsers: Any) -> None:
    """Add ``control-plane`` to ``argparse``'s sub-commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "control-plane",
        help=f"serve a mesh file by xDS ({_WARNING})",
        description=f"Serve a mesh file: {_WARNING}.",
    )
    add_flags(
        parser,
        ("mesh", "MESH.YAML", None, {"type": Path}),
        ("--listen", "ADDRESS",
         "unix:/path or host:port, repeatable (default unix:ztunnel-xds.sock beside the mesh file)",
         {"action": "append"}),
        ("--ca-dir", "DIR", "the root certificate's folder (default .ztunnel-ca)", {"type": Path}),
        ("--certificate-lifetime", "SECONDS", None, {"type": some_seconds, "default": 86400.0}),
        ("--access-log", "PATH", "access log of the proxies", {"default": "/dev/stdout"}),
        ("--json-log", "", "access log lines as JSON, with identities"),
        ("--tls-host", "HOST",
         "this server's name or address, repeatable: serve TCP with TLS to callers with a token",
         {"action": "append"}),
        ("--token", "NODE", "print a bearer token for the proxy of a node, and exit"),
        ("--token-lifetime", "SECONDS", "(default a year)", {"type": some_seconds, "default": 365 * 86400.0}),
        ("--kube", "", "also accept tokens of service accounts, which the API server reviews"),
        ("--kubeconfig", "FILE", "kubeconfig for --kube (default: the pod's service account)", {"type": Path}),
        ("--token-audience", "NAME", "audience of these tokens (default istio-ca)", {"default": "istio-ca"}),
        ("--node-account", "NAMESPACE/NAME",
         "account of node proxies, which get their pods' certificates (default istio-system/ztunnel)",
         {"action": "append"}),
        ("--policy-sync", "DIR",
         "serve the file's calico section by PolicySync, on DIR/NODE.sock for each node's proxy (POLICY_SYNC)",
         {"type": Path}),
        ("--check", "", "only read the mesh file and list its faults"),
    )  # fmt: skip
    parser.set_defaults(run=run)


def refuse_exposed(addresses: list[str]) -> str | None:
    """Return why one of the addresses must not be served without TLS: private keys would cross a network
    unencrypted. None if all are local.
    """
    for address in addresses:
        if address.startswith("unix:"):
            continue
        host = address.rpartition(":")[0].strip("[]")
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = host == "localhost"
        if not loopback:
            return (
                f"--listen {address}: private keys are served here in plain text, so only loopback addresses and "
                "Unix sockets are allowed; --tls-host serves others"
            )
    return None


def _faulty(args: argparse.Namespace) -> str | None:
    """Return the fault in the combination of options about tokens, if any."""
    if not args.kube and (args.kubeconfig is not None or args.node_account):
        return "--kubeconfig and --node-account need --kube"
    for account in args.node_account or ():
        if len(account.split("/")) != 2 or not all(account.split("/")):
            return f"--node-account {account}: must be NAMESPACE/NAME"
    return None


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status."""
    from xds.grpc.serve_error import ServeError
    from ztunnel.control_plane.accounts import NODE_ACCOUNTS
    from ztunnel.control_plane.mesh import MeshFaults, parse_mesh
    from ztunnel.control_plane.server import ControlPlane, Reviews
    from ztunnel.kube.errors import KubeError
    from ztunnel.proxy.identity.authority import CaError

    log_lines()
    addresses = args.listen or [f"unix:{args.mesh.parent.resolve()}/ztunnel-xds.sock"]
    exposed = None if args.tls_host else refuse_exposed(addresses)
    if exposed is not None:
        return failed("control-plane", exposed, 2)
    if fault := _faulty(args):
        return failed("control-plane", fault, 2)
    ca_directory = args.ca_dir or args.mesh.parent / ".ztunnel-ca"
    try:
        if args.check:
            mesh = parse_mesh(read_text(args.mesh))
            print(f"{args.mesh}: {len(mesh.nodes)} nodes, {len(mesh.pods)} pods, {len(mesh.services)} services")
            return 0
        if args.token is not None:
            return _print_token(args, ca_directory)
        logging.getLogger(__name__).warning("embedded control plane: %s", _WARNING)

        async def serve(reviews: Reviews | None) -> None:
            plane = ControlPlane(
                args.mesh,
                addresses,
                ca_directory,
                lifetime=timedelta(seconds=args.certificate_lifetime),
                access_log=args.access_log,
                log_json=args.json_log,
                tls_hosts=args.tls_host or (),
                reviews=reviews,
                policy_folder=args.policy_sync,
            )
            with until_signal():
                await plane.run()

        async def serve_beside_a_cluster() -> None:
            from ztunnel.kube.client import connect

            async with connect(args.kubeconfig) as client:
                accounts = args.node_account or NODE_ACCOUNTS
                await serve(Reviews(api=client, audience=args.token_audience, node_accounts=accounts))

        asyncio.run(serve_beside_a_cluster() if args.kube else serve(None))
    except MeshFaults as error:
        for fault in error.faults:
            print(f"{args.mesh}: {fault}", file=sys.stderr)
        return 1
    except (CaError, KubeError, ServeError, OSError) as error:
        return failed("control-plane", error)
    return 0


def _print_token(args: argparse.Namespace, ca_directory: Path) -> int:
    from ztunnel.control_plane.mesh import parse_mesh
    from ztunnel.control_plane.tokens import node_token
    from ztunnel.proxy.identity import authority as ca

    mesh = parse_mesh(read_text(args.mesh))
    if args.token not in mesh.nodes:
        known = ", ".join(mesh.nodes)
        return failed("control-plane", f"no node {args.token} in {args.mesh}; there are {known}")
    ca.CertificateAuthority.open(ca_directory, mesh.trust_domain, ca.now())
    expires_s = ca.now().timestamp() + args.token_lifetime
    print(node_token(ca.token_secret(ca_directory), args.token, expires_s))
    return 0
