"""Fills the cache with istiod for the tests beside a real one: ``make istiod``.

istiod is built from the Go module proxy, checked by Go's checksum database like every module. The build takes both
cores of a small machine for about ten minutes, once. The program has a temporary name until it is complete.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.apiserver.build import go_command
from tests.apiserver.programs import cache

#: The version of istiod: a commit of Istio's main branch, from August 2026.
VERSION = "v0.0.0-20260827124520-eed52ebb66ad"
_MODULE = "istio.io/istio"
PROGRAM = "pilot-discovery"
#: The files with CustomResourceDefinitions, beside the program: Istio's own, and those of the Gateway API.
DEFINITIONS, GATEWAY_DEFINITIONS = "istio-crds.yaml", "gateway-api-crds.yaml"
_IN_MODULE = {
    DEFINITIONS: Path("manifests/charts/base/files/crd-all.gen.yaml"),
    GATEWAY_DEFINITIONS: Path("tests/integration/pilot/testdata/gateway-api-crd.yaml"),
}


def main() -> int:
    """Build what the cache lacks. Return 1, after a line with the reason, if this fails."""
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / PROGRAM
    missing = [name for name in _IN_MODULE if not (folder / name).exists()]
    if program.exists() and not missing:
        print(f"{program}: is there")
        return 0
    try:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            run = go_command(Path(work))
            run("mod", "init", "istiod")
            described = json.loads(run("mod", "download", "-json", f"{_MODULE}@{VERSION}"))
            for name in missing:
                shutil.copyfile(Path(described["Dir"]) / _IN_MODULE[name], folder / name)
            if not program.exists():
                run("mod", "edit", f"-require={_MODULE}@{VERSION}")
                made = Path(work, PROGRAM)
                command = f"{_MODULE}/pilot/cmd/{PROGRAM}"
                run("build", "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o", str(made), command)
                made.rename(program)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{PROGRAM} could not be made: {error}", file=sys.stderr)
        return 1
    print(f"{program}: made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
