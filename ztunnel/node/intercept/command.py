"""The command ``ztunnel intercept apply|show|remove``: applies, shows or removes a node's interception.

Exit status: 0 done, or ``show`` found no difference; 1 ``show`` found a difference; 2 failed, with one line on
standard error that says what to do.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TextIO

from tproxy.aio.kernel import Kernel
from tproxy.aio.netns import Netns
from tproxy.diff import diff
from tproxy.errors import TproxyError, UnknownNamespace
from tproxy.node import HOST, OWNERSHIP, ZTUNNEL, node
from tproxy.operations import Operation
from tproxy.render.text import operation_text, state_text
from tproxy.resources import Namespace, NamespaceName, State
from ztunnel.node.intercept.description import BadDescription, Description, Flags, namespaces, parse
from ztunnel.runtime.console.serving import until_signal
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.text_file import read_again, read_text
from ztunnel.runtime.watched_file import InPlaceEdits, file_state

DONE, DIFFERS, FAILED = 0, 1, 2
#: Seconds between two checks whether the file was edited; each is one stat call. A new pod is captured within 0.2
#: s of the edit.
_LOOK_S: Final = 0.05


def add_arguments(subparsers: Any) -> None:
    """Add ``intercept`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "intercept", help="apply, show or remove a node's traffic interception"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="apply|show|remove")
    for action, text in (
        ("apply", "apply the description to the kernel; idempotent"),
        ("show", "print the resources and their differences from the description; status 1 if there are any"),
        ("remove", "remove all our resources and restore sysctls"),
    ):
        command = actions.add_parser(action, help=text, description=text)
        command.add_argument("-f", "--file", type=Path, metavar="YAML", help="file that describes the node")
        command.add_argument(
            "--host-netns",
            metavar="NS",
            help="the node's network namespace: name, path or pid (default: this process's)",
        )
        command.add_argument(
            "--ztunnel-netns", metavar="NS", help="the proxy's network namespace: name, path or pid"
        )
        # Removal needs only the namespaces. The other flags are accepted, so that the command line of apply can be
        # reused.
        _add_node_arguments(command)
        if action == "apply":
            command.add_argument(
                "--watch", action="store_true", help="keep running, and undo changes by other programs"
            )
    parser.set_defaults(run=run)


def _add_node_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--host-ip", action="append", default=[], metavar="IP", help="an address of the node, repeatable"
    )
    command.add_argument("--ztunnel-veth", metavar="IF", help="the node's end of the proxy's veth pair")
    command.add_argument("--ztunnel-uplink", metavar="IF", help="the proxy's end of the veth pair (default eth0)")
    command.add_argument(
        "--ztunnel-ip", action="append", default=[], metavar="IP", help="an address of the proxy, repeatable"
    )
    command.add_argument(
        "--pod", action="append", default=[], metavar="UID=IP[,IP]@IF", help="a pod of the mesh, repeatable"
    )


def flags_from(args: argparse.Namespace) -> Flags:
    """Return the command line's part of the node's description."""
    return Flags(
        host_namespace=args.host_netns,
        ztunnel_namespace=args.ztunnel_netns,
        host_addresses=tuple(args.host_ip),
        ztunnel_interface=args.ztunnel_veth,
        ztunnel_uplink=args.ztunnel_uplink,
        ztunnel_addresses=tuple(args.ztunnel_ip),
        pods=tuple(args.pod),
    )


async def run(args: argparse.Namespace, out: TextIO | None = None, err: TextIO | None = None) -> int:
    """Run a parsed command line, and return the exit status; errors are printed, not raised."""
    out = out if out is not None else sys.stdout
    err = err if err is not None else sys.stderr
    try:
        match args.action:
            case "apply":
                return await _apply(args, out, err)
            case "show":
                return await _show(args, out)
            case _:
                return await _remove(args, out)
    except (TproxyError, BadDescription, OSError) as error:
        print(f"ztunnel intercept: {plain_reason(error)}", file=err)
        return FAILED


def _read_file(args: argparse.Namespace) -> str | None:
    file: Path | None = args.file
    return None if file is None else read_text(file)


async def _apply(args: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    description = parse(_read_file(args), flags_from(args))
    with contextlib.ExitStack() as stack:
        netns = _open(description.host_namespace, description.ztunnel_namespace, stack)
        async with Kernel(netns, OWNERSHIP) as kernel:
            done = await _apply_whole(kernel, description)
            _print_operations(done, out)
            print(f"{len(done)} changes" if done else "nothing to change", file=out, flush=True)
            if args.watch:
                await _watch(kernel, args, description, out, err)
    return DONE


async def _apply_whole(kernel: Kernel, description: Description) -> tuple[Operation, ...]:
    """Apply a description. If this fails and the node had none of our resources before, all are removed again.

    A node that had some keeps them, because they can be carrying connections.
    """
    wanted = node(description.node)
    nothing = State({name: Namespace() for name in wanted.namespaces})
    fresh = not diff(await kernel.read(wanted), nothing)
    try:
        return await kernel.apply(wanted)
    except TproxyError:
        if fresh:
            with contextlib.suppress(TproxyError):  # the first error is more informative
                await kernel.apply(nothing)
        raise


async def _watch(
    kernel: Kernel, args: argparse.Namespace, description: Description, out: TextIO, err: TextIO
) -> None:
    """Keep the node repaired until SIGINT or SIGTERM. Edits of the file are applied, but a faulty file is reported
    and ignored.
    """
    current = description

    def wanted() -> State:
        nonlocal current
        try:
            holds = bool(current.node.members) and not args.pod
            text = None if args.file is None else read_again(args.file, holds=holds)
            parsed = parse(text, flags_from(args))
        except (BadDescription, OSError) as error:
            reason = plain_reason(error)
            print(f"ztunnel intercept: description not applied: {reason}", file=err, flush=True)
        else:
            if parsed != current:
                print("description changed", file=out, flush=True)
            current = parsed
        return node(current.node)

    edited = asyncio.Event()

    async def look() -> None:
        """This polls, because a ConfigMap swaps links, and editors rename files or write in place."""
        file: Path | None = args.file
        known, edits = file_state(file) if file is not None else None, InPlaceEdits()
        while file is not None:
            await asyncio.sleep(_LOOK_S)
            found = file_state(file)
            if found != known and not edits.is_written(file, known, found):
                known = found
                edited.set()

    async def repair() -> None:
        async with contextlib.aclosing(kernel.keep(wanted, changed=edited)) as results:
            async for result in results:
                if isinstance(result, TproxyError):
                    print(f"ztunnel intercept: {result}", file=err, flush=True)
                else:
                    _print_operations(result, out)
                    print(f"{len(result)} repairs", file=out, flush=True)

    with until_signal():
        async with asyncio.TaskGroup() as group:
            group.create_task(repair(), name="intercept repair")
            group.create_task(look(), name="intercept file")


async def _show(args: argparse.Namespace, out: TextIO) -> int:
    description = parse(_read_file(args), flags_from(args))
    wanted = node(description.node)
    with contextlib.ExitStack() as stack:
        netns = _open(description.host_namespace, description.ztunnel_namespace, stack)
        async with Kernel(netns, OWNERSHIP) as kernel:
            found = await kernel.read(wanted)
    print(state_text(found), file=out)
    missing = diff(found, wanted)
    if not missing:
        print("\nas wanted", file=out)
        return DONE
    print("\nthe state differs; apply would do:", file=out)
    _print_operations(missing, out)
    return DIFFERS


async def _remove(args: argparse.Namespace, out: TextIO) -> int:
    host, ztunnel = namespaces(_read_file(args), flags_from(args))
    with contextlib.ExitStack() as stack:
        try:
            netns = _open(host, ztunnel, stack)
        except UnknownNamespace as error:
            # The ztunnel pod's namespace can be gone already, with its resources. Then only the node's resources
            # must be removed.
            if error.name != ztunnel:
                raise
            print(f"{error}; removing the node's side only", file=out)
            netns = {HOST: stack.enter_context(Netns.open(host))}
        async with Kernel(netns, OWNERSHIP) as kernel:
            done = await kernel.apply(State({name: Namespace() for name in netns}))
    _print_operations(done, out)
    print(f"{len(done)} changes" if done else "nothing to remove", file=out)
    return DONE


def _open(host: str | None, ztunnel: str, stack: contextlib.ExitStack) -> dict[NamespaceName, Netns]:
    opened = {
        ZTUNNEL: stack.enter_context(Netns.open(ztunnel)),
        HOST: stack.enter_context(Netns.open(host)),
    }
    if opened[ZTUNNEL].inode == opened[HOST].inode:
        raise BadDescription([f"host and ztunnel are the same namespace: {ztunnel}"])
    return opened


def _print_operations(operations: Iterable[Operation], out: TextIO) -> None:
    for operation in operations:
        for line in operation_text(operation):
            print(line, file=out)
