"""How addons are found, and which faults keep them out."""

from __future__ import annotations

import hashlib
import importlib.metadata
import signal
import sys
from pathlib import Path

import pytest

from ztunnel.addons import Addon, Facts
from ztunnel.addons.testing import outbound
from ztunnel.proxy.addons.load import AddonError, end, faults_of, load, load_all, load_class
from ztunnel.proxy.addons.preview import end_preview, preview_of, would_say
from ztunnel.proxy.addons.settings import AddonSettings, Given, parse_spec

GOOD = """
from dataclasses import dataclass
from ztunnel.addons import Addon, Deny, Facts

class DenyAll(Addon):
    @dataclass(frozen=True)
    class Options:
        reason: str = "closed"

    def configured(self, options):
        self.options = options

    def connecting(self, facts: Facts) -> Deny:
        return Deny(self.options.reason)
"""


def written(folder: Path, text: str, name: str = "a.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_file_is_loaded_with_its_options(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    options = {"deny-all": {"reason": Given("not today", "here")}}
    (loaded,) = load_all(AddonSettings(specs=(parse_spec(path),), options=options))
    assert (loaded.name, sorted(loaded.hooks)) == ("deny-all", ["configured", "connecting"])
    assert loaded.hooks["connecting"](Facts()).reason == "not today"
    assert loaded.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()


def test_addons_that_a_preview_has_started_are_ended(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    done = f"""
    def done(self):
        with open({str(ended)!r}, "a") as file:
            file.write("done ")
"""
    first = parse_spec(written(tmp_path, GOOD + done))
    with pytest.raises(AddonError, match="missing"):
        preview_of(AddonSettings(specs=(first, parse_spec(str(tmp_path / "missing.py"))), options={}))
    assert ended.read_text() == "done "
    end_preview(preview_of(AddonSettings(specs=(first,), options={})))
    assert ended.read_text() == "done done "


def test_a_digest_pins_the_contents(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    digest = hashlib.sha256(GOOD.encode()).hexdigest()
    assert load(parse_spec(f"{path}@sha256:{digest}"), {}).name == "deny-all"
    written(tmp_path, GOOD + "\n")
    with pytest.raises(AddonError, match="the file has another digest, sha256:"):
        load(parse_spec(f"{path}@sha256:{digest}"), {})


def test_a_module_and_an_entry_point_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, GOOD, "my_addon_module.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert load(parse_spec("my_addon_module:DenyAll"), {}).name == "deny-all"
    point = importlib.metadata.EntryPoint("mine", "my_addon_module:DenyAll", "ztunnel.addons")
    found = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    assert load(parse_spec("mine"), {}).name == "deny-all"
    with pytest.raises(AddonError, match=r"no entry point of the group ztunnel\.addons; installed are mine"):
        load(parse_spec("other"), {})
    sys.modules.pop("my_addon_module")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "it has no class with a hook"),
        ("class A:\n  def nothing(self): pass", "it has no class with a hook"),
        (
            f"{GOOD}\nclass Other(Addon):\n  def done(self): pass",
            "it has several addons, name one of DenyAll, Other",
        ),
        ("x = (", "line 1: SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "cannot be imported: {path}:1: SystemExit: 3"),
        ("raise KeyboardInterrupt", "cannot be imported: {path}:1: KeyboardInterrupt"),
        (
            f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n{GOOD}",
            "it changes the signal handlers of the process: SIGTERM",
        ),
        (
            "import signal\nclass A:\n  def configured(self, o): signal.signal(signal.SIGALRM, signal.SIG_DFL)",
            "it changes the signal handlers of the process: SIGALRM",
        ),
        ("class A:\n  def configured(self, o): raise KeyboardInterrupt", "cannot be started: {path}:2: Keyboard"),
        (
            "class Meta(type):\n  needs = property(lambda _: exit(2))\nclass A(metaclass=Meta):\n  done = print",
            "cannot be started: {path}:2: SystemExit: 2",
        ),
        ("class A:\n  def connecting(self): pass", "connecting must take self and one argument"),
        ("class A:\n  async def opened(self, facts): pass", "opened cannot be async def"),
        ("class A:\n  api = 99\n  def done(self): pass", "it is written for version 99 of the API"),
        ("class A:\n  name = 'Not Good'\n  def done(self): pass", "the name 'Not Good' must be"),
        ("class A:\n  needs = {'bytes'}\n  def done(self): pass", "needs names unknown facts: bytes"),
        ("class A:\n  needs = 5\n  def done(self): pass", "needs must be a set of texts"),
        ("class A:\n  needs = [['x']]\n  def done(self): pass", "needs must be a set of texts"),
        ("class A:\n  def configured(self, o): 1 / 0", "cannot be started: {path}:2: ZeroDivisionError"),
        ("class A:\n  def __init__(self): exit(1)\n  def done(self): pass", "cannot be started"),
    ],
)
def test_faults_are_named_by_file_and_line(tmp_path: Path, text: str, fault: str) -> None:
    path = written(tmp_path, text)
    handlers = {number: signal.signal(number, keep) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        with pytest.raises(AddonError) as error:
            load(parse_spec(path), {})
        assert [signal.getsignal(number) for number in handlers] == [keep, keep]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert str(error.value).startswith(f"addon {path}: ")
    assert fault.format(path=path) in str(error.value)


def keep(number: int, frame: object) -> None:
    """Handle a signal like the proxy."""


OPTIONS = """
from dataclasses import dataclass
class A:
    @dataclass
    class Options:
        def __post_init__(self): {body}
    def done(self): {body}
"""


@pytest.mark.parametrize("stop", ["SystemExit(4)", "KeyboardInterrupt"])
def test_code_of_an_addon_cannot_end_the_process_wherever_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stop: str
) -> None:
    fault = stop.replace("(4)", ": 4")
    raises = f"raise {stop}"
    written(tmp_path, raises, f"stops_{len(stop)}.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AddonError, match=f"cannot be imported: .*{fault}"):
        load(parse_spec(f"stops_{len(stop)}:A"), {})
    point = importlib.metadata.EntryPoint("mine", f"stops_{len(stop)}:A", "ztunnel.addons")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints([point]))
    with pytest.raises(AddonError, match=f"cannot be imported: .*{fault}"):
        load(parse_spec("mine"), {})
    spec = parse_spec(written(tmp_path, OPTIONS.format(body=raises)))
    with pytest.raises(AddonError, match=f"its options are refused: {stop[:10]}"):
        load(spec, {})
    assert "its options are refused" in faults_of(AddonSettings(specs=(spec,)))[0]
    loaded = load(
        parse_spec(written(tmp_path, f"class A:\n  def done(self): {raises}\n  connecting = lambda *_: None")), {}
    )
    end(loaded)
    assert f"hook done failed: {tmp_path}/a.py:2: {fault}" in caplog.text
    hooks = f"class A:\n  def connecting(self, facts): {raises}"
    (said,) = would_say([(load(parse_spec(written(tmp_path, hooks)), {}), "")], "connecting", outbound())
    assert (said.denies, fault in said.says) == (True, True)


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    good = written(tmp_path, GOOD)
    specs = tuple(map(parse_spec, (good, str(tmp_path / "missing.py"), f"{good}:Nothing")))
    with pytest.raises(AddonError) as error:
        load_all(AddonSettings(specs=specs))
    assert len(error.value.faults) == 2
    assert "missing.py: no such file or directory" in error.value.faults[0]
    with pytest.raises(AddonError, match="another addon is named deny-all"):
        load_all(AddonSettings(specs=(parse_spec(good), parse_spec(good))))
    with pytest.raises(AddonError, match=r"addon denyall: no loaded addon has this name, only deny-all \(here\)"):
        load_all(AddonSettings(specs=(parse_spec(good),), options={"denyall": {"x": Given("1", "here")}}))


def test_a_misspelt_hook_is_reported() -> None:
    class Typo(Addon):
        def conecting(self, facts: Facts) -> None:
            """Is never called."""

        def done(self) -> None:
            """Is a hook."""

    assert load_class(Typo, {}).warnings == ("addon typo: method conecting is no hook; did you mean connecting?",)
