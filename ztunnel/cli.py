"""The command ``ztunnel``: parses its command line and runs one of its sub-commands."""

import argparse
import contextlib
import errno
import importlib
import io
import json
import logging
import os
import select
import signal
import sys
import warnings
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ztunnel.runtime.console import log_form
from ztunnel.runtime.console.proxy_flags import (
    ADDON_FLAGS,
    ADDON_VARIABLES,
    FLAGS,
    REPLACE,
    SHARED_FLAGS,
    SWITCH_FLAGS,
    names_a_source,
)
from ztunnel.runtime.console.subcommands import subcommands
from ztunnel.runtime.settings import SettingsError
from ztunnel.runtime.unused_imports import WITHOUT_SSL, leave_out

if TYPE_CHECKING:
    from ztunnel.proxy.envoy.config.settings import Settings

log = logging.getLogger("ztunnel")

#: The exit status that a shell shows for a program ended by SIGPIPE. Other programs also have it when their reader
#: has closed the pipe.
_READER_IS_GONE = 141
#: The exit status that a shell shows for a program ended by Ctrl-C.
_INTERRUPTED = 130
#: The exit status of a command whose output cannot be written, like that of commands without an answer.
_NOT_WRITTEN = 2
#: Errors of writing to a full or broken disk, or to a closed terminal.
_CANNOT_WRITE: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))

#: The lowest similarity of a mistyped command to a suggestion. Below it, "get" would resemble "agent".
_NEAR: Final = 0.78

#: asyncio's TLS stays usable if one of these variables is set, because addons' libraries or a sidecar's prober
#: need it.
_USE_ASYNCIO_TLS: Final = (ADDON_VARIABLES["addon"], "ISTIO_KUBE_APP_PROBERS")

#: The commands that each package adds. ``proxy`` and ``version`` are defined here.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "node.agent": ("agent",),
    "policy.authz": ("authz",),
    "control_plane": ("control-plane",),
    "sidecar.init": ("init",),
    "sidecar.inject": ("inject", "gate", "drain"),
    "ask.inspect": (
        *("status", "connections", "workloads", "services", "policies", "certificates", "denials", "nodes"),
        *("explain", "config", "log", "completion", "tap", "handover", "audit"),
    ),
    "node.intercept": ("intercept",),
    "ask.check": ("check",),
    "ask.flows": ("flows",),
    "ask.report": ("bug-report", "changes"),
    "ask.stat": ("stat", "top", "edges"),
    "policy.netpol": ("netpol",),
    "policy.policysync": ("policy",),
    "ask.simulate": ("simulate",),
    "ask.addons": ("addons", "addon"),
}


#: The commands by purpose, in the order of the help.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Ask": (
        *(
            "check",
            "nodes",
            "status",
            "connections",
            "flows",
            "stat",
            "top",
            "edges",
            "denials",
            "policies",
            "certificates",
        ),
        *("workloads", "services", "explain", "simulate", "audit", "config", "log", "tap"),
        *("handover", "addons", "bug-report", "changes"),
    ),
    "Run": ("proxy", "agent", "control-plane", "authz", "policy", "netpol"),
    "Install": ("inject", "gate", "drain", "init", "intercept"),
    "Extend": ("addon",),
    "This program": ("completion", "version"),
}


def _program(path: str) -> str:
    """Return the program's name as a person types it: kubectl runs its plugins by the names of their files."""
    return "kubectl ztunnel" if os.path.basename(path).startswith("kubectl-ztunnel") else "ztunnel"


class _Parser(argparse.ArgumentParser):
    """The program's own parser, whose help lists the commands in groups."""

    def format_help(self) -> str:
        explained = {
            action.dest: action.help or ""
            for group in self._actions
            if isinstance(group, argparse._SubParsersAction)
            for action in group._choices_actions
        }
        width = max(map(len, explained), default=0)
        lines = [f"usage: {self.prog} COMMAND ...", "", str(self.description)]
        for title, names in GROUPS.items():
            shown = [f"  {name:{width}}  {explained[name]}" for name in names if name in explained]
            lines += ["", f"{title}:", *shown] if shown else []
        return "\n".join([*lines, "", str(self.epilog), ""])


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    program = _program(sys.argv[0])
    parser = _Parser(
        prog=program,
        description="A node's tunnel proxy for ambient meshes.",
        epilog=f"{program} COMMAND --help explains a command; the daemon is {program} proxy.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    proxy = commands.add_parser(
        "proxy",
        help="run the proxy",
        description="Run the proxy of one node. With a bootstrap or a control plane's address it works in Envoy's "
        "dialect; without either it is an Istio mesh's ztunnel, configured by the variables of Istio's chart.",
    )
    proxy.add_argument(
        "arguments", nargs="*", metavar="ARG", help="ignored; accepted because Istio's chart passes an argument"
    )
    proxy.add_argument(
        "--validate", action="store_true", help="check the configuration, list its faults, and exit"
    )
    proxy.add_argument(
        "--replace",
        action="store_true",
        help="replace the running proxy and take over its connections [ZTUNNEL_REPLACE]",
    )
    proxy.add_argument(
        "--hold-sockets",
        action="store_true",
        help="keep the listening sockets in a small parent process, which starts the proxy again when it dies, so "
        "that no connection is refused meanwhile [ZTUNNEL_HOLD_SOCKETS]",
    )
    proxy.add_argument(
        "--envoy-compat",
        action="store_const",
        const="true",
        help="set every flag that deviates from Envoy (from --route-timeouts on) to Envoy's behaviour",
    )
    for name, metavar, text in ADDON_FLAGS:
        proxy.add_argument(name, action="append", default=[], metavar=metavar, help=text)
    for table in (FLAGS, SWITCH_FLAGS):
        for name, (variable, explanation) in table.items():
            flag = "--" + name.removesuffix("_s").replace("_", "-")
            proxy.add_argument(flag, dest=name, metavar="X", help=f"{explanation} [{variable}]")
    version = commands.add_parser("version", help="print the version")
    version.add_argument("--json", action="store_true", help="print JSON")
    for package in _packages(argv[0] if argv else ""):
        importlib.import_module(f"ztunnel.{package}").add_arguments(commands)
    return parser


def _packages(named: str) -> list[str]:
    """Return the packages whose commands a command line can name.

    If it names a command, only that command's package is needed. So it starts sooner and keeps no other modules in
    memory, which matters for commands that run in every pod. The help, and an unknown command, need all packages.
    """
    if named in ("proxy", "version"):
        return []
    return [package for package, added in COMMANDS.items() if named in added] or list(COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit status."""
    # Roots with a serial number of 0 are common, and each would cause this warning.
    warnings.filterwarnings("ignore", message="Parsed a serial number which wasn't positive", category=UserWarning)
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and reasons can have characters that the terminal's encoding lacks. ``reconfigure`` also asks for
        # the stream's position, which fails if the descriptor was replaced by another kind of file.
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, because the interpreter reports a failure of its own flush in other words
    except BrokenPipeError:
        if not _output_is_gone():
            raise
        return _READER_IS_GONE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        _discard_output()
        with contextlib.suppress(OSError):  # standard error can be on the same disk
            print(f"ztunnel: the output cannot be written: {error.strerror}", file=sys.stderr)
        return _NOT_WRITTEN


def _replace_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream.

    Otherwise the next socket or file would get the stream's descriptor, and ``print`` would write errors to
    standard output if standard error is closed.
    """
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  stays open


def _output_is_gone() -> bool:
    """Return whether the reader of our output has closed it, like ``| head`` does. If so, further output is
    discarded.
    """
    ends = select.poll()
    ends.register(sys.stdout.fileno(), 0)
    if not ends.poll(0):
        return False
    _discard_output()
    return True


def _discard_output() -> None:
    """Write no more to standard output. Otherwise the interpreter would flush it once more at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv) or ["help"]
    if given[0] == "--version":
        given[0] = "version"
    if given[0] == "worker" and given[1:2] and given[1].isdigit():  # internal: the proxy starts its workers so
        from ztunnel.runtime.process import end_with_parent

        # If the main process is killed, its worker must end, too. Otherwise the worker would still accept
        # connections on listening sockets that it shares with the next main process.
        end_with_parent(signal.SIGKILL)
        if given[2:] == [WITHOUT_SSL]:
            leave_out()
        from ztunnel.proxy.istio.workers.worker import run

        return run(int(given[1]))
    if given[:2] == ["completion", "--words"]:
        return _complete(given[2:])
    if given[0] == "help" and given[1:] and not given[1].startswith("-"):
        given = [*given[1:], "--help"]  # `ztunnel help explain`
    parser = _parser(given)
    if given[0] == "help":
        parser.print_help()
        return 0
    if not given[0].startswith("-") and given[0] not in subcommands(parser):
        import difflib

        near = difflib.get_close_matches(given[0], subcommands(parser), n=1, cutoff=_NEAR)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"unknown command: {given[0]}; {hint}`ztunnel help` lists them", file=sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(given)
    if unknown:
        _command_of(parser, given).error(f"unknown arguments: {' '.join(unknown)}")
    if args.command == "version":
        return _version(as_json=args.json)
    if args.command == "proxy":
        return _proxy(args)
    status = args.run(args)
    if isinstance(status, Awaitable):
        import asyncio  # a proxy imports it later, without some of the modules that it imports

        status = asyncio.run(_result(status))
    return int(status)


def _complete(words: Sequence[str]) -> int:
    """Print the candidates for the last word, one per line; see :mod:`ztunnel.ask.inspect.completion`."""
    from ztunnel.ask import inspect

    for word in inspect.candidates(_parser(words), words, inspect.names_for(words, inspect.ADDRESS)):
        print(word)
    return 0


def complete_for_kubectl() -> int:
    """Answer ``kubectl ztunnel WORD... <TAB>``: print one candidate per line, then a directive for kubectl's
    completion function.
    """
    _complete(sys.argv[1:] or [""])
    print(":0")
    return 0


def _command_of(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the innermost command that a command line names. Its usage is the most helpful one."""
    for word in given:
        parser = subcommands(parser).get(word, parser)
    return parser


async def _result(status: Awaitable[int]) -> int:
    return await status


def _proxy(args: argparse.Namespace) -> int:
    from ztunnel.runtime import process

    try:
        own = process.under_holder(os.environ, wanted=args.hold_sockets, serves=not args.validate)
    except ValueError as error:
        print(f"ztunnel: {error}", file=sys.stderr)
        return 2
    if not (args.addon or any(os.environ.get(name) for name in _USE_ASYNCIO_TLS)):
        leave_out()
    from ztunnel.runtime import descriptors, heap, log_rotation

    log_rotation.ignore_rotation()  # until there is a loop that handles the signals
    descriptors.raise_limit()  # before the first thread
    heap.expect_growth()  # before most imports: at the default thresholds collections take 6 % of their time
    flags = {name: getattr(args, name) for name in (*FLAGS, *SWITCH_FLAGS, "envoy_compat")}
    env = _with_addons(args, own)
    if args.replace:
        env = {**env, REPLACE: "true"}
    others = [value for name, value in flags.items() if name not in SHARED_FLAGS]
    if not (names_a_source(flags, os.environ) or any(others)):
        given = {FLAGS[name][0]: value for name in SHARED_FLAGS if (value := flags[name]) is not None}
        return _istio(args, {**env, **given})
    from ztunnel.proxy.envoy.config.settings import settings_from

    try:
        settings = settings_from(flags, env)
    except SettingsError as error:
        for fault in error.faults:
            print(f"ztunnel: {fault}", file=sys.stderr)
        return 2
    _configure_logging(settings.log_level)
    for warning in settings.warnings:
        if args.validate:
            print(f"Warning: {warning}", file=sys.stderr)
        else:
            log.warning(warning)
    return run_proxy(settings, validate=args.validate)


def _with_addons(args: argparse.Namespace, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment, with each addon flag's values in the flag's variable."""
    given = {}
    for name, variable in ADDON_VARIABLES.items():
        values = getattr(args, name)
        if values:
            given[variable] = "\n".join(values)
    return {**env, **given} if given else env


def _istio(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Run the proxy of an Istio mesh, configured by the environment, and return the exit status."""
    from ztunnel.proxy.istio.command import check, run, validate

    try:
        config = check(env, " ".join(["proxy", *args.arguments]))
    except SettingsError as error:
        for fault in error.faults:
            print(f"Error: {fault}", file=sys.stderr)
        return 1
    return validate(config) if args.validate else run(config)


def _version(*, as_json: bool) -> int:
    from ztunnel.proxy.istio.admin.config_dump import build_info, version_entry

    istio = os.environ.get("ISTIO_META_ISTIO_VERSION", "unknown")
    print(json.dumps(version_entry(istio), indent=2) if as_json else build_info(istio))
    return 0


def _configure_logging(level: str) -> None:
    logging.addLevelName(5, "TRACE")
    levels = {"trace": 5, "off": logging.CRITICAL + 1}
    log_form.install(levels.get(level, level.upper()))
    # These libraries log every header field and netlink attribute, even at levels that operators enable for our
    # own lines.
    for library in ("hpack", "pyroute2"):
        logging.getLogger(library).setLevel(logging.WARNING)


def run_proxy(settings: "Settings", *, validate: bool) -> int:
    """Load the bootstrap and serve, or only check it with ``validate``; return the exit status."""
    import uvloop

    from tproxy.errors import TproxyError
    from xds.errors import ConfigError
    from ztunnel.proxy.envoy.app import Proxy
    from ztunnel.proxy.envoy.config.bootstrap import bootstrap_for, load_bootstrap, read_bootstrap
    from ztunnel.proxy.envoy.validate import Findings, findings_of, findings_of_file
    from ztunnel.runtime.tasks import errors_of

    status = 0
    try:
        if settings.bootstrap and validate:
            found = findings_of_file(settings.bootstrap)
        elif settings.bootstrap:
            bootstrap = load_bootstrap(settings.bootstrap)
        else:
            bootstrap = read_bootstrap(
                bootstrap_for(settings.control_plane, settings.node, delta=settings.delta, admin=settings.admin)
            )
            found = findings_of(bootstrap) if validate else Findings([])
        if validate:
            if settings.addons is not None:
                from ztunnel.proxy.addons.load import faults_of

                found.faults.extend(faults_of(settings.addons))
            for fault in found.faults:
                print(fault)
            summary = f"configuration is valid: {found.checked()}"
            number = len(found.faults)
            counted = f"{number} fault{'' if number == 1 else 's'}"
            print(counted if number else summary, file=sys.stderr)
            status = 1 if found.faults else 0
        else:

            async def serve() -> None:
                await Proxy(settings, bootstrap).run()

            uvloop.run(serve())
    except* (ConfigError, TproxyError) as group:  # alone, or in the groups of the tasks it stopped
        for error in errors_of(group):
            print(f"ztunnel: {error}", file=sys.stderr)
        status = 1
    return status
