from pathlib import Path

import pytest

from xds.proto import generate


def test_committed_code_is_what_the_proto_files_generate(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, which brings protoc, is not installed")
    made = generate.generate(tmp_path)
    different = [
        str(path) for path in made if (generate.ROOT / path).read_bytes() != (tmp_path / path).read_bytes()
    ]
    assert different == [], "run `make proto`"
    committed = {
        path.relative_to(generate.ROOT)
        for pattern in ("*_pb2.py", "*_pb2.pyi")
        for path in (generate.ROOT / "xds" / "proto").rglob(pattern)
    }
    assert committed == set(made)


def test_every_folder_with_a_proto_file_is_a_package() -> None:
    for source in generate.sources():
        for folder in (generate.ROOT / source).parents:
            if folder == generate.ROOT:
                break
            assert (folder / "__init__.py").exists(), folder


def test_no_import_reaches_the_package_outside_proto() -> None:
    for path in (generate.ROOT / "xds" / "proto").rglob("*_pb2.py"):
        for line in path.read_text().splitlines():
            if line.startswith("from ") and " import " in line:
                assert line.startswith(("from google.protobuf", "from xds.proto.")), (path, line)


@pytest.mark.skipif(not generate.RIVALS.is_dir(), reason="`make setup` installs xds-protos there")
def test_the_table_of_missing_fields_is_that_of_envoys_descriptors() -> None:
    committed = (generate.ROOT / generate.MISSING_FIELDS).read_text()
    assert committed == generate.missing_fields(), "run `make proto`"
