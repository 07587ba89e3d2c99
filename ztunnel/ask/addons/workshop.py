"""The command ``ztunnel addon``: ``new`` writes an addon with its test, ``check`` imports, types and times one.

Exit status: 0; 1 if the addon has a fault or a file exists already; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any, Final

import ztunnel
from ztunnel import addons as api
from ztunnel.addons import testing
from ztunnel.proxy.addons.decide import ALLOWED_VERDICTS, fault_of
from ztunnel.proxy.addons.load import AddonError, LoadedAddon, find_class, load_class, where
from ztunnel.proxy.addons.settings import OPTION, addon_settings, parse_spec

_NAME: Final = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
#: The numbers of measured calls and of preceding warm-up calls, for each hook.
_CALLS: Final = 500
_WARM_UP: Final = 20

_ADDON: Final = '''"""What this addon does, in one sentence."""

from dataclasses import dataclass

from ztunnel.addons import Addon, Deny, Facts, Verdict


class {cls}(Addon):
    """Refuses connections to a namespace from all others."""

    name = "{name}"

    @dataclass(frozen=True)
    class Options:
        """Set by --addon-option {name}.namespace=NAME."""

        namespace: str = "restricted"

    def configured(self, options: Options) -> None:
        self.namespace = options.namespace

    def connecting(self, facts: Facts) -> Verdict | None:
        to, source = facts.destination.namespace, facts.source.namespace
        if to == self.namespace and source != to:
            return Deny(f"namespace {{to}} is closed to {{source}}")
        return None
'''
_TEST: Final = '''"""Tests of {module}.py: pytest {test}"""

from {module} import {cls}

from ztunnel.addons import Deny
from ztunnel.addons.testing import Playbook, outbound


def test_other_namespaces_are_refused() -> None:
    play = Playbook({cls}, namespace="vault")
    play.connecting(outbound("shop.web", "keys.vault"), expect=Deny("namespace vault is closed to web"))


def test_its_own_pods_are_not() -> None:
    play = Playbook({cls}, namespace="vault")
    play.connecting(outbound("rotator.vault", "keys.vault"), expect=None)
    play.connecting(outbound("shop.web", "cart.web"), expect=None)
'''


def add_arguments(subparsers: Any) -> None:
    """Add ``addon`` with its sub-commands."""
    command = subparsers.add_parser(
        "addon", help="write and check an addon", description="Write and check addons for ztunnel proxy."
    )
    commands = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = commands.add_parser("new", help="write NAME.py and test_NAME.py, whose test passes")
    new.add_argument(
        "name", metavar="NAME", help="the addon's name, lower case, with dashes or underscores between words"
    )
    new.add_argument(
        "-C", "--directory", default=".", metavar="DIR", help="write to this folder (default: the current one)"
    )
    new.set_defaults(run=_new)
    check = commands.add_parser(
        "check",
        help="import an addon, check its types, and time its hooks",
        description="Load an addon as ztunnel proxy does, check the annotations of its hooks (and its file with"
        " mypy if that is installed), and call each hook some hundred times with made-up facts.",
    )
    check.add_argument("file", metavar="FILE", help="FILE.py[:Class], module:Class or an entry point")
    check.add_argument(
        "--addon-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an option of the addon, like that of ztunnel proxy",
    )
    check.add_argument("--no-mypy", action="store_true", help="check annotations without mypy")
    check.set_defaults(run=_check)


def _new(args: argparse.Namespace) -> int:
    if not _NAME.fullmatch(args.name):
        print(f"ztunnel addon: {args.name!r} is no name of lower-case words", file=sys.stderr)
        return 2
    module = args.name.replace("-", "_")
    folder = Path(args.directory)
    addon, test = folder / f"{module}.py", folder / f"test_{module}.py"
    names = {
        "name": args.name.replace("_", "-"),
        "module": module,
        "test": test.name,
        "cls": "".join(word.capitalize() for word in module.split("_")),
    }
    try:
        for path, text in ((addon, _ADDON), (test, _TEST)):
            with path.open("x") as file:
                file.write(text.format(**names))
    except FileExistsError as error:
        print(f"ztunnel addon: {error.filename}: exists already", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ztunnel addon: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{addon} and {test} are written. Next: pytest {test}; ztunnel addon check {addon}")
    return 0


def _check(args: argparse.Namespace) -> int:
    faults = list(_checked(args))
    for fault in faults:
        print(f"Error: {fault}", file=sys.stderr)
    if not faults:
        print(f"{args.file}: no faults")
    return 1 if faults else 0


def _checked(args: argparse.Namespace) -> Iterator[str]:
    """Yield an addon's faults, and print the results of all checks."""
    settings, faults = addon_settings({"ZTUNNEL_ADDONS": args.file, OPTION: "\n".join(args.addon_option)})
    if faults or settings is None:
        yield from faults
        return
    spec = parse_spec(args.file)
    try:
        cls, digest = find_class(spec)
        loaded = load_class(cls, settings.options, spec, digest)
    except AddonError as error:
        yield from error.faults
        return
    for warning in loaded.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    print(f"addon {loaded.name}: hooks {', '.join(loaded.hooks)}" + (f", sha256:{digest}" if digest else ""))
    yield from _faults_of_types(cls, loaded)
    if spec.file and not args.no_mypy:
        yield from _faults_by_mypy(spec.file)
    yield from _faults_of_calls(loaded)


# Types


def _faults_of_types(cls: type, loaded: LoadedAddon) -> Iterator[str]:
    for hook in loaded.hooks:
        wanted = _WANTED.get(hook)
        try:
            hints = typing.get_type_hints(getattr(cls, hook), localns=dict(vars(cls)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  an annotation is code of the addon
            yield f"addon {loaded.name}: the annotations of {hook} cannot be read: {error}"
            continue
        result = hints.pop("return", None)
        if wanted is not None:
            parameter = list(inspect.signature(getattr(cls, hook)).parameters)[-1]
            given = hints.get(parameter, wanted)
            if given is not wanted and given is not Any:
                yield f"addon {loaded.name}: {hook} takes {wanted.__name__}, not {_shown(given)}"
        allowed = ALLOWED_VERDICTS.get(hook)
        if allowed is not None and result is not None:
            members = set(typing.get_args(result) or (result,)) - {type(None)}
            other = [each for each in members if each not in allowed and each is not Any]
            for each in other:
                yield f"addon {loaded.name}: {hook} cannot return {_shown(each)}"


_WANTED: Final[dict[str, type]] = {
    "connecting": api.Facts,
    "accepting": api.Facts,
    "opened": api.Facts,
    "closed": api.Record,
    "refused": api.Record,
    "mesh_changed": api.MeshSummary,
}


def _shown(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _faults_by_mypy(file: str) -> Iterator[str]:
    if importlib.util.find_spec("mypy") is None:
        print("mypy is not installed; only annotations of hooks were checked")
        return
    flags = ("--follow-imports=silent", "--no-error-summary", "--config-file=")
    # mypy finds installed packages by itself, unless a package is installed as a link to its sources.
    sources = Path(ztunnel.__file__).parents[1]
    found = {} if sources.name == "site-packages" else {"MYPYPATH": str(sources)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, file],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **found},
    )
    if done.returncode:
        yield from (line for line in done.stdout.splitlines() if ": error:" in line)
        if done.returncode not in (0, 1):
            yield f"mypy: {(done.stderr or done.stdout).strip()}"


# Time


def _faults_of_calls(loaded: LoadedAddon) -> Iterator[str]:
    budget_us = loaded.common.budget_us
    for hook, argument in _arguments().items():
        if hook not in loaded.hooks:
            continue
        if hook in loaded.waits:
            print(f"  {hook:<13} async def, within {loaded.common.time_limit_s:g} s; not called")
            continue
        try:
            times = _timed(loaded, hook, argument)
        except _Fault as fault:
            yield f"addon {loaded.name}: {fault}"
            continue
        middle, worst = median(times), quantiles(times, n=100)[-1]
        print(f"  {hook:<13} median {middle:.1f} us, p99 {worst:.1f} us, budget {budget_us:g} us")
        if middle > budget_us:
            yield f"addon {loaded.name}: {hook} takes {middle:.0f} us, more than its budget of {budget_us:g} us"
    if "done" in loaded.hooks:
        try:
            loaded.hooks["done"]()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the hook is code of the addon
            yield f"addon {loaded.name}: its hook done raised {where(error)}"


class _Fault(Exception):
    """A hook failed."""


def _timed(loaded: LoadedAddon, hook: str, argument: object) -> list[float]:
    function = loaded.hooks[hook]
    times = []
    for number in range(_WARM_UP + _CALLS):
        began = perf_counter_ns()
        try:
            answer = function(argument)
        except (Exception, SystemExit) as error:
            raise _Fault(f"its hook {hook} raised {where(error)}") from error
        took = perf_counter_ns() - began
        fault = fault_of(hook, answer) if hook in ALLOWED_VERDICTS else ""
        if fault:
            raise _Fault(f"its hook {hook} {fault}")
        if number >= _WARM_UP:
            times.append(took / 1000)
    return times


def _arguments() -> dict[str, object]:
    return {
        "connecting": testing.outbound(),
        "accepting": testing.inbound(),
        "opened": testing.outbound(),
        "closed": testing.record(),
        "refused": testing.record(reason="refused"),
        "mesh_changed": api.MeshSummary(10, 5, 2),
    }
