"""``ztunnel inject -f``: what comes out, and what is said of bad input."""

import json
from pathlib import Path

import pytest
import yaml

from ztunnel.cli import main

POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: app, image: app}]}\n"


def test_a_file_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text(f"{POD}---\nkind: ConfigMap\ndata: {{a: 'on'}}\n")
    assert main(["inject", "-f", str(path)]) == 0
    printed = capsys.readouterr()
    made = list(yaml.safe_load_all(printed.out))
    assert made[0]["spec"]["initContainers"][0]["name"] == "mesh-gate"
    assert made[1] == {"kind": "ConfigMap", "data": {"a": "on"}}
    assert printed.err == "Pod web: policy\n"


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
    assert capsys.readouterr().out == text.replace("\r", "")


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
    assert '\n    "kind": "List"' in made
    assert "wäb" in made
    found = json.loads(made)
    assert found["items"][0] == {"kind": "Service"}
    assert found["items"][1]["spec"]["initContainers"][0]["name"] == "mesh-gate"
    compact = injected(tmp_path, capsys, json.dumps(pod) + json.dumps({"kind": "Service"}))
    first, second = compact.splitlines()
    assert json.loads(first)["spec"]["initContainers"][0]["name"] == "mesh-gate"
    assert json.loads(second) == {"kind": "Service"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "while parsing"), ("3", "document 0: is no object"), (None, "no such file")],
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
