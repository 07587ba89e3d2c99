"""Audits the packages in the image (``make audit``, ``python -m deploy.supply``).

There are four checks. Each prints one line, and the exit status is 0 if all succeed:

- **floors**: no locked version is below the fix of a known vulnerability (``requirements/floors.txt``). We
  maintain that list, and it needs no network.
- **database**: pip-audit looks up the packages of the lock file in a database of vulnerabilities. The check is
  skipped, with a message, if pip-audit is not installed or cannot reach a database.
- **SBOM**: ``dist/sbom.json``, CycloneDX 1.5, from the lock file: names, versions, hashes, and dependencies.
- **wheel**: the wheel is built twice, from two copies of the tree at different paths and times. The bytes must be
  equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ztunnel import __version__

ROOT: Final = Path(__file__).parents[1]
_LOCKED: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\]+)")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_VIA: Final = re.compile(r"^\s+#\s+(?:via\s+)?(\S.*)$")
_FLOOR: Final = re.compile(r"^([a-z0-9-]+)\s*>=\s*(\S+)\s+#\s*(\S.*)$")
_NAMESPACE: Final = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")  # of domain names, RFC 9562


@dataclass(frozen=True, slots=True)
class Package:
    """One package of a lock file.

    Attributes:
        sha256: the hashes of its installable files.
        needed_by: the packages that depend on it, or the project.
    """

    name: str
    version: str
    sha256: tuple[str, ...] = ()
    needed_by: tuple[str, ...] = ()


@dataclass(slots=True)
class _Entry:
    name: str
    version: str
    hashes: list[str] = field(default_factory=list)
    via: list[str] = field(default_factory=list)


def read_lock(text: str) -> list[Package]:
    """Return the packages of a lock file of pip-compile with hashes.

    Raises:
        ValueError: a package has no hash. The error names it.
    """
    entries: list[_Entry] = []
    for line in text.splitlines():
        found = _LOCKED.match(line)
        if found is not None:
            entries.append(_Entry(_normal(found[1]), found[2]))
        if not entries:
            continue
        entries[-1].hashes += _HASH.findall(line)
        via = _VIA.match(line)
        if via is not None and via[1] != "via" and not via[1].startswith("The following"):
            entries[-1].via.append(_normal(via[1].removeprefix("via ").split(" (")[0]))
    for entry in entries:
        if not entry.hashes:
            raise ValueError(f"{entry.name}=={entry.version} has no hash")
    return [Package(each.name, each.version, tuple(each.hashes), tuple(each.via)) for each in entries]


def read_floors(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the floors in a text, as (version, reason) pairs by package name.

    Raises:
        ValueError: a line does not state a floor. The error quotes the line.
    """
    floors: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        found = _FLOOR.match(line)
        if found is None:
            raise ValueError(f"no floor: {line!r}")
        floors.setdefault(found[1], []).append((found[2], found[3]))
    return floors


def below(packages: Sequence[Package], floors: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Return a line for each package that is below a floor."""
    return [
        f"{package.name} {package.version} is below {least}: {reason}"
        for package in packages
        for least, reason in floors.get(package.name, ())
        if _numbers(package.version) < _numbers(least)
    ]


def sbom(packages: Sequence[Package], version: str) -> dict[str, Any]:
    """Return a CycloneDX 1.5 document. It contains no time, so equal arguments give equal documents."""
    refs = {package.name: _purl(package.name, package.version) for package in packages}
    own = _purl("ztunnel-py", version)
    needs: dict[str, list[str]] = {own: [], **{ref: [] for ref in refs.values()}}
    for package in packages:
        for user in package.needed_by:
            needs[refs.get(user, own)].append(refs[package.name])
    content = json.dumps([own, sorted(refs.values())])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, content)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "ztunnel-py",
                "version": version,
                "bom-ref": own,
                "purl": own,
            }
        },
        "components": [
            {
                "type": "library",
                "name": package.name,
                "version": package.version,
                "bom-ref": refs[package.name],
                "purl": refs[package.name],
                "hashes": [{"alg": "SHA-256", "content": each} for each in package.sha256],
            }
            for package in packages
        ],
        "dependencies": [{"ref": ref, "dependsOn": sorted(set(needed))} for ref, needed in needs.items()],
    }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers, to compare it with a floor. Suffixes (rc1, post1) are ignored."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release is not None else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def verdict(status: int, output: str, errors: str) -> tuple[bool, str]:
    """Return whether pip-audit found no vulnerability, and a line about it. A package that it could not query
    counts as a failure.
    """
    if "No module named pip_audit" in errors:
        return True, "database: NOT CHECKED, pip-audit is not installed (pip install pip-audit)"
    try:
        found = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        return True, f"database: NOT CHECKED, pip-audit: {(errors.strip().splitlines() or ['no answer'])[-1]}"
    known = [each for each in found if "skip_reason" not in each]
    vulnerable = [f"{each['name']} {each['version']}: {flaw['id']}" for each in known for flaw in each["vulns"]]
    if vulnerable or (status and known):
        return False, "\n".join(["database:", *vulnerable])
    if not known:
        return True, "database: NOT CHECKED, it knows none of the packages"
    return (
        True,
        f"database: {len(known)} packages without a known vulnerability, {len(found) - len(known)} unknown",
    )


def _database(lock: Path) -> tuple[bool, str]:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--disable-pip", "--no-deps"]
    done = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"], capture_output=True, text=True, check=False
    )
    return verdict(done.returncode, done.stdout, done.stderr)


def _wheel(folder: Path, name: str) -> str:
    """Build the wheel from a copy of the tracked files; return the digest of its bytes."""
    tree = folder / name / "tree"
    tree.mkdir(parents=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for path in filter(None, tracked.decode().split("\0")):
        if path.startswith(("hbone/", "xds/", "tproxy/", "ztunnel/")) or "/" not in path:
            target = tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target)  # copies get the current time instead of the file's
    when = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "-w", str(folder / name), str(tree)],
        check=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": when.stdout.strip(), "PYTHONWARNINGS": "ignore"},
    )
    (wheel,) = (folder / name).glob("*.whl")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def main() -> int:
    """Run the four checks; return the exit status."""
    lock = ROOT / "requirements" / "runtime.lock"
    packages = read_lock(lock.read_text())
    low = below(packages, read_floors((ROOT / "requirements" / "floors.txt").read_text()))
    print("\n".join(low) if low else f"floors: {len(packages)} packages, none below a known one")
    known, said = _database(lock)
    print(said)
    path = ROOT / "dist" / "sbom.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(sbom(packages, __version__), indent=1) + "\n")
    print(f"SBOM: {path.relative_to(ROOT)}, CycloneDX 1.5, {len(packages)} components")
    with tempfile.TemporaryDirectory() as folder:
        first, second = (_wheel(Path(folder), name) for name in ("a", "another-path"))
    same = first == second
    print(f"wheel: sha256 {first}, twice the same" if same else f"wheel: {first} and {second}: NOT REPRODUCIBLE")
    return 0 if not low and known and same else 1


if __name__ == "__main__":
    sys.exit(main())
