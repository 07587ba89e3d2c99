"""Objects from a folder: existing ones, changes, and the objects that stay when a file cannot be read."""

import asyncio
import logging
from pathlib import Path

import pytest

from tests.limits import WAIT_S
from ztunnel.kube.files import FileObjects
from ztunnel.kube.objects import Changes, ObjectKey


def pod(name: str, label: str = "x") -> str:
    return f"{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, labels: {{app: {label}}}}}}}\n---\n"


def names(changes: Changes) -> dict[str, str | None]:
    return {
        key.name: value["metadata"]["labels"]["app"] if value is not None else None
        for key, value in changes.objects.items()
    }


async def soon(source: FileObjects) -> Changes:
    async with asyncio.timeout(WAIT_S):
        return await source.next()


def test_objects_come_change_and_go(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "a.yaml").write_text(pod("one") + pod("two"))
        (tmp_path / "notes.txt").write_text("not an object")
        source = FileObjects(tmp_path)
        first = await soon(source)
        assert first.synced
        assert names(first) == {"one": "x", "two": "x"}
        (tmp_path / "a.yaml").write_text(pod("one", "longer"))
        (tmp_path / "b.json").write_text(
            '{"apiVersion": "v1", "kind": "PodList", "items": [' + pod("three")[:-5] + "]}"
        )
        found: dict[str, str | None] = {}
        while len(found) < 3:
            found |= names(await soon(source))
        assert found == {"one": "longer", "two": None, "three": "x"}
        (tmp_path / "a.yaml").unlink()
        assert names(await soon(source)) == {"one": None}

    asyncio.run(main())


def test_objects_at_the_end_of_a_file_stay_while_it_is_written_in_place(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "a.yaml"
        path.write_text(pod("one") + pod("two"))
        source = FileObjects(tmp_path)
        assert len(names(await soon(source))) == 2
        with path.open("w") as file:
            file.write(pod("one", "longer"))
            file.flush()
            assert not source._look()
            file.write(pod("two", "longer"))
        assert names(await soon(source)) == {"one": "longer", "two": "longer"}

    asyncio.run(main())


POLICIES = """kind: NetworkPolicyList
apiVersion: networking.k8s.io/v1
items:
- metadata: {name: a, namespace: shop}
"""
POLICIES_IN_JSON = """{"kind": "NetworkPolicyList", "apiVersion": "networking.k8s.io/v1",
\t"items": [{"metadata": {"name": "a", "namespace": "shop"}}]}"""


@pytest.mark.parametrize("text", [POLICIES, POLICIES_IN_JSON], ids=["yaml", "json"])
def test_item_without_a_kind_has_that_of_its_list(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    [(key, value)] = asyncio.run(soon(FileObjects(tmp_path))).objects.items()
    assert key == ObjectKey("NetworkPolicy", "shop", "a")
    assert value is not None
    assert (value["kind"], value["apiVersion"]) == ("NetworkPolicy", "networking.k8s.io/v1")


def test_scalars_are_those_of_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "kind: Pod\nmetadata: {name: a, labels: {at: 10:00, is: =}}\nspec: {number: 0o17, y: yes}\n"
    )
    [value] = asyncio.run(soon(FileObjects(tmp_path))).objects.values()
    assert value is not None
    assert value["metadata"]["labels"] == {"at": "10:00", "is": "="}
    assert value["spec"] == {"number": 15, "true": True}


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_key_given_twice_is_a_fault_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"kind": "Pod", "metadata": {"name": "a", "name": "b"}}')
    source = FileObjects(tmp_path)
    assert source.everything().objects == {}
    [(path, fault)] = source.faults.items()
    assert path.endswith(name)
    assert "duplicate key 'name'" in fault


def test_objects_of_unrequested_kinds_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(pod("one") + "{apiVersion: v1, kind: Secret, metadata: {name: s}}")
    changes = asyncio.run(soon(FileObjects(tmp_path, kinds=("Pod",))))
    assert list(changes.objects) == [ObjectKey("Pod", "default", "one")]


def test_policies_of_two_groups_with_one_name_are_two(tmp_path: Path) -> None:
    policies = [
        f"{{apiVersion: {group}, kind: NetworkPolicy, metadata: {{name: one, namespace: x}}}}"
        for group in ("networking.k8s.io/v1", "projectcalico.org/v3")
    ]
    (tmp_path / "a.yaml").write_text("\n---\n".join(policies))
    found = asyncio.run(soon(FileObjects(tmp_path, kinds=("NetworkPolicy",)))).objects
    assert {key.kind for key in found} == {"NetworkPolicy", "NetworkPolicy.projectcalico.org"}


def test_kinds_of_the_cluster_have_no_namespace(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{apiVersion: v1, kind: Namespace, metadata: {name: shop}}")
    assert list(asyncio.run(soon(FileObjects(tmp_path))).objects) == [ObjectKey("Namespace", "", "shop")]


@pytest.mark.parametrize("text", ["{", "[]", "{kind: Pod}", "{kind: Pod, metadata: {name: ''}}"])
def test_a_file_that_cannot_be_read_keeps_what_it_held(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        (tmp_path / "a.yaml").write_text(pod("one"))
        source = FileObjects(tmp_path)
        await soon(source)
        (tmp_path / "a.yaml").write_text(text)
        (tmp_path / "b.yaml").write_text(pod("two"))
        assert names(await soon(source)) == {"two": "x"}
        assert source._look()
        assert source.faults
        (tmp_path / "a.yaml").write_text(pod("one", "mended"))
        assert names(await soon(source)) == {"one": "mended"}

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "a.yaml" in caplog.text


def test_an_item_of_a_list_that_is_no_object_costs_the_others_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def items(*texts: str) -> str:
        return "kind: List\nitems:\n" + "".join(f"- {text.partition(chr(10))[0]}\n" for text in texts)

    file = tmp_path / "a.yaml"
    file.write_text(items(pod("one"), pod("two"), pod("three")))
    source = FileObjects(tmp_path)
    source.everything()
    file.write_text(items(pod("one", "new"), pod("''"), pod("four")))
    # The nameless document can be either of the two missing objects, so both stay.
    assert names(source.everything()) == {"one": "new", "four": "x"}
    assert caplog.messages == [
        f"objects not read file={file} error=document 1 at line 1: Pod: an object needs kind and metadata.name; "
        "what has disappeared stays as it was: Pod/default/two, Pod/default/three"
    ]
    file.write_text(items(pod("one", "new"), pod("four")))
    assert names(source.everything()) == {"two": None, "three": None}


def test_a_source_is_not_synced_before_every_file_has_been_read(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "a.yaml").write_text(pod("one"))
        (tmp_path / "b.yaml").write_text("{")
        source = FileObjects(tmp_path)
        assert not (await soon(source)).synced
        (tmp_path / "b.yaml").write_text("")
        assert (await soon(source)).synced

    asyncio.run(main())


def test_an_empty_folder_is_synced(tmp_path: Path) -> None:
    assert asyncio.run(soon(FileObjects(tmp_path))).synced


def test_a_single_read_returns_the_readable_objects_and_the_faults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(pod("one"))
    (tmp_path / "b.yaml").write_bytes(b"\xff")
    source = FileObjects(tmp_path)
    found = source.everything()
    assert not found.synced
    assert names(found) == {"one": "x"}
    assert source.faults == {str(tmp_path / "b.yaml"): "not UTF-8 text at byte 0"}
    with pytest.raises(FileNotFoundError):
        FileObjects(tmp_path / "missing").everything()


def test_items_of_a_typed_list_have_its_kind(tmp_path: Path) -> None:
    text = (
        "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicyList, items: [{metadata: {name: a, namespace: x}}]}"
    )
    (tmp_path / "all.yaml").write_text(text)
    [(key, body)] = FileObjects(tmp_path, kinds=("NetworkPolicy",)).everything().objects.items()
    assert key == ObjectKey("NetworkPolicy", "x", "a")
    assert body is not None
    assert (body["apiVersion"], body["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
