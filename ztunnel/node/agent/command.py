"""The command ``ztunnel agent``."""

import argparse
import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from ztunnel.runtime.console.arguments import add_flags, seconds, whole_number
from ztunnel.runtime.console.serving import failed, log_lines, stop_event
from ztunnel.runtime.text_file import read_text

_DEFAULT_SOCKET = Path("/var/run/ztunnel/ztunnel.sock")


def add_arguments(subparsers: Any) -> None:
    """Add ``agent`` to ``argparse``'s sub-commands."""
    text = "put pods of this node into the mesh: labelled pods of a Kubernetes cluster, or the pods of a file"
    parser: argparse.ArgumentParser = subparsers.add_parser("agent", help=text, description=text)
    source = parser.add_mutually_exclusive_group()
    add_flags(
        source,
        ("--state", "FILE", "enrol the pods of this YAML file; edits are applied", {"type": Path}),
        ("--kube", "", "enrol pods by the labels of pods and namespaces in the API server"),
    )  # fmt: skip
    add_flags(
        parser,
        ("--socket", "PATH", f"socket for proxies (default {_DEFAULT_SOCKET})",
         {"type": Path, "default": _DEFAULT_SOCKET}),
        ("--record", "FILE", "record of the enrolled pods (default: beside the socket)", {"type": Path}),
        ("--grace", "SECONDS",
         "how long a leaving pod's open connections can continue (default 10; with --kube 3600)",
         {"type": seconds}),
        ("--remove", "", "release all pods at the end; otherwise they stay in the mesh, for an upgrade"),
        ("--probe-user", "UID",
         "kubelet's user: connections of this user from the node to pods are not captured "
         "(with --kube default auto: that of the node's kubelet; none: capture all)", {"type": _probe_user}),
        ("--check", "", "only read the file and list its faults"),
    )  # fmt: skip
    cluster = parser.add_argument_group("with --kube")
    add_flags(
        cluster,
        ("--kubeconfig", "FILE", "kubeconfig to use (default: the pod's service account)", {"type": Path}),
        ("--node", "NAME", "name of this node (default: the host name)", {"default": socket.gethostname()}),
        ("--proc", "DIR", "the node's processes (default /proc)", {"type": Path, "default": Path("/proc")}),
        ("--exclude", "NS,...", "namespaces that are never in the mesh (default kube-system)",
         {"default": "kube-system"}),
        ("--system-namespace", "NS", "the proxies' namespace (default istio-system)", {"default": "istio-system"}),
        ("--cni-socket", "PATH",
         "socket for the CNI plugin (POST /cmdadd, like istio-cni's /var/run/istio-cni/pluginevent.sock)",
         {"type": Path}),
        ("--install-cni", "BIN:CONF",
         "keep our CNI plugin installed in these folders of the host, such as /opt/cni/bin:/etc/cni/net.d; "
         "it needs python3 on the host, and --cni-socket"),
        ("--cni-owned", "",
         "put the plugin into a network configuration of its own, which survives a reboot of the node"),
        ("--daemonset", "NS/NAME",
         "the agent's DaemonSet; if it is deleted or leaves this node, SIGTERM releases all pods"),
        ("--metrics", "[IP:]PORT", "address of /healthz, /readyz and /metrics"),
        ("--established", None,
         "connections that are open when a pod is enrolled: keep them outside of the mesh until they end "
         "(default), or redirect their next packet, too, which ends them",
         {"choices": ("keep", "capture"), "default": "keep"}),
        ("--no-dns-capture", "", "do not capture DNS, except for pods that request it"),
    )  # fmt: skip
    parser.set_defaults(run=run)


def _probe_user(text: str) -> int | str:
    if text in ("auto", "none"):
        return text
    return whole_number(text)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status."""
    from ztunnel.kube.errors import KubeError
    from ztunnel.node.agent.description import PodFaults, parse_pods

    log_lines()
    try:
        if args.check:
            if args.state is None:
                raise ValueError("--check needs --state FILE")
            pods = parse_pods(read_text(args.state))
            print(f"{args.state}: {len(pods)} pods")
            return 0
        asyncio.run(_serve(args))
    except PodFaults as error:
        for fault in error.faults:
            print(f"{args.state}: {fault}", file=sys.stderr)
        return 1
    except (KubeError, ValueError, OSError) as error:
        return failed("agent", error)
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from ztunnel.node.agent.node import NodeAgent

    stop = stop_event()
    loop = asyncio.get_running_loop()
    record = args.record or args.socket.with_name(f"{args.socket.name}.pods.json")
    if args.kube:
        from ztunnel.node.agent.cluster import serve

        await serve(args, record, stop)
        return
    agent = NodeAgent(
        args.socket,
        record=record,
        grace_s=10.0 if args.grace is None else args.grace,
        remove_on_exit=args.remove,
        probe_user=args.probe_user if isinstance(args.probe_user, int) else None,
    )
    async with agent:
        if args.state is None:
            await stop.wait()
            return
        following = loop.create_task(agent.follow(args.state), name="follow")
        stopping = loop.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in (following, stopping):
                task.cancel()
            await asyncio.wait((following, stopping))
