"""``ztunnel inject -f FILE``, ``ztunnel inject serve``, and the commands of injected pods: ``gate`` and
``drain``."""

import argparse
import asyncio
import contextlib
import functools
import logging
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ztunnel.runtime.console.arguments import add_flags, port, port_or_any, seconds
from ztunnel.runtime.console.serving import failed, log_lines, stop_event

log = logging.getLogger(__name__)


def add_arguments(subparsers: Any) -> None:
    """Add ``inject``, ``gate`` and ``drain`` to ``argparse``'s sub-commands."""
    text = "print a file with gates or sidecars added to its pods"
    parser: argparse.ArgumentParser = subparsers.add_parser("inject", help=text, description=text)
    add_flags(
        parser,
        ("-f --file", "FILE", "YAML or JSON of pods, workloads, lists and anything else; - is standard input"),
        ("--config", "FILE", "the injector's configuration (default: ambient)", {"type": Path}),
        ("-n --namespace", "NAME", "namespace of objects without one (default default)", {"default": "default"}),
        ("--template", "NAME", "template for pods that do not name one, instead of the configuration's"),
        ("--image", "NAME", "image of the added containers, instead of the configuration's"),
    )  # fmt: skip
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", metavar="serve")
    text = "serve the webhook that the API server calls for each created pod"
    serve: argparse.ArgumentParser = actions.add_parser("serve", help=text, description=text)
    add_flags(
        serve,
        ("--address", "IP", "address to serve on (default: all, of both families)", {"default": ""}),
        ("--port", "PORT", "HTTPS port (default 8443; 0: any)", {"type": port_or_any, "default": 8443}),
        ("--certificate", "FILE", "certificate in PEM; reloaded when it changes", {"type": Path}),
        ("--key", "FILE", "private key in PEM", {"type": Path}),
        ("--own-ca", "SECRET", "use the CA in this Secret instead of files; it is created if it is missing"),
        ("--service", "NAME.NAMESPACE", "the injector's Service, for the certificate of --own-ca"),
        ("--config", "FILE", "configuration file; reloaded when it changes (default: ambient)", {"type": Path}),
        ("--webhook-config", "NAME",
         "a MutatingWebhookConfiguration whose caBundle is kept equal to --ca, repeatable", {"action": "append"}),
        ("--ca", "FILE", "PEM certificates, for --webhook-config", {"type": Path}),
        ("--kubeconfig", "FILE", "kubeconfig to use (default: the pod's service account)", {"type": Path}),
    )  # fmt: skip
    serve.set_defaults(run=run_serve)
    text = "print the configurations by which the API server calls the injector"
    webhooks: argparse.ArgumentParser = actions.add_parser("webhooks", help=text, description=text)
    add_flags(
        webhooks,
        ("--service", "NAME.NAMESPACE", "the injector's Service", {"default": "ztunnel-injector.istio-system"}),
        ("--ambient", "", "print the configuration for the template ambient instead of sidecars"),
        ("--revision", "NAME", "the revision that pods request (default default)", {"default": "default"}),
        ("--tag", "NAME", "another name for the revision, repeatable", {"action": "append", "default": []}),
        ("--template", "NAME", "template for pods that do not name one (default sidecar)", {"default": "sidecar"}),
        ("--every-namespace", "", "inject into unlabelled namespaces, too, except for system namespaces"),
    )  # fmt: skip
    webhooks.set_defaults(run=run_webhooks)
    _add_pod_commands(subparsers)


def _add_pod_commands(subparsers: Any) -> None:
    text = "wait until the proxy's listeners exist in this pod (the first init container of an injected pod)"
    gate: argparse.ArgumentParser = subparsers.add_parser("gate", help=text, description=text)
    add_flags(
        gate,
        ("--timeout", "SECONDS", "fail after this time; kubelet then restarts it (default 60)",
         {"type": seconds, "default": 60.0}),
        ("--fail-open", "", "let the application start anyway after the timeout"),
    )  # fmt: skip
    gate.set_defaults(run=run_gate)
    text = "drain this pod's proxy (the preStop hook of a sidecar)"
    drain: argparse.ArgumentParser = subparsers.add_parser("drain", help=text, description=text)
    add_flags(
        drain,
        ("--port", "PORT", "the proxy's metrics port (default 15020)", {"type": port, "default": 15020}),
        ("--wait", "SECONDS", "wait for open connections to end, at most this long (default 0)",
         {"type": seconds, "default": 0.0}),
        ("--least", "SECONDS", "with --wait, wait at least this long (default 5)",
         {"type": seconds, "default": 5.0}),
    )  # fmt: skip
    drain.set_defaults(run=run_drain)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status."""
    from ztunnel.kube.errors import KubeError
    from ztunnel.sidecar.inject.authority import BadAuthority
    from ztunnel.sidecar.inject.config import ConfigFaults
    from ztunnel.sidecar.inject.server import BadCertificate

    log_lines()
    if (fault := _faulty(args)) is not None:
        return failed("inject serve", fault, 2)
    try:
        asyncio.run(_serve(args))
    except ConfigFaults as error:
        for fault in error.faults:
            print(f"ztunnel inject serve: {args.config}: {fault}", file=sys.stderr)
        return 1
    except (BadAuthority, BadCertificate, KubeError, OSError) as error:
        return failed("inject serve", error)
    return 0


_NO_SERVICE: Final = "must be NAME.NAMESPACE, small letters, digits and hyphens each"


def _is_service(text: str) -> bool:
    """Return whether a text is ``SERVICE.NAMESPACE``, with valid names."""
    from ztunnel.sidecar.inject.config import is_dns_label

    service, dot, namespace = text.partition(".")
    return bool(dot) and is_dns_label(service) and is_dns_label(namespace)


def _faulty(args: argparse.Namespace) -> str | None:
    """Return the fault in the combination of options, if any."""
    if args.own_ca is not None:
        if any(each is not None for each in (args.certificate, args.key, args.ca)):
            return "--own-ca excludes --certificate, --key and --ca"
        if args.service is None:
            return "--own-ca needs --service NAME.NAMESPACE"
        if not _is_service(args.service):
            return f"--own-ca needs --service NAME.NAMESPACE, not {args.service}"
        return None
    if args.certificate is None or args.key is None:
        return "needs --certificate and --key, or --own-ca"
    if (args.webhook_config is None) != (args.ca is None):
        return "--webhook-config and --ca must be given together"
    return None


async def _serve(args: argparse.Namespace) -> None:
    from ztunnel.kube.client import connect
    from ztunnel.runtime.tasks import Tasks
    from ztunnel.sidecar.inject.authority import OwnCertificates, service_names
    from ztunnel.sidecar.inject.bundle_sync import keep_bundle
    from ztunnel.sidecar.inject.server import InjectServer

    stop = stop_event()
    tasks = Tasks("inject")
    async with contextlib.AsyncExitStack() as stack:
        certificate, key, ca = args.certificate, args.key, args.ca
        stack.push_async_callback(tasks.close)
        if args.own_ca is not None or args.webhook_config is not None:
            client = await stack.enter_async_context(connect(args.kubeconfig))
        if args.own_ca is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ztunnel-inject-")))
            service, _, namespace = args.service.partition(".")
            names = service_names(service, namespace)
            own = OwnCertificates(client, namespace, args.own_ca, names, folder)
            await own.refresh()
            certificate, key, ca = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
            tasks.keep(own.keep, "own CA")
        listener = _listener(args.address, args.port)
        stack.callback(listener.close)
        server = await stack.enter_async_context(InjectServer(listener, certificate, key, args.config))
        for name in args.webhook_config or ():
            tasks.keep(functools.partial(keep_bundle, client, name, ca), f"caBundle of {name}")
        log.info("inject: serving on port %s", server.port)
        await stop.wait()


def _listener(address: str, port: int) -> socket.socket:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=128)


def run_webhooks(args: argparse.Namespace) -> int:
    """Print the webhook configurations for the API server, and return the exit status."""
    from ztunnel.runtime.formats.go_yaml import dump_all
    from ztunnel.sidecar.inject.config import TEMPLATES, is_dns_label
    from ztunnel.sidecar.inject.webhooks import ambient, sidecars, tag

    service, _, namespace = args.service.partition(".")
    faults = [] if _is_service(args.service) else [f"--service {args.service}: {_NO_SERVICE}"]
    names = [("--revision", args.revision), *(("--tag", name) for name in args.tag)]
    faults += [
        f"{flag} {name}: must be small letters, digits and hyphens"
        for flag, name in names
        if not is_dns_label(name)
    ]
    if args.template not in TEMPLATES:
        faults.append(f"--template {args.template}: known are {', '.join(TEMPLATES)}")
    if faults:
        for fault in faults:
            print(f"ztunnel inject webhooks: {fault}", file=sys.stderr)
        return 2
    if args.ambient:
        made = [ambient(service, namespace)]
    else:
        every = args.every_namespace
        made = [sidecars(args.revision, service, namespace, template=args.template, every_namespace=every)]
        made += [tag(name, args.revision, service, namespace, template=args.template) for name in args.tag]
    sys.stdout.write(dump_all(made))
    return 0


def run_gate(args: argparse.Namespace) -> int:
    """Wait for the mesh's listeners, and return the exit status."""
    from ztunnel.sidecar.inject.gate import wait

    return wait(args.timeout, fail_open=args.fail_open)


def run_drain(args: argparse.Namespace) -> int:
    """Drain the pod's proxy, and return the exit status."""
    from ztunnel.sidecar.inject.drain import drain

    return drain(args.wait, args.least, port=args.port)


def _standard_input() -> str:
    """Return the standard input, with its line ends unchanged."""
    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if binary is None else binary.read().decode()


def run(args: argparse.Namespace) -> int:
    """Print the injected documents and return the exit status. If a document cannot be injected,
    none is printed.
    """
    from ztunnel.runtime.text_file import read_text
    from ztunnel.sidecar.inject.config import ConfigFaults, InjectConfig, parse_config
    from ztunnel.sidecar.inject.manual import BadDocument, inject_text

    if args.file is None:
        return failed("inject", "needs -f FILE", 2)
    notes: list[str] = []
    try:
        config = InjectConfig() if args.config is None else parse_config(read_text(args.config))
        if args.template is not None:
            config = replace(config, templates=(args.template,))
        if args.image is not None:
            config = replace(config, image=args.image)
        source = _standard_input() if args.file == "-" else read_text(Path(args.file), newline="")
        made = inject_text(source, args.namespace, config, notes)
    except ConfigFaults as error:
        for fault in error.faults:
            print(f"ztunnel inject: {args.config}: {fault}", file=sys.stderr)
        return 1
    except (BadDocument, OSError, UnicodeDecodeError) as error:  # a decoding error of the standard input
        return failed("inject", error if isinstance(error, OSError) else f"{args.file}: {error}")
    sys.stdout.write(made)
    for note in notes:
        print(note, file=sys.stderr)
    if made != source and config.image == InjectConfig().image:
        print(f"image {config.image} names no registry: give one by --image or --config", file=sys.stderr)
    return 0
