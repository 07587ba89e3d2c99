"""Variables, metrics, commands, values of charts and files that README.md and docs/ mention exist in the code."""

import functools
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ztunnel.cli import _parser
from ztunnel.proxy.istio.environment import config_from
from ztunnel.runtime.console.subcommands import subcommands
from ztunnel.runtime.process import under_holder

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RUNNING = (ROOT / "docs/running.md").read_text()
DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "bench", "deploy", "examples", "tests/*")
    for path in ROOT.glob(f"{folder}/*.md")
)
#: Upstream's, too, though their names begin like ours.
SHARED = {
    "ZTUNNEL_WORKER_THREADS",
    "ZTUNNEL_CPU_LIMIT",
    "ZTUNNEL_RESOURCE_CPU_LIMIT",
    "ZTUNNEL_RESOURCE_CPU_REQUEST",
}

#: Variables of other programs.
OF_OTHERS = {"FLOWS_API_ADDR", "HTTPS_PROXY", "MADV_COLLAPSE"}
#: The part of an OpenTelemetry variable that is for a single signal. The code composes these names.
SIGNAL = re.compile(r"(?<=^OTEL_EXPORTER_OTLP_)(?:LOGS|METRICS|TRACES)_")


@functools.cache
def code() -> str:
    """Return the text of all files in which a name can be defined."""
    folders = ("ztunnel", "hbone", "tproxy", "deploy", "bench", "tests", "xds/aio", "xds/grpc", "xds/protocol")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    files += [ROOT / "Makefile", ROOT / "setup.py", ROOT / "deploy/Dockerfile"]
    return "\n".join(path.read_text() for path in files)


def quoted(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", document.read_text())


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


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_section_that_a_link_names_exists(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([\w./-]*)#([\w-]+)\)", document.read_text())
    assert [
        (page, anchor)
        for page, anchor in links
        if anchor not in anchors(document.parent / page if page else document)
    ] == []


def commands(parser: ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Yield the words of each command, and the long flags of it and of its sub-commands."""
    flags = {name for action in parser._actions for name in action.option_strings}
    for name, command in subcommands(parser).items():
        if isinstance(command, ArgumentParser):
            below = [*commands(command, (*words, name))]
            yield from below
            flags |= below[-1][1]
    yield words, flags


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_flag_of_a_command_in_the_documents_exists(document: Path) -> None:
    known = dict(commands(_parser(["help"])))
    wrong = []
    for line in re.findall(r"\bztunnel ([a-z][^`\n|]*)", document.read_text()):
        command: tuple[str, ...] = ()
        for word in line.split():
            if (*command, word) not in known:
                break
            command = (*command, word)
        given = set(re.findall(r"(?<=[\s(])--[a-z][a-z-]*", line))
        if command and given - known[command]:
            wrong.append(line)
    assert wrong == []


def test_every_folder_with_manifests_is_on_the_page_about_deployments() -> None:
    page = (ROOT / "deploy/README.md").read_text()
    folders = [
        path.parent.relative_to(ROOT / "deploy") for path in ROOT.glob("deploy/kustomize/*/kustomization.yaml")
    ]
    assert {str(folder) for folder in folders} - set(re.findall(r"kustomize/[\w-]+", page)) == set()


def test_every_metric_in_the_documents_is_in_the_code() -> None:
    text = code()
    form = re.compile(r"\b(?:istio|netpol|workload_manager|ztunnel)_[a-z0-9_]+\b")
    found = {name for document in DOCUMENTS for each in quoted(document) for name in form.findall(each)}
    assert len(found) > 30
    assert {name for name in found if re.sub(r"_(?:total|bucket|count|sum)$", "", name) not in text} == set()


def test_every_variable_in_the_documents_is_in_the_code() -> None:
    text = code()
    form = re.compile(r"(?<![\w./$-])[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+\b")
    found = {name for document in DOCUMENTS for each in quoted(document) for name in form.findall(each)}
    assert len(found) > 50
    assert {name for name in found - OF_OTHERS if SIGNAL.sub("", name) not in text} == set()


def test_every_target_and_module_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*)\b[^=]*?:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        commands = [*quoted(document), *re.findall(r"^make .*$", document.read_text(), re.MULTILINE)]
        named = {name for each in commands for name in re.findall(r"^make ([a-z][a-z-]*)", each)}
        assert named - targets == set(), document
        for module in {
            name for each in commands for name in re.findall(r"python -m ((?:bench|deploy|tests)[\w.]*)", each)
        }:
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (document, module)


def paths(values: dict[str, object], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield before + name
        if isinstance(value, dict):
            yield from paths(value, f"{before}{name}.")


def test_every_value_of_a_chart_in_the_documents_exists() -> None:
    charts = [yaml.safe_load(path.read_text()) for path in ROOT.glob("deploy/helm/*/values.yaml")]
    known = {path for chart in charts for path in paths(chart)}
    sections = {name for chart in charts for name, value in chart.items() if isinstance(value, dict)}
    free = {"env", "config", "global", "resources"}  # with keys of the user, or of another document
    form = re.compile(r"[a-z][a-zA-Z]*(?:\.[a-zA-Z]+)+(?<!\.py)")
    found = {each for document in DOCUMENTS for each in quoted(document) if form.fullmatch(each)}
    found |= {name for document in DOCUMENTS for name in re.findall(r"--set ([a-z][\w.]*)=", document.read_text())}
    of_others = {"cni.exclusive"}  # of Cilium's chart
    named = {each for each in found - of_others if each.partition(".")[0] in sections - free}
    assert len(named) > 5
    assert named - known == set()
