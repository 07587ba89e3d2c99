"""Measures the memory of a proxy's imports, in steps.

Each step is a process of its own that imports what the steps before it import, and a little more. The rest, up to
what ``make bench`` shows at rest, is buffers, contexts and configuration. Run: ``python -m bench.imports``.
"""

import subprocess
import sys

STEPS = (
    ("the interpreter, asyncio", "asyncio"),
    ("uvloop", "uvloop"),
    ("OpenSSL and certificates", "OpenSSL.SSL, cryptography.x509, cryptography.hazmat.primitives.serialization"),
    ("protobuf", "google.protobuf.message, google.protobuf.any_pb2, google.protobuf.json_format"),
    ("this proxy, with Envoy's messages", "ztunnel.envoy.app, ztunnel.cli"),
)
_REPORT = "import os; print(int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))"


def resident_bytes(modules: str) -> int:
    """Return the resident bytes of a process that has imported these modules."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {modules}\n{_REPORT}"], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def main() -> None:
    """Print the table."""
    modules, before = "sys", 0
    print("MiB resident | more | after importing")
    for name, more in STEPS:
        modules = f"{modules}, {more}"
        now = resident_bytes(modules)
        print(f"{now / 2**20:12.1f} | {(now - before) / 2**20:4.1f} | {name}")
        before = now


if __name__ == "__main__":
    main()
