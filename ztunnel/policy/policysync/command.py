"""``ztunnel policy check|explain|serve``."""

import argparse
import asyncio
import http.client
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ztunnel.runtime.console.arguments import add_flags
from ztunnel.runtime.console.serving import bound_address, failed, log_lines, metrics_server, stop_event
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.sockets import socket_mode
from ztunnel.runtime.watched_file import InPlaceEdits

if TYPE_CHECKING:
    from ztunnel.policy.calico.files import FilePolicies
    from ztunnel.policy.calico.resources import Resources
    from ztunnel.policy.policysync.cluster import ClusterPolicies
    from ztunnel.policy.policysync.server import Binder, PolicySyncServer

log = logging.getLogger(__name__)

#: The longest wait for a server's explanation.
_ASK_S: Final = 10.0


def add_arguments(subparsers: Any) -> None:
    """Add ``policy`` to ``argparse``'s sub-commands."""
    policy: argparse.ArgumentParser = subparsers.add_parser(
        "policy",
        help="check, explain and serve Calico's and Kubernetes' policies",
        description="Check, explain or serve policies in YAML files, with the pods, namespaces and accounts "
        "that they select.",
    )
    commands = policy.add_subparsers(dest="policy", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="read files and list every fault")
    _add_files(check)
    check.set_defaults(run=check_command)
    explain = commands.add_parser("explain", help="explain which rule decides about a connection or request")
    add_flags(
        explain,
        ("files", "FILE", "YAML, or a folder of .yaml files", {"nargs": "*", "type": Path}),
        ("--server", "WHERE",
         "query a running server instead: the admin address of a proxy or policy server, or unix:/path, the "
         "socket of a PolicySync server, which treats this command like a client (a pod's socket serves only "
         "one client, so its client is disconnected and reconnects)"),
        ("--from", "WHO", "namespace/pod, IP or SPIFFE id", {"dest": "source", "required": True}),
        ("--to", "WHO", "namespace/pod or IP", {"required": True}),
        ("--port", "PORT", "port of the destination (default 80); for icmp and icmpv6 TYPE or TYPE/CODE "
        "(default any)",
         {"default": ""}),
        ("--source-port", "PORT", "the client's port (default 49152, an ephemeral port)", {"default": ""}),
        ("--protocol", "NAME", "protocol of the connection (default tcp)", {"default": "tcp"}),
        ("--method", None, "method of an HTTP request; without method and path a connection is evaluated"),
        ("--path", None, "path of an HTTP request"),
        ("--staged", "", "evaluate staged policies as if they were enforced"),
        ("--trust-domain", "NAME", "trust domain of pods' identities", {"default": "cluster.local"}),
    )  # fmt: skip
    explain.set_defaults(run=explain_command)
    serve = commands.add_parser(
        "serve", help="serve policies of files or a cluster by PolicySync; changes apply at once"
    )
    add_flags(
        serve,
        ("files", "FILE", "YAML, or a folder of .yaml files", {"nargs": "*", "type": Path}),
        ("--kube", "", "follow the API server instead of files"),
        ("--kubeconfig", "FILE", "kubeconfig for --kube (default: the pod's service account, $KUBECONFIG or "
        "~/.kube/config)",
         {"type": Path}),
        ("--node-peers", "", "with --kube: follow Nodes, for rules about nodes"),
        ("--socket", "PATH", "serve a socket for a node's proxy, with all pods of the node"),
        ("--socket-mode", "OCTAL", "mode of --socket (default 777); 600 admits proxies of this user and of root",
         {"type": socket_mode, "default": 0o777}),
        ("--prefix", "DIR", "serve a socket for each pod, DIR/mount/UID/socket", {"type": Path}),
        ("--node", "NAME", "serve only pods of this node"),
        ("--form", None, "form of the messages; names is for clients before Calico 3.32",
         {"choices": ("messages", "names"), "default": "messages"}),
        ("--metrics", "[IP:]PORT", "address of /healthz, /readyz and the Prometheus page /metrics"),
    )  # fmt: skip
    serve.set_defaults(run=serve_command)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="YAML, or a folder of .yaml files")


def check_command(args: argparse.Namespace) -> int:
    """Print a summary of policy files, or their faults and the rules that are stricter than written. Return the
    exit status.
    """
    resources = _read(args.files)
    if resources is None:
        return 1
    notes = [f"{policy.id}: {note}" for policy in resources.policies.values() for note in policy.notes]
    if notes:
        print("\n".join(notes), file=sys.stderr)
        return 1
    tiers = {policy.tier for policy in resources.policies.values()}
    print(
        f"{len(resources.policies)} policies in {len(tiers)} tiers, "
        f"{len(resources.pods)} pods, {len(resources.namespaces)} namespaces, "
        f"{len(resources.accounts)} service accounts: valid"
    )
    return 0


def explain_command(args: argparse.Namespace) -> int:
    """Print how the policies of both ends are evaluated. The exit status is 0 if both allow."""
    if args.server is not None:
        return _ask_server(args)
    from ztunnel.policy.calico.compile import compile_resources
    from ztunnel.policy.calico.explain import BadQuestion, UnknownParty, explain_both, flow_of, port_text
    from ztunnel.policy.policysync.explain import evaluator_of, party

    if not args.files:
        return failed("policy explain", "needs files or --server", 2)
    resources = _read(args.files)
    if resources is None:
        return 2
    try:
        source = party(args.source, resources, args.trust_domain)
        destination = party(args.to, resources, args.trust_domain)
        flow = flow_of(
            source,
            destination,
            args.port,
            args.protocol,
            args.method,
            args.path,
            source_port=args.source_port,
        )
    except (UnknownParty, BadQuestion) as error:
        return failed("policy explain", error, 2)
    request = f" {flow.method} {flow.path}" if flow.method is not None else ""
    print(f"from {source.name} to {destination.name}, {port_text(flow)}/{args.protocol}{request}")
    made = evaluator_of(compile_resources(resources))
    allowed, lines = explain_both(made, flow, source, destination, enforced=not args.staged)
    print("\n".join(lines))
    return 0 if allowed else 1


def _ask_server(args: argparse.Namespace) -> int:
    """Ask the admin server of a proxy or policy server to explain a decision. The exit status is 0 if both ends
    allow.
    """
    import json
    import urllib.error
    import urllib.parse

    from ztunnel.runtime.http.admin_request import open_page

    if args.files:
        return failed("policy explain", "files and --server exclude each other", 2)
    is_socket = args.server.startswith(("unix:", "/", "./"))
    asked = {
        "from": args.source,
        "to": args.to,
        "protocol": args.protocol,
        "trust_domain": args.trust_domain,
        "staged": "true" if args.staged else "false",
        **({"port": args.port} if args.port else {}),
        **({"source_port": args.source_port} if args.source_port else {}),
        **({"method": args.method} if args.method is not None else {}),
        **({"path": args.path} if args.path is not None else {}),
    }
    if is_socket:
        return _ask_socket(args.server, asked)
    base = args.server if "://" in args.server else f"http://{args.server}"
    url = f"{base.rstrip('/')}/policies/explain?{urllib.parse.urlencode(asked)}"
    try:
        with open_page(url, limit_s=_ASK_S) as response:
            told = json.load(response)
    except urllib.error.HTTPError as error:
        reason = error.read().decode(errors="replace").strip()
        return failed("policy explain", f"{args.server}: {error.code} {reason}", 2)
    except (OSError, ValueError, http.client.HTTPException) as error:
        is_os = isinstance(error, OSError)
        reason = plain_reason(error) if is_os else f"no server's address, or no answer ({error})"
        return failed("policy explain", f"{args.server}: {reason}", 2)
    print("\n".join(told["lines"]))
    return 0 if told["allowed"] else 1


def _ask_socket(where: str, asked: Mapping[str, str]) -> int:
    """Explain a decision from the state that a PolicySync server sends on a socket. The exit status is 0 if both
    ends allow.
    """
    from ztunnel.policy.calico.explain import BadQuestion, answer
    from ztunnel.policy.calico.follower import Follower
    from ztunnel.policy.calico.settings import sync_target
    from ztunnel.runtime.clock import SystemClock

    async def follow() -> Follower:
        changed = asyncio.Event()
        follower = Follower(sync_target(where), SystemClock(), changed=changed.set)
        deadline_s = time.monotonic() + _ASK_S
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follower.run(), name="policies")
            while not follower.in_sync and not follower.error and time.monotonic() < deadline_s:
                # A stream that ends does not invalidate the received state, so only the follower's error is
                # checked.
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await changed.wait()
                changed.clear()
            following.cancel()
        return follower

    # The follower's log lines about its stream are not part of the answer.
    logging.getLogger("ztunnel.policy.calico.follower").setLevel(logging.CRITICAL)
    try:
        follower = asyncio.run(follow())
        if not follower.evaluator.store.in_sync:
            reason = follower.error or f"it has not sent all of its policies in {_ASK_S:g} s"
            return failed("policy explain", f"{where}: {reason}", 2)
        allowed, lines = answer(follower.evaluator, asked)
    except (BadQuestion, ValueError) as error:
        return failed("policy explain", error, 2)
    print("\n".join(lines))
    return 0 if allowed else 1


def serve_command(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status."""
    from xds.grpc.serve_error import ServeError

    log_lines()
    wrong = ""
    if args.socket is None and args.prefix is None:
        wrong = "needs --socket or --prefix"
    elif args.kube == bool(args.files):
        wrong = "needs either files or --kube"
    elif not args.kube and (args.kubeconfig is not None or args.node_peers):
        wrong = "--kubeconfig and --node-peers are for --kube"
    if wrong:
        return failed("policy serve", wrong, 2)
    policies = None
    if not args.kube:
        from ztunnel.policy.calico.files import FilePolicies

        policies = FilePolicies(*args.files)
        policies.read()
        if not policies.complete:
            # Refuse to start, because an unreadable document can be a policy that denies a pod's traffic.
            return failed("policy serve", "there are documents that have never been readable")
    # Imported here, because a server of files needs no API client.
    known: tuple[type[Exception], ...] = (ServeError, OSError, ValueError)
    if args.kube:
        from ztunnel.kube.errors import KubeError

        known += (KubeError,)
    try:
        asyncio.run(_serve(args, policies))
    except known as error:
        return failed("policy serve", str(error))
    return 0


async def _serve(args: argparse.Namespace, from_files: "FilePolicies | None") -> None:
    from xds.dialects.calico.policysync import PolicyForm
    from ztunnel.policy.calico.compile import Compiled
    from ztunnel.policy.policysync.server import NODE_STREAMS, Binder, PolicySyncServer

    stop, metrics = stop_event(), bound_address(args.metrics, "--metrics")

    def of_node(compiled: Compiled) -> list[Any]:
        return [key for key in compiled.endpoints if args.node in (None, compiled.nodes.get(key))]

    async with PolicySyncServer(PolicyForm(args.form)) as server, AsyncExitStack() as stack:
        policies: _Files | ClusterPolicies
        if from_files is not None:
            policies = _Files(args.files, from_files, server)
        else:
            policies = await _of_cluster(args, server, stack)
        if metrics is not None:
            from ztunnel.policy.policysync.metrics import families

            measured = metrics_server(
                metrics,
                lambda: families(server, policies.problems, policies.not_followed),
                lambda: policies.unready,
            )
            await stack.enter_async_context(measured)
        if args.socket is not None:
            await server.open(args.socket, of_node, streams=NODE_STREAMS, mode=args.socket_mode)
        binder = Binder(server, args.prefix, args.node) if args.prefix is not None else None
        if binder is not None:
            await binder.bind(policies.compiled)
        log.info("serving PolicySync on %s", ", ".join(server.paths) or "no socket yet")
        await _follow(policies, binder, stop)


async def _follow(policies: "_Files | ClusterPolicies", binder: "Binder | None", stop: asyncio.Event) -> None:
    """Follow changes of policies until ``stop`` is set. Concurrently, look for new pods and credentials.

    Raises:
        The first error of these tasks, not wrapped in a group.
    """
    from ztunnel.policy.calico import files

    try:
        async with asyncio.TaskGroup() as group:
            following = group.create_task(policies.follow(), name="policies")
            stopping = group.create_task(stop.wait(), name="stop")
            while not stop.is_set():
                # If credentials of pods are used, their folder is read again at each interval.
                limit_s = files.POLL_S if binder is not None else None
                await asyncio.wait({following, stopping}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following = group.create_task(policies.follow(), name="policies")
                if binder is not None:
                    await binder.bind(policies.compiled)
            following.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


class _Files:
    """Serves policies from files, and publishes each change. ``FilePolicies`` describes the effect of faulty
    parts.

    Attributes:
        compiled: the served state.
        unready: why no state can be served yet; always empty, because the files were read at the start.
    """

    def __init__(self, paths: list[Path], policies: "FilePolicies", server: "PolicySyncServer") -> None:
        from ztunnel.policy.calico import files

        self._paths = paths
        self._policies = policies
        self._server = server
        self._seen = files.states_of(paths)
        self._edits = InPlaceEdits()
        self.not_followed: tuple[str, ...] = ()
        self.unready = ""
        self._publish()

    @property
    def problems(self) -> int:
        """The number of files and objects with a fault."""
        return len(self._policies.faults)

    def _publish(self) -> None:
        from ztunnel.policy.calico.compile import compile_resources

        self.compiled = compile_resources(self._policies.read())
        self._server.publish(self.compiled)

    async def follow(self) -> None:
        """Wait for one poll interval, then read and publish the files if they have changed."""
        from ztunnel.policy.calico import files

        await asyncio.sleep(files.POLL_S)
        now = files.states_of(self._paths)
        if now == self._seen or not self._edits.are_complete(self._seen, now):
            return
        self._seen = now
        self._publish()
        log.info("policies changed, %d are served", len(self.compiled.policies))


async def _of_cluster(
    args: argparse.Namespace, server: "PolicySyncServer", stack: AsyncExitStack
) -> "ClusterPolicies":
    """Return the policies of an API server. Nothing is served before all objects have been read.

    Raises:
        BadKubeconfig: raised before any request.
    """
    import socket

    from ztunnel.kube.client import connect
    from ztunnel.kube.events import EventWriter
    from ztunnel.kube.informer import Informer
    from ztunnel.policy.policysync.cluster import ClusterPolicies
    from ztunnel.policy.policysync.kinds import NODES, SERVED
    from ztunnel.policy.policysync.problems import LoggedEvents

    client = await stack.enter_async_context(connect(args.kubeconfig))
    selections = (*SERVED, NODES) if args.node_peers else SERVED
    informer = await stack.enter_async_context(Informer(client, selections))
    instance = args.node or socket.gethostname()
    writer = EventWriter(client, "ztunnel-policy", instance, informer.known)
    events = LoggedEvents(await stack.enter_async_context(writer))
    return ClusterPolicies(informer, server, args.node, events, nodes=args.node_peers)


def _read(paths: list[Path]) -> "Resources | None":
    """Return the resources in the files, or None after printing every fault."""
    from ztunnel.policy.calico.files import read_files
    from ztunnel.runtime.formats.config_reader import Faults

    try:
        return read_files(paths)
    except Faults as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return None
