"""A file that is read by the wrong command is told by its kind, and by nothing else."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from xds.errors import ConfigError
from ztunnel.control_plane.mesh import parse_mesh
from ztunnel.kube.files import FileObjects
from ztunnel.node.agent.description import parse_pods
from ztunnel.node.intercept.description import Flags, parse
from ztunnel.policy.calico.files import read_files
from ztunnel.proxy.envoy.config.bootstrap import parse_bootstrap
from ztunnel.proxy.istio.xds.mesh_feed import read_local_file
from ztunnel.runtime.formats.config_reader import Faults
from ztunnel.runtime.formats.file_kinds import FileKind, belongs_elsewhere, looks_like
from ztunnel.sidecar.inject.config import InjectConfig, parse_config
from ztunnel.sidecar.inject.manual import BadDocument, inject_text

EXAMPLES = Path(__file__).parents[4] / "examples"
FILES = {
    FileKind.MESH: "mesh.yaml",
    FileKind.PODS: "pods.yaml",
    FileKind.NODE: "node.yaml",
    FileKind.INJECTOR: "injector.yaml",
    FileKind.BOOTSTRAP: "bootstrap.yaml",
    FileKind.LOCAL_MESH: "local.yaml",
    FileKind.OBJECTS: "app.yaml",
}
READERS: Mapping[FileKind, Callable[[Path], object]] = {
    FileKind.MESH: lambda path: parse_mesh(path.read_text()),
    FileKind.PODS: lambda path: parse_pods(path.read_text()),
    FileKind.NODE: lambda path: parse(path.read_text(), Flags()),
    FileKind.INJECTOR: lambda path: parse_config(path.read_text()),
    FileKind.BOOTSTRAP: lambda path: parse_bootstrap(str(path)),
    FileKind.LOCAL_MESH: lambda path: read_local_file(str(path)),
}


@pytest.mark.parametrize("kind", FILES)
def test_each_example_looks_like_what_it_is(kind: FileKind) -> None:
    assert looks_like((EXAMPLES / FILES[kind]).read_text()) is kind


@pytest.mark.parametrize("kind", [FileKind.MESH, FileKind.NODE, FileKind.INJECTOR, FileKind.BOOTSTRAP])
def test_each_example_is_recognised_in_json_form(kind: FileKind) -> None:
    document = yaml.safe_load((EXAMPLES / FILES[kind]).read_text())
    assert looks_like(json.dumps(document)) is kind


@pytest.mark.parametrize("wanted", READERS)
@pytest.mark.parametrize("given", FILES)
def test_a_reader_of_another_kind_names_the_kind_and_who_reads_it(given: FileKind, wanted: FileKind) -> None:
    path = EXAMPLES / FILES[given]
    if given is wanted:
        READERS[wanted](path)
        return
    with pytest.raises((Faults, ConfigError)) as refused:
        READERS[wanted](path)
    text = str(refused.value).removeprefix("file: ")
    assert text == f"looks like {given.value.name}, for {given.value.read_by}; {wanted.value.name} is wanted here"


@pytest.mark.parametrize("given", [kind for kind in FILES if kind is not FileKind.OBJECTS])
def test_object_readers_name_a_file_of_another_kind_and_its_reader(given: FileKind) -> None:
    path = EXAMPLES / FILES[given]
    said = f"looks like {given.value.name}, for {given.value.read_by}; a file of Kubernetes objects is wanted here"
    with pytest.raises(Faults) as refused:
        read_files([path])
    assert refused.value.faults == [f"{path}: {said}"]
    with pytest.raises(BadDocument) as bad:
        inject_text(path.read_text(), "shop", InjectConfig(), [])
    assert str(bad.value).removeprefix("file: ") == said
    objects = FileObjects(path)
    objects.everything()
    assert objects.faults == {str(path): said}


@pytest.mark.parametrize(
    "text", ["", "pods:\n", "a: 1\n", "- apiVersion\n", "[]", "{", "\x00", "pods: {a: {x: 1}}\n"]
)
def test_a_file_that_resembles_none_has_its_own_faults(text: str) -> None:
    assert all(belongs_elsewhere(text, wanted) == "" for wanted in FileKind)


def test_a_dump_is_one_of_either_dialect() -> None:
    assert looks_like('{"configs": []}') is FileKind.DUMP
    assert looks_like('{"certificates": [], "workloads": []}') is FileKind.DUMP


def test_a_file_nested_too_deeply_looks_like_no_kind() -> None:
    text = "[" * 100_000
    assert looks_like(text) is None
    with pytest.raises(Faults, match="nested too deeply"):
        parse_mesh(text)
