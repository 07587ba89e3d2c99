"""``ztunnel inject -f``: its output, and its messages about invalid input."""

import json
from pathlib import Path

import pytest
import yaml

from ztunnel.cli import main
from ztunnel.runtime.formats.go_yaml import load

POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: app, image: app}]}\n"


def test_a_file_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text(f"{POD}---\nkind: ConfigMap\ndata: {{a: 'on'}}\n")
    assert main(["inject", "-f", str(path)]) == 0
    printed = capsys.readouterr()
    made = list(yaml.safe_load_all(printed.out))
    assert made[0]["spec"]["initContainers"][0]["name"] == "mesh-gate"
    assert made[1] == {"kind": "ConfigMap", "data": {"a": "on"}}
    of_no_registry = "image ztunnel-py names no registry: give one by --image or --config\n"
    assert printed.err == f"Pod web: policy\n{of_no_registry}"
    assert main(["inject", "-f", str(path), "--image", "example.com/z:1"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "Pod web: policy\n"
    assert "image: example.com/z:1\n" in printed.out


def injected(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> str:
    path = tmp_path / "pods"
    path.write_text(text)
    assert main(["inject", "-f", str(path)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "# a file\n\nkind: ConfigMap  # of nobody\ndata:\n  a: 'on'   # quoted\n  mode: 0644\n",
        "--- # first\nkind: Service\n...\n# between\n---\n{kind: Service}\n---\n---\nkind: A\n# the end\n",
        "%YAML 1.1\n---\nkind: Service\n",
        "# nothing\n",
        "kind: Service\r\n# with returns\r\n",
        "--- {kind: Service}\n",
    ],
)
def test_what_is_not_injected_comes_out_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "pods"
    path.write_bytes(text.encode())
    assert main(["inject", "-f", str(path)]) == 0
    assert capsys.readouterr().out == text


def test_order_and_the_comments_around_a_changed_document_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = "---\n# behind it\nkind: ConfigMap # as it was\n"
    made = injected(tmp_path, capsys, f"# in front\nkind: Service\n--- # the pod\n# its name is web\n{POD}{last}")
    assert made.startswith(
        "# in front\nkind: Service\n--- # the pod\n# its name is web\napiVersion: v1\nkind: Pod\n"
    )
    assert made.endswith(f"\n{last}")
    service, pod, config = yaml.safe_load_all(made)
    assert (service, config) == ({"kind": "Service"}, {"kind": "ConfigMap"})
    assert pod["spec"]["initContainers"][0]["name"] == "mesh-gate"
    # Once more changes nothing at all.
    assert injected(tmp_path, capsys, made) == made
    for joined in (f"{POD.rstrip()}\n---\nkind: A", "--- {kind: Pod, spec: {containers: []}}\n---\nkind: A"):
        first, second = yaml.safe_load_all(injected(tmp_path, capsys, joined))
        assert (first["kind"], second) == ("Pod", {"kind": "A"})
        assert first["spec"]["initContainers"][0]["name"] == "mesh-gate"


def test_json_stays_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod = {"kind": "Pod", "metadata": {"name": "wäb"}, "spec": {"containers": [{"name": "on"}]}}
    listed = {"kind": "List", "items": [{"kind": "Service"}, pod]}
    made = injected(tmp_path, capsys, json.dumps(listed, indent=2, ensure_ascii=False))
    assert made.startswith('{\n  "kind": "List",\n  "items": [\n    {\n      "kind": "Service"\n    },\n')
    assert "wäb" in made
    found = json.loads(made)
    assert found["items"][0] == {"kind": "Service"}
    assert found["items"][1]["spec"]["initContainers"][0]["name"] == "mesh-gate"
    compact = injected(tmp_path, capsys, json.dumps(pod) + json.dumps({"kind": "Service"}))
    first, end = json.JSONDecoder().raw_decode(compact)
    assert first["spec"]["initContainers"][0]["name"] == "mesh-gate"
    assert compact[end:] == '{"kind": "Service"}'


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "while parsing"), ("3", "document 0: is not a Kubernetes object"), (None, "no such file")],
)
def test_a_bad_file_is_one_line_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    path = tmp_path / "pods.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["inject", "-f", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert str(path) in printed.err


def test_every_fault_of_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("policy: maybe\nimage: ''\n")
    assert main(["inject", "-f", "/dev/null", "--config", str(config)]) == 1
    assert capsys.readouterr().err.count(str(config)) == 2
    assert main(["inject"]) == 2


ITEM = "{kind: Service, metadata: {name: a, annotations: {at: 10:00, big: 0x1F}}}"


@pytest.mark.parametrize(
    ("before", "pod", "after"),
    [
        (f"kind: List\nitems:   # all\n- {ITEM} # kept\n# and this\n- ", "{kind: Pod, spec: {}}", "\n# last\n"),
        (
            "kind: List\nitems:\n    - kind: A\n      data: |\n        x\n\n    - ",
            "{kind: Pod, spec: {}}",
            "\n    - {a: =}\n",
        ),
        ("kind: List\nitems: [{kind: A, x: 010}, ", '{"kind": "Pod", "spec": {}}', ', {"kind": "B", x: 1.10}]\n'),
        (
            '{"kind": "List", "n": 1.10, "items": [\n  {"kind": "A", "x": 1e2},\n  ',
            '{"kind": "Pod", "spec": {}}',
            "  ]}\n",
        ),
        ("kind: List\nitems:\n- ", "kind: Pod\n  spec:\n    args: |\n      a\n", "- kind: B # kept\n"),
    ],
    ids=["flow items", "block items", "flow list", "json", "block scalar at the end"],
)
def test_items_of_a_list_that_are_not_injected_keep_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, pod: str, after: str
) -> None:
    made = injected(tmp_path, capsys, before + pod + after)
    assert made.startswith(before)
    assert made.endswith(after)
    assert "mesh-gate" in made[len(before) : len(made) - len(after)]
    items = load(made)["items"]  # type: ignore[index]  # of the list
    assert [item.get("spec", {}).get("initContainers", []) != [] for item in items].count(True) == 1


def test_item_without_a_kind_has_that_of_its_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = injected(
        tmp_path, capsys, "kind: DeploymentList\nitems:\n- spec: {template: {spec: {containers: []}}}\n"
    )
    assert "mesh-gate" in made


@pytest.mark.parametrize("kind", ["DeploymentConfig", "Deployment", "PodTemplate", "ReplicationController"])
def test_kinds_with_a_template_of_pods_are_injected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    template = "template: {spec: {containers: []}}"
    spec = template if kind == "PodTemplate" else f"spec: {{{template}}}"
    assert "mesh-gate" in injected(tmp_path, capsys, f"kind: {kind}\nmetadata: {{name: a}}\n{spec}\n")


def test_unknown_kind_with_a_template_of_pods_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rollout.yaml"
    path.write_text("kind: Rollout\nmetadata: {name: a}\nspec: {template: {spec: {containers: [{name: a}]}}}\n")
    assert main(["inject", "-f", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == path.read_text()
    assert printed.err.startswith("Rollout a: not injected: ")


@pytest.mark.parametrize("text", ["kind: Pod\nspec: {}\nspec: {}\n", '{"kind": "Pod", "spec": {}, "spec": {}}'])
def test_key_given_twice_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "pod").write_text(text)
    assert main(["inject", "-f", str(tmp_path / "pod")]) == 1
    assert "duplicate key 'spec'" in capsys.readouterr().err


def test_anchors_are_written_out_where_a_pod_is_injected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "kind: List\nitems:\n- &a {kind: Pod, metadata: {name: a}, spec: {}}\n- *a\n"
    made = injected(tmp_path, capsys, text)
    assert made.count("mesh-gate") >= 2
    assert "*a" not in made
