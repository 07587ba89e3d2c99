"""``ztunnel authz serve|check|health``, and the same under the names and flags of Calico's ``dikastes``."""

import argparse
import asyncio
import logging
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from ztunnel.policy.calico.settings import sync_target
from ztunnel.runtime.console.arguments import add_flags, seconds
from ztunnel.runtime.console.serving import bound_address, failed, log_lines, metrics_server, stop_event
from ztunnel.runtime.sockets import socket_mode

if TYPE_CHECKING:
    from xds.model.address import SocketAddress
    from ztunnel.runtime.http.exposition import Family

log = logging.getLogger(__name__)

DEFAULT_LISTEN: Final = "/var/run/dikastes/dikastes.sock"
DEFAULT_DIAL: Final = "/var/run/felix/nodeagent/socket"
_CALL_S: Final = 5.0

#: The exit statuses of ``health``. Calico's probe has the same statuses.
HEALTHY, BAD_ARGUMENT, NO_ANSWER, UNHEALTHY = 0, 1, 2, 3


def add_arguments(subparsers: Any) -> None:
    """Add ``authz`` to ``argparse``'s sub-commands."""
    authz: argparse.ArgumentParser = subparsers.add_parser(
        "authz",
        help="answer Envoy's ext_authz checks by Calico's policies",
        description="Run or query a policy server for Envoy. It answers ext_authz checks by the policies of "
        "PolicySync.",
    )
    commands = authz.add_subparsers(dest="authz", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the server", description="Serve until SIGTERM or SIGINT.")
    add_serve_arguments(serve)
    serve.set_defaults(run=serve_command)
    check = commands.add_parser("check", help="query a server about one request")
    add_flags(
        check,
        ("namespace", "NAMESPACE", "namespace of the client's service account"),
        ("account", "ACCOUNT", "the client's service account"),
        ("--method", None, "method of the HTTP request; without it a connection is checked"),
        ("--path", None, "path of the HTTP request"),
        ("--source", "IP", "the client's address"),
        ("--destination", "IP[:PORT]", "the pod's address"),
        ("--trust-domain", "NAME", None, {"default": "cluster.local"}),
    )  # fmt: skip
    _add_dial(check)
    check.set_defaults(run=check_command, denied=1)
    health = commands.add_parser("health", help="query a server's health; exit status 0, 2 or 3")
    health.add_argument("probe", choices=("liveness", "readiness"))
    _add_dial(health)
    health.set_defaults(run=health_command)


def _add_dial(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dial",
        "-d",
        default=DEFAULT_LISTEN,
        metavar="ADDRESS",
        help=f"address of the server (default {DEFAULT_LISTEN})",
    )


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``serve``."""
    add_flags(
        parser,
        ("--listen -l", "ADDRESS", f"path, unix:/path or host:port, repeatable (default {DEFAULT_LISTEN})",
         {"action": "append"}),
        ("--dial -d", "ADDRESS", f"PolicySync server (default {DEFAULT_DIAL})", {"default": DEFAULT_DIAL}),
        ("--socket-mode", "OCTAL", "mode of Unix sockets (default 777)", {"type": socket_mode, "default": 0o777}),
        ("--per-host", "", "serve all pods of a node, by destination address"),
        ("--explain", "", "name the denying rule in responses to clients"),
        ("--trust-domain", "NAME", "an accepted trust domain, repeatable", {"action": "append", "default": []}),
        ("--max-stale", "SECONDS", "refuse after this time without a stream (default: never)", {"type": seconds}),
        ("--terminate", "[IP:]PORT", "address of an HTTP page /terminate that ends the server"),
        ("--metrics", "[IP:]PORT", "address of the Prometheus page /metrics"),
        ("--report", "", "report evaluated flows to the PolicySync server every 5 s"),
        ("--admin", "[IP:]PORT", "address of the page /policies (default IP: loopback)"),
        ("--debug", "", "log more"),
    )  # fmt: skip


def serve_command(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status."""
    import uvloop

    from xds.grpc.serve_error import ServeError

    log_lines(logging.DEBUG if args.debug else logging.INFO)
    try:
        listen = [sync_target(text) for text in args.listen or [DEFAULT_LISTEN]]
        dial = sync_target(args.dial)
        terminate, metrics = bound_address(args.terminate), bound_address(args.metrics)
        admin = bound_address(args.admin, host="127.0.0.1")
    except ValueError as error:
        return failed("authz serve", error, BAD_ARGUMENT)
    try:
        uvloop.run(_serve(args, listen, dial, terminate, metrics, admin))
    except (ServeError, OSError) as error:
        return failed("authz serve", error)
    return 0


async def _serve(
    args: argparse.Namespace,
    listen: list[str],
    dial: str,
    terminate: "SocketAddress | None",
    metrics: "SocketAddress | None",
    admin: "SocketAddress | None",
) -> None:
    from ztunnel.policy.authz.reporter import Reporter
    from ztunnel.policy.authz.server import AuthzSettings, PolicyServer
    from ztunnel.policy.calico.follower import Follower
    from ztunnel.runtime.clock import SystemClock
    from ztunnel.runtime.http.page import PLAIN, Page, PageRequest, not_found, text
    from ztunnel.runtime.http.server import PageServer
    from ztunnel.runtime.tasks import Tasks

    clock = SystemClock()
    stop = stop_event()
    settings = AuthzSettings(per_host=args.per_host, explain=args.explain, max_stale_s=args.max_stale)
    follower = Follower(dial, clock, trust_domains=frozenset(args.trust_domain))
    tasks = Tasks("authz")
    reporter = Reporter(dial) if args.report else None

    def terminated(request: PageRequest) -> Page:
        if request.path != "/terminate":
            return not_found(["/terminate"])
        asyncio.get_running_loop().call_soon(stop.set)
        return text("terminating Dikastes\n", content_type=PLAIN)

    def measured() -> "Iterable[Family]":
        from ztunnel.policy.authz.metrics import families

        return families(server, follower)

    def inspected(request: PageRequest) -> Page:
        from ztunnel.policy.authz.pages import page

        return page(server, follower, request)

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            PolicyServer(listen, follower, clock, settings, socket_mode=args.socket_mode, reporter=reporter)
        )
        stack.push_async_callback(tasks.close)
        tasks.keep(follower.run, "policysync")
        if reporter is not None:
            tasks.keep(reporter.run, "reports")
        if metrics is not None:
            await stack.enter_async_context(metrics_server(metrics, measured))
        for name, address, pages in (("terminate", terminate, terminated), ("admin", admin, inspected)):
            if address is not None:
                await stack.enter_async_context(PageServer(name, address, pages, clock))
        log.info("serving ext_authz on %s, PolicySync from %s", ", ".join(server.addresses), dial)
        await stop.wait()


async def check_command(args: argparse.Namespace) -> int:
    """Query a server about one request, and print its answer. The exit status is 0 if it allows the request."""
    from xds.dialects.calico.authorization import decode_response, encode_request
    from xds.grpc.status import RpcFailed
    from xds.model import calico as c
    from ztunnel.policy.calico.verdict import Code

    try:
        dial = sync_target(args.dial)
        destination, port = _destination(args.destination)
        source, _ = _destination(args.source)
    except ValueError as error:
        return failed("authz check", error, BAD_ARGUMENT)
    principal = f"spiffe://{args.trust_domain}/ns/{args.namespace}/sa/{args.account}"
    flow = c.Flow(
        source_ip=source,
        destination_ip=destination,
        destination_port=port,
        source_principal=principal,
        method=args.method if args.method is not None or args.path is None else "",
        path=args.path if args.path is not None or args.method is None else "",
    )
    try:
        answer = await _call(dial, "/envoy.service.auth.v3.Authorization/Check", encode_request(flow))
    except RpcFailed as error:
        return failed("authz check", f"{args.dial}: {error}", NO_ANSWER)
    code, message = decode_response(answer)
    known = {each.value: each.name for each in Code}
    print(f"{known.get(code, code)}{f': {message}' if message else ''}")
    status: int = 0 if code == 0 else args.denied
    return status


async def health_command(args: argparse.Namespace) -> int:
    """Request a server's health and return it as the exit status."""
    from google.protobuf.message import DecodeError

    from xds.grpc.status import RpcFailed
    from xds.proto.dikastes.healthz_pb2 import HealthCheckResponse

    method = {"liveness": "CheckLiveness", "readiness": "CheckReadiness"}[args.probe]
    try:
        answer = await _call(sync_target(args.dial), f"/dikastes.Healthz/{method}", b"")
        healthy = HealthCheckResponse.FromString(answer).healthy
    except ValueError as error:
        return failed("authz health", error, BAD_ARGUMENT)
    except (RpcFailed, DecodeError) as error:
        return failed("authz health", f"{args.dial}: {error}", NO_ANSWER)
    print("healthy" if healthy else "unhealthy")
    return HEALTHY if healthy else UNHEALTHY


async def _call(dial: str, method: str, message: bytes) -> bytes:
    from xds.aio.channel import Channel

    async with Channel(dial) as channel:
        return await channel.unary(method, message, timeout_s=_CALL_S)


def _destination(text: str | None) -> tuple[str | None, int]:
    """Parse ``IP[:PORT]``. Without a port, the port is 0."""
    from xds.model.address import SocketAddress, canonical

    if text is None:
        return None, 0
    try:
        return canonical(text.strip("[]")), 0
    except ValueError:
        pass
    try:
        return SocketAddress.parse(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an IP address nor one with a port") from None
