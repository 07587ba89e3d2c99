"""Which addons are named, and with which options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from ztunnel.proxy.addons.options import Common, OptionsError, read_options
from ztunnel.proxy.addons.settings import AddonSpec, Given, addon_settings, parse_spec

_DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a.py", AddonSpec(text="a.py", file="a.py")),
        ("/x/a.py:Cls", AddonSpec(text="/x/a.py:Cls", file="/x/a.py", class_name="Cls")),
        (f"a.py@sha256:{_DIGEST}", AddonSpec(text=f"a.py@sha256:{_DIGEST}", file="a.py", sha256=_DIGEST)),
        ("pack.age:Cls", AddonSpec(text="pack.age:Cls", module="pack.age", class_name="Cls")),
        ("installed-one", AddonSpec(text="installed-one", entry_point="installed-one")),
    ],
)
def test_addon_specification_is_parsed(text: str, spec: AddonSpec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize("text", ["a.py@sha256:12", f"mod:Cls@sha256:{_DIGEST}", "a b", "mod:1", "/etc/passwd"])
def test_invalid_addon_specification_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"^addon "):
        parse_spec(text)


def test_an_environment_names_addons_in_their_order() -> None:
    env = {"ZTUNNEL_ADDONS": "b.py, a.py\nmod:C", "ZTUNNEL_ADDON_OPTION": "a.rate=5\nb.names=x,y=z"}
    settings, faults = addon_settings(env)
    assert not faults
    assert settings is not None
    assert [spec.text for spec in settings.specs] == ["b.py", "a.py", "mod:C"]
    assert settings.options["b"]["names"] == Given("x,y=z", "ZTUNNEL_ADDON_OPTION")


def test_an_option_wins_over_the_file() -> None:
    env = {"ZTUNNEL_ADDONS": "new.py", "ZTUNNEL_ADDON_OPTION": "new.rate=2", "ZTUNNEL_ADDON_OPTIONS": "/o.yaml"}
    settings, faults = addon_settings(env, {"new": {"rate": 1, "burst": 3}})
    assert not faults
    assert settings is not None
    assert [spec.text for spec in settings.specs] == ["new.py"]
    assert settings.options["new"] == {
        "rate": Given("2", "ZTUNNEL_ADDON_OPTION"),
        "burst": Given(3, "/o.yaml: new"),
    }


def test_environment_without_addons_has_no_settings() -> None:
    assert addon_settings({}) == (None, [])


def test_faults_are_named_by_their_place() -> None:
    env = {"ZTUNNEL_ADDONS": "/etc/passwd", "ZTUNNEL_ADDON_OPTION": "nonsense", "ZTUNNEL_ADDON_OPTIONS": "/o.yaml"}
    _, faults = addon_settings(env, {"a": 5})
    assert [fault.partition(":")[0] for fault in faults] == ["ZTUNNEL_ADDONS", "/o.yaml", "ZTUNNEL_ADDON_OPTION"]


@dataclass(frozen=True)
class Options:
    """The options of the addon below."""

    rate: float
    burst: int = 10
    label: str = "x"
    names: tuple[str, ...] = ()
    dry: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)
    path: str | None = None

    def __post_init__(self) -> None:
        if self.rate == 13:
            raise ValueError("13 is no good rate")


class Limited:
    """An addon with options."""

    on_error = "ignore"
    Options = Options


def read(**given: object) -> tuple[Options, Common]:
    return read_options("limited", Limited, {key: Given(value, "here") for key, value in given.items()})


def test_options_are_read_by_their_types() -> None:
    value, common = read(rate="2.5", burst=3, names="a, b", dry="true", weights="v1=1,v2=2", budget_us="50")
    assert value == Options(2.5, 3, "x", ("a", "b"), True, {"v1": 1, "v2": 2})
    assert common == Common("ignore", 50.0, 1.0)
    value, common = read(rate=2, names=["a"], weights={"v1": 1}, path="/x", on_error="deny")
    assert value == Options(2, names=("a",), weights={"v1": 1}, path="/x")
    assert common.denies


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({}, "option rate: is required (not given)"),
        ({"rate": "x"}, "option rate: must be a number: 'x' (here)"),
        ({"rate": 10**400}, f"option rate: must be a number: {10**400} (here)"),
        ({"rate": 1, "burts": 2}, "option burts: not an option of this addon; did you mean burst? (here)"),
        ({"rate": 1, "burst": 2.5}, "option burst: must be a whole number: 2.5 (here)"),
        ({"rate": 1, "burst": True}, "option burst: must be a whole number: True (here)"),
        ({"rate": 1, "dry": "yes"}, "option dry: must be true or false: 'yes' (here)"),
        ({"rate": 1, "names": {"a": 1}}, "option names: must be a list: {'a': 1} (here)"),
        ({"rate": 1, "on_error": "open"}, "option on_error: must be deny or ignore: 'open' (here)"),
        ({"rate": 1, "budget_us": 0}, "option budget_us: must be more than 0: 0 (here)"),
        ({"rate": 13}, "its options are refused: 13 is no good rate"),
    ],
)
def test_wrong_options_are_named(given: dict[str, object], fault: str) -> None:
    with pytest.raises(OptionsError) as error:
        read(**given)
    assert f"addon limited: {fault}" in error.value.faults


def test_an_addon_without_options_takes_none() -> None:
    with pytest.raises(OptionsError, match="option x: the addon has no options"):
        read_options("a", object, {"x": Given(1, "here")})
    assert read_options("a", object, {})[0] is None
