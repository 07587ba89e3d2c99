"""``ztunnel inject -f``: what comes out, and what is said of bad input."""

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
