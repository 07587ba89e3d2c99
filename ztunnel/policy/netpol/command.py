"""The command ``ztunnel netpol run|explain|trace|status|cleanup``: a node's network policy in the kernel.

Exit status: 0 done, or ``explain`` found the connection allowed; 1 ``explain`` found it denied, or ``status``
found no table; 2 failed, with one line on standard error that says what to do.
"""

import argparse
import contextlib
import logging
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ztunnel.runtime.console.arguments import add_flags
from ztunnel.runtime.console.serving import bound_address, log_lines, metrics_server, until_signal
from ztunnel.runtime.sockets import socket_mode

if TYPE_CHECKING:
    from tproxy.aio.netns import Netns
    from tproxy.operations import NftStep
    from xds.model.address import IpNetwork
    from ztunnel.kube.client import Client
    from ztunnel.kube.objects import EventSink, WatchedSource
    from ztunnel.policy.netpol.table_builder import TableBuilder
    from ztunnel.policy.policysync.server import PolicySyncServer
    from ztunnel.runtime.http.exposition import Family

DONE, DENIED, FAILED = 0, 1, 2
_BRIDGE = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")

log = logging.getLogger(__name__)


def add_arguments(subparsers: Any) -> None:
    """Add ``netpol`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "netpol",
        help="enforce Kubernetes' and Calico's network policies in this node's kernel",
        description="Keep the policies of a node's pods in one nftables table, explain them, or remove the table.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|explain|trace|status|cleanup")
    follow = _action(
        actions, "run", "follow objects and keep the table current; the table stays when the command stops"
    )
    add_flags(
        follow,
        ("--objects", "DIR", "read the YAML files of this folder instead of the API server", {"type": Path}),
        ("--kubeconfig", "FILE", "kubeconfig to use (default: the pod's service account)", {"type": Path}),
        ("--node", "NAME", "name of this node (default: the host name)", {"default": socket.gethostname()}),
        ("--netns", "NS", "the node's namespace: name, path or pid"),
        ("--print", "", "print the table in nft's language, and change nothing"),
        ("--once", "", "end when the kernel has the table"),
        ("--metrics", "[IP:]PORT", "address of /healthz, /readyz and the Prometheus page /metrics"),
        ("--tunnels", None,
         "tunnels (port 15008) of captured pods: judge: apply policies to them like to any port (default); "
         "allow: let them pass, because the node's proxy enforces the same policies inside tunnels",
         {"choices": ("judge", "allow"), "default": "judge"}),
        ("--policy-sync", "PATH",
         "serve the policies to this node's proxies on this socket (their POLICY_SYNC), so that they enforce "
         "them inside tunnels"),
        ("--socket-mode", "OCTAL",
         "mode of --policy-sync's socket (default 777); 600 admits proxies of this user and of root",
         {"type": socket_mode, "default": 0o777}),
        ("--pod-cidr", "CIDR",
         "this node's range of pod addresses, repeatable: an unknown address in it is closed; "
         '"node": the ranges in the Node object', {"action": "append", "default": []}),
        ("--calico", "",
         "follow Calico's policies of the cluster, too (projectcalico.org/v3), with the service accounts and "
         "services that they name; with --objects all of these are read without this flag"),
        ("--node-peers", "",
         "follow the cluster's Node objects, for rules about nodes in cluster-wide policies; without it such a "
         "rule allows nothing, or denies everything; with --objects Nodes are read without this flag"),
    )  # fmt: skip
    ask = _action(actions, "explain", "explain whether a connection is allowed; status 1 if it is denied")
    _add_objects(ask)
    add_flags(
        ask,
        ("source", "SRC", "namespace/pod or IP"),
        ("destination", "DST", "namespace/pod or IP"),
        ("port", "PORT", "for icmp and icmpv6 TYPE or TYPE/CODE"),
        ("protocol", "PROTO", "tcp, udp, sctp, icmp, icmpv6 or a number", {"nargs": "?", "default": "tcp"}),
        ("--source-port", "PORT", "source port (default 49152, an ephemeral port)", {"default": ""}),
    )  # fmt: skip
    follow_packets = _action(actions, "trace", "follow live packets between two addresses, rule by rule")
    add_flags(
        follow_packets,
        ("source", "IP", None),
        ("destination", "IP", None),
        ("--netns", "NS", "the node's namespace: name, path or pid"),
    )  # fmt: skip
    for name, text in (
        ("status", "print the table in the kernel with its counters"),
        ("cleanup", "remove the table, and change nothing else of the node"),
    ):
        command = _action(actions, name, text)
        command.add_argument("--netns", metavar="NS", help="name, path or pid of the node's namespace")
    parser.set_defaults(run=run)


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    return parser


def _add_objects(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objects",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of YAML files with pods, namespaces and policies",
    )


async def run(args: argparse.Namespace, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run a parsed command line, and return the exit status; errors are printed, not raised."""
    from tproxy.errors import TproxyError
    from xds.errors import ConfigError
    from ztunnel.kube.errors import KubeError
    from ztunnel.policy.calico.explain import BadQuestion
    from ztunnel.runtime.settings import plain_reason

    out = out if out is not None else sys.stdout
    err = err if err is not None else sys.stderr
    try:
        match args.action:
            case "run":
                return await _run(args, out)
            case "explain":
                return await _explain(args, out)
            case "trace":
                return await _trace(args, out)
            case "status":
                return await _status(args, out)
            case _:
                return await _cleanup(args, out)
    except (TproxyError, ConfigError, KubeError, BadQuestion, ValueError, OSError) as error:
        print(f"ztunnel netpol: {plain_reason(error)}", file=err)
        return FAILED


async def _run(args: argparse.Namespace, out: TextIO) -> int:
    """Keep the table until SIGINT or SIGTERM. Once this has the lock, these signals also end the start."""
    from tproxy.aio.table import KeptTable
    from ztunnel.policy.netpol.controller import Controller
    from ztunnel.policy.netpol.lock import NodeLock
    from ztunnel.policy.netpol.table_builder import TABLE, TableBuilder

    log_lines()
    metrics = bound_address(args.metrics)
    tunnels = args.tunnels == "allow"
    async with contextlib.AsyncExitStack() as stack:
        source, events, client = await _source(args, stack)
        pod_cidrs = await _pod_cidrs(args, client)
        if args.print:
            builder = TableBuilder(tunnels=tunnels, pod_cidrs=pod_cidrs)
            return await _print(source, args.node, out, builder, nodes=_follows_nodes(args))
        netns = _opened(args.netns, stack)
        _warn_of_bridges()
        table = await stack.enter_async_context(KeptTable(TABLE, netns))
        with until_signal():
            # Take the lock before opening the socket and the metrics port, which another controller of this node
            # would occupy.
            await stack.enter_async_context(NodeLock(TABLE, netns, wait=not args.once))
            proxies = await _proxies(args.policy_sync, args.socket_mode, stack)
            controller = Controller(
                source,
                table,
                args.node,
                events,
                tunnels=tunnels,
                netns=netns,
                proxies=proxies,
                pod_cidrs=pod_cidrs,
                nodes=_follows_nodes(args),
            )
            if metrics is not None:
                from ztunnel.policy.netpol.metrics import families

                async def measured() -> "Iterable[Family]":
                    return families(controller, await table.read(), source.faults)

                def unready() -> str:
                    return controller.unready(source.faults)

                await stack.enter_async_context(metrics_server(metrics, measured, unready))
            await controller.run(once=args.once)
    return DONE


def _follows_nodes(args: argparse.Namespace) -> bool:
    return args.objects is not None or args.node_peers


async def _pod_cidrs(args: argparse.Namespace, client: "Client | None") -> "tuple[IpNetwork, ...]":
    """Return the node's ranges of pod addresses, which never change once a Node object has them.

    Raises:
        ValueError: a range is not a network, or the Node has none.
        KubeError: the Node cannot be read.
    """
    texts: list[str] = []
    for text in args.pod_cidr:
        if text != "node":
            texts.append(text)
            continue
        if client is None:
            raise ValueError("--pod-cidr node: needs the API server, not --objects")
        from ztunnel.kube.kinds import NODE

        spec = (await client.get(NODE, "", args.node)).get("spec") or {}
        found = spec.get("podCIDRs") or ([spec["podCIDR"]] if spec.get("podCIDR") else [])
        if not found:
            raise ValueError(f"--pod-cidr node: Node {args.node} has no spec.podCIDRs; give its ranges instead")
        texts += found
    return tuple(_network(text) for text in texts)


async def _source(
    args: argparse.Namespace, stack: contextlib.AsyncExitStack
) -> "tuple[WatchedSource, EventSink, Client | None]":
    """Return the source of objects and the sink for their faults: files and log lines, or the API server's objects
    and Events.
    """
    from ztunnel.policy.policysync.problems import LoggedEvents

    if args.objects is not None:
        from ztunnel.kube.files import FileObjects
        from ztunnel.policy.calico.objects import KINDS

        if not args.objects.is_dir():
            raise ValueError(f"{args.objects} is no folder")
        files = FileObjects(args.objects, kinds=KINDS)
        if args.once and not args.print:  # otherwise the command waits until the file is corrected
            files.require_all()
        return files, LoggedEvents(), None
    from ztunnel.kube.client import connect
    from ztunnel.kube.events import EventWriter
    from ztunnel.kube.informer import Informer
    from ztunnel.policy.policysync.kinds import NODES, SELECTIONS, SERVED

    client = await stack.enter_async_context(connect(args.kubeconfig))
    selections = (*(SERVED if args.calico else SELECTIONS), *((NODES,) if args.node_peers else ()))
    informer = await stack.enter_async_context(Informer(client, selections))
    writer = EventWriter(client, "ztunnel-netpol", args.node, informer.known)
    return informer, LoggedEvents(await stack.enter_async_context(writer)), client


async def _proxies(path: str | None, mode: int, stack: contextlib.AsyncExitStack) -> "PolicySyncServer | None":
    """Return the PolicySync server for this node's proxies. The server starts sending only after all objects have
    been read.

    Raises:
        ValueError: the path cannot be served.
    """
    if path is None:
        return None
    from xds.grpc.serve_error import ServeError
    from ztunnel.policy.policysync.server import NODE_STREAMS, PolicySyncServer

    server = await stack.enter_async_context(PolicySyncServer())
    try:
        # Only policies of endpoints on this node are published.
        await server.open(path, lambda found: found.endpoints, streams=NODE_STREAMS, mode=mode)
    except ServeError as error:
        raise ValueError(f"--policy-sync: {error}") from error
    return server


async def _print(source: Any, node: str, out: TextIO, builder: "TableBuilder", *, nodes: bool) -> int:
    from tproxy.render.text import table_text
    from ztunnel.kube.files import FileObjects
    from ztunnel.policy.calico.incremental import Compiler
    from ztunnel.policy.calico.objects import PolicyObjects

    objects, compiler = PolicyObjects(nodes=nodes), Compiler()
    synced = False
    while not synced:
        is_files = isinstance(source, FileObjects)
        changes = source.everything() if is_files else await source.next()
        compiler.apply(objects.changes(changes.objects))
        synced = changes.synced
        if is_files:
            break  # a file that cannot be read has been reported
    notes = [f"{key}: {problem}" for key, problem in sorted(objects.problems.items())]
    built = builder.build(compiler.compiled, node, notes)
    for note in notes:
        print(f"# {note}", file=out)
    for unseen in built.unseen:
        print(f"# {unseen}", file=out)
    print(table_text(built.table), file=out)
    return DONE if synced else FAILED


async def _explain(args: argparse.Namespace, out: TextIO) -> int:
    from ztunnel.kube.files import FileObjects
    from ztunnel.policy.calico.incremental import Compiler
    from ztunnel.policy.calico.objects import KINDS, PolicyObjects
    from ztunnel.policy.netpol.explain import explained

    if not args.objects.is_dir():
        raise ValueError(f"{args.objects} is no folder")
    objects, compiler = PolicyObjects(), Compiler()
    logging.getLogger("ztunnel.kube.files").setLevel(logging.CRITICAL)  # this command prints the faults itself
    source = FileObjects(args.objects, kinds=KINDS)
    source.require_all()  # a missing file might have a policy that decides otherwise
    compiler.apply(objects.changes(source.everything().objects))
    for key, problem in objects.problems.items():
        print(f"{key}: {problem}", file=out)
    allowed, lines = explained(
        compiler.resources,
        compiler.compiled,
        args.source,
        args.destination,
        args.port,
        args.protocol,
        source_port=args.source_port,
    )
    print("\n".join(lines), file=out)
    return DONE if allowed else DENIED


async def _trace(args: argparse.Namespace, out: TextIO) -> int:
    """Print traced packets until SIGINT or SIGTERM, then remove the marks."""
    from ztunnel.policy.netpol.trace import trace

    async with contextlib.AsyncExitStack() as stack:
        lines = trace(args.source, args.destination, _opened(args.netns, stack))
        with until_signal():
            async with contextlib.aclosing(lines):
                async for line in lines:
                    print(line, file=out, flush=True)
    return DONE


async def _status(args: argparse.Namespace, out: TextIO) -> int:
    from tproxy.aio.table import KeptTable
    from tproxy.packets import counters
    from ztunnel.policy.netpol.metrics import outcome
    from ztunnel.policy.netpol.table_builder import TABLE, notes_of

    async with contextlib.AsyncExitStack() as stack:
        table = await (await stack.enter_async_context(KeptTable(TABLE, _opened(args.netns, stack)))).read()
    if table is None:
        print("no table: nothing is policed", file=out)
        return DENIED
    sizes = {item.name: len(item.elements) for item in table.sets}
    for direction in ("ingress", "egress"):
        addresses = sum(sizes.get(f"{direction}{version}", 0) for version in (4, 6))
        print(f"{direction}: {addresses} addresses of pods are policed", file=out)
    print(f"{len(table.chains)} chains, {len(table.sets)} sets with {sum(sizes.values())} elements", file=out)
    for note in notes_of(table):
        print(f"not as written: {note}", file=out)
    packets: Counter[str] = Counter()
    for chain, rule, counter in counters(table):
        packets[f"{outcome(rule)}: {rule.comment or chain}"] += counter.packets
    for text, count in sorted(packets.items()):
        if count:
            print(text.replace(":", f" {count}:", 1), file=out)
    return DONE


async def _cleanup(args: argparse.Namespace, out: TextIO) -> int:
    from tproxy.aio.table import KeptTable
    from ztunnel.policy.netpol.table_builder import TABLE
    from ztunnel.policy.netpol.trace import TRACE_TABLE

    async with contextlib.AsyncExitStack() as stack:
        netns = _opened(args.netns, stack)
        steps: list[NftStep] = []
        for name in (TABLE, TRACE_TABLE):  # a killed trace leaves its table behind
            table = await stack.enter_async_context(KeptTable(name, netns))
            steps += await table.apply(None)
    print("table removed" if steps else "nothing to remove", file=out)
    return DONE


def _opened(where: str | None, stack: contextlib.AsyncExitStack) -> "Netns | None":
    from tproxy.aio.netns import Netns

    return stack.enter_context(Netns.open(where)) if where is not None else None


def _network(text: str) -> "IpNetwork":
    from ipaddress import ip_network

    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"--pod-cidr: {text!r} is no network") from None


def _warn_of_bridges() -> None:
    """Warn if the kernel lets pods on one bridge bypass the table."""
    with contextlib.suppress(OSError):
        if _BRIDGE.read_text().strip() == "0":
            log.warning(
                "bridge-nf-call-iptables=0: packets between pods on the same bridge pass no policy; "
                "set net.bridge.bridge-nf-call-iptables and -ip6tables to 1 if the CNI uses a bridge"
            )
