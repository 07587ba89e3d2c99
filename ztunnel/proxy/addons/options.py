"""Reads the typed options of an addon: the fields of its dataclass ``Options``. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ztunnel.proxy.addons.settings import Given

#: The options that every addon has. They override the class's attributes of the same names.
_ON_ERROR: Final = ("deny", "ignore")
COMMON: Final = ("on_error", "budget_us", "time_limit_s")


class Common(NamedTuple):
    """The settings of an addon that the proxy applies when it calls hooks; see :class:`ztunnel.addons.Addon`."""

    on_error: str = "deny"
    budget_us: float = 200.0
    time_limit_s: float = 1.0

    @property
    def denies(self) -> bool:
        """Whether a hook's failure denies the connection."""
        return self.on_error == "deny"


class OptionsError(Exception):
    """The options of an addon are unusable.

    Attributes:
        faults: one line per fault. It names the addon, the option, and where the option was given.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(self.faults)


def read_options(name: str, cls: type, given: Mapping[str, Given]) -> tuple[Any, Common]:
    """Parse an addon's options. Return its ``Options`` object and its common settings. Without a class ``Options``
    the object is ``None``.

    Args:
        name: the addon's name.
        cls: its class.
        given: its options by key.

    Raises:
        OptionsError: lists all unusable options.
    """
    faults: list[str] = []

    def fault(key: str, text: str, place: str) -> None:
        faults.append(f"addon {name}: option {key}: {text} ({place})")

    own = {key: each for key, each in given.items() if key not in COMMON}
    common = _common(cls, given, fault)
    options_class = getattr(cls, "Options", None)
    if options_class is None:
        for key, each in own.items():
            fault(key, "the addon has no options", each.place)
        value = None
    elif not (isinstance(options_class, type) and dataclasses.is_dataclass(options_class)):
        raise OptionsError([f"addon {name}: Options must be a dataclass"])
    else:
        value = _dataclass(name, options_class, own, fault)
    if faults:
        raise OptionsError(faults)
    return value, common


_Fault = Callable[[str, str, str], None]


def _common(cls: type, given: Mapping[str, Given], fault: _Fault) -> Common:
    values: dict[str, Any] = {}
    defaults = Common()
    for key in COMMON:
        each = given.get(key, Given(getattr(cls, key, getattr(defaults, key)), f"attribute of {cls.__name__}"))
        try:
            if key == "on_error":
                if each.value not in _ON_ERROR:
                    raise ValueError(f"must be deny or ignore: {each.value!r}")
                values[key] = each.value
            else:
                values[key] = _positive(each.value)
        except ValueError as error:
            fault(key, str(error), each.place)
    return Common(**values)


def _positive(value: object) -> float:
    number = _float(value)
    if number <= 0:
        raise ValueError(f"must be more than 0: {value!r}")
    return number


def _dataclass(name: str, cls: type, given: Mapping[str, Given], fault: _Fault) -> Any:
    try:
        hints = typing.get_type_hints(cls)
    except BaseException as error:
        raise OptionsError([f"addon {name}: the types of Options cannot be read: {_words(error)}"]) from error
    fields = {each.name: each for each in dataclasses.fields(cls) if each.init}
    values: dict[str, Any] = {}
    faulty = False
    for key, each in given.items():
        if key not in fields:
            near = difflib.get_close_matches(key, (*fields, *COMMON), n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join((*fields, *COMMON))}"
            fault(key, f"not an option of this addon{hint}", each.place)
            continue
        try:
            values[key] = _value(hints[key], each.value)
        except ValueError as error:
            fault(key, str(error), each.place)
            faulty = True
    for key, each_field in fields.items():
        missing = dataclasses.MISSING
        if key not in given and each_field.default is missing and each_field.default_factory is missing:
            fault(key, "is required", "not given")
            faulty = True
    if faulty:
        return None
    try:
        return cls(**values)
    except BaseException as error:
        raise OptionsError([f"addon {name}: its options are refused: {_words(error)}"]) from error


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, Exception) else repr(error)  # SystemExit's text is only its status


def _value(kind: Any, value: object) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        others = [each for each in arguments if each is not type(None)]
        if len(others) != 1:
            raise ValueError(f"its type {kind} cannot be given")
        return None if value is None else _value(others[0], value)
    if origin in (tuple, list, frozenset, set):
        inner = arguments[0] if arguments else str
        parts = [each.strip() for each in value.split(",") if each.strip()] if isinstance(value, str) else value
        if not isinstance(parts, list):
            raise ValueError(f"must be a list: {value!r}")
        return origin(_value(inner, each) for each in parts)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[1] if len(arguments) == 2 else str, value)
    reader = _SCALARS.get(kind)
    if reader is None:
        raise ValueError(f"its type {getattr(kind, '__name__', kind)} cannot be given")
    return reader(value)


def _mapping(inner: Any, value: object) -> dict[str, Any]:
    if isinstance(value, str):
        pairs = [each.partition("=") for each in value.split(",") if each.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError(f"must be key=value,key=value: {value!r}")
        return {key.strip(): _value(inner, text.strip()) for key, _, text in pairs}
    if not isinstance(value, dict):
        raise ValueError(f"must be a mapping: {value!r}")
    return {str(key): _value(inner, each) for key, each in value.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text: {value!r}")
    return value


def _int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    raise ValueError(f"must be a whole number: {value!r}")


def _float(value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):  # OverflowError: an int beyond the largest float
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError(f"must be a number: {value!r}")


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ValueError(f"must be true or false: {value!r}")


_SCALARS: Final[Mapping[Any, Callable[[object], Any]]] = {str: _text, int: _int, float: _float, bool: _bool}
