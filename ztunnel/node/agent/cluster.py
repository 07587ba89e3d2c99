"""Runs the agent on a Kubernetes node: ``ztunnel agent --kube``."""

import argparse
import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Final

from ztunnel.kube.client import connect
from ztunnel.kube.events import EventWriter
from ztunnel.kube.informer import Informer
from ztunnel.node.agent.auditor import Auditor
from ztunnel.node.agent.cni.installer import Installation, Installer, uninstall
from ztunnel.node.agent.cni_server import CniServer
from ztunnel.node.agent.enroller import Enroller, annotating, selections
from ztunnel.node.agent.enrolment import Settings
from ztunnel.node.agent.last_agent import is_last
from ztunnel.node.agent.scan import kubelet_user
from ztunnel.node.agent.status import status_server
from ztunnel.runtime.console.serving import bound_address
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: The grace period for connections of a pod whose label takes it out of the mesh. During it, the pod costs one
#: listener.
_GRACE_S: Final = 3600.0
#: The time limit for taking pods out of the mesh when the node's last agent stops. Kubelet kills the agent after
#: 30 s (the chart's value).
_WITHDRAW_S: Final = 10.0


async def serve(args: argparse.Namespace, record: Path, stop: asyncio.Event) -> None:
    """Keep the node's pods in the mesh until ``stop``.

    Args:
        args: the arguments of ``ztunnel agent --kube``.
        record: see :mod:`ztunnel.node.agent.record`.
        stop: ends the agent. Pods stay in the mesh for the next agent, unless the arguments say otherwise.

    Raises:
        BadKubeconfig: raised before any other work.
        OSError: a socket cannot be bound.
        ValueError: an argument is invalid. Also raised before any other work.
    """
    address = bound_address(args.metrics, "--metrics")
    own_namespace, _, own_name = (args.daemonset or "").partition("/")
    if args.daemonset and not (own_namespace and own_name):
        raise ValueError(f"--daemonset: {args.daemonset!r} is not namespace/name")
    installation = _installation(args, own_namespace)
    settings = Settings(
        excluded=frozenset(name.strip() for name in args.exclude.split(",") if name.strip()),
        system_namespace=args.system_namespace,
        dns=not args.no_dns_capture,
        new_connections_only=args.established == "keep",
    )
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(args.kubeconfig))
        informer = await stack.enter_async_context(Informer(client, selections(args.node)))
        events = await stack.enter_async_context(EventWriter(client, "ztunnel-agent", args.node, informer.known))
        enroller = await stack.enter_async_context(
            Enroller(
                args.socket,
                informer,
                annotating(client),
                events,
                settings,
                proc=args.proc,
                record=record,
                grace_s=_GRACE_S if args.grace is None else args.grace,
                probe_user=_user_of_probes(args),
            )
        )
        auditor = await stack.enter_async_context(Auditor(enroller, events, args.node))
        cni = None
        if args.cni_socket is not None:
            cni = await stack.enter_async_context(CniServer(args.cni_socket, enroller.added))
        installing = Tasks("cni")
        stack.push_async_callback(installing.close)
        if installation is not None:
            installing.keep(Installer(installation).run, "installer", first_s=5.0)
        if address is not None:
            await stack.enter_async_context(status_server(address, enroller, informer, auditor, cni, installation))
        log.info("agent started node=%s socket=%s", args.node, args.socket)
        await stop.wait()
        if args.remove or (own_name and await is_last(client, own_namespace, own_name, args.node)):
            if installation is not None:
                # The CNI plugin is removed first, so that no sandbox waits for a stopped agent. The installer ends
                # before that, because it would install the plugin again.
                await installing.close()
                try:
                    log.info("cni: removed %s", ", ".join(uninstall(installation)) or "nothing")
                except OSError as error:
                    log.error("cni: not removed: %s", plain_reason(error))
            await enroller.withdraw(_WITHDRAW_S)


def _installation(args: argparse.Namespace, own_namespace: str) -> Installation | None:
    if args.install_cni is None:
        return None
    binaries, _, configurations = args.install_cni.partition(":")
    if not (binaries and configurations) or args.cni_socket is None:
        raise ValueError("--install-cni: needs BIN:CONF, two folders, and --cni-socket")
    return Installation(
        binaries=Path(binaries),
        configurations=Path(configurations),
        owned=args.cni_owned,
        options={
            "socket": str(args.cni_socket),
            "exclude_namespaces": sorted(name.strip() for name in args.exclude.split(",") if name.strip()),
            "agent_namespace": own_namespace or args.system_namespace,
        },
    )


def _user_of_probes(args: argparse.Namespace) -> int | None:
    """Return the user id whose connections from the node are not captured. None if all are captured."""
    if isinstance(args.probe_user, int):
        return args.probe_user
    if args.probe_user == "none":
        return None
    found = kubelet_user(args.proc)
    if found is None:
        log.warning("no kubelet below %s: its probes will be captured (--probe-user)", args.proc)
    return found
