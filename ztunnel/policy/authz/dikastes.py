"""The command lines of Calico's ``dikastes`` and ``healthz``, so that a manifest needs only another image."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from ztunnel.policy.authz import command


class _Parser(argparse.ArgumentParser):
    """A parser that exits with 1 on a bad command line, like Calico's, because 2 means no answer from a server."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(command.BAD_ARGUMENT, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dikastes server|client|health`` and return the exit status."""
    parser = _Parser(prog="dikastes", description="Policy server for Envoy, by Calico's policies.")
    parser.add_argument("--version", action="version", version=f"%(prog)s of ztunnel {version('ztunnel-py')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    server = commands.add_parser("server", help="serve ext_authz")
    command.add_serve_arguments(server)
    client = commands.add_parser("client", help="query a server about one request")
    client.add_argument("namespace", metavar="NAMESPACE")
    client.add_argument("account", metavar="ACCOUNT")
    client.add_argument("--method")
    client.add_argument("--dial", "-d", default=command.DEFAULT_LISTEN, metavar="ADDRESS")
    health = commands.add_parser("health", help="query a server's health")
    health.add_argument("probe", choices=("liveness", "readiness"))
    health.add_argument("--dial-path", dest="dial", default=command.DEFAULT_LISTEN, metavar="PATH")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if args.command == "server":
        port = os.environ.get("DIKASTES_HTTP_BIND_PORT")
        if port:  # an empty port counts as missing, like in Calico's
            address = os.environ.get("DIKASTES_HTTP_BIND_ADDR", "")
            bracketed = f"[{address}]" if ":" in address else address
            args.terminate = f"{bracketed}:{port}" if address else port
        return command.serve_command(args)
    if args.command == "client":
        args.path = args.source = args.destination = None
        args.trust_domain = "cluster.local"
        args.denied = 0  # exit with 0 also for a denial, like Calico's client
        return asyncio.run(command.check_command(args))
    return asyncio.run(command.health_command(args))


def healthz(argv: Sequence[str] | None = None) -> int:
    """Run the older probe, ``healthz liveness|readiness``, and return the exit status."""
    parser = _Parser(prog="healthz", description="Ask a policy server for its health.")
    parser.add_argument("probe", choices=("liveness", "readiness"))
    parser.add_argument("-dialPath", dest="dial", default=command.DEFAULT_LISTEN, metavar="PATH")
    return asyncio.run(command.health_command(parser.parse_args(argv)))
