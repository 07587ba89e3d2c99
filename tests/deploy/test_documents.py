"""Variables, commands and files that README.md and docs/ mention exist in the code."""

import re
from pathlib import Path

import pytest

from ztunnel.proxy.istio.environment import config_from
from ztunnel.runtime.process import under_holder

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RUNNING = (ROOT / "docs/running.md").read_text()
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("tests/*/*.md")]
)
#: Upstream's, too, though their names begin like ours.
SHARED = {
    "ZTUNNEL_WORKER_THREADS",
    "ZTUNNEL_CPU_LIMIT",
    "ZTUNNEL_RESOURCE_CPU_LIMIT",
    "ZTUNNEL_RESOURCE_CPU_REQUEST",
}


class Asked(dict[str, str]):
    """An empty environment that remembers what was looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]  # values are texts or None
        self.names.add(key)
        return super().get(key, default)


def test_the_variables_that_are_ours_alone_are_listed() -> None:
    env = Asked()
    config_from(env, cpus=2, read_file=lambda path: None)
    under_holder(env, wanted=False, serves=False)
    ours = {name for name in env.names if name.startswith("ZTUNNEL_")} - SHARED
    assert set(re.findall(r"^\| `(ZTUNNEL_\w+)`", RUNNING, re.MULTILINE)) == ours


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_named_in_the_documents_exists(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`((?:hbone|xds|tproxy|ztunnel|tests|deploy|bench|docs)/[\w./-]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    linked = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)
    assert [name for name in linked if not (document.parent / name).exists()] == []


def test_the_first_screen_has_a_picture_the_commands_and_both_modes() -> None:
    first = README[: README.index("## ")]
    assert first.index("<picture>") < first.index("```sh")
    assert all(line in first for line in ("pip install .", "docker build ", "helm upgrade "))
    assert "make demo " in first
    assert "make test " in first
    assert "make demo MODE=inpod" in first
