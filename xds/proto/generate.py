"""Generate the Python modules and type stubs of every ``.proto`` below this folder (``make proto``).

The ``.proto`` files name each other by the path from the repository's root
(``import "xds/proto/envoy/config/core/v3/core.proto"``), so protoc writes imports that start with
``xds.proto`` by itself. With Envoy's own paths it would write ``from xds.core.v3 import ...``, which finds
this project's ``xds`` package. What protoc wrote is then moved from the process-wide descriptor pool to ours
(:mod:`xds.proto.pool`), so that other packages may define the same messages in one process.

``google/protobuf/*.proto`` come with grpcio-tools, which only developers need.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class GenerateError(Exception):
    """protoc refused, its message is on standard error; or its output is not what :func:`privately` rewrites."""


def sources(root: Path = ROOT) -> list[Path]:
    """Return every ``.proto`` file of the project, relative to ``root``, sorted."""
    return sorted(path.relative_to(root) for path in (root / "xds" / "proto").rglob("*.proto"))


def generate(output: Path, root: Path = ROOT) -> list[Path]:
    """Write ``*_pb2.py`` and ``*_pb2.pyi`` below ``output`` and return their paths relative to it.

    Raises:
        ImportError: grpcio-tools is not installed.
        GenerateError: a ``.proto`` file is wrong, or mypy-protobuf is not installed.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]  # it has neither stubs nor py.typed

    well_known = Path(protoc.__file__).with_name("_proto")
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")
    names = sources(root)
    arguments = [
        "protoc",
        f"--proto_path={root}",
        f"--proto_path={well_known}",
        f"--python_out={output}",
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--mypy_out=quiet:{output}",
        *map(str, names),
    ]
    if protoc.main(arguments) != 0:
        raise GenerateError
    for name in names:
        module = output / name.with_name(f"{name.stem}_pb2.py")
        module.write_text(privately(module.read_text()))
    made = [name.with_name(f"{name.stem}_pb2{suffix}") for name in names for suffix in (".py", ".pyi")]
    for folder in {parent for name in made for parent in (output / name).parents if output in parent.parents}:
        marker = folder / "__init__.py"
        if not marker.exists():
            marker.touch()
    return made


def privately(code: str) -> str:
    """Return a module that protoc wrote, registering its file in our descriptor pool instead of the default one.

    The imports of ``google.protobuf.*_pb2`` go as well: they only loaded the default pool, and ours has these files.

    Raises:
        GenerateError: the module mentions pools in another way than protoc does today.
    """
    rewritten = code.replace(
        "from google.protobuf import descriptor_pool as _descriptor_pool\n",
        "from xds.proto.pool import POOL as _POOL\n",
    )
    rewritten = rewritten.replace("_descriptor_pool.Default().AddSerializedFile(", "_POOL.AddSerializedFile(")
    rewritten = re.sub(r"^from google\.protobuf import \w+_pb2 as \w+\n", "", rewritten, flags=re.MULTILINE)
    if "descriptor_pool" in rewritten or rewritten.count("_POOL.") != 1:
        raise GenerateError("protoc's output uses descriptor pools in an unknown way")
    return rewritten


def main() -> None:
    """Regenerate in place; what no longer has a source is removed."""
    made = {ROOT / path for path in generate(ROOT)}
    for pattern in ("*_pb2.py", "*_pb2.pyi"):
        for path in (ROOT / "xds" / "proto").rglob(pattern):
            if path not in made:
                path.unlink()
    print(f"{len(made)} files")


if __name__ == "__main__":
    main()
