"""Measures the memory and time of a proxy's imports, in steps, and the cost of messages with every field.

    python -m bench.imports                  the steps; Envoy's messages as here, and with every field
    python -m bench.imports --beside TREE    the last step here and in another checkout, by turns

Each measurement is a process of its own. The first only compiles its imports. The rest of a proxy's memory, up to
what ``make bench`` shows at rest, is buffers, contexts and configuration.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xds.proto import registry
from xds.proto.generate import RIVALS

ROOT = Path(__file__).parents[1]
_PROXY = "ztunnel.proxy.envoy.app, ztunnel.cli"
STEPS = (
    ("the interpreter, asyncio, uvloop", "asyncio, uvloop"),
    ("OpenSSL and certificates", "OpenSSL.SSL, cryptography.x509, cryptography.hazmat.primitives.serialization"),
    ("protobuf", "google.protobuf.message, google.protobuf.any_pb2, google.protobuf.json_format"),
    ("this proxy, with Envoy's messages", _PROXY),
    ("the page of metrics", "ztunnel.proxy.envoy.admin.families"),
)
#: Run first, as a proxy does.
_LEAVE_OUT = "from ztunnel.runtime.unused_imports import leave_out\nleave_out()"
_ROUNDS = 7
_MEASURE = """
import os, sys, time
{before}
def resident():
    return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
bytes_before, begun = resident(), time.perf_counter()
{measured}
print([resident(), resident() - bytes_before, time.perf_counter() - begun])
"""
#: Protobuf and its own types, which both kinds of messages need. The path of our package xds also finds their
#: modules.
_PROTOBUF = f"sys.path.insert(1, {str(RIVALS)!r})\nfrom xds.proto import registry, well_known"


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians: the process's resident bytes, the bytes added by the measured statements, and the statements'
    time.
    """

    resident_bytes: int
    more_bytes: int
    seconds: float


def cost(programs: Sequence[tuple[Path, str, str]], rounds: int = _ROUNDS) -> list[Cost]:
    """Return the cost of each program, measured alternately.

    Args:
        programs: the folder to run in, unmeasured statements, measured statements.
        rounds: how often each program runs, after one run that is not counted.
    """
    seen: list[list[list[float]]] = [[] for _ in programs]
    for number in range(rounds + 1):
        for (folder, before, measured), values in zip(programs, seen, strict=True):
            text = _MEASURE.format(before=before, measured=measured)
            done = subprocess.run(
                [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=True
            )
            if number:
                values.append(json.loads(done.stdout))
    medians = [[statistics.median(column) for column in zip(*values, strict=True)] for values in seen]
    return [Cost(int(resident), int(more), seconds) for resident, more, seconds in medians]


def steps() -> None:
    """Print the table of steps."""
    modules = "sys"
    programs = []
    for _, more in STEPS:
        modules = f"{modules}, {more}"
        programs.append((ROOT, "", f"{_LEAVE_OUT}\nimport {modules}"))
    print("MiB resident | more |  ms | after importing")
    before_bytes, before_s = 0, 0.0
    for (name, _), found in zip(STEPS, cost(programs), strict=True):
        more_bytes, more_s = found.resident_bytes - before_bytes, found.seconds - before_s
        print(f"{found.resident_bytes / 2**20:12.1f} | {more_bytes / 2**20:4.1f} | {more_s * 1e3:3.0f} | {name}")
        before_bytes, before_s = found.resident_bytes, found.seconds


#: Prints the modules of xds-protos that have the messages named on standard input.
_MODULES_OF = """
import importlib, pathlib, pkgutil, sys
root = sys.argv[1]
sys.path.insert(0, root)
from google.protobuf import descriptor_pool
for top in ("envoy", "udpa", "xds"):
    for module in pkgutil.walk_packages([str(pathlib.Path(root, top))], top + "."):
        if module.name.endswith("_pb2"):
            importlib.import_module(module.name)
found = set()
for name in sys.stdin.read().split():
    try:
        found.add(descriptor_pool.Default().FindMessageTypeByName(name).file.name)
    except KeyError:
        pass
print(*sorted(name.removesuffix(".proto").replace("/", ".") + "_pb2" for name in found))
"""


def theirs() -> list[str]:
    """Return the modules of xds-protos that have the messages of ours.

    Raises:
        SystemExit: xds-protos is not installed.
    """
    if not RIVALS.is_dir():
        raise SystemExit(f"xds-protos is not in {RIVALS}; make setup installs it")
    names = [message.full_name for message in registry.messages()]
    asked = "\n".join(name for name in names if name.startswith(("envoy.", "udpa.", "xds.")))
    command = [sys.executable, "-c", _MODULES_OF, str(RIVALS)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return done.stdout.split()


def messages() -> None:
    """Print what Envoy's messages cost: ours with the names of missing fields, and theirs with every field."""
    names = theirs()
    every_field = "\n".join(f"import {name}" for name in names)
    programs = (
        ("the fields that are read", "registry.import_all()"),
        (
            "and the names of the others",
            "registry.import_all()\nfrom xds.proto.unknown import *\nmissing_fields()",
        ),
        (
            f"every field, and the messages of these: {len(names)} files of xds-protos and what they import",
            every_field,
        ),
    )
    print("\nMiB more |  ms | Envoy's messages with")
    for (name, _), found in zip(programs, cost([(ROOT, _PROTOBUF, it) for _, it in programs]), strict=True):
        print(f"{found.more_bytes / 2**20:8.1f} | {found.seconds * 1e3:3.0f} | {name}")


def beside(tree: Path) -> None:
    """Print what a whole proxy's imports cost here and in another checkout."""
    imports = "import uvloop, " + _PROXY
    print("MiB resident |  ms | tree")
    trees = (ROOT, tree.resolve())
    for folder, found in zip(trees, cost([(folder, "", imports) for folder in trees], 15), strict=True):
        print(f"{found.resident_bytes / 2**20:12.1f} | {found.seconds * 1e3:3.0f} | {folder}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.imports", description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", type=Path, metavar="TREE", help="compare with another checkout")
    args = parser.parse_args()
    if args.beside:
        beside(args.beside)
    else:
        steps()
        messages()


if __name__ == "__main__":
    main()
